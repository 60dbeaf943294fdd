"""A tar archive, plain or gzip, as a tree.

The tree is what extracting the archive in order gives: the last of equal paths wins (a directory over a directory
changes its attributes and keeps what is in it, anything else over a directory drops what is below), and a hard link
joins the inode that its target has at that moment. Unlike GNU tar, a hard link may come before its target. What would
be written outside the tree or through one of its symbolic links is refused.

For kind ``diff`` names that start with ``.wh.`` are OCI whiteouts (image specification, "Layer Filesystem Changeset"),
applied after everything else, whatever their place in the archive: ``.wh.x`` beside an ``x`` means that x replaces
what is below, so a directory x becomes opaque.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from erofs_tools.content import Archive, PiecesContent, RangeContent, os_error_text
from erofs_tools.errors import SourceError, show_path
from erofs_tools.gzip_spool import GZIP_MAGIC, Spool, spool_gzip, spool_plain
from erofs_tools.source_rules import (
    OPAQUE_WHITEOUT,
    WHITEOUT_META_PREFIX,
    WHITEOUT_PREFIX,
    layer_xattrs,
    refuse_whiteout_device,
    refuse_whiteout_name,
)
from erofs_tools.tar_headers import LINK, Member, members
from erofs_tools.tree import Entry, Tree, parent_of

_OTHER_FORMATS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_MAX_MAJOR, _MAX_MINOR = 1 << 12, 1 << 20
"""What Linux packs into its 32-bit device numbers."""


@contextmanager
def from_tar(
    path: str | os.PathLike[str],
    *,
    kind: str,
    strip_overlay: bool = False,
    literal_whiteouts: bool = False,
    spool_dir: str | os.PathLike[str],
) -> Iterator[Tree]:
    """The tree of an archive; its contents can be read until the context ends.

    A gzip archive (known by its first bytes) and one that comes through a pipe are kept uncompressed in an unnamed file
    in ``spool_dir`` meanwhile. ``kind`` is the layer's; ``.wh.`` names mean whiteouts for ``diff`` and are refused for
    others, ``literal_whiteouts`` keeps them as files for any. ``strip_overlay`` drops overlayfs's attributes and 0/0
    character devices instead of refusing them. Raises SourceError for whatever is not a whole, harmless archive.
    """
    archive = _open(path, spool_dir)
    try:
        builder = _Builder(
            whiteouts=kind == "diff" and not literal_whiteouts, literal=literal_whiteouts, strip_overlay=strip_overlay
        )
        for member in members(archive):
            builder.add(member, archive)
        archive.check_unchanged()
        yield builder.finish()
    finally:
        archive.close()


def _open(path: str | os.PathLike[str], spool_dir: str | os.PathLike[str]) -> Archive:
    name = show_path(os.fsencode(path))
    try:
        _refuse_devices(Path(path).stat().st_mode, name)  # before opening it, which some devices take for an order
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"cannot open {name}: {os_error_text(error)}") from error
    try:
        kind = os.fstat(source).st_mode
        _refuse_devices(kind, name)
        if stat.S_ISDIR(kind):
            raise SourceError(f"{name} is a directory; expected a tar archive")
        try:
            first = os.read(source, 512)
            while 0 < len(first) < 8 and (more := os.read(source, 512)):  # a pipe gives what it has
                first += more
            for magic, format_ in _OTHER_FORMATS.items():
                if first.startswith(magic):
                    raise SourceError(f"{name} is {format_}; expected a tar archive, plain or gzip")
            compressed = first.startswith(GZIP_MAGIC)
            if stat.S_ISREG(kind) and not compressed:
                fd, source = source, -1
                return Archive(fd, name)
            spool = Spool(spool_dir, name)
            try:
                if compressed:
                    spool_gzip(source, first, spool, name)
                else:
                    spool_plain(source, first, spool)
                return Archive(spool.finish(), name)
            finally:
                spool.close()
        except OSError as error:
            raise SourceError(f"cannot read {name}: {os_error_text(error)}") from error
    finally:
        if source >= 0:
            os.close(source)


def _refuse_devices(mode: int, name: str) -> None:
    """A device may never end (/dev/zero), and has no size."""
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        kind = "character" if stat.S_ISCHR(mode) else "block"
        raise SourceError(f"{name} is a {kind} device; expected a tar archive, as a file or through a pipe")


class _Builder:
    """Adds members to a tree, and at the end what has to wait for all of them."""

    def __init__(self, *, whiteouts: bool, literal: bool, strip_overlay: bool) -> None:
        self._tree = Tree()
        self._whiteouts = whiteouts
        self._literal = literal
        self._strip = strip_overlay
        self._hidden: set[bytes] = set()  # what whiteouts name
        self._opaque: set[bytes] = set()
        self._early_links: dict[bytes, bytes] = {}  # hard links whose target is still to come
        self._dropped: set[bytes] = set()  # paths of 0/0 devices that strip_overlay leaves out

    def add(self, member: Member, archive: Archive) -> None:
        path = _clean(member.name)
        if WHITEOUT_PREFIX in member.name and self._take_whiteout(path):
            return
        xattrs = layer_xattrs(member.xattrs, path, strip_overlay=self._strip)
        if member.kind == LINK:
            self._add_link(path, member)
            return
        entry = Entry(
            path, member.kind | member.mode, member.uid, member.gid, member.mtime, member.mtime_ns, xattrs=xattrs
        )
        if member.kind == stat.S_IFREG:
            entry.size = member.size
            if member.pieces is not None:
                entry.content = PiecesContent(archive, member.pieces, member.size, path)
            elif member.size:
                entry.content = RangeContent(archive, member.data, member.size, path)
        elif member.kind == stat.S_IFLNK:
            entry.mode = stat.S_IFLNK | 0o777  # as every Linux file system says, whatever the archive does
            entry.target = member.target
        elif member.kind in (stat.S_IFCHR, stat.S_IFBLK):
            if not (0 <= member.major < _MAX_MAJOR and 0 <= member.minor < _MAX_MINOR):
                raise SourceError(f"device number {member.major}:{member.minor} is out of range", path)
            entry.rdev = os.makedev(member.major, member.minor)
            if entry.is_whiteout:
                if not self._strip:
                    raise refuse_whiteout_device(path)
                self._dropped.add(path)
                return
        self._early_links.pop(path, None)
        self._dropped.discard(path)
        if self._whiteouts and not entry.is_dir:
            self._forget_whiteouts_below(path)
        self._tree.add(entry)

    def finish(self) -> Tree:
        """The whole tree: late links made, whiteouts put where nothing of the archive took their place."""
        self._make_early_links()
        tree = self._tree
        for path in self._hidden:
            holder = tree.resolve(path)
            if holder is None:
                tree.add_whiteout(path)
            elif holder.is_dir:
                tree.make_opaque(path)
        for path in self._opaque:
            if not path:
                # overlayfs merges the roots of all layers without asking
                raise SourceError("an opaque whiteout for the root; a layer cannot hide the whole of those below it")
            tree.make_opaque(path)
        return tree

    def _add_link(self, path: bytes, member: Member) -> None:
        target = _clean_target(member.target, path)
        if target in self._dropped:
            return
        if target not in self._tree:
            self._early_links[path] = target
        elif self._tree.resolve(target) is not self._tree.resolve(path):
            # (it is for "x links to x", which GNU tar writes for a file that it was told to add twice)
            self._early_links.pop(path, None)
            self._forget_whiteouts_below(path)
            self._tree.add(Entry(path, stat.S_IFREG, hardlink_to=target))

    def _make_early_links(self) -> None:
        waiting = self._early_links
        while waiting:
            ready = [path for path, target in waiting.items() if target in self._tree]
            if not ready:
                path, target = next(iter(waiting.items()))
                raise SourceError(f"a hard link to {show_path(target)}, which is not in the archive", path)
            for path in ready:
                self._tree.add(Entry(path, stat.S_IFREG, hardlink_to=waiting.pop(path)))

    def _take_whiteout(self, path: bytes) -> bool:
        """Note what a ``.wh.`` name asks for; False when it is an ordinary name after all."""
        *parents, last = path.split(b"/")
        if not any(name.startswith(WHITEOUT_PREFIX) for name in (*parents, last)) or self._literal:
            return False
        if not self._whiteouts:
            raise refuse_whiteout_name(path)
        for name in parents:
            if name.startswith(WHITEOUT_META_PREFIX):
                return True  # aufs kept things of its own there
            if name.startswith(WHITEOUT_PREFIX):
                raise SourceError("a path through a whiteout", path)
        parent = parent_of(path)
        if last == OPAQUE_WHITEOUT:
            self._tree.make_parents(path)
            self._opaque.add(parent)
        elif not last.startswith(WHITEOUT_META_PREFIX):
            hidden = last[len(WHITEOUT_PREFIX) :]
            if hidden in (b"", b".", b".."):
                raise SourceError("a whiteout that names nothing", path)
            self._tree.make_parents(path)
            self._hidden.add(parent + b"/" + hidden if parent else hidden)
        return True

    def _forget_whiteouts_below(self, path: bytes) -> None:
        """Something that is no directory takes a directory's place: what whiteouts said below it is moot."""
        if (self._hidden or self._opaque) and self._tree.is_directory(path):
            below = path + b"/"
            self._hidden = {p for p in self._hidden if not p.startswith(below)}
            self._opaque = {p for p in self._opaque if p != path and not p.startswith(below)}


def _clean(name: bytes) -> bytes:
    """The path below the root that a member's name means. Raises SourceError for one that leaves it."""
    if name.startswith(b"/"):
        raise SourceError("an absolute path; expected one below the root", name)
    if b"./" not in name and b"//" not in name and not name.endswith((b"/", b".")):
        if not name:
            raise SourceError("a member without a name")
        return name
    names = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in names:
        raise SourceError("a path with '..'; expected one that stays below the root", name)
    return b"/".join(names)


def _clean_target(target: bytes, path: bytes) -> bytes:
    try:
        return _clean(target)
    except SourceError as error:
        raise SourceError(f"a hard link to {show_path(target)}: {error}", path) from error
