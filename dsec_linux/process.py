"""Processes by descriptor, and what a process says of itself.

A pid may be another process's by the time it is used; a pidfd never is.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH208

from __future__ import annotations

import os
import select

from dsec_linux.errors import from_os_error
from dsec_linux.libc import SYS_PIDFD_SEND_SIGNAL, check, libc, syscall

# From signal(7), equal on x86_64 and aarch64: the module signal costs an import of enum.
SIGKILL, SIGTERM = 9, 15

PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38


def pidfd_send_signal(pidfd: int, signal: int) -> None:
    """Raises ProcessLookupError when the process has ended and was waited for."""
    check(syscall(SYS_PIDFD_SEND_SIGNAL, pidfd, signal, None, 0), "pidfd_send_signal", f"signal {signal}")


def wait_ended(pidfd: int, timeout: float | None = None) -> bool:
    """Whether a process (anyone's) has ended within ``timeout`` seconds; None waits for ever."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0, timeout * 1000)))


class Exit:
    """How a child ended: ``code`` it exited with or None, ``signal`` that killed it or None."""

    __slots__ = ("code", "pid", "signal")

    def __init__(self, pid: int, code: int | None, signal: int | None) -> None:
        self.pid = pid
        self.code = code
        self.signal = signal

    def __repr__(self) -> str:
        how = f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"
        return f"Exit({self.pid}, {how})"


def _exit_of(info: os.waitid_result) -> Exit:
    if info.si_code == os.CLD_EXITED:
        return Exit(info.si_pid, info.si_status, None)
    return Exit(info.si_pid, None, info.si_status)


def wait_child(pidfd: int) -> Exit:
    """Wait for a child's end and take its status. Raises ChildProcessError when it is not (or no longer) our child."""
    info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert info is not None  # only with WNOHANG
    return _exit_of(info)


def reap_children() -> list[Exit]:
    """Take the status of every child that has ended, the orphans of a subreaper too; never waits."""
    ended: list[Exit] = []
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return ended
        if info is None:
            return ended
        ended.append(_exit_of(info))


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names one process until the next boot.

    Raises ProcessLookupError when there is none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, the second field, may hold anything; field 22 is the 20th after its parenthesis.
            return int(file.read().rpartition(b")")[2].split()[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    except OSError as error:
        raise from_os_error(error, "read", f"/proc/{pid}/stat") from error


def children(pid: int) -> list[int]:
    """The children of every thread of a process; none when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.extend(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def set_no_new_privs() -> None:
    """No exec of this process or its children gives it more rights, set-user-id programs included."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)", "this process")


def set_dumpable(on: bool) -> None:
    """Whether others of the same user may trace this process and read its memory through /proc."""
    check(libc.prctl(PR_SET_DUMPABLE, int(on), 0, 0, 0), "prctl(PR_SET_DUMPABLE)", "this process")


def set_name(name: str) -> None:
    """The name of the calling thread as ps shows it, cut at 15 bytes."""
    import ctypes

    buffer = ctypes.create_string_buffer(name.encode()[:15], 16)
    check(libc.prctl(PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0), "prctl(PR_SET_NAME)", name)
