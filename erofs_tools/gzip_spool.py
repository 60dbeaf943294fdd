"""A gzip file made into bytes that can be read by offset: an unnamed temporary file, gone with its descriptor."""

from __future__ import annotations

import os
import tempfile
import zlib

from erofs_tools.content import os_error_text
from erofs_tools.errors import SourceError

GZIP_MAGIC = b"\x1f\x8b"

_INPUT = 256 * 1024
_OUTPUT = 4 * 1024 * 1024  # a piece of output is never longer, however well the input was compressed
_HOLE = 64 * 1024
_ZEROS = bytes(_HOLE)


class Spool:
    """An unnamed file in ``directory``; nothing of it is left when its descriptor closes or the process dies.

    Raises SourceError when the directory cannot hold it. Aligned runs of zeros become holes: an image of a sparse disk
    costs what it holds.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self._directory, self._name = directory, name
        self._size = 0
        self._rest = b""
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self.fd = os.dup(file.fileno())
        except OSError as error:
            raise SourceError(f"cannot make a temporary file in {directory}: {os_error_text(error)}") from error

    def write(self, data: bytes) -> None:
        data = self._rest + data
        start = position = 0  # what lies between is data that was not written yet
        with memoryview(data) as view:
            while position + _HOLE <= len(data):
                if data.startswith(_ZEROS, position):
                    self._write(view[start:position])
                    self._size += _HOLE
                    start = position + _HOLE
                position += _HOLE
            self._write(view[start:position])
        self._rest = data[position:]  # so that the next piece begins at a multiple of _HOLE again

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                written = os.pwrite(self.fd, view, self._size)
            except OSError as error:
                raise SourceError(
                    f"{self._name}: cannot keep its uncompressed copy in {self._directory}: "
                    f"{os_error_text(error)} after {self._size} bytes"
                ) from error
            self._size += written
            view = view[written:]

    def finish(self) -> int:
        """The descriptor of the whole file, which the caller closes."""
        self._write(memoryview(self._rest))
        os.ftruncate(self.fd, self._size)
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def spool_gzip(source: int, first: bytes, spool: Spool, name: str) -> None:
    """Decompress all members of the gzip file that begins with ``first`` and goes on at the descriptor ``source``.

    RFC 1952: members follow each other; zeros may pad the end (tapes). Raises SourceError for a bad checksum or length
    (zlib checks both), for a file that ends inside a member, and for anything else behind the last member.
    """
    data = first
    consumed = 0
    while True:  # one member
        inflate = zlib.decompressobj(wbits=31)
        while not inflate.eof:
            if not data:
                data = os.read(source, _INPUT)
                if not data:
                    raise SourceError(f"{name}: truncated gzip: it ends inside a member after {consumed} bytes")
            try:
                out = inflate.decompress(data, _OUTPUT)
            except zlib.error as error:
                raise SourceError(f"{name}: corrupt gzip near byte {consumed}: {error}") from error
            rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            consumed += len(data) - len(rest)
            data = rest
            if out:
                spool.write(out)
        while True:  # what follows the member
            stripped = data.lstrip(b"\0")
            consumed += len(data) - len(stripped)
            data = stripped
            if len(data) >= len(GZIP_MAGIC):
                break
            more = os.read(source, _INPUT)
            if not more:
                break
            data += more
        if not data:
            return
        if not data.startswith(GZIP_MAGIC):
            raise SourceError(f"{name}: garbage behind the gzip data at byte {consumed}")


def spool_plain(source: int, first: bytes, spool: Spool) -> None:
    """Copy what comes through a pipe: ``first``, then the rest of ``source``."""
    data = first
    while data:
        spool.write(data)
        data = os.read(source, _OUTPUT)
