"""Who the command runs as: docker's reading of ``USER[:GROUP]``, by the image's own /etc/passwd and /etc/group.

The files are opened as if the image were the root directory (openat2 RESOLVE_IN_ROOT): a symlink in an image cannot
make us read the machine's files.
"""

from __future__ import annotations

import os
import stat

from dsec_linux.files import open_in_root
from runtimes.errors import SettingsError

MAX_ID = 2**31 - 1
_MAX_FILE = 16 << 20


class User:
    """``name`` is what the record shows, ``home`` the directory of /etc/passwd or ``/``."""

    __slots__ = ("gid", "groups", "home", "name", "uid")

    def __init__(self, name: str, uid: int, gid: int, groups: list[int], home: str) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.home = home


def resolve_user(root: int, text: str) -> User:
    """The user of ``text`` (a name or number, optionally ``:`` and a group's name or number; empty is root).

    ``root`` is a descriptor of the root file system. As docker: a number is looked up as an id only, and need not
    exist; a user without an explicit group gets the supplementary groups of /etc/group. Raises SettingsError.
    """
    user_part, colon, group_part = text.partition(":")
    if colon and not group_part:
        raise SettingsError(f"not a user: {text!r}: nothing after the colon; expected USER[:GROUP]")
    wanted = _number(user_part or "0", text)
    uid, gid, home, name = wanted or 0, 0, "/", ""
    found = False
    for fields in _entries(root, "etc/passwd", 4):
        entry_uid, entry_gid = _plain(fields[2]), _plain(fields[3])
        if entry_uid is None or entry_gid is None:
            continue
        if (entry_uid == wanted) if wanted is not None else (fields[0] == user_part):
            name, uid, gid, found = fields[0], entry_uid, entry_gid, True
            home = (fields[5] if len(fields) > 5 else "") or "/"
            break
    if not found and wanted is None:
        raise SettingsError(f"no user {user_part!r} in the sandbox's /etc/passwd")
    groups: list[int] = []
    if group_part:
        gid = _group(root, group_part, text)
    elif found:
        for fields in _entries(root, "etc/group", 4):
            number = _plain(fields[2])
            if number is not None and name in fields[3].split(","):
                groups.append(number)
    return User(text or name or "0", uid, gid, groups, home)


def _group(root: int, part: str, text: str) -> int:
    wanted = _number(part, text)
    for fields in _entries(root, "etc/group", 3):
        number = _plain(fields[2])
        if number is not None and ((number == wanted) if wanted is not None else (fields[0] == part)):
            return number
    if wanted is None:
        raise SettingsError(f"no group {part!r} in the sandbox's /etc/group")
    return wanted


def _plain(field: str) -> int | None:
    return int(field) if field.isascii() and field.isdigit() else None


def _number(part: str, text: str) -> int | None:
    number = _plain(part)
    if number is not None and number > MAX_ID:
        raise SettingsError(f"not a user: {text!r}: ids go to {MAX_ID}")
    return number


def _entries(root: int, path: str, least: int) -> list[list[str]]:
    """The lines of a colon-separated file with at least that many fields; none when there is no such regular file."""
    try:
        fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)  # a fifo in its place must not hold us up
    except OSError:
        return []
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        text = file.read(_MAX_FILE).decode(errors="surrogateescape")
    split = (line.strip().split(":") for line in text.splitlines() if not line.startswith("#"))
    return [fields for fields in split if len(fields) >= least]
