"""The data object of a layer: one zstd frame a chunk, then the seek table (docs/formats.md §3).

The seek table is that of zstd's seekable format (contrib/seekable_format in zstd's source), in a skippable frame, so
that plain ``zstd -d`` restores the data blob and other seekable readers can use the object.

Frames come from registries and cannot be trusted: before a byte is decompressed, the frame's header must declare the
size that the chunk table gives and a window of at most 256 KiB. An output limit of the binding alone does not bound the
memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import zstandard

from dsec_store.chunks import BLOCK, CHUNK, ZSTD, ChunkRecord, ChunkTable
from dsec_store.errors import IntegrityError

LEVEL = 3
"""zstd level of new objects: 2.5× the speed of level 5 for 2% more bytes on a Debian /usr."""
METADATA_MAX = 1 << 30
"""Bytes of the largest metadata image that is decompressed: about eight million inodes."""

ZSTD_NOTE = f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))} level {LEVEL}"
"""What the annotation ``dev.dsec.zstd`` says about objects made here."""

_ZEROS = bytes(CHUNK)
_SKIPPABLE = 0x184D2A5E
_SEEKABLE_FOOTER = 0x8F92EAB1
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_local = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    # A zstd context serves one thread at a time.
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def _compressor() -> zstandard.ZstdCompressor:
    found: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if found is None:
        found = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
    return found


def _decode(frame: bytes, size: int, digest: bytes, window_max: int, what: str) -> bytes:
    if bytes(frame[:4]) != _FRAME_MAGIC:
        raise IntegrityError(f"{what}: no zstd frame: found {bytes(frame[:4]).hex() or 'nothing'}")
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: bad zstd frame header: {error}") from error
    if header.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise IntegrityError(f"{what}: the frame does not declare its size, expected {size} bytes")
    if header.content_size != size:
        raise IntegrityError(f"{what}: the frame declares {header.content_size} bytes, expected {size}")
    if header.window_size > window_max:
        raise IntegrityError(
            f"{what}: the frame wants a window of {header.window_size} bytes, allowed are {window_max}"
        )
    if header.dict_id:
        raise IntegrityError(f"{what}: the frame wants the dictionary {header.dict_id}, expected none")
    try:
        data = _decompressor().decompress(frame, max_output_size=size, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: bad zstd frame of {len(frame)} bytes: {error}") from error
    if len(data) != size:
        raise IntegrityError(f"{what}: the frame gave {len(data)} bytes, expected {size}")
    found = hashlib.sha256(data).digest()
    if found != digest:
        raise IntegrityError(f"{what}: found sha256:{found.hex()}, expected sha256:{digest.hex()}")
    return data


def decode_chunk(frame: bytes, expected_size: int, expected_digest: bytes) -> bytes:
    """The bytes of one chunk from its stored frame.

    frame: exactly the stored bytes. expected_size: bytes of the chunk. expected_digest: 32 bytes of sha256. Raises
    IntegrityError unless the frame is one whole frame of that size and digest, with a window of at most 256 KiB and
    nothing after it.
    """
    return _decode(frame, expected_size, expected_digest, CHUNK, "chunk")


def decode_raw_chunk(data: bytes, expected_size: int, expected_digest: bytes) -> bytes:
    """The same for a raw data object: the bytes themselves, checked."""
    if len(data) != expected_size:
        raise IntegrityError(f"chunk: found {len(data)} bytes, expected {expected_size}")
    found = hashlib.sha256(data).digest()
    if found != expected_digest:
        raise IntegrityError(f"chunk: found sha256:{found.hex()}, expected sha256:{expected_digest.hex()}")
    return data


def decode_metadata(frame: bytes, expected_size: int, expected_digest: bytes, *, cap: int = METADATA_MAX) -> bytes:
    """The metadata image from its one frame; a size above ``cap`` bytes is refused before anything is decompressed."""
    if expected_size > cap:
        raise IntegrityError(f"metadata image: {expected_size} bytes, allowed are {cap}")
    return _decode(frame, expected_size, expected_digest, max(cap, CHUNK), "metadata image")


def encode_metadata(image: bytes | memoryview) -> bytes:
    """The metadata image as its one frame, with its size in the header."""
    return _compressor().compress(image)


class Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


@dataclass(frozen=True)
class DataStats:
    """Bytes of the data blob, of the data object, and the number of chunks."""

    data_size: int
    stored_size: int
    chunks: int


class DataObjectWriter:
    """Cuts a data blob into chunks, hashes and compresses them in threads, and writes the data object in order.

    out: gets the object; only ``write`` is called, in the caller's thread. raw_out: a descriptor that gets the blob
    itself, at its offsets (the kernel reads that file in place), or None. threads: hashing and compressing release the
    interpreter's lock; the bytes do not depend on their number. At most four chunks a thread are under way: that bounds
    the memory.

    A context manager: leaving it ends the threads. Errors of a thread are raised by a later ``write`` or by ``finish``.
    """

    def __init__(self, out: Sink, raw_out: int | None = None, threads: int = 2) -> None:
        self._out = out
        self._raw_out = raw_out
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="chunks")
        self._limit = 4 * threads
        self._pending: deque[Future[tuple[bytes, bytes, bool]]] = deque()
        self._buffer = bytearray()
        self._records: list[ChunkRecord] = []
        self._size = 0
        self._stored = 0

    def write(self, blocks: bytes | bytearray | memoryview, /) -> int:
        """Append to the data blob; pieces of any size, a whole number of 4096-byte blocks in the end."""
        rest = memoryview(blocks)
        if self._buffer:
            need = CHUNK - len(self._buffer)
            self._buffer += rest[:need]
            rest = rest[need:]
            if len(self._buffer) == CHUNK:
                self._submit(bytes(self._buffer))
                self._buffer.clear()
        while len(rest) >= CHUNK:
            self._submit(bytes(rest[:CHUNK]))
            rest = rest[CHUNK:]
        self._buffer += rest
        return len(blocks)

    def finish(self) -> tuple[ChunkTable, DataStats]:
        """Write what is left and the seek table; returns the chunk table and the sizes."""
        if len(self._buffer) % BLOCK:
            raise IntegrityError(
                f"data blob: ends after {self._size + len(self._buffer)} bytes, expected a multiple of {BLOCK}"
            )
        if self._buffer:
            self._submit(bytes(self._buffer))
            self._buffer.clear()
        while self._pending:
            self._take()
        table = ChunkTable.build(self._size, ZSTD, self._records)
        seek_table = self._seek_table(table)
        self._out.write(seek_table)
        self.close()
        return table, DataStats(self._size, self._stored + len(seek_table), len(table))

    def _submit(self, chunk: bytes) -> None:
        while len(self._pending) >= self._limit:
            self._take()
        self._pending.append(self._pool.submit(self._encode, chunk, self._size))
        self._size += len(chunk)

    def _encode(self, chunk: bytes, offset: int) -> tuple[bytes, bytes, bool]:
        if self._raw_out is not None:
            position, rest = offset, memoryview(chunk)
            while rest:
                written = os.pwrite(self._raw_out, rest, position)
                position, rest = position + written, rest[written:]
        return hashlib.sha256(chunk).digest(), _compressor().compress(chunk), chunk == _ZEROS[: len(chunk)]

    def _take(self) -> None:
        digest, frame, zero = self._pending.popleft().result()
        self._out.write(frame)
        self._records.append(ChunkRecord(digest, self._stored, len(frame), zero))
        self._stored += len(frame)

    @staticmethod
    def _seek_table(table: ChunkTable) -> bytes:
        entries = b"".join(
            struct.pack("<II", record.length, table.chunk_size(index)) for index, record in enumerate(table)
        )
        footer = struct.pack("<IBI", len(table), 0, _SEEKABLE_FOOTER)
        return struct.pack("<II", _SKIPPABLE, len(entries) + len(footer)) + entries + footer

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> DataObjectWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
