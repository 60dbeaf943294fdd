"""Decide whether an image may be mounted: everything the kernel would follow stays inside the image and its one data
file.

The kernel checks little of this, and a layer comes from elsewhere. Time counts, because a mount waits for it: 16,000
inodes with 160,000 extents take about a tenth of a second, so contents are looked at in bulk and by offsets instead
of by the objects of erofs_tools.reader.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from array import array
from dataclasses import dataclass
from typing import NoReturn

from erofs_tools.errors import FormatError, VerifyError, show_path
from erofs_tools.ondisk import (
    BLOCK,
    CHUNK_INDEXES,
    COMPACT_INODE_SIZE,
    COMPAT_CHECKSUM,
    COMPAT_MTIME,
    COMPAT_NAMES,
    COMPAT_XATTR_FILTER,
    DATA_DEVICE_ENTRY,
    EXTENT_ENTRY_SIZE,
    FORMAT_EXTENDED,
    FORMAT_LAYOUT_SHIFT,
    FT_BY_IFMT,
    HOLE_ENTRY,
    INODE,
    INODE_SIZE,
    LAYOUT_CHUNKS,
    LAYOUT_PLAIN,
    NO_BLOCK,
    SLOT,
    xattr_body_size,
)
from erofs_tools.reader import Image, Inode, parse_directory_block, parse_xattrs, table_entries

_BATCH = 1 << 16  # extent entries looked at in one go
_KEPT_BODIES = 4096  # xattrs that many inodes share are parsed once
_USUAL_FORMAT = FORMAT_EXTENDED | LAYOUT_CHUNKS << FORMAT_LAYOUT_SHIFT
_DIRECTORY, _FILE, _LINK = FT_BY_IFMT[stat.S_IFDIR], FT_BY_IFMT[stat.S_IFREG], FT_BY_IFMT[stat.S_IFLNK]


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found. ``extents`` counts blocks of files, holes included."""

    inodes: int
    files: int
    directories: int
    symlinks: int
    others: int
    extents: int
    metadata_size: int
    data_size: int


def verify(
    meta: str | os.PathLike[str] | bytes, *, data_size: int, digest: str | None = None, name: str | None = None
) -> Verified:
    """Check a metadata file (a path, or its bytes) against the size of its data file and, if given, its own digest
    (``sha256:…``).

    Looked at: the superblock (checksum, features), the device table (exactly one device, of ``data_size`` bytes), every
    inode that can be reached, every name, xattr, symbolic link and extent. Raises VerifyError with the first thing
    that is wrong and where it is, behind ``name`` (without one, the path); OSError when the file cannot be read.
    Memory: a few tens of bytes an inode.
    """
    try:
        with Image(meta) as image:
            if digest is not None:
                found = "sha256:" + hashlib.sha256(image.raw).hexdigest()
                if found != digest:
                    raise VerifyError(f"the digest is {found}; expected {digest}")
            return _Check(image, data_size).run()
    except FormatError as error:
        if name is None:
            name = "the metadata image" if isinstance(meta, bytes) else show_path(os.fsencode(meta))
        raise VerifyError(f"{name}: {error}") from error


class _Check:
    def __init__(self, image: Image, data_size: int) -> None:
        self.image = image
        self.raw = image.raw
        self.data_size = data_size
        self.data_blocks = data_size // BLOCK
        self.directories: dict[int, tuple[int, bytes]] = {}  # nid: the directory it is in, and its name there
        self.leaves: dict[int, int] = {}  # nid of anything else: its type
        # Nothing may be counted twice, or a small image with overlapping tables would take forever to look at.
        self.unclaimed = len(self.raw)
        self.extents = 0
        self.batch: list[tuple[int, bytes]] = []
        self.batched = 0
        self.bodies: set[bytes] = set()

    def run(self) -> Verified:
        self.superblock()
        self.tree()
        self.contents()
        kinds = array("B", self.leaves.values())
        inodes = len(self.directories) + len(self.leaves)
        if inodes != self.image.superblock.inodes:
            raise VerifyError(f"the superblock counts {self.image.superblock.inodes} inodes; found {inodes}")
        files, links = kinds.count(_FILE), kinds.count(_LINK)
        return Verified(
            inodes=inodes,
            files=files,
            directories=len(self.directories),
            symlinks=links,
            others=len(kinds) - files - links,
            extents=self.extents,
            metadata_size=len(self.raw),
            data_size=self.data_size,
        )

    def superblock(self) -> None:
        superblock = self.image.superblock
        if not superblock.compat & COMPAT_CHECKSUM:
            raise VerifyError("the superblock has no checksum")
        unknown = superblock.compat & ~(COMPAT_CHECKSUM | COMPAT_MTIME | COMPAT_XATTR_FILTER)
        if unknown:
            names = ", ".join(COMPAT_NAMES.get(bit, f"bit {bit}") for bit in range(32) if unknown >> bit & 1)
            raise VerifyError(f"compatible features that are not understood here: {names}")
        if superblock.blocks * BLOCK != len(self.raw):
            raise VerifyError(f"the superblock counts {superblock.blocks} blocks; the file has {len(self.raw)} bytes")
        if len(self.image.devices) != 1:
            raise VerifyError(f"the image names {len(self.image.devices)} devices; expected 1")
        device = self.image.devices[0]
        if device.blocks * BLOCK != self.data_size:
            raise VerifyError(f"the image names {device.blocks} blocks of data; the data has {self.data_size} bytes")
        if 0 < device.address < superblock.blocks:
            # the kernel would look for a directory's blocks in the data
            raise VerifyError(
                f"the data's address {device.address} lies inside the image of {superblock.blocks} blocks"
            )

    def tree(self) -> None:
        """Reach everything from the root: fills ``directories`` and ``leaves``."""
        root = self.image.superblock.root_nid
        directories, leaves = self.directories, self.leaves
        directories[root] = (root, b"")
        pending = [root]
        while pending:
            nid = pending.pop()
            try:
                entries = self.directory(nid)
            except FormatError as error:
                self.fail(nid, str(error))
            names = [entry[0] for entry in entries]
            joined = b"".join(names)
            if b"/" in joined or b"\0" in joined:
                self.fail(nid, "a name with a slash or a NUL byte")
            if sorted(set(names)) != names:
                self.fail(nid, "the names are not in order, or one is there twice")
            dots = {b".": nid, b"..": directories[nid][0]}
            for name, child, kind in entries:
                if kind != _DIRECTORY:
                    if leaves.setdefault(child, kind) != kind:
                        self.fail(nid, f"{show_path(name)!r} is listed as type {kind} and elsewhere as another")
                elif name in dots:
                    if dots.pop(name) != child:
                        self.fail(nid, f"{name.decode()!r} leads to inode {child}")
                elif child in directories:
                    self.fail(nid, f"the directory {show_path(name)!r} is reached twice")
                else:
                    directories[child] = (nid, name)
                    pending.append(child)
            if dots:
                self.fail(nid, f"no directory {next(iter(dots)).decode()!r} in it")

    def directory(self, nid: int) -> list[tuple[bytes, int, int]]:
        inode = self.image.inode(nid)
        if not stat.S_ISDIR(inode.mode):
            raise VerifyError(f"it is listed as a directory, but has the mode {inode.mode:#o}")
        self.attributes(inode)
        self.claim(inode.size)
        content = self.image.flat(inode)
        entries: list[tuple[bytes, int, int]] = []
        for start in range(0, len(content), BLOCK):
            entries += parse_directory_block(content[start : start + BLOCK])
        return entries

    def contents(self) -> None:
        """Look at everything that is no directory."""
        raw, base = self.raw, self.image.superblock.meta_block * BLOCK
        unpack, last = INODE.unpack_from, len(self.raw) - INODE_SIZE
        for nid, kind in self.leaves.items():
            at = base + nid * SLOT
            # nearly all are files of ours without xattrs: those without an object and without a call each
            if kind == _FILE and at <= last:
                form, icount, mode, _, size, union, _, _, _, _, ns, links, _ = unpack(raw, at)
                if (
                    form == _USUAL_FORMAT
                    and not icount
                    and union == CHUNK_INDEXES
                    and mode & 0xF000 == 0x8000
                    and ns < 1_000_000_000
                    and links
                ):
                    start = at + INODE_SIZE
                    count = (size + BLOCK - 1) // BLOCK
                    end = start + count * EXTENT_ENTRY_SIZE
                    self.unclaimed -= end - at
                    if count <= _BATCH and end <= last + INODE_SIZE and self.unclaimed >= 0:
                        self.batch.append((nid, raw[start:end]))
                        self.batched += count
                        if self.batched >= _BATCH:
                            self.flush()
                        continue
                    self.unclaimed += end - at
            try:
                self.leaf(self.image.inode(nid), kind)
            except FormatError as error:
                self.fail(nid, str(error))
        self.flush()

    def leaf(self, inode: Inode, kind: int) -> None:
        if FT_BY_IFMT[stat.S_IFMT(inode.mode)] != kind:
            raise VerifyError(f"it is listed as type {kind}, but has the mode {inode.mode:#o}")
        self.attributes(inode)
        if kind == _FILE:
            self.file(inode)
        elif kind == _LINK:
            self.claim(inode.size)
            if b"\0" in self.image.target(inode):
                raise VerifyError("a symbolic link with a NUL byte in its target")
        elif inode.size or inode.layout != LAYOUT_PLAIN:
            raise VerifyError(f"it has the mode {inode.mode:#o} and yet contents")

    def attributes(self, inode: Inode) -> None:
        """What all inodes have; counts the inode and its xattrs as taken."""
        if inode.mtime_ns >= 1_000_000_000 or not inode.nlink:
            raise VerifyError(f"it has {inode.nlink} links and a time of {inode.mtime_ns} ns")
        size = xattr_body_size(inode.icount)
        self.claim(COMPACT_INODE_SIZE + size)
        if not size:
            return
        body = self.raw[inode.body : inode.body + size]
        if len(body) < size:
            raise VerifyError("its xattrs leave the image")
        if body not in self.bodies:
            parse_xattrs(body)
            if size <= 256 and len(self.bodies) < _KEPT_BODIES:
                self.bodies.add(body)

    def file(self, inode: Inode) -> None:
        if inode.layout != LAYOUT_CHUNKS:
            self.claim(inode.size)
            self.image.flat_parts(inode)
            return
        start, count, per_entry = self.image.table(inode)
        self.claim(count * EXTENT_ENTRY_SIZE)
        for first in range(0, count, _BATCH):
            number = min(_BATCH, count - first)
            at = start + first * EXTENT_ENTRY_SIZE
            table = self.raw[at : at + number * EXTENT_ENTRY_SIZE]
            if per_entry == 1:
                self.batch.append((inode.nid, table))
                self.batched += number
                if self.batched >= _BATCH:
                    self.flush()
                continue
            self.extents += number
            left = -(-inode.size // BLOCK) - first * per_entry
            for value in table_entries(table):
                blocks = min(per_entry, left)
                left -= blocks
                if value >> 32 != NO_BLOCK and (
                    value & 0xFFFFFFFF != DATA_DEVICE_ENTRY or (value >> 32) + blocks > self.data_blocks
                ):
                    raise VerifyError(self.out_of_bounds)

    def flush(self) -> None:
        """Look at the extent tables put aside."""
        self.extents += self.batched
        if not self.sound(b"".join([table for _, table in self.batch])):
            for nid, table in self.batch:
                if not self.sound(table):
                    self.fail(nid, self.out_of_bounds)
        self.batch.clear()
        self.batched = 0

    def sound(self, tables: bytes) -> bool:
        """Whether each entry is a hole or a block of the data file."""
        words = array("I", tables)
        if sys.byteorder == "big":
            words.byteswap()
        heads, addresses = words[0::2], words[1::2]
        # an empty head (device 0, the metadata) is for holes only
        empty = heads.count(0)
        if heads.count(DATA_DEVICE_ENTRY) + empty != len(heads):
            return False
        if empty and table_entries(tables).count(HOLE_ENTRY) != empty:
            return False
        if empty:
            used = set(addresses)
            used.discard(NO_BLOCK)
            return max(used, default=-1) < self.data_blocks
        return max(addresses, default=-1) < self.data_blocks

    @property
    def out_of_bounds(self) -> str:
        return f"an extent that is neither a hole nor in the {self.data_blocks} blocks of device 1"

    def claim(self, size: int) -> None:
        self.unclaimed -= size
        if self.unclaimed < 0:
            raise VerifyError("inodes and what they hold overlap: together they are larger than the image")

    def fail(self, nid: int, message: str) -> NoReturn:
        raise VerifyError(f"{show_path(self.path(nid))}: {message}")

    def path(self, nid: int) -> bytes:
        """A path that leads to the inode, for a message."""
        if nid not in self.directories:
            for directory in self.directories:
                for name, child, _ in self.image.directory(self.image.inode(directory)):
                    if child == nid and name not in (b".", b".."):
                        return b"/".join([self.path(directory), name]).lstrip(b"/")
        names: list[bytes] = []
        while nid in self.directories and self.directories[nid][0] != nid:
            nid, name = self.directories[nid]
            names.append(name)
        return b"/".join(reversed(names))
