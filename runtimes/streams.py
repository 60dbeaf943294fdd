"""The supervisor's end of the command's stdin, stdout and stderr.

Nothing here blocks: whoever reads our stdout slowly, or not at all, holds up neither the timeout nor a signal.
Memory is bounded: one block is read, kept in the record's ends, and passed on before the next is read.

When the reader of our stdout goes away (``dsec run … | head``), the pipe to the command is closed too: the command
gets EPIPE or SIGPIPE, as it would have without us in between, and decides itself. The record then shows how it ended.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from runtimes.records import HeadTail

BLOCK = 65536
_CAREFUL = 512
"""Bytes written at once to what can only be polled: a terminal takes few, a pipe at least PIPE_BUF (4096)."""


class Sink:
    """A descriptor that is written to without ever waiting.

    The flag O_NONBLOCK belongs to the open file. One that was given to us is shared (a terminal: with the shell),
    so a pipe or terminal is opened anew through /proc, a socket is told with each call, and a plain file does not
    wait. With ``own`` the descriptor is ours alone and is closed with the sink.
    """

    __slots__ = ("_close", "_fd", "_socket", "_step")

    def __init__(self, fd: int, *, own: bool = False) -> None:
        self._fd = fd
        self._close = own
        self._socket: socket.socket | None = None
        self._step = BLOCK
        mode = os.fstat(fd).st_mode
        if own:
            os.set_blocking(fd, False)
        elif stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd, self._close = os.open(f"/proc/self/fd/{fd}", flags), True
            except OSError:
                self._step = _CAREFUL

    def fileno(self) -> int:
        return self._fd

    def write(self, data: memoryview) -> int:
        """Bytes taken; 0 when it must be polled first."""
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return os.write(self._fd, data[: self._step])
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._close:
            os.close(self._fd)


class Pump:
    """Moves bytes from ``source``, a descriptor of its own, to ``sink``, and notes them in ``kept``.

    It is asked what it waits for (``wants``), told when that has come (``ready``), and is ``done`` when there will
    be no more: then both ends are closed, and ``error`` says whether writing failed. ``at_end`` is written after
    the last byte (a terminal's end-of-file character).

    While ``suspicious`` the first block is neither noted nor passed on, but ``held`` until ``release``: it may come
    from the OCI runtime and not from the command.
    """

    __slots__ = ("_at_end", "_kept", "_view", "done", "error", "held", "sink", "source", "suspicious")

    def __init__(
        self, source: int, sink: Sink, kept: HeadTail | None = None, *, at_end: bytes = b"", suspicious: bool = False
    ) -> None:
        self.source = source
        self.sink = sink
        self.suspicious = suspicious
        self.held = b""
        self.done = False
        self.error: OSError | None = None
        self._kept = kept
        self._at_end = at_end
        self._view = memoryview(b"")

    def wants(self) -> tuple[int, int] | None:
        """(descriptor, poll events), or None when there is nothing to wait for."""
        if self.done or self.held:
            return None
        if self._view:
            return self.sink.fileno(), select.POLLOUT
        return self.source, select.POLLIN

    @property
    def pending(self) -> bool:
        """Whether there are bytes that the sink has not taken yet."""
        return bool(self._view)

    def ready(self) -> bool:
        """Move what can be moved now, at most one block; whether anything was."""
        if self.done or self.held:
            return False
        if not self._view and not self._read():
            return False
        return self._write()

    def release(self, *, drop: bool) -> None:
        """Pass on what was held back, or drop it."""
        held, self.held, self.suspicious = self.held, b"", False
        if held and not drop:
            self._take(held)

    def _read(self) -> bool:
        try:
            block = os.read(self.source, BLOCK)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:  # the other side of a pseudo terminal is gone
                self.error = error
            block = b""
        if block:
            if self.suspicious:
                self.held = block
                return False
            self._take(block)
            return True
        if not self._at_end:
            self.finish()
            return False
        self._view, self._at_end = memoryview(self._at_end), b""
        return True

    def _take(self, block: bytes) -> None:
        if self._kept is not None:
            self._kept.add(block)
        self._view = memoryview(block)

    def _write(self) -> bool:
        try:
            written = self.sink.write(self._view)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.error = error
            self.finish()
            return False
        self._view = self._view[written:]
        return written > 0

    def finish(self) -> None:
        """Close both ends: no more will be read, and who writes to the source is told by the kernel."""
        if not self.done:
            self.done = True
            self._view = memoryview(b"")
            os.close(self.source)
            self.sink.close()


def stdin_source(fd: int) -> int | None:
    """A descriptor of our own that reads what ``fd`` does; None when there is nothing to read (closed, /dev/null)."""
    try:
        info = os.fstat(fd)
    except OSError:
        return None
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == os.makedev(1, 3):
        return None
    if stat.S_ISFIFO(info.st_mode):
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            pass
    return os.dup(fd)
