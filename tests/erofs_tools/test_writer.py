"""What the writer promises of the bytes it makes, and the errors it gives."""

from __future__ import annotations

import io
import os
import random
import stat
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erofs_tools.contents import PIECE, nonzero_runs
from erofs_tools.errors import SourceError
from erofs_tools.ondisk import BLOCK
from erofs_tools.reader import Image
from erofs_tools.tree import BytesContent, Entry, Tree
from erofs_tools.writer import ImageStats, write_image
from tests.erofs_tools.images import (
    FILE,
    SparseContent,
    compare_read,
    directory,
    every_kind,
    file,
    link,
    sparse,
    tree_of,
    write,
)


def build(tree: Tree) -> tuple[bytes, bytes, ImageStats]:
    meta = io.BytesIO()
    pieces: list[bytes] = []
    stats = write_image(tree, meta, pieces.append)
    assert all(piece and len(piece) % BLOCK == 0 and len(piece) <= PIECE for piece in pieces)
    return meta.getvalue(), b"".join(pieces), stats


def test_the_order_of_adding_does_not_change_the_image() -> None:
    entries = [entry for entry in every_kind().entries() if entry.hardlink_to is None]
    links = [Entry(b"zz/link", 0, hardlink_to=b"large"), Entry(b"a/link", 0, hardlink_to=b"tail")]
    expected = build(tree_of(*entries, *links))
    for seed in range(5):
        random.Random(seed).shuffle(entries)
        tree = Tree()
        for entry in entries + links[:: 1 if seed % 2 else -1]:
            tree.add(entry)
        assert build(tree) == expected


def test_which_path_of_an_inode_is_the_link_does_not_change_the_image() -> None:
    one = tree_of(file(b"a", b"1", mtime=5), Entry(b"b", 0, hardlink_to=b"a"), file(b"m", b"2"))
    other = tree_of(file(b"b", b"1", mtime=5), Entry(b"a", 0, hardlink_to=b"b"), file(b"m", b"2"))
    assert build(one) == build(other)


@pytest.mark.parametrize("segments", [[(0, 50_000)], [(8192, 3), (40_959, 2)], [(8000, 1000), (9000, 40_000)]])
def test_how_a_source_lists_its_zeros_does_not_change_the_image(segments: list[tuple[int, int]]) -> None:
    content = SparseContent(50_000, {8192: b"abc", 40_959: b"de"})

    class Listed(SparseContent):
        def segments(self) -> list[tuple[int, int]]:
            return segments

    expected = build(tree_of(Entry(b"f", FILE, size=50_000, content=content)))
    assert build(tree_of(Entry(b"f", FILE, size=50_000, content=Listed(50_000, content.pieces)))) == expected
    assert expected[2].data_size == 3 * BLOCK
    assert expected[2].hole_size == 10 * BLOCK


def test_contents_lie_in_path_order_on_block_borders_padded_with_zeros() -> None:
    _, data, _ = build(tree_of(file(b"b", b"2" * 5000), file(b"a/z", b"1"), file(b"a-", b"3" * 4096)))
    assert data == b"1" + bytes(4095) + b"3" * 4096 + b"2" * 5000 + bytes(3192)


def test_equal_contents_are_stored_once() -> None:
    large = os.urandom(PIECE + 5000)
    _, data, stats = build(
        tree_of(
            *(file(b"large%d" % i, large) for i in range(3)),
            *(file(b"small%d" % i, b"small") for i in range(3)),
            sparse(b"hole%0", 20_000, {0: b"x"}),
            sparse(b"hole%1", 20_000, {0: b"x"}),
            sparse(b"hole%2", 20_000, {8192: b"x"}),
        )
    )
    whole = -(-len(large) // BLOCK) * BLOCK
    assert len(data) == stats.data_size == whole + 3 * BLOCK
    assert stats.shared_size == 2 * whole + 2 * BLOCK + BLOCK


def test_contents_of_one_size_that_differ_are_kept_apart(tmp_path: Path) -> None:
    blocks = [bytes([i]) * BLOCK for i in range(1, 4)]
    tree = tree_of(
        *(
            file(b"%d%d%d" % (i, j, k), blocks[i] + bytes(BLOCK) * j + blocks[k])
            for i in range(3)
            for j in (0, 1)
            for k in range(3)
        ),
        file(b"a", blocks[0] + bytes(BLOCK) + blocks[1]),
        file(b"b", blocks[0] + blocks[1] + bytes(BLOCK)),
        file(b"c", bytes(BLOCK) + blocks[0] + blocks[1]),
    )
    compare_read(write(tree, tmp_path), tree)


def test_a_file_of_exactly_some_blocks_takes_just_those() -> None:
    assert build(tree_of(file(b"f", b"x" * 3 * BLOCK)))[2].data_size == 3 * BLOCK


def test_a_terabyte_of_holes_is_not_read() -> None:
    class Counting(SparseContent):
        asked = 0

        def at(self, offset: int, length: int) -> bytes:
            Counting.asked += length
            return super().at(offset, length)

    size = 1 << 34
    content = Counting(size, {size // 2: b"x", size - 10: b"y"})
    stats = build(tree_of(Entry(b"f", FILE, size=size, content=content)))[2]
    assert Counting.asked <= 2 * BLOCK
    assert stats.data_size == 2 * BLOCK


def test_many_inodes_that_do_not_fit_are_refused_with_advice() -> None:
    tree = tree_of(*(file(b"%d" % i, b"x") for i in range(1000)))
    out: list[bytes] = []
    with pytest.raises(SourceError, match=r"at most 65536 are allowed: split the source .*1001 inodes"):
        write_image(tree, io.BytesIO(), out.append, metadata_max=65536)
    assert not out
    meta = io.BytesIO()
    stats = write_image(tree, meta, out.append, metadata_max=1 << 20)
    assert stats.metadata_size == len(meta.getvalue())


@pytest.mark.parametrize(
    ("xattrs", "text"),
    [
        ({b"system.nfs4_acl": b""}, "system.nfs4_acl"),
        ({b"user.": b""}, "user."),
        ({b"system.posix_acl_access.x": b""}, "posix_acl_access.x"),
        ({b"user." + b"n" * 251: b""}, "longer than 255"),
        ({b"user.v": bytes(65536)}, "65536 bytes; expected at most 65535"),
        ({b"user.%d" % i: bytes(60_000) for i in range(5)}, "together"),
    ],
)
def test_an_xattr_that_has_no_place_is_named_with_its_path(xattrs: dict[bytes, bytes], text: str) -> None:
    out: list[bytes] = []
    with pytest.raises(SourceError, match=text) as error:
        write_image(tree_of(file(b"a", b"1"), file(b"b/c", b"x", xattrs=xattrs)), io.BytesIO(), out.append)
    assert error.value.path == b"b/c"
    assert "b/c" in str(error.value) and "\n" not in str(error.value)
    assert not out, "nothing may be written before all of the tree is known to fit"


def test_a_device_number_beyond_the_kernels_is_refused() -> None:
    with pytest.raises(SourceError, match="4096:0"):
        build(tree_of(Entry(b"dev", stat.S_IFCHR | 0o600, rdev=os.makedev(4096, 0))))


@pytest.mark.parametrize("size", [10_000, 3 * PIECE])
def test_contents_that_end_early_are_an_error_with_the_path(size: int) -> None:
    entry = Entry(b"d/short", FILE, size=size, content=BytesContent(b"x" * (size - 1)))

    class Listed(BytesContent):
        def segments(self) -> list[tuple[int, int]]:
            return [(0, size)]

    entry.content = Listed(b"x" * (size - 1))
    with pytest.raises(SourceError, match=f"d/short: the contents end after {size - 1} of {size} bytes"):
        build(tree_of(entry))


def test_a_file_that_takes_less_than_it_is_given_gets_all() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:1000])

    slow = Slow()
    write_image(every_kind_without_noise(), slow, lambda _: None)
    assert slow.getvalue() == build(every_kind_without_noise())[0]


def every_kind_without_noise() -> Tree:
    return tree_of(file(b"f", b"x" * 10_000), link(b"l", b"t" * 4000), *(file(b"d/%d" % i) for i in range(900)))


@given(st.lists(st.booleans(), max_size=40), st.integers(0, BLOCK - 1))
def test_runs_are_the_blocks_that_are_not_zero(blocks: list[bool], where: int) -> None:
    data = b"".join(bytes(where) + b"x" + bytes(BLOCK - 1 - where) if full else bytes(BLOCK) for full in blocks)
    runs = nonzero_runs(data)
    assert [any(a <= i < b for a, b in runs) for i in range(len(blocks))] == blocks
    assert all(a < b for a, b in runs) and all(x[1] < y[0] for x, y in pairwise(runs))


def test_metadata_of_20000_entries_is_written_in_time() -> None:
    tree = Tree()
    for i in range(20_000):
        tree.add(file(b"usr/lib/d%d/some-name-%d.py" % (i // 12, i), b""))
    times = []
    for _ in range(3):
        start = time.process_time()
        build(tree)
        times.append(time.process_time() - start)
    assert min(times) < 1.5


KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
names = st.binary(min_size=1, max_size=12).map(lambda b: b.replace(b"/", b"_").replace(b"\0", b"0")).filter(
    lambda b: b not in (b".", b"..")
) | st.sampled_from([b"a", b"b", b"-", b"a-", b"n" * 255])
paths = st.lists(names, min_size=1, max_size=4).map(b"/".join)
contents = st.lists(
    st.sampled_from([bytes(BLOCK), b"x" * BLOCK, bytes(4095) + b"y", b"z" + bytes(4095)]) | st.binary(max_size=50),
    max_size=5,
).map(b"".join)
xattrs = st.dictionaries(
    st.sampled_from([b"user.a", b"user.b", b"trusted.\xff", b"security.x", b"system.posix_acl_default"]),
    st.binary(max_size=20),
    max_size=3,
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    common: dict[str, Any] = {
        "path": draw(paths),
        "uid": draw(st.integers(0, 0xFFFFFFFE)),
        "gid": draw(st.integers(0, 0xFFFFFFFE)),
        "mtime": draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        "mtime_ns": draw(st.integers(0, 999_999_999)),
        "xattrs": draw(xattrs),
    }
    bits = draw(st.integers(0, 0o7777))
    kind = draw(st.sampled_from([stat.S_IFREG, *KINDS]))
    if kind == stat.S_IFREG:
        return file(data=draw(contents), mode=kind | bits, **common)
    if kind == stat.S_IFLNK:
        target = draw(st.binary(min_size=1, max_size=60).filter(lambda b: 0 not in b))
        return link(target=target, mode=kind | bits, **common)
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        rdev = os.makedev(draw(st.integers(0, 4095)), draw(st.integers(0, 1_048_575)))
        return Entry(mode=kind | bits, rdev=rdev, **common)
    return Entry(mode=kind | bits, **common)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any sequence of entries that a tree takes, hard links among them."""
    tree = tree_of(directory(b"", mode=stat.S_IFDIR | draw(st.integers(0, 0o7777))))
    for entry in draw(st.lists(entries(), max_size=15)):
        if draw(st.integers(0, 5)) == 0:
            entry = Entry(entry.path, 0, hardlink_to=draw(st.sampled_from([one.path for one in tree.entries()])))
        try:
            tree.add(entry)
        except SourceError:
            continue
    return tree


@settings(deadline=None, max_examples=150)
@given(trees())
def test_any_tree_is_read_back_as_it_was(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pair = write(tree, Path(folder))
        pair.verify()
        compare_read(pair, tree)


def test_the_superblock_tells_nothing_of_when_and_where() -> None:
    meta, _, _ = build(every_kind())
    with Image(meta) as image:
        superblock = image.superblock
    assert (superblock.uuid, superblock.volume, superblock.build_time, superblock.epoch) == (bytes(16), bytes(16), 0, 0)
