"""What verify refuses: every field that a forged image could turn against the kernel, and what random damage makes."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erofs_tools.errors import FormatError, VerifyError
from erofs_tools.ondisk import BLOCK, CHECKSUM_OFFSET, DEVICE_TABLE_OFFSET, SUPER_OFFSET, checksum
from erofs_tools.reader import Image, Inode
from erofs_tools.tree import Entry, Tree
from erofs_tools.verify import verify
from tests.erofs_tools.images import Pair, directory, every_kind, file, link, sparse, tree_of, write

SMALL = tree_of(
    directory(b"d"),
    file(b"d/inner", b"x" * 10_000),
    directory(b"e"),
    file(b"file", b"y" * 5000 + bytes(9000) + b"z"),
    file(b"xattrs", b"", xattrs={b"user.a": b"1", b"trusted.b": b"22"}),
    link(b"link", b"target"),
    Entry(b"fifo", stat.S_IFIFO | 0o600),
    *(file(b"many/name-%04d" % i) for i in range(400)),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write(SMALL, tmp_path_factory.mktemp("small"))


def sealed(raw: bytearray) -> bytes:
    """With a right superblock checksum, as a forger would make it."""
    raw[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = checksum(bytes(raw[:BLOCK])).to_bytes(4, "little")
    return bytes(raw)


def refused(raw: bytes, data_size: int, folder: Path) -> str:
    meta = folder / "forged"
    meta.write_bytes(raw)
    with pytest.raises(VerifyError) as error:
        verify(meta, data_size=data_size)
    message = str(error.value)
    assert "\n" not in message and str(meta) in message
    return message


def test_images_of_ours_are_accepted_and_counted(tmp_path: Path) -> None:
    for number, tree in enumerate((Tree(), SMALL, every_kind())):
        pair = write(tree, tmp_path / str(number))
        found = pair.verify()
        stats = pair.stats
        assert (found.inodes, found.files, found.directories, found.symlinks, found.others) == (
            *(stats.inodes, stats.files, stats.directories, stats.symlinks, stats.others),
        )
        assert (found.metadata_size, found.data_size) == (stats.metadata_size, stats.data_size)


def test_the_digest_is_checked(small: Pair) -> None:
    digest = "sha256:" + hashlib.sha256(small.meta.read_bytes()).hexdigest()
    size = small.stats.data_size
    assert verify(small.meta, data_size=size, digest=digest).inodes == small.stats.inodes
    with pytest.raises(VerifyError, match=digest):
        verify(small.meta, data_size=size, digest="sha256:" + "0" * 64)


def test_an_error_begins_with_the_name_that_the_caller_gives(small: Pair) -> None:
    wrong = small.stats.data_size + BLOCK
    for meta in (small.meta, small.meta.read_bytes()):
        with pytest.raises(VerifyError, match=r"^layer x, metadata: the image names"):
            verify(meta, data_size=wrong, name="layer x, metadata")
    with pytest.raises(VerifyError, match=f"^{small.meta}: "):
        verify(small.meta, data_size=wrong)


@pytest.mark.parametrize("change", [-4096, 4096, 1, -1])
def test_data_of_another_size_is_refused(small: Pair, change: int) -> None:
    with pytest.raises(VerifyError, match="blocks of data; the data has"):
        verify(small.meta, data_size=small.stats.data_size + change)


def test_a_file_that_is_cut_or_longer_is_refused(small: Pair, tmp_path: Path) -> None:
    raw = small.meta.read_bytes()
    for forged in (raw[:-BLOCK], raw[:-1], raw + b"x", raw + bytes(BLOCK), raw[:2000], raw[:100], b""):
        refused(forged, small.stats.data_size, tmp_path)


SUPER = [
    (0, 4, 5, "magic"),
    (8, 4, 2, "no checksum"),
    (8, 4, 1 | 0x20, "ishare"),
    (12, 1, 9, "blocks of 2\\^9"),
    (13, 1, 1, "extension slots"),
    (14, 2, 0xFFFF, "behind the end"),
    (16, 8, 3, "counts 3 inodes"),
    (36, 4, 0xFFFFFFFF, "counts 4294967295 blocks"),
    (40, 4, 0xFFFFFFFF, "behind the end"),
    (80, 4, 4 | 8 | 1, "0padding"),
    (80, 4, 4 | 8 | 0x80, "48bit"),
    (80, 4, 4 | 8 | 0x80000000, "bit 31"),
    (80, 4, 4, "without the feature device_table"),
    (84, 2, 1, "compression"),
    (86, 2, 0, "names 0 devices"),
    (86, 2, 2, "names 2 devices"),
    (86, 2, 0xFFFF, "leaves the image"),
    (88, 2, 0xFFFF, "leaves the image"),
    (90, 1, 1, "directory block bits"),
    (91, 1, 1, "xattr prefixes"),
]


@pytest.mark.parametrize(("offset", "width", "value", "text"), SUPER)
def test_a_forged_superblock_is_refused(
    small: Pair, tmp_path: Path, offset: int, width: int, value: int, text: str
) -> None:
    raw = bytearray(small.meta.read_bytes())
    at = SUPER_OFFSET + offset
    raw[at : at + width] = value.to_bytes(width, "little")
    message = refused(sealed(raw), small.stats.data_size, tmp_path)
    assert text.replace("\\", "") in message


def test_a_wrong_checksum_is_refused(small: Pair, tmp_path: Path) -> None:
    raw = bytearray(small.meta.read_bytes())
    raw[SUPER_OFFSET + 48] ^= 1
    assert "checksum" in refused(bytes(raw), small.stats.data_size, tmp_path)


def test_a_device_that_would_lie_over_the_metadata_is_refused(small: Pair, tmp_path: Path) -> None:
    raw = bytearray(small.meta.read_bytes())
    raw[DEVICE_TABLE_OFFSET + 68 : DEVICE_TABLE_OFFSET + 72] = (1).to_bytes(4, "little")
    assert "address 1 lies inside" in refused(sealed(raw), small.stats.data_size, tmp_path)


Forge = Callable[[bytearray, "Finder"], None]


class Finder:
    """Byte offsets in the small image."""

    def __init__(self, image: Image) -> None:
        self.image = image

    def inode(self, path: bytes) -> Inode:
        found = self.image.find(path)
        assert found is not None
        return found

    def at(self, path: bytes) -> int:
        return self.inode(path).nid * 32

    def extent(self, path: bytes, index: int) -> int:
        return self.image.table(self.inode(path))[0] + 8 * index

    def dirent(self, path: bytes, name: bytes) -> int:
        """Of a directory beside its inode."""
        index = [found for found, _, _ in self.image.directory(self.inode(path))].index(name)
        return self.inode(path).tail + 12 * index

    def name(self, path: bytes, name: bytes) -> int:
        tail = self.inode(path).tail
        return tail + int.from_bytes(
            self.image.raw[self.dirent(path, name) + 8 : self.dirent(path, name) + 10], "little"
        )


def put(raw: bytearray, at: int, value: int, width: int) -> None:
    raw[at : at + width] = value.to_bytes(width, "little")


def swap_names(raw: bytearray, f: Finder) -> None:
    at = f.name(b"", b"file")
    raw[at : at + 4] = b"fifo"  # now twice


FORGED: dict[str, tuple[Forge, str]] = {
    "format": (lambda r, f: put(r, f.at(b"file"), 0x109, 2), "file: "),
    "compressed": (lambda r, f: put(r, f.at(b"file"), 3, 2), "compressed"),
    "layout of a directory": (lambda r, f: put(r, f.at(b"d"), 9, 2), "layout chunks"),
    "mode is another type": (lambda r, f: put(r, f.at(b"file") + 4, 0o020644, 2), "listed as type 1"),
    "mode is no type": (lambda r, f: put(r, f.at(b"file") + 4, 0o030644, 2), "no type of file"),
    "directory is a file": (lambda r, f: put(r, f.at(b"d") + 4, 0o100644, 2), "listed as a directory"),
    "size beyond the table": (lambda r, f: put(r, f.at(b"file") + 8, 1 << 40, 8), "leaves the image"),
    "size negative": (lambda r, f: put(r, f.at(b"file") + 8, 1 << 63, 8), "size of"),
    "size of a directory": (lambda r, f: put(r, f.at(b"d") + 8, 4000, 8), "d: "),
    "size of a large directory": (lambda r, f: put(r, f.at(b"many") + 8, 1 << 30, 8), "many: "),
    "start of a large directory": (lambda r, f: put(r, f.at(b"many") + 16, 0x00FFFFFF, 4), "leave the image"),
    "no start of a large directory": (lambda r, f: put(r, f.at(b"many") + 16, 0xFFFFFFFF, 4), "leave the image"),
    "empty directory": (lambda r, f: put(r, f.at(b"e") + 8, 0, 8), "no directory '.' in it"),
    "size of a link": (lambda r, f: put(r, f.at(b"link") + 8, 0, 8), "symbolic link"),
    "long link": (lambda r, f: put(r, f.at(b"link") + 8, 4096, 8), "symbolic link"),
    "size of a fifo": (lambda r, f: put(r, f.at(b"fifo") + 8, 9, 8), "contents"),
    "NUL in a link": (lambda r, f: put(r, f.inode(b"link").tail + 2, 0, 1), "NUL"),
    "nanoseconds": (lambda r, f: put(r, f.at(b"file") + 40, 1_000_000_000, 4), "1000000000 ns"),
    "no links": (lambda r, f: put(r, f.at(b"file") + 44, 0, 4), "0 links"),
    "chunk format": (lambda r, f: put(r, f.at(b"file") + 16, 0, 4), "chunk format"),
    "chunk format 48": (lambda r, f: put(r, f.at(b"file") + 16, 0x60, 4), "chunk format"),
    "larger chunks": (lambda r, f: put(r, f.at(b"file") + 16, 0x22, 4), "neither a hole nor"),
    "block address": (lambda r, f: put(r, f.extent(b"file", 1) + 4, 6, 4), "neither a hole nor"),
    "block address, large": (lambda r, f: put(r, f.extent(b"file", 0) + 4, 0xFFFFFFFE, 4), "file: an extent"),
    "block address, high bits": (lambda r, f: put(r, f.extent(b"file", 0), 1, 2), "neither a hole nor"),
    "device 0": (lambda r, f: put(r, f.extent(b"file", 0) + 2, 0, 2), "neither a hole nor"),
    "device 2": (lambda r, f: put(r, f.extent(b"d/inner", 0) + 2, 2, 2), "d/inner: an extent"),
    "hole of another device": (lambda r, f: put(r, f.extent(b"file", 2) + 2, 7, 2), "neither a hole nor"),
    "xattrs beyond the end": (
        lambda r, f: put(r, f.at(b"link") + 2, 0xFFFF, 2),
        "link: inodes and what they hold overlap",
    ),
    "shared xattrs": (lambda r, f: put(r, f.inode(b"xattrs").body + 4, 1, 1), "shared xattrs"),
    "many shared xattrs": (lambda r, f: put(r, f.inode(b"xattrs").body + 4, 255, 1), "shared xattrs"),
    "xattr name length": (lambda r, f: put(r, f.inode(b"xattrs").body + 12, 200, 1), "leaves the space"),
    "xattr value length": (lambda r, f: put(r, f.inode(b"xattrs").body + 14, 0xFFFF, 2), "leaves the space"),
    "xattr prefix": (lambda r, f: put(r, f.inode(b"xattrs").body + 13, 5, 1), "prefix 5"),
    "xattr long prefix": (lambda r, f: put(r, f.inode(b"xattrs").body + 13, 0x81, 1), "prefix 129"),
    "xattr name": (lambda r, f: put(r, f.inode(b"xattrs").body + 16, 0, 1), "no NUL"),
    "slash in a name": (lambda r, f: put(r, f.name(b"", b"link") + 1, ord("/"), 1), "slash"),
    "NUL in a name": (lambda r, f: put(r, f.name(b"", b"link") + 1, 0, 1), "NUL"),
    "order": (lambda r, f: put(r, f.name(b"", b"link"), ord("a"), 1), "not in order"),
    "twice": (swap_names, "not in order"),
    "name .": (lambda r, f: put(r, f.name(b"d", b"."), ord("!"), 1), "d: "),
    "name offset": (lambda r, f: put(r, f.dirent(b"", b"link") + 8, 3, 2), "directory block"),
    "name offset beyond": (lambda r, f: put(r, f.dirent(b"", b"link") + 8, 0xFFFF, 2), "directory block"),
    "first name offset": (lambda r, f: put(r, f.inode(b"").tail + 8, 13, 2), "directory block"),
    "first name offset 0": (lambda r, f: put(r, f.inode(b"").tail + 8, 0, 2), "directory block"),
    "type": (lambda r, f: put(r, f.dirent(b"", b"link") + 10, 1, 1), "link: it is listed as type 1"),
    "type unknown": (lambda r, f: put(r, f.dirent(b"", b"link") + 10, 9, 1), "link: it is listed as type 9"),
    "type directory": (lambda r, f: put(r, f.dirent(b"", b"file") + 10, 2, 1), "file: it is listed as a directory"),
    "nid": (lambda r, f: put(r, f.dirent(b"", b"link"), 1 << 60, 8), "link: inode"),
    "nid, 64 bits": (lambda r, f: put(r, f.dirent(b"", b"link"), (1 << 64) - 1, 8), "link: inode"),
    "cycle": (lambda r, f: put(r, f.dirent(b"", b"d"), f.inode(b"").nid, 8), "'d' is reached twice"),
    "two parents": (lambda r, f: put(r, f.dirent(b"", b"e"), f.inode(b"d").nid, 8), "'e' is reached twice"),
    "dot": (lambda r, f: put(r, f.dirent(b"d", b"."), f.inode(b"").nid, 8), "'.' leads to inode"),
    "dot dot": (lambda r, f: put(r, f.dirent(b"d", b".."), f.inode(b"e").nid, 8), "'..' leads to inode"),
    "an inode left out": (
        lambda r, f: put(r, f.dirent(b"d", b"inner"), f.inode(b"file").nid, 8),
        "the superblock counts",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_inode_or_name_is_refused(small: Pair, tmp_path: Path, what: str) -> None:
    forge, text = FORGED[what]
    raw = bytearray(small.meta.read_bytes())
    with Image(bytes(raw)) as image:
        forge(raw, Finder(image))
    message = refused(sealed(raw), small.stats.data_size, tmp_path)
    assert text in message


def test_a_bad_extent_is_found_in_a_long_table(tmp_path: Path) -> None:
    pair = write(tree_of(sparse(b"big", 1 << 30, {(1 << 30) - 1: b"!"}), file(b"small", b"x")), tmp_path)
    raw = bytearray(pair.meta.read_bytes())
    with Image(bytes(raw)) as image:
        put(raw, Finder(image).extent(b"big", 200_000) + 4, 2, 4)
    assert "big: an extent" in refused(sealed(raw), pair.stats.data_size, tmp_path)


def test_overlapping_tables_do_not_take_forever(tmp_path: Path) -> None:
    # 30,000 files that claim one table each, all of them up to the end of the image
    tree = tree_of(*(file(b"f%05d" % i) for i in range(30_000)))
    pair = write(tree, tmp_path)
    raw = bytearray(pair.meta.read_bytes())
    with Image(bytes(raw)) as image:
        for path, inode in list(image.walk()):
            if path:
                at = inode.nid * 32
                put(raw, at, 9, 2)
                put(raw, at + 8, (len(raw) - at - 64) // 8 * BLOCK, 8)
                put(raw, at + 16, 0x20, 4)
    start = time.process_time()
    refused(sealed(raw), 0, tmp_path)
    assert time.process_time() - start < 5


def test_an_image_of_mkfs_is_accepted_when_it_is_of_our_shape(tmp_path: Path, erofs_utils: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("file")
    for size in ("4096", "65536"):
        meta, data = tmp_path / f"meta{size}", tmp_path / f"data{size}"
        command: list[str | Path] = [
            erofs_utils / "mkfs.erofs",
            f"--blobdev={data}",
            f"--chunksize={size}",
            meta,
            source,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        assert verify(meta, data_size=data.stat().st_size).inodes == 3


@settings(deadline=None, max_examples=600)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=6),
    st.none() | st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_damage_is_refused_or_harmless(
    flips: list[tuple[float, int]], cut: float | None, seal: bool, used: bool
) -> None:
    raw, data_size, places = _fuzzed()
    forged = bytearray(raw)
    for where, mask in flips:
        at = places[int(where * (len(places) - 1))] if used else int(where * (len(raw) - 1))
        forged[at] ^= mask
    if cut is not None:
        del forged[int(cut * len(forged)) :]
    if seal and len(forged) >= BLOCK:
        sealed(forged)
    with tempfile.TemporaryDirectory() as folder:
        meta = Path(folder, "meta")
        meta.write_bytes(forged)
        try:
            verify(meta, data_size=data_size)
            accepted = True
        except VerifyError:
            accepted = False
        try:
            read_all(bytes(forged))
        except FormatError:
            assert not accepted, "what is accepted must be readable"


_FUZZED: list[tuple[bytes, int, list[int]]] = []


def _fuzzed() -> tuple[bytes, int, list[int]]:
    """The image, its data's size, and the bytes of it that say something: not zero, or beside one that is not."""
    if not _FUZZED:
        with tempfile.TemporaryDirectory() as folder:
            pair = write(every_kind(), Path(folder))
            raw = pair.meta.read_bytes()
            places = [i for i in range(1024, len(raw) - 1) if any(raw[i - 1 : i + 2])]
            _FUZZED.append((raw, pair.stats.data_size, places))
    return _FUZZED[0]


def read_all(raw: bytes) -> None:
    """Everything our reader can be asked about an image."""
    with Image(raw) as image:
        for _, inode in image.walk():
            image.xattrs(inode)
            if stat.S_ISDIR(inode.mode):
                image.directory(inode)
            elif stat.S_ISLNK(inode.mode):
                image.target(inode)
            elif stat.S_ISREG(inode.mode):
                for number, _ in enumerate(image.extents(inode)):
                    if number > 10_000:
                        break


@given(st.binary(max_size=9000))
def test_random_bytes_are_no_image(raw: bytes) -> None:
    with pytest.raises(FormatError):
        read_all(raw)


def test_a_layer_of_usual_size_is_checked_in_a_quarter_second(tmp_path: Path) -> None:
    tree = Tree()
    for i in range(16_000):
        where = b"usr/lib/d%d/name-%d" % (i // 12, i)
        if i % 12 == 0:
            tree.add(link(where, b"../lib%d" % i))
        else:
            tree.add(
                sparse(where, 11 * BLOCK, {10 * BLOCK: b"%d" % i, **({0: b"x" * BLOCK * 9} if i % 100 == 1 else {})})
            )
    pair = write(tree, tmp_path)
    times = []
    for _ in range(5):
        start = time.process_time()
        found = pair.verify()
        times.append(time.process_time() - start)
    assert found.inodes > 16_000 and found.extents > 160_000
    assert min(times) < 0.25
