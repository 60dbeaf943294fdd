"""Where the bytes of files lie: a range of an archive, pieces of one, a file below a directory."""

from __future__ import annotations

import errno
import io
import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from erofs_tools.errors import SourceError

Piece = tuple[int, int, int]
"""A piece of a sparse file: offset in the file, length, offset in the archive (bytes)."""

_SMALL = 65536
"""Files up to this size are read whole: asking the file system for their holes costs more."""


def os_error_text(error: OSError) -> str:
    """``Permission denied (EACCES)``: what the kernel said, without the path (the caller names it)."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{error.strerror or error} ({code})"


class Archive:
    """An open, uncompressed archive: bytes by offset, checked against the size and mtime that it had at first.

    Owns the descriptor. ``name`` is for messages.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        status = os.fstat(fd)
        self.size = status.st_size
        self._identity = (status.st_size, status.st_mtime_ns)

    def read(self, offset: int, length: int, what: str, path: bytes = b"") -> bytes:
        """Exactly ``length`` bytes. Raises SourceError when the archive ends before (``what`` says inside of what)."""
        try:
            data = os.pread(self.fd, length, offset)
            while len(data) < length:
                more = os.pread(self.fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise SourceError(f"{self.name}: cannot read at byte {offset}: {os_error_text(error)}", path) from error
        if len(data) < length:
            raise self.truncated(what, offset + length, path)
        return data

    def truncated(self, what: str, expected: int, path: bytes = b"") -> SourceError:
        """The error for an archive that should reach at least to byte ``expected``."""
        return SourceError(f"{self.name}: truncated in {what}: {self.size} bytes, expected at least {expected}", path)

    def check_unchanged(self, path: bytes = b"") -> None:
        """Raise SourceError when the archive was written to since it was opened."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != self._identity:
            raise SourceError(f"{self.name}: changed while it was read", path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Reader(io.RawIOBase):
    """A read-only file of ``size`` bytes over something that can be read by offset."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._position = 0

    @abstractmethod
    def _at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; the range lies within the file and is not empty."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size - self._position, 0)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        data = self._at(self._position, length)
        self._position += length
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class _RangeReader(_Reader):
    def __init__(self, content: RangeContent) -> None:
        super().__init__(content.size)
        self._content = content

    def _at(self, offset: int, length: int) -> bytes:
        content = self._content
        return content.archive.read(content.offset + offset, length, "contents", content.path)


class RangeContent:
    """``size`` bytes of an archive from ``offset``; ``path`` is the member's, for messages."""

    __slots__ = ("archive", "offset", "path", "size")

    def __init__(self, archive: Archive, offset: int, size: int, path: bytes) -> None:
        self.archive, self.offset, self.size, self.path = archive, offset, size, path

    def open(self) -> BinaryIO:
        self.archive.check_unchanged(self.path)
        return cast(BinaryIO, _RangeReader(self))

    def segments(self) -> Iterable[tuple[int, int]]:
        if self.size <= _SMALL:
            return ((0, self.size),)
        return data_segments(self.archive.fd, self.offset, self.size)


class _PiecesReader(_Reader):
    def __init__(self, content: PiecesContent) -> None:
        super().__init__(content.size)
        self._content = content
        self._starts = [piece[0] for piece in content.pieces]

    def _at(self, offset: int, length: int) -> bytes:
        content = self._content
        parts = []
        end = offset + length
        index = max(bisect_right(self._starts, offset) - 1, 0)
        while offset < end:
            if index == len(content.pieces) or content.pieces[index][0] >= end:
                parts.append(bytes(end - offset))
                break
            start, size, where = content.pieces[index]
            index += 1
            if offset < start:
                parts.append(bytes(start - offset))
                offset = start
            take = min(start + size, end) - offset
            if take > 0:
                parts.append(content.archive.read(where + offset - start, take, "contents", content.path))
                offset += take
        return b"".join(parts)


class PiecesContent:
    """A sparse member of an archive: ``pieces`` ascending and disjoint, zeros between them."""

    __slots__ = ("archive", "path", "pieces", "size")

    def __init__(self, archive: Archive, pieces: Sequence[Piece], size: int, path: bytes) -> None:
        self.archive, self.pieces, self.size, self.path = archive, pieces, size, path

    def open(self) -> BinaryIO:
        self.archive.check_unchanged(self.path)
        return cast(BinaryIO, _PiecesReader(self))

    def segments(self) -> Iterable[tuple[int, int]]:
        return [(offset, length) for offset, length, _ in self.pieces if length]


def data_segments(fd: int, offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Where ``size`` bytes from ``offset`` of a file may hold data, relative to ``offset`` (SEEK_DATA, SEEK_HOLE)."""
    position, end = offset, offset + size
    while position < end:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole up to the end of the file
                return
            if error.errno == errno.EINVAL:  # a file system that does not know
                yield position - offset, end - position
                return
            raise
        if start >= end:
            return
        position = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        yield start - offset, position - start


class DirectoryFds:
    """Directories below a top one, by descriptor and without following a symbolic link.

    Keeps the chain of the last directory open, so that going through a tree in order costs about one open a directory.
    """

    _CHAIN = 32  # deeper levels are opened one after the other and not kept: descriptors are few

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._chain: list[tuple[bytes, int]] = []

    def open(self, path: bytes) -> int:
        """A new descriptor of the directory. Raises OSError (ELOOP and ENOTDIR for what is not one)."""
        current, rest = self._walk(path)
        if not rest:
            return os.open(b".", _DIRECTORY, dir_fd=current)
        fd = os.open(rest[0], _DIRECTORY, dir_fd=current)
        for name in rest[1:]:
            try:
                deeper = os.open(name, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = deeper
        return fd

    def open_file(self, path: bytes) -> int:
        """A new read-only descriptor of a file, which is not waited for when it became a fifo."""
        parent, _, name = path.rpartition(b"/")
        current, rest = self._walk(parent)
        if not rest:
            return os.open(name, _FILE, dir_fd=current)
        fd = self.open(parent)
        try:
            return os.open(name, _FILE, dir_fd=fd)
        finally:
            os.close(fd)

    def _walk(self, path: bytes) -> tuple[int, list[bytes]]:
        """Make the chain reach as far as it may; its last descriptor and the names that are left to open."""
        names = path.split(b"/") if path else []
        common = 0
        for (have, _), want in zip(self._chain, names, strict=False):
            if have != want:
                break
            common += 1
        while len(self._chain) > common:
            os.close(self._chain.pop()[1])
        for name in names[common : self._CHAIN]:
            self._chain.append((name, os.open(name, _DIRECTORY, dir_fd=self._last())))
        return self._last(), names[self._CHAIN :]

    def _last(self) -> int:
        return self._chain[-1][1] if self._chain else self.top

    def close(self) -> None:
        while self._chain:
            os.close(self._chain.pop()[1])
        if self.top >= 0:
            os.close(self.top)
            self.top = -1

    def __del__(self) -> None:
        # contents keep this alive for as long as somebody may still read them; nobody else knows when that ends
        if hasattr(self, "_chain"):
            self.close()


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """What changes when another file takes the path, or when contents or attributes of this one are written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _FileReader(_Reader):
    def __init__(self, fd: int, content: FileContent) -> None:
        super().__init__(content.size)
        self._fd = fd
        self._content = content

    def _at(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise self._content.changed()
                data += more
        except OSError as error:
            raise SourceError(f"cannot read: {os_error_text(error)}", self._content.path) from error
        self._content.check(self._fd)  # after the read: what was read is then what the listed file had
        return data

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        super().close()


class FileContent:
    """A file below a directory, as it was when it was listed: any change since then is a SourceError."""

    __slots__ = ("_blocks", "_fds", "_identity", "path", "size")

    def __init__(self, fds: DirectoryFds, path: bytes, status: os.stat_result) -> None:
        self._fds, self.path, self.size = fds, path, status.st_size
        self._blocks = status.st_blocks
        self._identity = identity(status)

    def open(self) -> BinaryIO:
        return cast(BinaryIO, _FileReader(self._open(), self))

    def segments(self) -> Iterable[tuple[int, int]]:
        if self.size <= _SMALL or self._blocks * 512 >= self.size:
            return ((0, self.size),)
        fd = self._open()
        try:
            return list(data_segments(fd, 0, self.size))
        finally:
            os.close(fd)

    def check(self, fd: int) -> None:
        if identity(os.fstat(fd)) != self._identity:
            raise self.changed()

    def changed(self) -> SourceError:
        return SourceError("the file changed while the tree was read", self.path)

    def _open(self) -> int:
        try:
            fd = self._fds.open_file(self.path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise SourceError("the file was removed while the tree was read", self.path) from error
            raise SourceError(f"cannot open: {os_error_text(error)}", self.path) from error
        try:
            self.check(fd)
        except SourceError:
            os.close(fd)
            raise
        return fd
