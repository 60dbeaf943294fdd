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
MAX_GROUPS = 65536
"""Supplementary groups that a process may have (NGROUPS_MAX)."""
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
        raise SettingsError(f"not a user: {_shown(text)}: nothing after the colon; expected USER[:GROUP]")
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
        raise SettingsError(f"no user {_shown(user_part)} in the sandbox's /etc/passwd")
    groups: list[int] = []
    if group_part:
        gid = _group(root, group_part, text)
    elif found:
        for fields in _entries(root, "etc/group", 4):
            number = _plain(fields[2])
            if number is not None and name in fields[3].split(","):
                groups.append(_checked(number, text or name, f"the gid of {_shown(fields[0])} in /etc/group is beyond"))
        if len(groups) > MAX_GROUPS:
            raise SettingsError(
                f"user {_shown(text or name)} is in {len(groups)} groups of the sandbox's /etc/group; "
                f"a process can have {MAX_GROUPS}"
            )
    _checked(uid, text or name, "its uid in /etc/passwd is beyond")
    _checked(gid, text or name, "its gid in /etc/passwd is beyond")
    return User(text or name or "0", uid, gid, groups, home)


def _group(root: int, part: str, text: str) -> int:
    wanted = _number(part, text)
    for fields in _entries(root, "etc/group", 3):
        number = _plain(fields[2])
        if number is not None and ((number == wanted) if wanted is not None else (fields[0] == part)):
            return _checked(number, text, "its gid in /etc/group is beyond")
    if wanted is None:
        raise SettingsError(f"no group {_shown(part)} in the sandbox's /etc/group")
    return wanted


def _plain(field: str) -> int | None:
    """A number, or None for what is none. Beyond ten digits it is only said to be too large."""
    if not field.isascii() or not field.isdigit():
        return None
    digits = field.lstrip("0")  # int() refuses thousands of digits
    return int(digits or "0") if len(digits) <= len(str(MAX_ID)) else MAX_ID + 1


def _number(part: str, text: str) -> int | None:
    number = _plain(part)
    return None if number is None else _checked(number, text)


def _checked(number: int, text: str, where: str = "") -> int:
    """The id, unless it is out of range: an OCI runtime would make another user of it, 2**32 - 1 even root."""
    if number > MAX_ID:
        raise SettingsError(f"not a user: {_shown(text)}: ids go to {MAX_ID}{where and f'; {where}'}")
    return number


def _shown(text: str) -> str:
    from erofs_tools.errors import show

    return show(text)


def _entries(root: int, path: str, least: int) -> list[list[str]]:
    """The lines of a colon-separated file with at least that many fields; none when there is no such regular file."""
    try:
        fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)  # a fifo in its place must not hold us up
    except OSError:
        return []
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return []
    with open(fd, "rb") as file:
        text = file.read(_MAX_FILE).decode(errors="surrogateescape")
    split = (line.strip().split(":") for line in text.splitlines() if not line.startswith("#"))
    return [fields for fields in split if len(fields) >= least]
