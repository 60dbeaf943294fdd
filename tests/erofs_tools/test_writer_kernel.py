"""Images against the kernel: what it shows of a mounted pair is what the tree says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from erofs_tools.ondisk import BLOCK
from erofs_tools.tree import Entry, Tree
from tests.erofs_tools.images import compare_mounted, directory, every_kind, file, judge, link, sparse, tree_of, write


def test_every_kind_of_entry_comes_back(tmp_path: Path, erofs_utils: Path) -> None:
    stats = judge(every_kind(), tmp_path, erofs_utils).stats
    assert stats.hard_links == 4
    assert stats.shared_size == 5 * BLOCK  # twin, and the second of two files "x" and of two files "dots"


def test_fsck_extracts_what_was_put_in(tmp_path: Path, erofs_utils: Path) -> None:
    tree = every_kind()
    pair = write(tree, tmp_path)
    out = tmp_path / "out"
    subprocess.run(
        [erofs_utils / "fsck.erofs", f"--device={pair.data}", f"--extract={out}", "--xattrs", "--preserve", pair.meta],
        check=True,
        capture_output=True,
        timeout=120,
    )
    root = os.fsencode(out)
    for entry in tree.entries():
        held = tree.resolve(entry.path)
        assert held is not None
        if held.content is not None:
            with open(root + b"/" + entry.path, "rb") as found, held.content.open() as expected:
                # fsck.erofs 1.9.4 does not extract a hole at the end of a file
                assert found.read().ljust(held.size, b"\0") == expected.read(), entry.path


def test_an_empty_tree_is_an_image(tmp_path: Path, erofs_utils: Path) -> None:
    stats = judge(Tree(), tmp_path, erofs_utils).stats
    assert (stats.inodes, stats.data_size, stats.metadata_size) == (1, 0, BLOCK)


def test_a_directory_of_5000_entries_is_listed_and_looked_up(tmp_path: Path, erofs_utils: Path) -> None:
    names = [b"entry-%05d" % (i * 7919 % 5000) + b"x" * (i % 40) for i in range(5000)]
    judge(tree_of(*(file(b"big/" + name, name[:5]) for name in names)), tmp_path, erofs_utils)


def test_directories_of_every_length_around_a_block_are_whole(tmp_path: Path, erofs_utils: Path) -> None:
    # "." and ".." take 27 bytes; the inode 64: sizes from 3,950 to 4,120 cross both limits
    tree = Tree()
    for size in range(3950, 4121, 3):
        left, number = size - 27, 0
        while left > 12:
            length = min(180, left - 12)
            if 0 < left - 12 - length < 14:
                length -= 14
            tree.add(file(b"d%d/%03d" % (size, number) + b"n" * (length - 3)))
            left -= 12 + length
            number += 1
    judge(tree, tmp_path, erofs_utils)


def test_symbolic_links_up_to_4095_bytes(tmp_path: Path, erofs_utils: Path) -> None:
    lengths = [1, 2, 59, 60, 61, 1000, 2000, 3000, 4000, *range(4020, 4045), 4094, 4095]
    links = [link(b"l%d" % n, b"t" * n) for n in lengths]
    links += [link(b"x%d" % n, b"t" * n, xattrs={b"trusted.x": b"v" * 100}) for n in range(3900, 4096, 5)]
    judge(tree_of(*links), tmp_path, erofs_utils)


def test_large_xattrs(tmp_path: Path, erofs_utils: Path) -> None:
    tree = tree_of(
        file(b"value", b"x", xattrs={b"user.v": os.urandom(65535)}),
        file(b"values", b"x" * 9000, xattrs={b"trusted.%d" % i: os.urandom(65000) for i in range(4)}),
        directory(b"dir", xattrs={b"user.v": os.urandom(4000)}),
        directory(b"dir2", xattrs={b"user.v": os.urandom(65535)}),
        file(b"dir2/x"),
        link(b"link", b"target", xattrs={b"trusted.v": os.urandom(4095)}),
        file(b"name", xattrs={b"user." + b"n" * 250: b""}),
    )
    judge(tree, tmp_path, erofs_utils)


def test_a_sparse_file_beyond_4_gib_takes_its_data_only(tmp_path: Path, erofs_utils: Path) -> None:
    size = 5 * (1 << 30) + 1234
    pieces = {
        0: b"first",
        (1 << 32) - 3: b"across",
        (1 << 32) + 1000 * BLOCK - 1: b"x" * (2 * BLOCK + 2),
        size - 1: b"!",
    }
    pair = judge(tree_of(sparse(b"big", size, pieces)), tmp_path, erofs_utils)
    assert pair.stats.data_size == (1 + 2 + 4 + 1) * BLOCK


@pytest.mark.parametrize("depth", [1, 200])
def test_deep_directories(tmp_path: Path, erofs_utils: Path, depth: int) -> None:
    judge(tree_of(file(b"/".join([b"d"] * depth + [b"file"]), b"deep")), tmp_path, erofs_utils)


def test_a_link_that_sorts_before_the_file_it_was_made_of(tmp_path: Path, erofs_utils: Path) -> None:
    tree = tree_of(file(b"z", b"contents", mtime=4), Entry(b"a", 0, hardlink_to=b"z"), file(b"m", b"middle"))
    compare_mounted(judge(tree, tmp_path, erofs_utils), tree)
