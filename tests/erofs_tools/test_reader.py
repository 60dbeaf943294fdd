"""The reader against images of mkfs.erofs, and against bytes that are none."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from erofs_tools.errors import FormatError
from erofs_tools.ondisk import BLOCK
from erofs_tools.reader import Image
from tests.erofs_tools.images import directory, every_kind, file, link, sparse, tree_of, write, xattrs_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with what mkfs.erofs lays out in different ways."""
    root = tmp_path / "source"
    (root / "many").mkdir(parents=True)
    for i in range(1000):
        (root / "many" / f"file-{i:04}").write_bytes(b"%d" % i * (i % 50))
    (root / "large").write_bytes(os.urandom(1_000_000))
    (root / "twin").write_bytes((root / "large").read_bytes())
    (root / "inline").write_bytes(os.urandom(6000))
    with (root / "sparse").open("wb") as hole:
        hole.seek(1_000_000)
        hole.write(b"end")
    (root / "link").symlink_to("large")
    (root / "hard").hardlink_to(root / "inline")
    for name in ("a", "b", "c", "d"):
        (root / name).write_bytes(b"")
        os.setxattr(root / name, "user.shared", b"the same of all" * 10)
        os.setxattr(root / name, "user.own", name.encode())
    os.utime(root / "a", ns=(0, 1_234_567_890_123_456_789))
    os.chown(root / "b", 70_000, 80_000)
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--blobdev=DATA", "--chunksize=4096"],
        ["--blobdev=DATA", "--chunksize=65536", "-x1"],
        ["-x1", "-T0", "--all-root"],
        ["-Enoinline_data", "-Eforce-inode-compact", "-T5", "--all-root"],
        ["-Eforce-inode-extended", "-x-1"],
    ],
)
def test_what_mkfs_made_is_read(folder: Path, tmp_path: Path, erofs_utils: Path, options: list[str]) -> None:
    meta, data = tmp_path / "meta", tmp_path / "data"
    data.write_bytes(b"")
    command = [o.replace("DATA", str(data)) for o in options]
    subprocess.run([erofs_utils / "mkfs.erofs", *command, meta, folder], check=True, capture_output=True, timeout=60)
    with Image(meta) as image, data.open("rb") as device:
        found = dict(image.walk())
        expected = {
            os.fsencode(os.path.relpath(os.path.join(top, name), folder))
            for top, folders, files in os.walk(folder)
            for name in folders + files
        }
        assert set(found) == {b"", *expected}
        for path, inode in found.items():
            source = os.path.join(os.fsencode(folder), path)
            there = os.lstat(source)
            assert (inode.mode, inode.nlink) == (there.st_mode, there.st_nlink), path
            if "--all-root" not in options:
                assert (inode.uid, inode.gid) == (there.st_uid, there.st_gid)
            if not any(option.startswith("-T") for option in options):
                assert inode.mtime == there.st_mtime_ns // 10**9  # mkfs.erofs 1.9.4 drops the rest
            if "-x-1" not in options:
                assert image.xattrs(inode) == xattrs_of(source)
            if stat.S_ISREG(inode.mode):
                assert image.read(inode, [device]) == Path(os.fsdecode(source)).read_bytes(), path
            elif stat.S_ISLNK(inode.mode):
                assert image.target(inode) == os.readlink(source)
        assert found[b"hard"].nid == found[b"inline"].nid


def test_a_compressed_image_is_refused_by_the_name_of_its_feature(
    folder: Path, tmp_path: Path, erofs_utils: Path
) -> None:
    meta = tmp_path / "meta"
    subprocess.run([erofs_utils / "mkfs.erofs", "-zlz4", meta, folder], check=True, capture_output=True, timeout=60)
    with pytest.raises(FormatError, match="0padding"):
        Image(meta)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "0 bytes"),
        (b"x" * 100, "100 bytes"),
        (bytes(BLOCK), "magic"),
        (os.urandom(1024) + b"\xe2\xe1\xf5\xe0" + bytes(BLOCK), "blocks of 2\\^0"),
    ],
)
def test_what_is_no_image_is_refused(raw: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=text):
        Image(raw)
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(FormatError, match=text if raw else "an empty file"):
        Image(tmp_path / "file")


def test_extents_join_neighbours_and_show_holes(tmp_path: Path) -> None:
    pair = write(
        tree_of(
            file(b"a", b"x" * (5 * BLOCK + 1)),
            sparse(b"b", 100 * BLOCK, {0: b"x", 50 * BLOCK: b"y" * BLOCK}),
            file(b"c", bytes(10)),
            link(b"d", b"target"),
            directory(b"e"),
        ),
        tmp_path,
    )
    with Image(pair.meta) as image:
        found = {
            path: [(e.offset, e.length, e.device, e.block) for e in image.extents(inode)]
            for path, inode in image.walk()
            if stat.S_ISREG(inode.mode)
        }
        tail = next(image.extents(image.find(b"d") or image.root))
        assert (tail.offset, tail.length, tail.device) == (0, 6, 0)
        assert pair.meta.read_bytes()[(tail.block or 0) * BLOCK + tail.skip :][:6] == b"target"
    assert found == {
        b"a": [(0, 5 * BLOCK + 1, 1, 0)],
        b"b": [
            (0, BLOCK, 1, 6),
            (BLOCK, 49 * BLOCK, 0, None),
            (50 * BLOCK, BLOCK, 1, 7),
            (51 * BLOCK, 49 * BLOCK, 0, None),
        ],
        b"c": [(0, 10, 0, None)],
    }


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    tree = every_kind()
    pair = write(tree, tmp_path)
    entry = tree.get(b"hole-inside")
    assert entry is not None and entry.content is not None
    with entry.content.open() as reader:
        whole = reader.read()
    with Image(pair.meta) as image, pair.data.open("rb") as data:
        inode = image.find(b"hole-inside")
        assert inode is not None
        for offset, length in (
            (0, 0),
            (4000, 5000),
            (8191, 3),
            (30_000, 100_000),
            (len(whole), 5),
            (len(whole) + 5, 5),
        ):
            assert image.read(inode, [data], offset, length) == whole[offset : offset + length]


def test_paths_are_found(tmp_path: Path) -> None:
    with Image(write(every_kind(), tmp_path).meta) as image:
        found = image.find(b"sticky/deep/er/file")
        assert found is not None and found.size == 4
        assert image.find(b"") == image.root
        assert image.find(b"sticky/none") is image.find(b"one/below-a-file") is None
