"""The FUSE protocol, spoken on /dev/fuse itself: a read-only server of immutable files.

Source of every number and layout: include/uapi/linux/fuse.h, kernel ABI 7.31 and later. Raw rather than through a
library, because no library can take over a session that is already running, and ten operations are all that is needed.

A session is a descriptor of /dev/fuse that was mounted (``mounts.mount_fuse``). ``Session.serve`` is run by as many
threads as should work at once; each takes one request after the other and calls ``Operations``. READ may be answered
later and from any thread.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

MAJOR, MINOR = 7, 40
MINOR_MIN = 31

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = 25, 26, 27, 28, 29, 34
INTERRUPT, DESTROY, BATCH_FORGET = 36, 38, 42
# SETATTR SYMLINK MKNOD MKDIR UNLINK RMDIR RENAME LINK WRITE SETXATTR REMOVEXATTR CREATE FALLOCATE RENAME2
# COPY_FILE_RANGE TMPFILE
_WRITES = (4, 6, 8, 9, 10, 11, 12, 13, 16, 21, 24, 35, 43, 45, 47, 51)

NOTIFY_RESEND = 7
UNIQUE_RESEND = 1 << 63  # set in the number of a request that is sent again; the reply carries it too

ASYNC_READ = 1 << 0
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
INIT_EXT = 1 << 30
HAS_RESEND = 1 << 39

FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH = 1, 2, 32

ROOT = 1
MAX_READ = 1 << 20  # bytes of a READ: 256 pages, the default of fs.fuse.max_pages_limit
MAX_WRITE = 4096  # the least that the kernel takes; nothing is ever written
MAX_BACKGROUND = 64  # readahead requests under way at once; the kernel's default is 12
VALID = 365 * 86400  # seconds for which the kernel may keep names and attributes: they never change

_IN_HEADER = struct.Struct("=IIQQIIIHH")  # len opcode unique nodeid uid gid pid total_extlen padding
_OUT_HEADER = struct.Struct("=IiQ")  # len error unique
_INIT_IN = struct.Struct("=IIII")  # major minor max_readahead flags; then flags2 from 7.36 on
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")  # … max_background threshold max_write time_gran max_pages align flags2
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY_OUT = struct.Struct("=QQQQII")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_READ_IN = struct.Struct("=QQII")  # fh offset size read_flags; the rest does not matter here
_DIRENT = struct.Struct("=QQII")
_STATFS_OUT = struct.Struct("=QQQQQIIII24x")
_BUFFER = 65536  # a request has at most max_write + 4096 bytes; BATCH_FORGET fills what there is
_IOV_MAX = 1024


class Attr:
    """A file or directory: its node number (its inode number as well), full ``st_mode``, size in bytes."""

    __slots__ = ("gid", "mode", "mtime_ns", "nlink", "node", "size", "uid")

    def __init__(
        self, node: int, mode: int, size: int = 0, *, mtime_ns: int = 0, uid: int = 0, gid: int = 0, nlink: int = 1
    ) -> None:
        self.node = node
        self.mode = mode
        self.size = size
        self.mtime_ns = mtime_ns
        self.uid = uid
        self.gid = gid
        self.nlink = nlink

    def pack(self) -> bytes:
        """struct fuse_attr."""
        seconds, fraction = divmod(self.mtime_ns, 1_000_000_000)
        times = (seconds, seconds, seconds, fraction, fraction, fraction)
        blocks = (self.size + 511) // 512
        return _ATTR.pack(self.node, self.size, blocks, *times, self.mode, self.nlink, self.uid, self.gid, 0, 4096, 0)


class Read:
    """A READ that waits for ``Session.data`` or ``Session.error``."""

    __slots__ = ("node", "offset", "size", "unique")

    def __init__(self, unique: int, node: int, offset: int, size: int) -> None:
        self.unique = unique
        self.node = node
        self.offset = offset
        self.size = size

    def __repr__(self) -> str:
        return f"Read(node {self.node}, {self.size} bytes at {self.offset})"


class Operations(Protocol):
    """What a file system answers; called in the threads that serve. An OSError becomes the reader's errno."""

    def lookup(self, parent: int, name: bytes) -> Attr | None:
        """The entry of a directory; None: no such name (not remembered by the kernel)."""

    def getattr(self, node: int) -> Attr | None:
        """A node's attributes; the root's number is 1. None: no such node (the reader gets ESTALE)."""

    def open(self, node: int) -> int:
        """Open a file: FOPEN_* flags, normally FOPEN_KEEP_CACHE. The session adds FOPEN_NOFLUSH."""

    def read(self, request: Read) -> None:
        """Answer now or later, from any thread, through ``Session.data`` or ``Session.error``."""

    def readdir(self, node: int) -> Sequence[tuple[bytes, int, int]]:
        """(name, node, mode) of every entry, without . and .., in an order in which new ones come last."""


Log = Callable[[str, BaseException], object]


def _to_stderr(text: str, error: BaseException) -> None:
    print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr)


def open_device() -> int:
    """A new /dev/fuse, to be mounted once."""
    return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


class Session:
    """Serves a mounted /dev/fuse.

    ``fd`` stays the caller's, to be closed after ``close``; it is made non-blocking. ``log`` gets a line and
    the exception when an operation fails with something else than an OSError, or a reply cannot be written; it may be
    called in any thread.
    """

    def __init__(self, fd: int, operations: Operations, log: Log = _to_stderr) -> None:
        self.fd = fd
        self.operations = operations
        self.log = log
        self.kernel_minor = 0  # after INIT: the kernel's protocol version …
        self.flags = 0  # … and the features in use
        os.set_blocking(fd, False)
        # One epoll for all threads: it wakes one of them for a request, and all of them for the end.
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._registered = False
        self._stopped = False
        self._closed = False
        self._users = 0  # threads that serve, and replies being written: the descriptor may not be closed under them
        self._idle = threading.Condition()
        self._initialized = threading.Event()
        handlers: dict[int, Callable[[int, int, memoryview], None]] = {
            INIT: self._init,
            LOOKUP: self._lookup,
            GETATTR: self._getattr,
            OPEN: self._open,
            READ: self._read,
            READDIR: self._readdir,
            STATFS: self._statfs,
            OPENDIR: self._opendir,
        }
        handlers.update(dict.fromkeys((FLUSH, RELEASE, RELEASEDIR, ACCESS, DESTROY), self._done))
        handlers.update(dict.fromkeys((FORGET, BATCH_FORGET, INTERRUPT), self._no_reply))
        handlers.update(dict.fromkeys(_WRITES, self._read_only))
        self._handlers = handlers

    # --- life ---

    def serve(self) -> None:
        """Take and answer requests until the mount is gone or ``stop`` is called; no operation's error ends it.

        The device has been mounted before.
        """
        if not self._enter():
            return
        try:
            buffer = bytearray(_BUFFER)
            view = memoryview(buffer)
            fd, poll = self.fd, self._epoll.poll
            while not self._stopped:
                try:
                    length = os.readv(fd, (buffer,))
                except BlockingIOError:
                    if not self._registered:
                        self._register()
                    poll(-1, 1)
                    continue
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while it was read
                        continue
                    if error.errno != errno.ENODEV:  # ENODEV: unmounted or aborted
                        self.log("reading from /dev/fuse", error)
                    return
                self._dispatch(view[:length])
        finally:
            self._leave()

    def _register(self) -> None:
        # Not before a read has shown that the device is mounted: an unmounted one has no queue to wait on, and epoll
        # would never look for it again.
        with self._idle:
            if not self._registered:
                self._epoll.register(self.fd, select.EPOLLIN)
                self._registered = True

    def stop(self) -> None:
        """Let every ``serve`` return, after the operation that it is in.

        The session and its mount stay: who holds another copy of the descriptor can go on serving it.
        """
        self._stopped = True
        with self._idle:
            if not self._closed:
                os.eventfd_write(self._stop, 1)

    def close(self, timeout: float = 1.0) -> None:
        """``stop``, and wait for the threads and for replies under way; later replies go nowhere.

        The caller may close the descriptor then. When that was its last copy, readers get an error (EIO or ENOTCONN;
        EIO through EROFS).

        Raises TimeoutError, when an operation takes longer than ``timeout`` seconds to return.
        """
        self.stop()
        with self._idle:
            if self._closed:
                return
            if not self._idle.wait_for(lambda: self._users == 0, timeout):
                raise TimeoutError(f"FUSE session: {self._users} threads still at work after {timeout} s")
            self._closed = True
            self._epoll.close()
            os.close(self._stop)

    def wait_ready(self, timeout: float) -> bool:
        """Whether INIT was answered within ``timeout`` seconds."""
        return self._initialized.wait(timeout)

    def _enter(self) -> bool:
        with self._idle:
            if self._closed:
                return False
            self._users += 1
            return True

    def _leave(self) -> None:
        with self._idle:
            self._users -= 1
            if not self._users:
                self._idle.notify_all()

    # --- replies ---

    def reply(self, unique: int, *buffers: bytes | bytearray | memoryview) -> None:
        """Answer a request with the bytes of ``buffers``; without effect when it is gone (its reader was killed)."""
        length = _OUT_HEADER.size + sum([len(buffer) for buffer in buffers])
        if len(buffers) >= _IOV_MAX:
            buffers = (b"".join(buffers),)
        self._write(unique, (_OUT_HEADER.pack(length, 0, unique), *buffers))

    def data(self, request: Read, *buffers: bytes | bytearray | memoryview) -> None:
        """Answer a READ.

        The kernel would take a short answer for the file's end and show zeros: one that does not reach the end of the
        request or of the file becomes EIO, and is logged.
        """
        length = sum([len(buffer) for buffer in buffers])
        if length != request.size:
            attr = self.operations.getattr(request.node)
            expected = 0 if attr is None else max(0, min(request.size, attr.size - request.offset))
            if attr is None or length != expected:
                self.log(f"{request} was given {length} bytes", ValueError(f"expected {expected}"))
                self.error(request.unique, errno.EIO)
                return
        self.reply(request.unique, *buffers)

    def error(self, unique: int, number: int) -> None:
        """Answer a request with an errno."""
        if not 0 < number < 512:  # the kernel takes no others, and the reader would wait for ever
            number = errno.EIO
        self._write(unique, (_OUT_HEADER.pack(_OUT_HEADER.size, -number, unique),))

    def notify(self, code: int, *buffers: bytes) -> None:
        """Tell the kernel something (FUSE_NOTIFY_*). Raises OSError: EINVAL for a code it does not know."""
        length = _OUT_HEADER.size + sum([len(buffer) for buffer in buffers])
        if not self._enter():
            raise OSError(errno.EBADF, "the FUSE session is closed")
        try:
            os.writev(self.fd, (_OUT_HEADER.pack(length, code, 0), *buffers))
        finally:
            self._leave()

    def _write(self, unique: int, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        if not self._enter():
            return
        try:
            os.writev(self.fd, buffers)
        except OSError as error:
            # ENOENT: interrupted and forgotten, or the connection is gone.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                self.log(f"answering FUSE request {unique}", error)
        finally:
            self._leave()

    # --- requests ---

    def _dispatch(self, message: memoryview) -> None:
        _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(message)
        handler = self._handlers.get(opcode)
        try:
            if handler is None:
                self.error(unique, errno.ENOSYS)  # the kernel remembers it and does not ask again
            else:
                handler(unique, node, message[_IN_HEADER.size :])
        except OSError as error:
            self.error(unique, error.errno or errno.EIO)
        except Exception as error:
            self.log(f"FUSE operation {opcode} on node {node}", error)
            self.error(unique, errno.EIO)

    def _init(self, unique: int, node: int, body: memoryview) -> None:
        major, minor, max_readahead, flags = _INIT_IN.unpack_from(body)
        if major > MAJOR:  # the kernel then sends INIT again in our version
            self.reply(unique, struct.pack("=II", MAJOR, MINOR))
            return
        if (major, minor) < (MAJOR, MINOR_MIN):
            raise OSError(errno.EPROTO, f"FUSE protocol {major}.{minor}, {MAJOR}.{MINOR_MIN} is needed")
        if flags & INIT_EXT and len(body) >= 20:
            flags |= struct.unpack_from("=I", body, 16)[0] << 32
        self.kernel_minor = minor
        self.flags = flags & (ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES | INIT_EXT | HAS_RESEND)
        self.reply(
            unique,
            _INIT_OUT.pack(
                MAJOR,
                min(minor, MINOR),
                max(max_readahead, MAX_READ),
                self.flags & 0xFFFFFFFF,
                MAX_BACKGROUND,
                MAX_BACKGROUND * 3 // 4,
                MAX_WRITE,
                1,
                MAX_READ // 4096,
                0,
                self.flags >> 32,
            ),
        )
        self._initialized.set()

    def _lookup(self, unique: int, node: int, body: memoryview) -> None:
        attr = self.operations.lookup(node, bytes(body).partition(b"\0")[0])
        if attr is None:
            self.error(unique, errno.ENOENT)
        else:
            self.reply(unique, _ENTRY_OUT.pack(attr.node, 0, VALID, VALID, 0, 0), attr.pack())

    def _getattr(self, unique: int, node: int, body: memoryview) -> None:
        attr = self.operations.getattr(node)
        if attr is None:
            self.error(unique, errno.ESTALE)
        else:
            self.reply(unique, _ATTR_OUT.pack(VALID, 0, 0), attr.pack())

    def _open(self, unique: int, node: int, body: memoryview) -> None:
        if struct.unpack_from("=I", body)[0] & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "opened for writing")
        # There is nothing to flush, and a FLUSH that nobody answers would keep whoever closes the file from exiting.
        self.reply(unique, _OPEN_OUT.pack(0, self.operations.open(node) | FOPEN_NOFLUSH, 0))

    def _opendir(self, unique: int, node: int, body: memoryview) -> None:
        self.reply(unique, _OPEN_OUT.pack(0, 0, 0))

    def _read(self, unique: int, node: int, body: memoryview) -> None:
        _, offset, size, _ = _READ_IN.unpack_from(body)
        self.operations.read(Read(unique, node, offset, size))

    def _readdir(self, unique: int, node: int, body: memoryview) -> None:
        _, offset, size, _ = _READ_IN.unpack_from(body)
        entries = [(b".", node, stat.S_IFDIR), (b"..", node, stat.S_IFDIR), *self.operations.readdir(node)]
        out = bytearray()
        for position in range(offset, len(entries)):
            name, child, mode = entries[position]
            padded = -(-len(name) // 8) * 8
            if len(out) + _DIRENT.size + padded > size:
                break
            out += _DIRENT.pack(child, position + 1, len(name), stat.S_IFMT(mode) >> 12) + name.ljust(padded, b"\0")
        self.reply(unique, out)

    def _statfs(self, unique: int, node: int, body: memoryview) -> None:
        self.reply(unique, _STATFS_OUT.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0))

    def _done(self, unique: int, node: int, body: memoryview) -> None:
        self.reply(unique)

    def _no_reply(self, unique: int, node: int, body: memoryview) -> None:
        """Nothing is counted by looking up, and a READ that lost its reader is answered into the void."""

    def _read_only(self, unique: int, node: int, body: memoryview) -> None:
        self.error(unique, errno.EROFS)
