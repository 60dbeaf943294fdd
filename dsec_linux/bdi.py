"""Readahead of mounted file systems: /sys/class/bdi (Documentation/ABI/testing/sysfs-class-bdi)."""

# pathlib costs more to import than this module.
# ruff: noqa: PTH208

from __future__ import annotations

import os

from dsec_linux.errors import from_os_error
from dsec_linux.files import statx

FOLDER = "/sys/class/bdi"


def names() -> set[str]:
    """The names of all backing devices. EROFS's are ``erofs-N`` with a global counter and do not tell their mount: take
    the difference of two calls around the mount, under a lock."""
    try:
        return set(os.listdir(FOLDER))
    except OSError as error:
        raise from_os_error(error, "readdir", FOLDER) from error


def name_of(mount: int) -> str:
    """The name of the backing device of a FUSE mount, from a descriptor of its root. Asks the server nothing."""
    info = statx(mount, sync=False)
    return f"{info.dev_major}:{info.dev_minor}"


def read_ahead(name: str) -> int:
    """KiB that the kernel reads ahead at most."""
    path = f"{FOLDER}/{name}/read_ahead_kb"
    try:
        with open(path) as file:
            return int(file.read())
    except OSError as error:
        raise from_os_error(error, "read", path) from error


def set_read_ahead(name: str, kib: int) -> None:
    """Let the kernel read ahead up to ``kib`` KiB; ``name`` as of ``names()`` or ``name_of()``."""
    path = f"{FOLDER}/{name}/read_ahead_kb"
    try:
        with open(path, "w") as file:
            file.write(str(kib))
    except OSError as error:
        raise from_os_error(error, "write", path) from error
