"""EROFS on disk: structures and constants (Linux fs/erofs/erofs_fs.h), as far as images of ours use them.

Everything is little-endian. An image is a *metadata file* (superblock, device table, inodes, directories, xattrs)
and, as device 1, a *data file* of whole blocks without any header.

    byte 0      zeros
    1024        superblock, 128 bytes
    1152        device slot of the data file, 128 bytes
    1280        inodes, each followed by its xattrs and then by its tail or its extent table
    ...         whole blocks of long directories and symbolic links, up to the end of the file
"""

from __future__ import annotations

import stat
import struct

import google_crc32c

BLOCK = 4096
BLOCK_BITS = 12
EXTENT = 4096
"""Bytes that one extent of a file covers: one block, so that every aligned zero block can be a hole."""

MAGIC = 0xE0F5E1E2
SUPER_OFFSET = 1024
SUPER_SIZE = 128
DEVICE_SLOT_SIZE = 128
DEVICE_TABLE_OFFSET = SUPER_OFFSET + SUPER_SIZE
FIRST_INODE_OFFSET = DEVICE_TABLE_OFFSET + DEVICE_SLOT_SIZE
SLOT = 32
"""An inode's number (nid) is its byte offset divided by this."""
CHECKSUM_OFFSET = SUPER_OFFSET + 4

COMPAT_CHECKSUM, COMPAT_MTIME, COMPAT_XATTR_FILTER = 0x1, 0x2, 0x4
INCOMPAT_CHUNKED, INCOMPAT_DEVICE_TABLE = 0x4, 0x8
COMPAT_NAMES = {
    0: "csum",
    1: "mtime",
    2: "xattr_filter",
    3: "shared_xattrs_in_metabox",
    4: "plain_prefixes",
    5: "ishare",
}
INCOMPAT_NAMES = {
    0: "0padding",
    1: "compression_configs",
    2: "chunked",
    3: "device_table",
    4: "ztailpacking",
    5: "fragments",
    6: "xattr_prefixes",
    7: "48bit",
    8: "metabox",
}

# magic, checksum, compat, blkszbits, extslots, root nid, inodes, epoch, fixed ns, blocks, meta block, xattr block,
# uuid, volume name, incompat, compression, devices, device slot, dirblkbits, prefix count, prefix start, packed nid,
# filter reserved, ishare prefix, -, build time, root nid 64 bit, -
SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQBBHIQQ")
assert SUPERBLOCK.size == SUPER_SIZE

# tag, blocks, unified address, high halves of both, -
DEVICE_SLOT = struct.Struct("<64sIIHH52s")
assert DEVICE_SLOT.size == DEVICE_SLOT_SIZE

# format, xattr icount, mode, address high, size, i_u, ino, uid, gid, mtime, ns, nlink, -
INODE = struct.Struct("<HHHHQIIIIqII16s")
INODE_SIZE = 64
assert INODE.size == INODE_SIZE
# format, xattr icount, mode, nlink, size, mtime after the epoch, i_u, ino, uid, gid, -
COMPACT_INODE = struct.Struct("<HHHHIIIIHH4s")
COMPACT_INODE_SIZE = 32
assert COMPACT_INODE.size == COMPACT_INODE_SIZE

FORMAT_EXTENDED = 0x1
FORMAT_LAYOUT_SHIFT = 1
FORMAT_KNOWN = 0x0F
LAYOUT_PLAIN, LAYOUT_INLINE, LAYOUT_CHUNKS = 0, 2, 4
LAYOUT_NAMES = {0: "plain", 1: "compressed", 2: "inline", 3: "compressed compact", 4: "chunks"}

NO_BLOCK = 0xFFFFFFFF
"""No address: a hole, or a flat file without whole blocks."""
CHUNK_BITS, CHUNK_INDEXES, CHUNK_KNOWN = 0x1F, 0x20, 0x3F
EXTENT_ENTRY = struct.Struct("<HHI")
"""Address high, device, address in blocks of that device."""
EXTENT_ENTRY_SIZE = 8
HOLE_ENTRY = NO_BLOCK << 32
DATA_DEVICE = 1
DATA_DEVICE_ENTRY = DATA_DEVICE << 16
"""An extent entry as a 64-bit number: the block address shifted by 32, and this."""

# nid, offset of the name in its block, type, -
DIRENT = struct.Struct("<QHBB")
DIRENT_SIZE = 12
FT_BY_IFMT = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}

XATTR_HEADER_SIZE = 12
XATTR_ENTRY = struct.Struct("<BBH")
"""Length of the name without its prefix, number of the prefix, length of the value."""
XATTR_ENTRY_SIZE = 4
XATTR_PREFIXES = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
}
XATTR_WHOLE_NAMES = (2, 3)
"""Numbers that stand for a whole name: nothing may follow the prefix."""
XATTR_VALUE_MAX = 0xFFFF
XATTR_ICOUNT_MAX = 0xFFFF


def checksum(first_block: bytes) -> int:
    """The superblock's CRC-32C: over bytes 1024 to the end of the first block with the field as zero, not inverted."""
    covered = bytearray(first_block[SUPER_OFFSET:BLOCK])
    covered[4:8] = bytes(4)
    return int(google_crc32c.value(bytes(covered))) ^ 0xFFFFFFFF


def encode_rdev(major: int, minor: int) -> int:
    """The kernel's 32-bit form (new_encode_dev): 12 bits of major, 20 of minor."""
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def decode_rdev(code: int) -> tuple[int, int]:
    """Major and minor."""
    return (code >> 8) & 0xFFF, (code & 0xFF) | (code >> 12) & 0xFFF00


def xattr_body_size(icount: int) -> int:
    """Bytes between the inode and what follows: 0 for no xattrs."""
    return XATTR_HEADER_SIZE + (icount - 1) * 4 if icount else 0
