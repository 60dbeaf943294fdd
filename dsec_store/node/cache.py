"""The node's cache of a data blob: uncompressed chunks on local disk.

An entry is a folder ``cache/<first two hex>/<data root>/`` with three files: ``data`` (sparse, at the offsets of
the data blob), ``sums`` (64-byte header, then xxh3-64 of each chunk) and ``present`` (64-byte header, then one bit
a chunk). The header is magic[8], version u32, chunk_size u32, data_size u64, boot id[16], clean u8, zero to 64,
little-endian. A bit reaches the disk only after an fdatasync of the data it speaks of.

What a reader gets is checked every time: the first read of a chunk by this process against the sha256 of the chunk
table, each later one against the xxh3-64 that was noted then. Chunks that fail are forgotten and fetched again. An
entry that was not closed cleanly is thrown away when it is opened.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
from array import array
from pathlib import Path

import xxhash

from dsec_store.chunks import CHUNK, ChunkTable
from dsec_store.errors import StoreFull

VERSION = 1
HEADER = struct.Struct("<8sIIQ16sB23x")
SUMS_MAGIC = b"DSECSUMS"
PRESENT_MAGIC = b"DSECBITM"


def boot_id() -> bytes:
    """The kernel's 16-byte id of this boot."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


class CacheEntry:
    """One open entry; safe for several threads. At most one process has an entry open (an flock on ``present``).

    Reads give checked bytes or None. A full disk makes :meth:`put` say False: the caller has the bytes anyway.
    """

    def __init__(self, folder: Path, table: ChunkTable) -> None:
        self.folder = folder
        self._table = table
        self._lock = threading.Condition()
        self._users = 0  # calls that use the descriptors: they may not be closed under them
        self._noted = array("Q", bytes(8 * len(table)))  # xxh3-64 of what this process has checked
        self._checked = bytearray(len(table))
        self._dirty = False
        self._closed = False
        try:
            self._open()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"no space left to open the cache entry {folder}") from None
            raise

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fds: list[int] = []
        try:
            for name in ("present", "sums", "data"):
                self._fds.append(os.open(self.folder / name, flags, 0o600))
                if name == "present":  # before a look at the rest: another process may have the entry open
                    fcntl.flock(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._present, self._sums, self._data = self._fds
            if not self._usable():
                for fd in self._fds:
                    os.ftruncate(fd, 0)
            size = (len(self._table) + 7) // 8
            self._bits = bytearray(os.pread(self._present, size, HEADER.size).ljust(size, b"\0"))
            os.ftruncate(self._data, self._table.data_size)
            os.pwrite(self._sums, self._header(SUMS_MAGIC, clean=False), 0)
            os.pwrite(self._present, self._header(PRESENT_MAGIC, clean=False), 0)
            os.fdatasync(self._present)  # from here on a crash is seen
        except BaseException:
            self._close_files()
            raise

    def _header(self, magic: bytes, *, clean: bool) -> bytes:
        return HEADER.pack(magic, VERSION, CHUNK, self._table.data_size, boot_id(), clean)

    def _usable(self) -> bool:
        """Whether what lies there was closed cleanly and is of this version, chunk size and data size."""
        whole = HEADER.size + (len(self._table) + 7) // 8
        try:
            present = HEADER.unpack(os.pread(self._present, HEADER.size, 0))
            sums = HEADER.unpack(os.pread(self._sums, HEADER.size, 0))
        except struct.error:
            return False
        expected = (VERSION, CHUNK, self._table.data_size)
        return (
            present[:4] == (PRESENT_MAGIC, *expected)
            and present[5] == 1
            and os.fstat(self._present).st_size == whole
            and sums[:4] == (SUMS_MAGIC, *expected)
        )

    def has(self, index: int) -> bool:
        """Whether the chunk is thought to be here; only :meth:`read` says whether its bytes are right."""
        return bool(self._bits[index >> 3] & (1 << (index & 7)))

    def read(self, index: int) -> bytes | None:
        """The chunk's bytes, checked, or None when it is not here or was damaged (it is then forgotten)."""
        if not self.has(index) or not self._enter():
            return None
        try:
            data = os.pread(self._data, self._table.chunk_size(index), index * CHUNK)
        except OSError:
            data = b""  # a failing disk is a miss: the bytes can be had elsewhere
        finally:
            self._leave()
        if self._checked[index]:
            good = xxhash.xxh3_64_intdigest(data) == self._noted[index]
        else:
            good = hashlib.sha256(data).digest() == self._table.record(index).digest
            if good:
                self._noted[index] = xxhash.xxh3_64_intdigest(data)
                self._checked[index] = 1
        if good:
            return data
        with self._lock:
            self._bits[index >> 3] &= ~(1 << (index & 7))
            self._checked[index] = 0
            self._dirty = True
        return None

    def put(self, index: int, data: bytes) -> bool:
        """Keep a chunk whose sha256 the caller has checked. False: it could not be kept (disk full, closed)."""
        digest = xxhash.xxh3_64_intdigest(data)
        if not self._enter():
            return False
        try:
            _pwrite_all(self._data, data, index * CHUNK)
            _pwrite_all(self._sums, digest.to_bytes(8, "little"), HEADER.size + 8 * index)
        except OSError:
            return False
        finally:
            self._leave()
        with self._lock:
            self._noted[index] = digest
            self._checked[index] = 1
            self._bits[index >> 3] |= 1 << (index & 7)
            self._dirty = True
        return True

    def _enter(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._users += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closed:
                self._lock.notify_all()

    def flush(self) -> None:
        """Bring the bits to the disk, after the data and the sums that they speak of."""
        if not self._dirty or not self._enter():
            return
        try:
            with self._lock:
                bits = bytes(self._bits)
                self._dirty = False
            self._write_bits(bits)
        finally:
            self._leave()

    def _write_bits(self, bits: bytes) -> None:
        os.fdatasync(self._data)
        os.fdatasync(self._sums)
        _pwrite_all(self._present, bits, HEADER.size)
        os.fdatasync(self._present)

    def close(self) -> None:
        """Flush and mark as clean. An entry that cannot be written whole stays unclean, and is thrown away at the next
        opening.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.wait_for(lambda: self._users == 0)
            bits = bytes(self._bits)
        try:
            os.pwrite(self._sums, self._header(SUMS_MAGIC, clean=True), 0)
            self._write_bits(bits)
            os.pwrite(self._present, self._header(PRESENT_MAGIC, clean=True), 0)
            os.fdatasync(self._present)
        except OSError:
            pass
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _pwrite_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
