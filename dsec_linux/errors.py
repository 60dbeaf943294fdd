"""The one error of this package: a system call that failed, or that was refused before it was made.

OSError
└── LinuxError                  errno, call, subject, log
    ├── LinuxNotFound           ENOENT, also FileNotFoundError
    ├── LinuxExists             EEXIST, also FileExistsError
    ├── LinuxPermission         EPERM and EACCES, also PermissionError
    ├── LinuxNotADirectory      ENOTDIR, also NotADirectoryError
    ├── LinuxIsADirectory       EISDIR, also IsADirectoryError
    ├── LinuxNoProcess          ESRCH, also ProcessLookupError
    └── LinuxInterrupted        EINTR, also InterruptedError
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # not from typing: importing it costs several milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable


class LinuxError(OSError):
    """A failed system call.

    ``call`` is the call with what matters of its arguments, ``subject`` what it was made on, ``log`` the lines that
    explain it: the kernel's own (read from an fsopen descriptor), or ours where the call was refused before it was made
    because the kernel would have said nothing.
    """

    def __init__(self, number: int, call: str, subject: str, log: Iterable[str] = ()) -> None:
        super().__init__(number, os.strerror(number))
        self.call = call
        self.subject = subject
        self.log = list(log)

    def __str__(self) -> str:
        number = self.errno or 0
        text = f"{self.call} on {self.subject}: {os.strerror(number)} ({errno.errorcode.get(number, number)})"
        return f"{text}: {'; '.join(self.log)}" if self.log else text

    def __reduce__(self) -> tuple[type[LinuxError], tuple[int, str, str, list[str]]]:
        return type(self), (self.errno or 0, self.call, self.subject, self.log)


class LinuxNotFound(LinuxError, FileNotFoundError):
    pass


class LinuxExists(LinuxError, FileExistsError):
    pass


class LinuxPermission(LinuxError, PermissionError):
    pass


class LinuxNotADirectory(LinuxError, NotADirectoryError):
    pass


class LinuxIsADirectory(LinuxError, IsADirectoryError):
    pass


class LinuxNoProcess(LinuxError, ProcessLookupError):
    pass


class LinuxInterrupted(LinuxError, InterruptedError):
    pass


_CLASSES: dict[int, type[LinuxError]] = {
    errno.ENOENT: LinuxNotFound,
    errno.EEXIST: LinuxExists,
    errno.EPERM: LinuxPermission,
    errno.EACCES: LinuxPermission,
    errno.ENOTDIR: LinuxNotADirectory,
    errno.EISDIR: LinuxIsADirectory,
    errno.ESRCH: LinuxNoProcess,
    errno.EINTR: LinuxInterrupted,
}


def failure(number: int, call: str, subject: str, log: Iterable[str] = ()) -> LinuxError:
    """The LinuxError for an errno, of the class that also is Python's own exception for it."""
    return _CLASSES.get(number, LinuxError)(number, call, subject, log)


def from_os_error(error: OSError, call: str, subject: str) -> LinuxError:
    """The same error with the call and its subject, for calls that Python makes for us."""
    return failure(error.errno or errno.EIO, call, subject)
