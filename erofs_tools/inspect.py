"""What is in an image, for people and programs."""

from __future__ import annotations

import heapq
import os
import stat
from typing import Any

from erofs_tools.errors import whole_path
from erofs_tools.ondisk import BLOCK, COMPAT_NAMES, INCOMPAT_NAMES, LAYOUT_NAMES
from erofs_tools.reader import Image, Inode
from erofs_tools.tree import OPAQUE_VALUE, OPAQUE_XATTR, WHITEOUT_RDEV

_TYPES = {
    stat.S_IFREG: "files",
    stat.S_IFDIR: "directories",
    stat.S_IFLNK: "symlinks",
    stat.S_IFCHR: "character_devices",
    stat.S_IFBLK: "block_devices",
    stat.S_IFIFO: "fifos",
    stat.S_IFSOCK: "sockets",
}


def describe(meta: str | os.PathLike[str], largest: int = 10) -> dict[str, Any]:
    """A JSON object of a metadata file: superblock, devices, counts, sizes in bytes, the ``largest`` files and
    directories.

    Paths are text (``\\xNN`` where they are not UTF-8). Raises FormatError with what is wrong, and OSError.
    """
    with Image(meta) as image:
        return _describe(image, largest)


def _describe(image: Image, largest: int) -> dict[str, Any]:
    superblock = image.superblock
    counts = dict.fromkeys(_TYPES.values(), 0)
    layouts = dict.fromkeys(LAYOUT_NAMES.values(), 0)
    seen: set[int] = set()
    files: list[tuple[int, bytes]] = []
    folders: list[tuple[int, bytes]] = []
    names = xattrs = whiteouts = opaque = extents = contents = holes = 0
    for path, inode in image.walk():
        names += 1
        if inode.nid in seen:
            continue
        seen.add(inode.nid)
        counts[_TYPES[stat.S_IFMT(inode.mode)]] += 1
        layouts[LAYOUT_NAMES[inode.layout]] += 1
        values = image.xattrs(inode)
        xattrs += len(values)
        if stat.S_ISREG(inode.mode):
            number, hole = _extents(image, inode)
            extents += number
            holes += hole
            contents += inode.size
            _keep(files, (inode.size, path), largest)
        elif stat.S_ISDIR(inode.mode):
            opaque += values.get(OPAQUE_XATTR) == OPAQUE_VALUE
            _keep(folders, (len(image.directory(inode)) - 2, path), largest)
        elif stat.S_ISCHR(inode.mode):
            whiteouts += inode.rdev == WHITEOUT_RDEV
    return {
        "metadata_size": len(image.raw),
        "superblock": {
            "checksum": f"{superblock.checksum:#010x}",
            "features_compatible": _names(superblock.compat, COMPAT_NAMES),
            "features_incompatible": _names(superblock.incompat, INCOMPAT_NAMES),
            "block_size": BLOCK,
            "blocks": superblock.blocks,
            "root_nid": superblock.root_nid,
            "inodes": superblock.inodes,
            "epoch": superblock.epoch,
            "build_time": superblock.build_time,
            "uuid": superblock.uuid.hex(),
            "volume": whole_path(superblock.volume.rstrip(b"\0")) if superblock.volume.strip(b"\0") else "",
        },
        "devices": [
            {
                "tag": whole_path(device.tag) if device.tag else "",
                "blocks": device.blocks,
                "size": device.blocks * BLOCK,
                "address": device.address,
            }
            for device in image.devices
        ],
        "names": names,
        "inodes": len(seen),
        "hard_links": names - len(seen),
        **counts,
        "whiteouts": whiteouts,
        "opaque_directories": opaque,
        "xattrs": xattrs,
        "layouts": {name: count for name, count in layouts.items() if count},
        "contents": {"size": contents, "holes": holes, "stretches": extents},
        "largest_files": [{"path": whole_path(path), "size": size} for size, path in _sorted(files)],
        "largest_directories": [{"path": whole_path(path), "names": count} for count, path in _sorted(folders)],
    }


def _extents(image: Image, inode: Inode) -> tuple[int, int]:
    """How many stretches of data a file has, and bytes of holes."""
    number = holes = 0
    for extent in image.extents(inode):
        if extent.block is None:
            holes += extent.length
        else:
            number += 1
    return number, holes


def _keep(heap: list[tuple[int, bytes]], one: tuple[int, bytes], limit: int) -> None:
    (heapq.heappush if len(heap) < limit else heapq.heappushpop)(heap, one)


def _sorted(heap: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return sorted(heap, key=lambda one: (-one[0], one[1]))


def _names(bits: int, names: dict[int, str]) -> list[str]:
    return [names.get(bit, f"bit {bit}") for bit in range(32) if bits >> bit & 1]
