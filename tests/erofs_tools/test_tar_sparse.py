"""Sparse files of every format: the right bytes, and nothing read where there is nothing."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erofs_tools.directory import from_directory
from erofs_tools.errors import SourceError
from erofs_tools.writer import write_image
from tests.erofs_tools.trees import PAX, archive, gnu_tar, header, member, opened, padded, pax, tar_values, values

FORMATS = {
    "gnu": ("--format=gnu",),
    "0.0": (*PAX, "--sparse-version=0.0"),
    "0.1": (*PAX, "--sparse-version=0.1"),
    "1.0": (*PAX, "--sparse-version=1.0"),
}


def sparse_file(path: Path, size: int, pieces: list[tuple[int, bytes]]) -> None:
    with path.open("wb") as file:
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)
        file.truncate(size)
    os.utime(path, (1_600_000_000, 1_600_000_000))


@pytest.mark.parametrize("format_", FORMATS)
def test_gnu_tars_sparse_files_come_back_whole(tmp_path: Path, format_: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    noise = random.Random(5)
    sparse_file(folder / "all-hole", 1 << 20, [])
    sparse_file(folder / "few", 3_000_001, [(0, b"start"), (1_000_000, noise.randbytes(5000)), (2_999_990, b"end")])
    many = [(offset, noise.randbytes(4096)) for offset in range(0, 120 * 65536, 65536)]  # more than one extension block
    sparse_file(folder / "many", 120 * 65536, many)
    sparse_file(folder / ("n" * 200), 1 << 20, [(70_000, b"x")])
    sparse_file(folder / "dense", 9, [(0, b"no hole")])
    os.utime(folder, (1, 1))
    assert tar_values(gnu_tar(tmp_path / "x.tar", folder, "-S", *FORMATS[format_])) == values(from_directory(folder))


@pytest.mark.parametrize("format_", FORMATS)
def test_a_terabyte_of_hole_is_not_read_through(tmp_path: Path, format_: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    tail = 1 << 40
    sparse_file(folder / "disk", tail + 5, [(1 << 30, b"middle"), (tail, b"tail!")])
    tar = gnu_tar(tmp_path / "x.tar", folder, "-S", *FORMATS[format_])
    with opened(tar) as tree:
        for source in (tree, from_directory(folder)):
            entry = source.get(b"disk")
            assert entry is not None and entry.content is not None and entry.size == tail + 5
            segments = list(entry.content.segments())
            assert sum(length for _, length in segments) < 100_000
            with entry.content.open() as reader:
                for offset, data in ((1 << 30, b"middle"), (tail, b"tail!"), (12345, bytes(6))):
                    reader.seek(offset)
                    assert reader.read(len(data)) == data
                    if any(data):
                        assert any(start <= offset < start + length for start, length in segments)


def old_gnu(name: bytes, size: int, pairs: list[tuple[int, int]], stored: bytes, **fields: bytes) -> bytes:
    entries = b"".join(b"%011o\0%011o\0" % pair for pair in pairs[:4])
    rest = bytes(41) + entries.ljust(96, b"\0") + bytes([len(pairs) > 4]) + b"%011o\0" % size
    block = header(name, b"S", len(stored), magic=b"ustar  \0", rest=rest)
    pairs = pairs[4:]
    while pairs:
        body = b"".join(b"%011o\0%011o\0" % pair for pair in pairs[:21]).ljust(504, b"\0")
        pairs = pairs[21:]
        block += (body + bytes([bool(pairs)])).ljust(512, b"\0")
    return block + padded(stored)


PIECES = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=600)), max_size=30)


@given(PIECES, st.integers(0, 1000), st.sampled_from(["old", "0.0", "0.1", "1.0"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=120)
def test_any_map_puts_every_byte_in_its_place(
    tmp_path: Path, gaps: list[tuple[int, bytes]], end: int, format_: str
) -> None:
    wanted = b""
    pairs: list[tuple[int, int]] = []
    for gap, data in gaps:
        wanted += bytes(gap)
        pairs.append((len(wanted), len(data)))
        wanted += data
    wanted += bytes(end)
    pairs.append((len(wanted), 0))
    stored = b"".join(data for _, data in gaps)
    size = b"%d" % len(wanted)
    numbers = [b"%d" % number for pair in pairs for number in pair]
    if format_ == "old":
        part = old_gnu(b"f", len(wanted), pairs, stored)
    elif format_ == "0.0":
        records = [(b"GNU.sparse.size", size), (b"GNU.sparse.numblocks", b"%d" % len(pairs))]
        for offset, length in pairs:
            records += [(b"GNU.sparse.offset", b"%d" % offset), (b"GNU.sparse.numbytes", b"%d" % length)]
        part = pax(records) + member(b"f", stored)
    elif format_ == "0.1":
        records = [(b"GNU.sparse.size", size), (b"GNU.sparse.map", b",".join(numbers)), (b"GNU.sparse.name", b"f")]
        part = pax(records) + member(b"GNUSparseFile.1/f", stored)
    else:
        records = [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"f")]
        text = padded(b"".join(number + b"\n" for number in [b"%d" % len(pairs), *numbers]))
        part = pax([*records, (b"GNU.sparse.realsize", size)]) + member(b"GNUSparseFile.1/f", text + stored)
    found = tar_values(archive(tmp_path / "x.tar", part, member(b"g", b"next")))
    assert list(found) == [b"", b"f", b"g"]
    assert found[b"f"]["contents"] == wanted


def sparse_1_0(text: bytes, stored: bytes, size: int) -> bytes:
    records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.realsize": b"%d" % size}
    return pax(records) + member(b"f", padded(text) + stored)


def sparse_0_1(map_: bytes, stored: bytes, size: bytes = b"100") -> bytes:
    return pax({b"GNU.sparse.size": size, b"GNU.sparse.map": map_}) + member(b"f", stored)


@pytest.mark.parametrize(
    "part",
    [
        sparse_0_1(b"0,10,5,10", b"x" * 20),  # overlap
        sparse_0_1(b"20,10,0,10", b"x" * 20),  # not ascending
        sparse_0_1(b"95,10", b"x" * 10),  # beyond the file
        sparse_0_1(b"0,10", b"x" * 9),  # less stored
        sparse_0_1(b"0,10", b"x" * 11),  # more stored
        sparse_0_1(b"0", b""),
        sparse_0_1(b"0,-1", b""),
        sparse_0_1(b"a,b", b""),
        sparse_0_1(b"0," + b"9" * 30, b""),
        sparse_0_1(b"0,0", b"", b"-5"),
        sparse_0_1(b"0,0", b"", b""),
        old_gnu(b"f", 100, [(0, 10), (5, 10)], b"x" * 20),
        old_gnu(b"f", 100, [(0, 10)] * 30, b"x" * 300),
        old_gnu(b"f", 5, [(0, 10)], b"x" * 10),
        sparse_1_0(b"1\n0\n", b"", 100),
        sparse_1_0(b"99999999\n", b"x" * 512, 100),
        sparse_1_0(b"no\n", b"", 100),
        sparse_1_0(b"-1\n", b"", 100),
        sparse_1_0(b"1" * 400, b"", 100),
        sparse_1_0(b"1\n0\n10\n", b"x" * 11, 100),
        sparse_1_0(b"", b"", 100),
        pax({b"GNU.sparse.major": b"2", b"GNU.sparse.minor": b"0", b"GNU.sparse.realsize": b"9"}) + member(b"f"),
    ],
)
def test_maps_that_lie_are_refused(tmp_path: Path, part: bytes) -> None:
    with pytest.raises(SourceError) as caught, opened(archive(tmp_path / "x.tar", part)):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_sparse_member_cut_anywhere_is_refused(tmp_path: Path, format_: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    sparse_file(folder / "f", 40 << 16, [(offset << 16, b"x" * 100) for offset in range(0, 40, 2)])
    tar = gnu_tar(tmp_path / "x.tar", folder, "-S", *FORMATS[format_])
    data = tar.read_bytes().rstrip(b"\0")
    for length in range(0, len(data), 512):
        tar.write_bytes(data[:length])
        with pytest.raises(SourceError), opened(tar):
            pass


@pytest.mark.parametrize("size", [1 << 40, 1 << 53, (1 << 63) - 1])
def test_a_size_that_no_image_holds_is_refused_before_anything_is_written(tmp_path: Path, size: int) -> None:
    records = {b"GNU.sparse.size": b"%d" % size, b"GNU.sparse.map": b"0,10", b"GNU.sparse.name": b"d/sp"}
    tar = archive(tmp_path / "x.tar", pax(records) + member(b"GNUSparseFile.1/sp", b"x" * 10))
    written: list[bytes] = []
    metadata = io.BytesIO()
    with opened(tar) as tree, pytest.raises(SourceError) as caught:
        write_image(tree, metadata, written.append, metadata_max=1 << 30)
    assert caught.value.path == b"d/sp"
    assert f"this file of {size} bytes" in str(caught.value) and "at most 1073741824" in str(caught.value)
    assert "make it smaller" in str(caught.value)
    assert not written and not metadata.getvalue()


def test_a_size_beyond_32_bits_of_blocks_is_refused_without_a_limit_of_the_caller(tmp_path: Path) -> None:
    records = {b"GNU.sparse.size": b"%d" % (1 << 53), b"GNU.sparse.map": b"0,10", b"GNU.sparse.name": b"sp"}
    tar = archive(tmp_path / "x.tar", pax(records) + member(b"GNUSparseFile.1/sp", b"x" * 10))
    with opened(tar) as tree, pytest.raises(SourceError, match=r"^sp: .*9007199254740992 bytes"):
        write_image(tree, io.BytesIO(), lambda _: None)
