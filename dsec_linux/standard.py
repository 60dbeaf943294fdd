"""The standard descriptors. Apart from the system calls, because every command starts with it and needs no ctypes."""

from __future__ import annotations

import os


def fill_standard_descriptors() -> None:
    """Put /dev/null in the place of the standard descriptors that the caller closed.

    Without it the next file opened gets the number, and what a child process prints ends up in it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(fd, True)
