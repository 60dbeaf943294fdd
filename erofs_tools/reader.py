"""Read EROFS images: what an image of ours holds, and the uncompressed part of what mkfs.erofs makes (blocks of 4096
bytes).

Every offset is checked before it is used: bytes that are no image give FormatError and nothing else. Nothing here
decides whether an image may be mounted; that is erofs_tools.verify.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from erofs_tools.errors import FormatError, show_path
from erofs_tools.ondisk import (
    BLOCK,
    BLOCK_BITS,
    CHUNK_BITS,
    CHUNK_INDEXES,
    CHUNK_KNOWN,
    COMPACT_INODE,
    COMPACT_INODE_SIZE,
    COMPAT_CHECKSUM,
    DEVICE_SLOT,
    DEVICE_SLOT_SIZE,
    DIRENT,
    DIRENT_SIZE,
    EXTENT_ENTRY_SIZE,
    FORMAT_EXTENDED,
    FORMAT_KNOWN,
    FORMAT_LAYOUT_SHIFT,
    FT_BY_IFMT,
    INCOMPAT_CHUNKED,
    INCOMPAT_DEVICE_TABLE,
    INCOMPAT_NAMES,
    INODE,
    INODE_SIZE,
    LAYOUT_CHUNKS,
    LAYOUT_INLINE,
    LAYOUT_NAMES,
    LAYOUT_PLAIN,
    MAGIC,
    NO_BLOCK,
    SLOT,
    SUPER_OFFSET,
    SUPER_SIZE,
    SUPERBLOCK,
    XATTR_ENTRY,
    XATTR_ENTRY_SIZE,
    XATTR_HEADER_SIZE,
    XATTR_PREFIXES,
    XATTR_WHOLE_NAMES,
    checksum,
    decode_rdev,
    xattr_body_size,
)
from erofs_tools.tree import NAME_MAX, TARGET_MAX

Buffer = bytes | mmap.mmap
_TABLE_PIECE = 1 << 16  # extent entries looked at a time


@dataclass(frozen=True, slots=True)
class Superblock:
    compat: int
    incompat: int
    root_nid: int
    inodes: int
    epoch: int
    fixed_ns: int
    blocks: int
    meta_block: int
    xattr_block: int
    uuid: bytes
    volume: bytes
    devices: int
    device_slot: int
    build_time: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Device:
    """A file beside the metadata. ``address`` is its first block when all files are seen as one (0: it has none)."""

    tag: bytes
    blocks: int
    address: int


@dataclass(slots=True)  # not frozen: that makes it three times as slow to create
class Inode:
    """``union`` is the raw i_u, ``body`` the byte offset of the xattrs, ``tail`` that of what follows them."""

    nid: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    mtime_ns: int
    nlink: int
    layout: int
    union: int
    body: int
    icount: int

    @property
    def tail(self) -> int:
        return self.body + xattr_body_size(self.icount)

    @property
    def rdev(self) -> int:
        """As os.makedev gives it; 0 for what is no device."""
        if stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode):
            return os.makedev(*decode_rdev(self.union))
        return 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of a file: from ``offset``, ``length`` bytes lie at ``block`` of ``device`` (0: the metadata); None:
    a hole.

    A tail beside its inode begins inside a block: ``skip`` bytes into it.
    """

    offset: int
    length: int
    device: int
    block: int | None
    skip: int = 0


def parse_superblock(raw: Buffer) -> Superblock:
    """Raises FormatError for what is no superblock, is damaged, or asks for a feature that is not read here."""
    if len(raw) < BLOCK:
        raise FormatError(f"{len(raw)} bytes are no EROFS image; expected at least one block of {BLOCK}")
    fields = SUPERBLOCK.unpack(raw[SUPER_OFFSET : SUPER_OFFSET + SUPER_SIZE])
    magic, found, compat, block_bits, extslots, root_nid, inodes, epoch, fixed_ns, blocks = fields[:10]
    meta_block, xattr_block, uuid, volume, incompat, compression, devices, slot, directory_bits, prefixes = fields[
        10:20
    ]
    if magic != MAGIC:
        raise FormatError(f"no EROFS image: magic {magic:#010x} at byte {SUPER_OFFSET}; expected {MAGIC:#010x}")
    if block_bits != BLOCK_BITS:
        raise FormatError(f"blocks of 2^{block_bits} bytes; expected 2^{BLOCK_BITS}")
    if compat & COMPAT_CHECKSUM:
        expected = checksum(raw[:BLOCK])
        if found != expected:
            raise FormatError(f"superblock checksum {found:#010x}; its block gives {expected:#010x}")
    unknown = incompat & ~(INCOMPAT_CHUNKED | INCOMPAT_DEVICE_TABLE)
    if unknown:
        names = ", ".join(INCOMPAT_NAMES.get(bit, f"bit {bit}") for bit in range(32) if unknown >> bit & 1)
        raise FormatError(f"features that are not understood here: {names}")
    for what, number in (
        ("extension slots", extslots),
        ("compression", compression),
        ("directory block bits", directory_bits),
        ("xattr prefixes", prefixes),
    ):
        if number:
            raise FormatError(f"superblock field {what} is {number}; expected 0")
    if devices and not incompat & INCOMPAT_DEVICE_TABLE:
        raise FormatError(f"{devices} devices without the feature device_table")
    return Superblock(
        *(compat, incompat, root_nid, inodes, epoch, fixed_ns, blocks, meta_block, xattr_block, uuid, volume),
        *(devices, slot, fields[25], found),
    )


def parse_devices(raw: Buffer, superblock: Superblock) -> list[Device]:
    start = superblock.device_slot * DEVICE_SLOT_SIZE
    if start + superblock.devices * DEVICE_SLOT_SIZE > len(raw):
        raise FormatError(f"the table of {superblock.devices} devices at byte {start} leaves the image")
    devices = []
    for i in range(superblock.devices):
        at = start + i * DEVICE_SLOT_SIZE
        tag, blocks, address, blocks_high, address_high, _ = DEVICE_SLOT.unpack(raw[at : at + DEVICE_SLOT_SIZE])
        devices.append(Device(tag.rstrip(b"\0"), blocks | blocks_high << 32, address | address_high << 32))
    return devices


def parse_directory_block(raw: bytes) -> list[tuple[bytes, int, int]]:
    """``(name, nid, type)`` of one block, cut to what the directory's size says. Order and types are not looked at."""
    size = len(raw)
    first = int.from_bytes(raw[8:10], "little")
    if size < DIRENT_SIZE or not first or first % DIRENT_SIZE or first >= size:
        raise FormatError(f"a directory block with names from {first} of {size}; expected a multiple of {DIRENT_SIZE}")
    fields = list(DIRENT.iter_unpack(raw[:first]))
    starts = [one[1] for one in fields]
    ends = starts[1:]
    # the last name ends at the end of the block or at the first NUL
    nul = raw.find(0, starts[-1])
    ends.append(nul if nul >= 0 else size)
    entries = []
    at = first
    for (nid, start, kind, _), end in zip(fields, ends, strict=True):
        if start != at or not start < end <= size or end - start > NAME_MAX:
            raise FormatError(f"a directory block with a name from {start} to {end} of {size}, after one up to {at}")
        entries.append((raw[start:end], nid, kind))
        at = end
    return entries


def parse_xattrs(body: bytes, shared: bytes | None = None) -> dict[bytes, bytes]:
    """The inline xattrs of a body (header included). ``shared``: the image from where shared ones are counted, if
    there are any.

    Raises FormatError unless the entries fill the body exactly.
    """
    found: dict[bytes, bytes] = {}
    ids = body[4]
    at = XATTR_HEADER_SIZE + 4 * ids
    if at > len(body):
        raise FormatError(f"{ids} shared xattrs in {len(body)} bytes")
    for i in range(ids):
        if shared is None:
            raise FormatError("shared xattrs; expected all of them beside the inode")
        where = int.from_bytes(body[XATTR_HEADER_SIZE + 4 * i : XATTR_HEADER_SIZE + 4 * i + 4], "little") * 4
        name, value, _ = _xattr(shared, where)
        found[name] = value
    while at < len(body):
        name, value, at = _xattr(body, at)
        if name in found:
            raise FormatError(f"the xattr {show_path(name)!r} twice")
        found[name] = value
    return found


def _xattr(raw: bytes, at: int) -> tuple[bytes, bytes, int]:
    if at + XATTR_ENTRY_SIZE > len(raw):
        raise FormatError("an xattr leaves the space of its inode")
    length, index, size = XATTR_ENTRY.unpack_from(raw, at)
    name_at = at + XATTR_ENTRY_SIZE
    value_at = name_at + length
    end = value_at + size
    if end > len(raw):
        raise FormatError("an xattr leaves the space of its inode")
    prefix = XATTR_PREFIXES.get(index)
    if prefix is None or bool(length) == (index in XATTR_WHOLE_NAMES):
        raise FormatError(f"an xattr with the name prefix {index} and {length} more bytes")
    name = raw[name_at:value_at]
    if b"\0" in name or len(prefix) + length > NAME_MAX:
        raise FormatError(f"the xattr name {show_path(prefix + name)!r}; expected at most {NAME_MAX} bytes and no NUL")
    return prefix + name, raw[value_at:end], end + -end % 4


class Image:
    """The metadata file of an image, mapped into memory; a context manager. Not for files that change under it."""

    def __init__(self, meta: str | os.PathLike[str] | bytes) -> None:
        """``meta``: a path, or the bytes themselves. Raises FormatError, and OSError when there is no such file."""
        if isinstance(meta, bytes):
            self.raw: Buffer = meta
        else:
            with Path(meta).open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise FormatError("an empty file is no EROFS image")
                self.raw = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        try:
            self.superblock = parse_superblock(self.raw)
            self.devices = parse_devices(self.raw, self.superblock)
        except FormatError:
            self.close()
            raise
        self._meta_offset = self.superblock.meta_block * BLOCK

    def __enter__(self) -> Image:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if isinstance(self.raw, mmap.mmap):
            self.raw.close()

    @property
    def root(self) -> Inode:
        return self.inode(self.superblock.root_nid)

    def inode(self, nid: int) -> Inode:
        raw = self.raw
        at = self._meta_offset + nid * SLOT
        if at + COMPACT_INODE_SIZE > len(raw):
            raise FormatError(f"inode {nid} lies behind the end of the image")
        form = raw[at] | raw[at + 1] << 8
        if form & ~FORMAT_KNOWN:
            raise FormatError(f"inode {nid} has the format {form:#06x}; expected none but the bits {FORMAT_KNOWN:#x}")
        layout = form >> FORMAT_LAYOUT_SHIFT
        if layout not in (LAYOUT_PLAIN, LAYOUT_INLINE, LAYOUT_CHUNKS):
            raise FormatError(f"inode {nid} has the layout {LAYOUT_NAMES.get(layout, layout)}, which is not read here")
        if form & FORMAT_EXTENDED:
            if at + INODE_SIZE > len(raw):
                raise FormatError(f"inode {nid} lies behind the end of the image")
            _, icount, mode, _, size, union, _, uid, gid, mtime, ns, nlink, _ = INODE.unpack(raw[at : at + INODE_SIZE])
            body = at + INODE_SIZE
        else:
            record = COMPACT_INODE.unpack(raw[at : at + COMPACT_INODE_SIZE])
            _, icount, mode, nlink, size, after, union, _, uid, gid, _ = record
            mtime, ns = self.superblock.epoch + after, self.superblock.fixed_ns
            body = at + COMPACT_INODE_SIZE
        if stat.S_IFMT(mode) not in FT_BY_IFMT:
            raise FormatError(f"inode {nid} has the mode {mode:#o}, which is no type of file")
        if size >= 1 << 63:
            raise FormatError(f"inode {nid} has a size of {size} bytes")
        return Inode(nid, mode, uid, gid, size, mtime, ns, nlink, layout, union, body, icount)

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        if not inode.icount:
            return {}
        if inode.tail > len(self.raw):
            raise FormatError(f"the xattrs of inode {inode.nid} leave the image")
        body = self.raw[inode.body : inode.tail]
        return parse_xattrs(body, self.raw[self.superblock.xattr_block * BLOCK :] if body[4] else None)

    def directory(self, inode: Inode) -> list[tuple[bytes, int, int]]:
        """``(name, nid, type)`` in the order of the image, "." and ".." included."""
        if not stat.S_ISDIR(inode.mode):
            raise FormatError(f"inode {inode.nid} is no directory")
        content = self.flat(inode)
        entries: list[tuple[bytes, int, int]] = []
        for start in range(0, len(content), BLOCK):
            entries += parse_directory_block(content[start : start + BLOCK])
        return entries

    def target(self, inode: Inode) -> bytes:
        """Where a symbolic link leads."""
        if not stat.S_ISLNK(inode.mode) or not 0 < inode.size <= TARGET_MAX:
            raise FormatError(f"inode {inode.nid} is no symbolic link of 1 to {TARGET_MAX} bytes")
        return self.flat(inode)

    def extents(self, inode: Inode) -> Iterator[Extent]:
        """The stretches of a file or of anything flat, ascending, covering its size; neighbours are joined."""
        if not inode.size:
            return
        if inode.layout == LAYOUT_CHUNKS:
            yield from self._chunk_extents(inode)
            return
        whole, tail = self.flat_parts(inode)
        if whole:
            yield Extent(0, whole, 0, inode.union)
        if tail:
            yield Extent(whole, tail, 0, inode.tail // BLOCK, inode.tail % BLOCK)

    def read(self, inode: Inode, devices: Sequence[BinaryIO], offset: int = 0, length: int | None = None) -> bytes:
        """Contents of a regular file, in one piece. ``devices``: the open data files, device 1 first."""
        end = inode.size if length is None else min(inode.size, offset + length)
        parts: list[bytes] = []
        for extent in self.extents(inode):
            start, stop = max(offset, extent.offset), min(end, extent.offset + extent.length)
            if start >= stop:
                continue
            if extent.block is None:
                parts.append(bytes(stop - start))
                continue
            at = extent.block * BLOCK + extent.skip + start - extent.offset
            if not extent.device:
                parts.append(self.raw[at : at + stop - start])
                continue
            if extent.device > len(devices):
                raise FormatError(f"contents of inode {inode.nid} lie on device {extent.device} of {len(devices)}")
            file = devices[extent.device - 1]
            file.seek(at)
            data = file.read(stop - start)
            if len(data) != stop - start:
                raise FormatError(f"device {extent.device} ends before the contents of inode {inode.nid}")
            parts.append(data)
        return b"".join(parts)

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every path with its inode, in the order of Tree.entries; FormatError for a directory reached twice."""
        root = self.root
        seen = {root.nid}
        pending: list[tuple[bytes, int]] = [(b"", root.nid)]
        while pending:
            path, nid = pending.pop()
            inode = self.inode(nid)
            yield path, inode
            if not stat.S_ISDIR(inode.mode):
                continue
            children = []
            for name, child, kind in self.directory(inode):
                if name in (b".", b".."):
                    continue
                if b"/" in name or b"\0" in name:
                    raise FormatError(f"{show_path(path)}: the name {show_path(name)!r}")
                if kind == FT_BY_IFMT[stat.S_IFDIR]:
                    if child in seen:
                        raise FormatError(f"{show_path(path)}: the directory {show_path(name)!r} is reached twice")
                    seen.add(child)
                elif stat.S_ISDIR(self.inode(child).mode):
                    raise FormatError(f"{show_path(path)}: the directory {show_path(name)!r} is listed as type {kind}")
                children.append((path + b"/" + name if path else name, child))
            children.sort(reverse=True)
            pending += children

    def find(self, path: bytes) -> Inode | None:
        """The inode under a path, without following symbolic links; None when there is none."""
        inode = self.root
        for name in path.split(b"/") if path else []:
            if not stat.S_ISDIR(inode.mode):
                return None
            nid = next((nid for found, nid, _ in self.directory(inode) if found == name), None)
            if nid is None:
                return None
            inode = self.inode(nid)
        return inode

    def flat_parts(self, inode: Inode) -> tuple[int, int]:
        """Bytes in whole blocks, and bytes beside the inode; both within the image."""
        size = inode.size
        whole = size
        if inode.layout == LAYOUT_INLINE:
            whole = (size - 1) // BLOCK * BLOCK
            at, tail = inode.tail, size - whole
            if at + tail > len(self.raw) or at // BLOCK != (at + tail - 1) // BLOCK:
                raise FormatError(f"the tail of inode {inode.nid} at byte {at} leaves its block or the image")
        if whole:
            end = inode.union + -(-whole // BLOCK)
            if inode.union == NO_BLOCK or end * BLOCK > len(self.raw):
                raise FormatError(f"the {whole} bytes of inode {inode.nid} from block {inode.union} leave the image")
        return whole, size - whole

    def flat(self, inode: Inode) -> bytes:
        """The contents of a directory or a symbolic link."""
        if inode.layout == LAYOUT_CHUNKS:
            raise FormatError(f"inode {inode.nid} has the layout chunks; expected plain or inline for its type")
        if not inode.size:
            return b""
        whole, tail = self.flat_parts(inode)
        start = inode.union * BLOCK if whole else 0
        return self.raw[start : start + whole] + self.raw[inode.tail : inode.tail + tail]

    def table(self, inode: Inode) -> tuple[int, int, int]:
        """Where the extent table of a file is: byte offset, number of entries, blocks that an entry covers."""
        form = inode.union
        if form & ~CHUNK_KNOWN or not form & CHUNK_INDEXES:
            raise FormatError(f"inode {inode.nid} has the chunk format {form:#x}; expected 8-byte indexes")
        per_entry = 1 << (form & CHUNK_BITS)
        count = -(-inode.size // (per_entry * BLOCK))
        start = inode.tail + -inode.tail % EXTENT_ENTRY_SIZE
        if start + count * EXTENT_ENTRY_SIZE > len(self.raw):
            raise FormatError(f"the extent table of inode {inode.nid} leaves the image")
        return start, count, per_entry

    def _chunk_extents(self, inode: Inode) -> Iterator[Extent]:
        start, count, per_entry = self.table(inode)
        step = per_entry * BLOCK
        offset = length = device = 0
        block: int | None = None
        for first in range(0, count, _TABLE_PIECE):
            number = min(_TABLE_PIECE, count - first)
            at = start + first * EXTENT_ENTRY_SIZE
            for value in table_entries(self.raw[at : at + number * EXTENT_ENTRY_SIZE]):
                address = value >> 32
                next_device, next_block = (0, None) if address == NO_BLOCK else (value >> 16 & 0xFFFF, address)
                covered = min(step, inode.size - offset - length)
                if length and (
                    next_block is None
                    if block is None
                    else next_device == device and next_block == block + length // BLOCK and not length % BLOCK
                ):
                    length += covered
                    continue
                if length:
                    yield self._checked(inode, Extent(offset, length, device, block))
                    offset += length
                device, block, length = next_device, next_block, covered
        if length:
            yield self._checked(inode, Extent(offset, length, device, block))

    def _checked(self, inode: Inode, extent: Extent) -> Extent:
        if extent.block is None:
            return extent
        blocks = len(self.raw) // BLOCK
        if extent.device:
            if extent.device > len(self.devices):
                raise FormatError(f"inode {inode.nid} has an extent on device {extent.device} of {len(self.devices)}")
            blocks = self.devices[extent.device - 1].blocks
        if extent.block + -(-extent.length // BLOCK) > blocks:
            raise FormatError(f"an extent of inode {inode.nid} leaves device {extent.device} of {blocks} blocks")
        return extent


def table_entries(raw: bytes) -> array[int]:
    """Extent entries as 64-bit numbers: address << 32 | device << 16 | high bits of the address."""
    numbers = array("Q", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
