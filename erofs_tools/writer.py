"""Make an EROFS image, metadata and data apart, of a tree of entries.

Equal trees give equal bytes: inodes and contents follow the sorted paths, the superblock carries no time, name or
uuid, and whether a zero block is stored does not depend on how the source stores it.
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from erofs_tools.contents import DataWriter
from erofs_tools.errors import SourceError, show_path
from erofs_tools.ondisk import (
    BLOCK,
    BLOCK_BITS,
    CHUNK_INDEXES,
    COMPAT_CHECKSUM,
    COMPAT_MTIME,
    DATA_DEVICE_ENTRY,
    DEVICE_SLOT,
    DEVICE_TABLE_OFFSET,
    DIRENT,
    DIRENT_SIZE,
    EXTENT_ENTRY_SIZE,
    FIRST_INODE_OFFSET,
    FORMAT_EXTENDED,
    FORMAT_LAYOUT_SHIFT,
    FT_BY_IFMT,
    HOLE_ENTRY,
    INCOMPAT_CHUNKED,
    INCOMPAT_DEVICE_TABLE,
    INODE,
    INODE_SIZE,
    LAYOUT_CHUNKS,
    LAYOUT_INLINE,
    LAYOUT_PLAIN,
    MAGIC,
    NO_BLOCK,
    SLOT,
    SUPER_OFFSET,
    SUPERBLOCK,
    XATTR_ENTRY,
    XATTR_HEADER_SIZE,
    XATTR_ICOUNT_MAX,
    XATTR_PREFIXES,
    XATTR_VALUE_MAX,
    XATTR_WHOLE_NAMES,
    checksum,
    encode_rdev,
)
from erofs_tools.tree import Entry, Tree, parent_of

_FLUSH = 1 << 20
FILE_MAX = (NO_BLOCK - 1) * BLOCK
"""Bytes of the largest file: the number of its blocks has 32 bits, like every number of blocks in an image."""
_TABLE_PIECE = 1 << 16  # extent entries made at a time: a sparse file of a terabyte has 268 million


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What an image holds. Sizes in bytes.

    ``file_size`` adds up the files as they look, hard links once; ``hole_size`` and ``shared_size`` are what zero
    blocks and repeated contents saved, ``data_size`` and ``metadata_size`` what was written.
    """

    inodes: int
    files: int
    directories: int
    symlinks: int
    others: int
    hard_links: int
    file_size: int
    hole_size: int
    shared_size: int
    data_size: int
    metadata_size: int


@dataclass(slots=True)
class _Inode:
    entry: Entry
    number: int
    parent: _Inode | None = None
    links: int = 1
    children: list[tuple[bytes, _Inode]] = field(default_factory=list)
    xattrs: bytes = b""
    layout: int = LAYOUT_PLAIN
    size: int = 0
    runs: array[int] | None = None
    groups: list[int] = field(default_factory=list)  # directories: how many of the sorted dirents each block holds
    position: int = 0  # byte offset of the inode
    block: int = NO_BLOCK  # plain: first whole block in the metadata file


def write_image(
    tree: Tree, metadata: BinaryIO, data: Callable[[bytes], object], *, metadata_max: int = NO_BLOCK * BLOCK
) -> ImageStats:
    """Write ``tree``: ``data`` gets the data file as whole blocks in order, then ``metadata`` (need not seek) gets
    the image, of at most ``metadata_max`` bytes.

    Contents are opened one at a time, in path order; files of which another has the same size are hashed, and read
    twice if larger than 1 MiB. Memory: a few hundred bytes an entry, and 2 MiB. Raises SourceError with the path of
    what cannot be expressed (an xattr's name, value or number, a size), before anything is written, and of contents
    that are not what the tree says.
    """
    inodes = _collect(tree)
    for inode in inodes:
        inode.xattrs = xattr_body(inode.entry)
        _rdev(inode.entry)  # every error there can be before anything is written
        _size_file(inode)
    end = _place(inodes)
    blocks = _place_whole_blocks(inodes, -(-end // BLOCK))
    _check_size(inodes, blocks * BLOCK, metadata_max)
    store = DataWriter(data)
    file_size = _store_contents(inodes, store)
    store.flush()
    _emit(inodes, blocks, store.blocks, metadata)
    kinds = Counter(stat.S_IFMT(inode.entry.mode) for inode in inodes)
    known = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return ImageStats(
        inodes=len(inodes),
        files=kinds[stat.S_IFREG],
        directories=kinds[stat.S_IFDIR],
        symlinks=kinds[stat.S_IFLNK],
        others=sum(count for kind, count in kinds.items() if kind not in known),
        hard_links=len(tree) - len(inodes),
        file_size=file_size,
        hole_size=store.holes,
        shared_size=store.shared,
        data_size=store.blocks * BLOCK,
        metadata_size=blocks * BLOCK,
    )


def _collect(tree: Tree) -> list[_Inode]:
    """One _Inode for each inode, in the order of the first path that leads to it, linked to its directory."""
    by_path: dict[bytes, _Inode] = {}
    order: list[_Inode] = []
    for entry in tree.entries():
        holder = entry
        if entry.hardlink_to is not None:
            found = tree.resolve(entry.path)
            assert found is not None
            holder = found
        inode = by_path.get(holder.path)
        if inode is None:
            inode = by_path[holder.path] = _Inode(holder, len(order) + 1)
            order.append(inode)
        else:
            inode.links += 1
        if entry.path:
            parent = by_path[parent_of(entry.path)]
            parent.children.append((entry.path.rpartition(b"/")[2], inode))
            if inode.entry.is_dir:
                inode.parent = parent
                inode.links = 2
                parent.links += 1
        else:
            inode.links = 2
    return order


def xattr_body(entry: Entry) -> bytes:
    """The inline xattrs of an inode, b"" for none: all of them in the inode, none shared, by name.

    Raises SourceError naming path and xattr for what the format has no place for.
    """
    if not entry.xattrs:
        return b""
    parts = [bytes(XATTR_HEADER_SIZE)]
    for name, value in sorted(entry.xattrs.items()):
        shown = show_path(name)
        for index, prefix in XATTR_PREFIXES.items():
            if name == prefix if index in XATTR_WHOLE_NAMES else name.startswith(prefix) and len(name) > len(prefix):
                suffix = name[len(prefix) :]
                break
        else:
            raise SourceError(
                f"the xattr {shown!r} has no place in EROFS; expected user., trusted., security. or an ACL", entry.path
            )
        if len(name) > 255 or b"\0" in name:
            raise SourceError(f"the xattr {shown!r} has a name longer than 255 bytes or with a NUL byte", entry.path)
        if len(value) > XATTR_VALUE_MAX:
            raise SourceError(
                f"the xattr {shown!r} has a value of {len(value)} bytes; expected at most {XATTR_VALUE_MAX}", entry.path
            )
        one = XATTR_ENTRY.pack(len(suffix), index, len(value)) + suffix + value
        parts.append(one + bytes(-len(one) % 4))
    body = b"".join(parts)
    if _icount(body) > XATTR_ICOUNT_MAX:
        limit = XATTR_HEADER_SIZE + (XATTR_ICOUNT_MAX - 1) * 4
        raise SourceError(
            f"the xattrs take {len(body)} bytes together, the last is {shown!r}; an inode holds at most {limit}",
            entry.path,
        )
    return body


def _icount(body: bytes) -> int:
    return (len(body) - XATTR_HEADER_SIZE) // 4 + 1 if body else 0


def _size_file(inode: _Inode) -> None:
    """Size and layout of a file, which do not depend on what is in it: a hole has its extents too."""
    if stat.S_ISREG(inode.entry.mode) and inode.entry.size:
        inode.size = inode.entry.size
        inode.layout = LAYOUT_CHUNKS


def _table_size(inode: _Inode) -> int:
    return -(-inode.size // BLOCK) * EXTENT_ENTRY_SIZE if inode.layout == LAYOUT_CHUNKS else 0


def _check_size(inodes: list[_Inode], size: int, limit: int) -> None:
    """Raise SourceError for a metadata image that is too large, with the file that takes the most of it."""
    largest = max(inodes, key=_table_size)
    table = _table_size(largest)
    if size <= limit and table <= FILE_MAX // BLOCK * EXTENT_ENTRY_SIZE:
        return
    limit = min(limit, NO_BLOCK * BLOCK)
    if size <= limit:
        raise SourceError(
            f"a size of {largest.size} bytes; a file in an image has at most {FILE_MAX}", largest.entry.path
        )
    found = f"the metadata image would have {size} bytes; at most {limit} are allowed"
    if 2 * table > limit:
        raise SourceError(
            f"{found}, and this file of {largest.size} bytes takes {table} of them (8 for each 4 KiB of it, holes too):"
            " leave it out or make it smaller",
            largest.entry.path,
        )
    raise SourceError(f"{found}: split the source into several layers ({len(inodes)} inodes)")


def _store_contents(inodes: list[_Inode], store: DataWriter) -> int:
    files = [inode for inode in inodes if inode.layout == LAYOUT_CHUNKS]
    sizes = Counter(inode.size for inode in files)
    for inode in files:
        inode.runs = store.add(inode.entry, sizes[inode.size] > 1)
    return sum(inode.size for inode in files)


def _place(inodes: list[_Inode]) -> int:
    """Decide layouts and give every inode its position; the return value is where the last one ends."""
    position = FIRST_INODE_OFFSET
    for inode in inodes:
        position = -(-position // SLOT) * SLOT
        length = INODE_SIZE + len(inode.xattrs)
        mode = inode.entry.mode
        if inode.layout == LAYOUT_CHUNKS:
            inode.position = position
            position = -(-(position + length) // 8) * 8 + _table_size(inode)
            continue
        if stat.S_ISDIR(mode):
            # sorted with "." and "..": names such as "!" and "-" come before them
            inode.children += [(b".", inode), (b"..", inode.parent or inode)]
            inode.children.sort(key=lambda child: child[0])
            inode.size = _group(inode)
        elif stat.S_ISLNK(mode):
            inode.size = len(inode.entry.target)
        if inode.size and length + inode.size <= BLOCK:
            # the kernel refuses a tail that crosses a block, and reads an inode and its tail best from one
            inode.layout = LAYOUT_INLINE
            length += inode.size
            if position // BLOCK != (position + length - 1) // BLOCK:
                position = -(-position // BLOCK) * BLOCK
        inode.position = position
        position += length
    return position


def _group(inode: _Inode) -> int:
    """Split a directory's names into blocks (``groups``); gives i_size: whole blocks and what the last one uses."""
    groups: list[int] = []
    used = count = 0
    for name, _ in inode.children:
        need = DIRENT_SIZE + len(name)
        if used + need > BLOCK:
            groups.append(count)
            used = count = 0
        used += need
        count += 1
    groups.append(count)
    inode.groups = groups
    return (len(groups) - 1) * BLOCK + used


def _place_whole_blocks(inodes: list[_Inode], block: int) -> int:
    """Give blocks behind the inodes to what does not fit beside its inode; gives the image's size in blocks."""
    for inode in inodes:
        if inode.layout == LAYOUT_PLAIN and inode.size:
            inode.block = block
            block += -(-inode.size // BLOCK)
    return block


def _emit(inodes: list[_Inode], blocks: int, data_blocks: int, out: BinaryIO) -> None:
    first = _header(inodes, blocks, data_blocks)
    pending = first
    written = 0
    for inode in inodes:
        gap = inode.position - written - len(pending)
        pending += bytes(gap)
        pending += _inode_record(inode)
        pending += inode.xattrs
        if inode.layout == LAYOUT_INLINE:
            pending += _flat_content(inode)
        elif inode.layout == LAYOUT_CHUNKS:
            pending += bytes(-len(pending) % 8)  # flushes are multiples of 8
            for piece in _extent_table(inode):
                pending += piece
                if len(pending) >= _FLUSH:
                    written += _flush(out, pending, written)
        if len(pending) >= _FLUSH:
            written += _flush(out, pending, written)
    pending += bytes(-len(pending) % BLOCK)
    for inode in inodes:
        if inode.layout == LAYOUT_PLAIN and inode.size:
            content = _flat_content(inode)
            pending += content
            pending += bytes(-len(content) % BLOCK)
            if len(pending) >= _FLUSH:
                written += _flush(out, pending, written)
    if not written:
        _seal(pending)
    _write(out, bytes(pending))
    written += len(pending)
    assert written == blocks * BLOCK, f"{written} bytes written, {blocks} blocks planned"


def _flush(out: BinaryIO, pending: bytearray, written: int) -> int:
    """Write the whole blocks of ``pending`` and take them out of it."""
    if not written:
        _seal(pending)
    size = len(pending) // BLOCK * BLOCK
    _write(out, bytes(pending[:size]))
    del pending[:size]
    return size


def _write(out: BinaryIO, data: bytes) -> None:
    done = out.write(data)
    while done < len(data):  # an unbuffered file may take less than it is given
        done += out.write(data[done:])


def _seal(first: bytearray) -> None:
    """Put in the superblock's checksum: it covers the first block, inodes included."""
    first[SUPER_OFFSET + 4 : SUPER_OFFSET + 8] = checksum(bytes(first[:BLOCK])).to_bytes(4, "little")


def _header(inodes: list[_Inode], blocks: int, data_blocks: int) -> bytearray:
    """Everything before the first inode; the checksum is still zero."""
    root_nid = inodes[0].position // SLOT
    superblock = SUPERBLOCK.pack(
        *(MAGIC, 0, COMPAT_CHECKSUM | COMPAT_MTIME, BLOCK_BITS, 0, root_nid, len(inodes), 0, 0, blocks, 0, 0),
        *(bytes(16), bytes(16), INCOMPAT_CHUNKED | INCOMPAT_DEVICE_TABLE, 0, 1, DEVICE_TABLE_OFFSET // 128),
        *(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    )
    # the address is where the device would begin if all were one address space: right behind the metadata file
    slot = DEVICE_SLOT.pack(b"", data_blocks, blocks, 0, 0, b"")
    header = bytearray(FIRST_INODE_OFFSET)
    header[SUPER_OFFSET:DEVICE_TABLE_OFFSET] = superblock
    header[DEVICE_TABLE_OFFSET:FIRST_INODE_OFFSET] = slot
    return header


def _inode_record(inode: _Inode) -> bytes:
    entry = inode.entry
    union = NO_BLOCK
    if inode.layout == LAYOUT_CHUNKS:
        union = CHUNK_INDEXES
    elif stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode):
        union = _rdev(entry)
    elif inode.layout == LAYOUT_PLAIN:
        union = inode.block
    return INODE.pack(
        FORMAT_EXTENDED | inode.layout << FORMAT_LAYOUT_SHIFT,
        _icount(inode.xattrs),
        entry.mode,
        0,
        inode.size,
        union,
        inode.number & 0xFFFFFFFF,
        entry.uid,
        entry.gid,
        entry.mtime,
        entry.mtime_ns,
        inode.links,
        b"",
    )


def _rdev(entry: Entry) -> int:
    major, minor = os.major(entry.rdev), os.minor(entry.rdev)
    if major > 0xFFF or minor > 0xFFFFF:
        raise SourceError(f"the device number {major}:{minor}; expected at most 4095:1048575", entry.path)
    return encode_rdev(major, minor)


def _flat_content(inode: _Inode) -> bytes:
    """A link's target, or a directory's blocks, the last one cut to what it uses."""
    if not inode.groups:
        return inode.entry.target
    out = bytearray()
    start = 0
    for count in inode.groups:
        out += bytes(-len(out) % BLOCK)
        children = inode.children[start : start + count]
        start += count
        offset = DIRENT_SIZE * count
        for name, child in children:
            out += DIRENT.pack(child.position // SLOT, offset, FT_BY_IFMT[stat.S_IFMT(child.entry.mode)], 0)
            offset += len(name)
        out += b"".join([name for name, _ in children])
    return bytes(out)


def _extent_table(inode: _Inode) -> Iterator[bytes]:
    """The table of a file, in pieces."""
    assert inode.runs is not None
    runs = inode.runs
    at = 0
    for i in range(0, len(runs), 3):
        block, address, count = runs[i : i + 3]
        yield from _holes(block - at)
        for start in range(address, address + count, _TABLE_PIECE):
            end = min(start + _TABLE_PIECE, address + count)
            step = 1 << 32
            yield _little(array("Q", range((start << 32) + DATA_DEVICE_ENTRY, (end << 32) + DATA_DEVICE_ENTRY, step)))
        at = block + count
    yield from _holes(-(-inode.size // BLOCK) - at)


def _holes(count: int) -> Iterator[bytes]:
    one = HOLE_ENTRY.to_bytes(8, "little")
    while count > 0:
        step = min(count, _TABLE_PIECE)
        yield one * step
        count -= step


def _little(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
