"""A tree of file system entries: what sources (tar, directory, upper) make and the image writer takes.

Paths are raw bytes relative to the root, without a leading or trailing slash; ``b""`` is the root. The tree holds names
and attributes; contents stay where they are and are opened one at a time.
"""

from __future__ import annotations

import dataclasses
import io
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from erofs_tools.errors import SourceError, show_path

NAME_MAX = 255
TARGET_MAX = 4095
PATH_MAX = 16384
"""Longer paths than a system call takes do occur, but a path costs memory for each directory on it."""

WHITEOUT_RDEV = 0
"""A character device with this number hides what layers below have under its name (overlayfs)."""
OPAQUE_XATTR, OPAQUE_VALUE = b"trusted.overlay.opaque", b"y"
"""On a directory: nothing of the layers below shows in it."""
ORIGIN_XATTR, ORIGIN_VALUE = b"trusted.overlay.origin", b""
"""On a directory that holds whiteouts: without it overlayfs lists their names when no other layer has the directory."""


class Content(Protocol):
    """The bytes of a regular file."""

    def open(self) -> BinaryIO:
        """A new reader of exactly ``size`` bytes (``read``, ``seek``, ``close``, with statement); gaps read as zeros.

        Unbuffered is best: it is asked for large pieces. Its ``read`` raises SourceError when the source changed since
        it was listed.
        """
        ...

    def segments(self) -> Iterable[tuple[int, int]]:
        """``(offset, length)``, ascending and disjoint: everything outside is known to be zero without reading it."""
        ...


@dataclass(slots=True)
class BytesContent:
    """Contents that are in memory already."""

    data: bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.data)

    def segments(self) -> Iterable[tuple[int, int]]:
        return [(0, len(self.data))] if self.data else []


@dataclass(slots=True)
class Entry:
    """One name and the inode behind it.

    ``mode`` is the full st_mode, ``rdev`` as os.makedev gives it, ``mtime`` seconds since 1970 (may be negative) and
    ``mtime_ns`` 0..999,999,999 on top of it. ``xattrs`` have full names (``b"user.x"``). ``hardlink_to`` is the path of
    another entry: then only ``path`` of this one counts, everything else is that entry's.
    """

    path: bytes
    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    mtime_ns: int = 0
    rdev: int = 0
    size: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    target: bytes = b""
    hardlink_to: bytes | None = None
    content: Content | None = None

    @property
    def is_dir(self) -> bool:
        return self.hardlink_to is None and stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        return self.hardlink_to is None and stat.S_ISCHR(self.mode) and self.rdev == WHITEOUT_RDEV


_TYPES = frozenset((stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK))


def check_path(path: bytes) -> None:
    """Raise SourceError unless every component is a name that a directory can hold."""
    if not path:
        return
    if b"\0" in path:
        raise SourceError("a path with a NUL byte", path)
    if len(path) > PATH_MAX:
        raise SourceError(f"a path of {len(path)} bytes; expected at most {PATH_MAX}", path[:NAME_MAX])
    for name in path.split(b"/"):
        if name in (b"", b".", b".."):
            raise SourceError(f"a path with the component {name.decode()!r}; expected plain names below the root", path)
        if len(name) > NAME_MAX:
            raise SourceError(f"a name of {len(name)} bytes; a directory holds at most {NAME_MAX}", path)


def check_entry(entry: Entry) -> None:
    """Raise SourceError for attributes that no inode can hold. (Xattrs are the writer's to check.)"""
    if entry.hardlink_to is not None:
        if not entry.path:
            raise SourceError("the root is a hard link; expected a directory")
        return
    kind = stat.S_IFMT(entry.mode)
    if kind not in _TYPES or entry.mode != kind | stat.S_IMODE(entry.mode):
        raise SourceError(f"the mode {entry.mode:#o} names no type of file", entry.path)
    for what, number in (("user", entry.uid), ("group", entry.gid)):
        if not 0 <= number < 0xFFFFFFFF:  # (uid_t) -1 means "no id" to the kernel
            raise SourceError(f"{what} id {number}; expected 0 to 4294967294", entry.path)
    if not -(1 << 63) <= entry.mtime < 1 << 63 or not 0 <= entry.mtime_ns < 1_000_000_000:
        raise SourceError(f"modification time {entry.mtime} s {entry.mtime_ns} ns is out of range", entry.path)
    if kind == stat.S_IFLNK:
        if not entry.target or b"\0" in entry.target:
            raise SourceError("a symbolic link with an empty target or a NUL byte in it", entry.path)
        if len(entry.target) > TARGET_MAX:
            raise SourceError(
                f"a symbolic link to {len(entry.target)} bytes; expected at most {TARGET_MAX}", entry.path
            )
    elif kind == stat.S_IFREG:
        if not 0 <= entry.size < 1 << 63:
            raise SourceError(f"a size of {entry.size} bytes; expected at most {(1 << 63) - 1}", entry.path)
        if entry.size and entry.content is None:
            raise SourceError(f"a file of {entry.size} bytes without contents", entry.path)
    if not entry.path and kind != stat.S_IFDIR:
        raise SourceError("the root is not a directory")


def parent_of(path: bytes) -> bytes:
    """``b"a/b"`` for ``b"a/b/c"``, the root for ``b"a"``."""
    return path.rpartition(b"/")[0]


def _sort_key(path: bytes) -> bytes:
    return path.replace(b"/", b"\0")


class Tree:
    """Entries by path. Adding behaves like extracting a tar: the last of equal paths wins."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {b"": Entry(b"", stat.S_IFDIR | 0o755)}
        self._below: dict[bytes, set[bytes]] = {b"": set()}  # a directory's path: paths of what it holds
        self._links: dict[bytes, dict[bytes, None]] = {}  # the path that holds an inode: its other paths, in order

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path: object) -> bool:
        return path in self._entries

    def get(self, path: bytes) -> Entry | None:
        return self._entries.get(path)

    def children(self, path: bytes) -> list[bytes]:
        """Paths of what the directory holds, sorted; empty for anything else."""
        return sorted(self._below.get(path, ()))

    def resolve(self, path: bytes) -> Entry | None:
        """The entry that holds the inode of this path: itself, or what it is a hard link to."""
        entry = self._entries.get(path)
        return self._entries[entry.hardlink_to] if entry is not None and entry.hardlink_to is not None else entry

    def add(self, entry: Entry) -> None:
        """Put an entry in, in place of what had its path.

        A directory over a directory changes its attributes and keeps what is in it; anything else over a directory
        drops what is below. Missing parents become directories 0755, 0:0, mtime 0. A hard link joins the inode that its
        target has now: replacing the target later does not change it. Raises SourceError for a bad path or attribute,
        for a path below something that is not a directory, and for a hard link to nothing, to a directory, or to
        itself.
        """
        path = entry.path
        check_path(path)
        check_entry(entry)
        self.make_parents(path)
        if entry.hardlink_to is not None:
            entry = self._checked_link(entry)
        if entry.is_dir and path in self._below:
            self._entries[path] = entry
            return
        self.remove(path)
        self._entries[path] = entry
        if path:
            self._below[parent_of(path)].add(path)
        if entry.is_dir:
            self._below.setdefault(path, set())
        elif entry.hardlink_to is not None:
            self._links.setdefault(entry.hardlink_to, {})[path] = None

    def remove(self, path: bytes) -> None:
        """Take out a path and all that is below it; nothing happens when there is no such path. The root stays."""
        pending = [path]
        if path:
            if path not in self._entries:
                return
            self._below[parent_of(path)].discard(path)
        else:
            pending = list(self._below[b""])
            self._below[b""].clear()
        doomed: list[bytes] = []
        while pending:
            one = pending.pop()
            doomed.append(one)
            pending.extend(self._below.pop(one, ()))
        for one in doomed:
            self._forget(one)

    def is_directory(self, path: bytes) -> bool:
        return path in self._below

    def add_whiteout(self, path: bytes) -> None:
        """Hide ``path`` of the layers below, as overlayfs does when it is deleted; the attributes are always equal.

        Nobody sees a whiteout's owner or time. Its directory gets the empty ``trusted.overlay.origin``.
        """
        self.add(Entry(path, stat.S_IFCHR, rdev=WHITEOUT_RDEV))
        self._entries[parent_of(path)].xattrs[ORIGIN_XATTR] = ORIGIN_VALUE

    def make_opaque(self, path: bytes) -> None:
        """Let nothing of the layers below show in a directory that the tree has."""
        self._entries[path].xattrs[OPAQUE_XATTR] = OPAQUE_VALUE

    def entries(self) -> Iterator[Entry]:
        """All entries, the root first, each directory before what it holds, names in byte order.

        Of the paths of one inode the first in this order holds it, whichever came first into the tree.
        """
        for holder in list(self._links):
            self._let_first_hold(holder)
        # NUL is in no name and sorts before every byte of one: "a" < "a/b" < "a-" component by component
        for path in sorted(self._entries, key=_sort_key):
            yield self._entries[path]

    def _let_first_hold(self, holder: bytes) -> None:
        """Move an inode to the first of its paths."""
        paths = [holder, *self._links[holder]]
        first = min(paths, key=_sort_key)
        if first == holder:
            return
        inode = self._entries[holder]
        del self._links[holder]
        self._links[first] = dict.fromkeys(path for path in paths if path != first)
        self._entries[first] = dataclasses.replace(inode, path=first)
        for path in self._links[first]:
            self._entries[path] = Entry(path, inode.mode, hardlink_to=first)

    def make_parents(self, path: bytes) -> None:
        """Add the directories above a path that are missing. Raises SourceError when one is something else."""
        missing: list[bytes] = []
        above = path
        while above:
            above = parent_of(above)
            if above in self._below:
                break
            found = self.resolve(above)
            if found is not None:
                kind = "symbolic link" if stat.S_ISLNK(found.mode) else "file"
                raise SourceError(f"the path goes through the {kind} {show_path(above)}; expected a directory", path)
            missing.append(above)
        for one in reversed(missing):
            self._entries[one] = Entry(one, stat.S_IFDIR | 0o755)
            self._below[one] = set()
            self._below[parent_of(one)].add(one)

    def _checked_link(self, entry: Entry) -> Entry:
        assert entry.hardlink_to is not None
        holder = self.resolve(entry.hardlink_to)
        if holder is None:
            raise SourceError(f"a hard link to {show_path(entry.hardlink_to)}, which is not there", entry.path)
        if holder.is_dir:
            raise SourceError(f"a hard link to the directory {show_path(entry.hardlink_to)}", entry.path)
        if entry.hardlink_to == entry.path or holder.path == entry.path:
            raise SourceError("a hard link to itself", entry.path)
        if holder.path.startswith(entry.path + b"/"):
            raise SourceError("a hard link that takes the place of the directory its target is in", entry.path)
        return entry if holder.path == entry.hardlink_to else dataclasses.replace(entry, hardlink_to=holder.path)

    def _forget(self, path: bytes) -> None:
        """Drop one entry; when other paths share its inode, the first of them holds it from now on."""
        entry = self._entries.pop(path)
        if entry.hardlink_to is not None:
            others = self._links.get(entry.hardlink_to)
            if others is not None:
                others.pop(path, None)
            return
        others = self._links.pop(path, {})
        if not others:
            return
        heir, *rest = others
        self._entries[heir] = dataclasses.replace(entry, path=heir)
        for one in rest:
            self._entries[one] = dataclasses.replace(self._entries[one], hardlink_to=heir)
        if rest:
            self._links[heir] = dict.fromkeys(rest)
