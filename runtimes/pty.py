"""A terminal for the command (``-t``): the OCI runtime makes the pseudo terminal in the container and hands its
other end over.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios

from dsec_linux.sockets import receive_with_fds
from runtimes.container import CONSOLE
from runtimes.errors import ContainerFailed

END_OF_FILE = b"\x04"


class Console:
    """The socket in the bundle to which the runtime sends the terminal."""

    def __init__(self, bundle: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(bundle, os.O_PATH | os.O_CLOEXEC)
        try:
            self._listener.bind(f"/proc/self/fd/{folder}/{CONSOLE}")  # an address holds 107 bytes
        except BaseException:
            self._listener.close()
            raise
        finally:
            os.close(folder)
        self._listener.listen(1)

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> int:
        """The master's descriptor. Call it when the socket is readable."""
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(10)
            _, fds = receive_with_fds(connection, 1)
        if not fds:
            raise ContainerFailed("the OCI runtime sent no terminal")
        return fds[0]

    def close(self) -> None:
        self._listener.close()


class RawTerminal:
    """Our own terminal in raw mode until ``restore``: every key goes to the command, Ctrl-C too."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before = termios.tcgetattr(fd)
        mode = termios.tcgetattr(fd)
        # cfmakeraw(3)
        mode[0] &= ~(
            termios.IGNBRK
            | termios.BRKINT
            | termios.PARMRK
            | termios.ISTRIP
            | termios.INLCR
            | termios.IGNCR
            | termios.ICRNL
            | termios.IXON
        )
        mode[1] &= ~termios.OPOST
        mode[2] = mode[2] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(fd, termios.TCSANOW, mode)

    def restore(self) -> None:
        try:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        except termios.error:
            pass  # the terminal is gone


def size_of(fd: int) -> tuple[int, int] | None:
    """(rows, columns) of a terminal, None when it is none or does not know."""
    size = array.array("H", [0, 0, 0, 0])
    try:
        fcntl.ioctl(fd, termios.TIOCGWINSZ, size)
    except OSError:
        return None
    return (size[0], size[1]) if size[0] and size[1] else None


def set_size(master: int, rows: int, columns: int) -> None:
    try:
        fcntl.ioctl(master, termios.TIOCSWINSZ, array.array("H", [rows, columns, 0, 0]))
    except OSError:
        pass  # the command has ended
