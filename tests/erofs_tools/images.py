"""Trees to make images of, and the comparison of an image with its tree: by the kernel, fsck.erofs and our reader."""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dsec_linux.mounts import mount_erofs
from erofs_tools.reader import Image
from erofs_tools.tree import BytesContent, Entry, Tree
from erofs_tools.verify import Verified, verify
from erofs_tools.writer import ImageStats, write_image

FILE, DIRECTORY, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


def file(path: bytes, data: bytes = b"", **attributes: Any) -> Entry:
    return Entry(path, **{"mode": FILE, **attributes}, size=len(data), content=BytesContent(data))


def link(path: bytes, target: bytes, **attributes: Any) -> Entry:
    return Entry(path, **{"mode": LINK, **attributes}, target=target)


def directory(path: bytes, **attributes: Any) -> Entry:
    return Entry(path, **{"mode": DIRECTORY, **attributes})


def tree_of(*entries: Entry) -> Tree:
    tree = Tree()
    for entry in entries:
        tree.add(entry)
    return tree


class _SparseReader(io.RawIOBase):
    def __init__(self, content: SparseContent) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._at = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        data = self._content.at(self._at, size if size >= 0 else self._content.size)
        self._at += len(data)
        return data


@dataclass
class SparseContent:
    """Pieces of data in a file of any size."""

    size: int
    pieces: dict[int, bytes]

    def at(self, offset: int, length: int) -> bytes:
        out = bytearray(max(0, min(length, self.size - offset)))
        for start, data in self.pieces.items():
            for i in range(max(start, offset), min(start + len(data), offset + len(out))):
                out[i - offset] = data[i - start]
        return bytes(out)

    def segments(self) -> Iterable[tuple[int, int]]:
        return [(start, len(data)) for start, data in sorted(self.pieces.items())]

    def open(self) -> BinaryIO:
        return _SparseReader(self)  # type: ignore[return-value]


def sparse(path: bytes, size: int, pieces: dict[int, bytes]) -> Entry:
    return Entry(path, FILE, size=size, content=SparseContent(size, pieces))


@dataclass
class Pair:
    """An image on disk."""

    meta: Path
    data: Path
    stats: ImageStats

    def verify(self) -> Verified:
        return verify(self.meta, data_size=self.data.stat().st_size)


def write(tree: Tree, folder: Path) -> Pair:
    folder.mkdir(exist_ok=True)
    meta, data = folder / "meta.erofs", folder / "data"
    with meta.open("wb") as meta_file, data.open("wb") as data_file:
        stats = write_image(tree, meta_file, data_file.write)
    assert (meta.stat().st_size, data.stat().st_size) == (stats.metadata_size, stats.data_size)
    return Pair(meta, data, stats)


def judge(tree: Tree, folder: Path, utils: Path) -> Pair:
    """Write the tree; verify, fsck.erofs, the kernel and our reader must all find exactly that tree."""
    pair = write(tree, folder)
    found = pair.verify()
    assert found.inodes == pair.stats.inodes
    fsck = subprocess.run(
        [utils / "fsck.erofs", f"--device={pair.data}", pair.meta],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert fsck.returncode == 0 and "<E>" not in fsck.stdout + fsck.stderr, fsck.stdout + fsck.stderr
    compare_mounted(pair, tree)
    compare_read(pair, tree)
    return pair


def compare_mounted(pair: Pair, tree: Tree) -> None:
    """The kernel's view, entry by entry: lookup, attributes, contents, xattrs, names listed, hard links."""
    fd = mount_erofs(str(pair.meta), [str(pair.data)])
    try:
        root = os.fsencode(f"/proc/self/fd/{fd}/.")
        numbers: dict[bytes, int] = {}
        links = Counter(entry.path if entry.hardlink_to is None else entry.hardlink_to for entry in tree.entries())
        for entry in tree.entries():
            held = tree.resolve(entry.path)
            assert held is not None
            path = root + b"/" + entry.path if entry.path else root
            found = os.lstat(path)
            assert attributes(held) == (
                *(found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_rdev),
                xattrs_of(path),
            ), entry.path
            assert numbers.setdefault(held.path, found.st_ino) == found.st_ino, entry.path
            if held.is_dir:
                names = sorted(child.rpartition(b"/")[2] for child in tree.children(entry.path))
                assert sorted(os.listdir(path)) == names
                assert found.st_nlink == 2 + sum(1 for c in tree.children(entry.path) if _get(tree, c).is_dir)
            else:
                assert found.st_nlink == links[held.path], entry.path
            if stat.S_ISLNK(held.mode):
                assert os.readlink(path) == held.target
                assert found.st_size == len(held.target)
            elif stat.S_ISREG(held.mode):
                assert found.st_size == held.size
                with open(path, "rb", buffering=0) as mounted:
                    compare_contents(held, mounted)
        assert len(set(numbers.values())) == len(numbers)
    finally:
        os.close(fd)


def _get(tree: Tree, path: bytes) -> Entry:
    found = tree.get(path)
    assert found is not None
    return found


def attributes(entry: Entry) -> tuple[Any, ...]:
    mtime = entry.mtime * 1_000_000_000 + entry.mtime_ns
    return (entry.mode, entry.uid, entry.gid, mtime, entry.rdev, entry.xattrs)


def xattrs_of(path: bytes) -> dict[bytes, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return {}
    return {os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in names}


def compare_contents(entry: Entry, found: BinaryIO) -> None:
    """Every byte of files up to 64 MiB; of larger ones all that is data, and the borders of the holes."""
    content = entry.content
    if content is None:
        assert found.read() == b""
        return
    with content.open() as expected:
        if entry.size <= 64 << 20:
            assert found.read() == expected.read(), entry.path
            return
        for offset, length in content.segments():
            start, end = max(0, offset - 8192), min(entry.size, offset + length + 8192)
            expected.seek(start)
            found.seek(start)
            assert found.read(end - start) == expected.read(end - start), (entry.path, offset)


def compare_read(pair: Pair, tree: Tree) -> None:
    """Our reader's view: the same paths in the same order, the same attributes and contents."""
    with Image(pair.meta) as image, pair.data.open("rb") as data:
        entries = list(tree.entries())
        walked = list(image.walk())
        assert [path for path, _ in walked] == [entry.path for entry in entries]
        numbers: dict[bytes, int] = {}
        for (path, inode), entry in zip(walked, entries, strict=True):
            held = tree.resolve(entry.path)
            assert held is not None
            mtime = inode.mtime * 1_000_000_000 + inode.mtime_ns
            found = (inode.mode, inode.uid, inode.gid, mtime, inode.rdev, image.xattrs(inode))
            assert found == attributes(held), path
            assert numbers.setdefault(held.path, inode.nid) == inode.nid
            if stat.S_ISLNK(held.mode):
                assert image.target(inode) == held.target
            elif stat.S_ISREG(held.mode):
                assert inode.size == held.size
                if held.size <= 64 << 20:
                    compare_contents(held, io.BytesIO(image.read(inode, [data])))
        assert len(set(numbers.values())) == len(numbers) == image.superblock.inodes


ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, permissions, number)
    for tag, permissions, number in (
        (1, 6, 0xFFFFFFFF),
        (2, 4, 1000),
        (4, 4, 0xFFFFFFFF),
        (16, 4, 0xFFFFFFFF),
        (32, 4, 0xFFFFFFFF),
    )
)
"""user::rw-, user:1000:r--, group::r--, mask::r--, other::r--, as system.posix_acl_* hold it."""

CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""cap_net_bind_service=ep, as security.capability holds it."""


def every_kind() -> Tree:
    """At least one of everything a tree can hold."""
    noise = bytes(range(1, 256)) * 300
    return tree_of(
        directory(
            b"", mode=stat.S_IFDIR | 0o755, mtime=1_700_000_000, mtime_ns=123_456_789, xattrs={b"user.root": b"yes"}
        ),
        file(b"empty"),
        file(b"one", b"x", uid=1, gid=2),
        file(b"block", noise[:4096]),
        file(b"blocks", noise[: 3 * 4096], mtime=1, mtime_ns=1),
        file(b"tail", noise[: 2 * 4096 + 1]),
        file(b"large", os.urandom(3_000_001)),
        file(b"twin", noise[: 2 * 4096 + 1], mtime=77),
        file(b"zeros", bytes(10_000)),
        file(b"hole-inside", noise[:5000] + bytes(20_000) + noise[:100] + bytes(9000)),
        sparse(b"sparse", 10_000_000, {5_000_000: b"middle", 9_999_999: b"!"}),
        file(b"setuid", b"#!/bin/sh\n", mode=stat.S_IFREG | 0o6755),
        file(b"no-rights", b"", mode=stat.S_IFREG),
        file(b"large-ids", b"", uid=4_294_967_294, gid=70_000),
        file(b"before-1970", b"", mtime=-5, mtime_ns=999_999_999),
        file(b"far-future", b"", mtime=1 << 34, mtime_ns=999_999_999),
        file(
            b"xattrs",
            b"x",
            xattrs={
                b"user.a": b"1",
                b"user.empty": b"",
                b"user.\xff\xfe": bytes(range(256)),
                b"trusted.overlay.overlay.opaque": b"y",
                b"trusted.t": b"t" * 1000,
                b"security.capability": CAPABILITY,
                b"system.posix_acl_access": ACL,
                b"user." + b"n" * 250: b"long name",
            },
        ),
        directory(b"acl", xattrs={b"system.posix_acl_default": ACL, b"system.posix_acl_access": ACL}),
        directory(b"sticky", mode=stat.S_IFDIR | 0o1777),
        directory(b"sticky/deep/er"),
        file(b"sticky/deep/er/file", b"deep"),
        link(b"link", b"one", uid=3, mtime=9, mtime_ns=8),
        link(b"dangling", b"../\xff\xfe/nowhere", xattrs={b"trusted.on-link": b"v"}),
        Entry(b"char", stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3)),
        Entry(b"char-large", stat.S_IFCHR | 0o600, rdev=os.makedev(4095, 1_048_575)),
        Entry(b"block-device", stat.S_IFBLK | 0o660, rdev=os.makedev(259, 70_000)),
        Entry(b"fifo", stat.S_IFIFO | 0o622),
        Entry(b"socket", stat.S_IFSOCK | 0o777),
        Entry(b"whiteout", stat.S_IFCHR, rdev=0),
        directory(b"opaque", xattrs={b"trusted.overlay.opaque": b"y"}),
        Entry(b"hard-1", 0, hardlink_to=b"one"),
        Entry(b"sticky/hard-2", 0, hardlink_to=b"hard-1"),
        Entry(b"a-hard-fifo", 0, hardlink_to=b"fifo"),
        Entry(b"a-hard-link", 0, hardlink_to=b"link"),
        file(b"!before-the-dots", b"!"),
        file(b"-", b"-"),
        file(b"..+", b"dots"),
        file(b"...", b"dots"),
        file(b"n" * 255, b"255"),
        file(b"\xff\xfe\x01\n", b"not UTF-8"),
        file("größe".encode(), b"UTF-8"),
    )
