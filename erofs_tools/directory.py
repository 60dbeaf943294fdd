"""A directory as a tree: everything below it, as it lies there.

Goes by descriptors and follows no symbolic link, so a tree that somebody moves about cannot lead outside. Contents are
read later; a file that was replaced or written since it was listed is an error then, a directory that changes while it
is listed is one at once. File systems mounted below belong to the tree. Access and change times and the SELinux label
are not looked at.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod

from erofs_tools.content import DirectoryFds, FileContent, identity, os_error_text
from erofs_tools.errors import SourceError, show_path
from erofs_tools.source_rules import WHITEOUT_PREFIX, layer_xattrs, refuse_whiteout_device, refuse_whiteout_name
from erofs_tools.tree import Entry, Tree


class Rules(ABC):
    """What a kind of directory may hold, and what becomes of it."""

    @abstractmethod
    def check_name(self, name: bytes, path: bytes) -> None:
        """Raise SourceError for a name that must not be there."""

    @abstractmethod
    def xattrs(self, found: dict[bytes, bytes], path: bytes, mode: int) -> dict[bytes, bytes]:
        """The attributes that stay, full names. Raises SourceError for those that must not be there."""

    @abstractmethod
    def whiteout(self, tree: Tree, path: bytes) -> None:
        """A 0/0 character device was found."""


class _DirectoryRules(Rules):
    def __init__(self, *, strip_overlay: bool, literal_whiteouts: bool) -> None:
        self._strip = strip_overlay
        self._literal = literal_whiteouts

    def check_name(self, name: bytes, path: bytes) -> None:
        if not self._literal and name.startswith(WHITEOUT_PREFIX):
            raise refuse_whiteout_name(path)

    def xattrs(self, found: dict[bytes, bytes], path: bytes, mode: int) -> dict[bytes, bytes]:
        return layer_xattrs(found, path, strip_overlay=self._strip)

    def whiteout(self, tree: Tree, path: bytes) -> None:
        if not self._strip:
            raise refuse_whiteout_device(path)


def from_directory(
    path: str | os.PathLike[str], *, strip_overlay: bool = False, literal_whiteouts: bool = False
) -> Tree:
    """The tree of a directory, whose own mode, owner, mtime and attributes are the root's.

    Names that start with ``.wh.`` are refused unless ``literal_whiteouts`` keeps them as they are; overlayfs's
    attributes and 0/0 character devices are refused unless ``strip_overlay`` drops them. The same inode under several
    paths becomes hard links. Raises SourceError, with the path, for those, for what cannot be read, and for what
    changes meanwhile. The contents of the tree can be read as long as it is referred to.
    """
    return scan(path, _DirectoryRules(strip_overlay=strip_overlay, literal_whiteouts=literal_whiteouts))


def scan(path: str | os.PathLike[str], rules: Rules) -> Tree:
    """The tree of a directory under the given rules."""
    try:
        fds = DirectoryFds(path)
    except OSError as error:
        raise SourceError(f"cannot open {show_path(os.fsencode(path))}: {os_error_text(error)}") from error
    return _Scan(fds, rules).run()


class _Scan:
    def __init__(self, fds: DirectoryFds, rules: Rules) -> None:
        self._fds = fds
        self._rules = rules
        self._tree = Tree()
        self._linked: dict[tuple[int, int], bytes] = {}  # (device, inode) with several links: its first path

    def run(self) -> Tree:
        status = os.fstat(self._fds.top)
        try:
            found = read_xattrs(self._fds.top)
        except OSError as error:
            raise SourceError(f"cannot read the root's attributes: {os_error_text(error)}") from error
        self._add(b"", status, found)
        pending = [b""]
        while pending:
            # the last of a directory's directories is taken first: reversed, so that the way is in byte order
            pending.extend(reversed(self._list(pending.pop())))
        return self._tree

    def _list(self, path: bytes) -> list[bytes]:
        """Add what a directory holds; the directories among it, in byte order."""
        try:
            fd = self._fds.open(path)
        except OSError as error:
            raise _unreadable(error, path, "open the directory") from error
        try:
            before = os.fstat(fd)
            directories = []
            prefix = path + b"/" if path else b""
            here = b"/proc/self/fd/%d/" % fd  # for calls that take no descriptor of a directory
            for name in sorted(os.listdir(here)):  # noqa: PTH208 (a Path would decode the names)
                child = prefix + name
                if self._add_child(fd, here + name, name, child):
                    directories.append(child)
            if identity(os.fstat(fd)) != identity(before):
                raise SourceError("the directory changed while the tree was read", path)
        except OSError as error:
            raise _unreadable(error, path, "list the directory") from error
        finally:
            os.close(fd)
        return directories

    def _add_child(self, fd: int, where: bytes, name: bytes, path: bytes) -> bool:
        self._rules.check_name(name, path)
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            found = read_xattrs(where)
            target = os.readlink(where) if stat.S_ISLNK(status.st_mode) else b""  # noqa: PTH115
        except OSError as error:
            raise _unreadable(error, path, "read its attributes") from error
        return self._add(path, status, found, target)

    def _add(self, path: bytes, status: os.stat_result, found: dict[bytes, bytes], target: bytes = b"") -> bool:
        """Add one path; whether it is a directory."""
        mode = status.st_mode
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            self._rules.whiteout(self._tree, path)  # before the links: overlayfs uses one inode for many whiteouts
            return False
        if status.st_nlink > 1 and kind != stat.S_IFDIR:
            first = self._linked.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                self._tree.add(Entry(path, mode, hardlink_to=first))
                return False
        seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
        entry = Entry(path, mode, status.st_uid, status.st_gid, seconds, nanoseconds)
        if found:
            entry.xattrs = self._rules.xattrs(found, path, mode)
        if kind == stat.S_IFREG:
            entry.size = status.st_size
            if status.st_size:
                entry.content = FileContent(self._fds, path, status)
        elif kind == stat.S_IFLNK:
            entry.target = target
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            entry.rdev = status.st_rdev
        self._tree.add(entry)
        return kind == stat.S_IFDIR


def read_xattrs(where: int | bytes) -> dict[bytes, bytes]:
    """All extended attributes of a descriptor or of a path (whose last component is not followed).

    Raises OSError, but not for a file system that has none.
    """
    follow = isinstance(where, int)
    try:
        names = os.listxattr(where, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {os.fsencode(name): os.getxattr(where, name, follow_symlinks=follow) for name in names}


def _unreadable(error: OSError, path: bytes, what: str) -> SourceError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENODATA):
        return SourceError("it was removed or replaced while the tree was read", path)
    return SourceError(f"cannot {what}: {os_error_text(error)}", path)
