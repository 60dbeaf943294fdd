"""Namespaces, and what binds a child to its parent: prctl(2) flags that a new process sets on itself."""

from __future__ import annotations

import os

from dsec_linux.errors import from_os_error
from dsec_linux.libc import check, libc

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


def unshare(flags: int) -> None:
    """Give the calling process new namespaces (CLONE_NEWPID: its next children)."""
    check(libc.unshare(flags), "unshare", f"flags {flags:#x}")


def setns(fd: int, flags: int = 0) -> None:
    """Enter the namespace of a descriptor of /proc/PID/ns/*, or those in ``flags`` of a pidfd's process."""
    check(libc.setns(fd, flags), "setns", f"descriptor {fd}")


def set_pdeathsig(signal: int) -> None:
    """Ask for a signal when the thread that made this process ends. A parent that is already gone sends none: compare
    os.getppid() afterwards."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)", f"signal {signal}")


def set_subreaper(on: bool = True) -> None:
    """Become the parent of every orphan among this process's descendants."""
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)", "this process")


def pidfd_open(pid: int) -> int:
    """A descriptor of a process; readable once it has ended. Raises ProcessLookupError when there is none."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise from_os_error(error, "pidfd_open", f"process {pid}") from error
