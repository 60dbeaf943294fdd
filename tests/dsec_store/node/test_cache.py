"""The cache entry: what it keeps, what it refuses to give back."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.chunks import CHUNK, RAW, ChunkRecord, ChunkTable
from dsec_store.node.cache import HEADER, CacheEntry, boot_id


def blob(size: int, seed: int = 0) -> tuple[bytes, ChunkTable]:
    data = b"".join(hashlib.sha256(struct.pack("<QQ", seed, i)).digest() for i in range(size // 32))
    parts = [data[offset : offset + CHUNK] for offset in range(0, size, CHUNK)]
    records = [
        ChunkRecord(hashlib.sha256(part).digest(), index * CHUNK, len(part), False) for index, part in enumerate(parts)
    ]
    return data, ChunkTable.build(size, RAW, records)


def part(data: bytes, index: int) -> bytes:
    return data[index * CHUNK : (index + 1) * CHUNK]


DATA, TABLE = blob(3 * CHUNK + 8192)


def test_files_are_laid_out_as_documented(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "entry", TABLE)
    assert entry.put(3, part(DATA, 3))
    assert entry.put(1, part(DATA, 1))
    entry.close()
    present = (tmp_path / "entry" / "present").read_bytes()
    assert HEADER.unpack(present[:64]) == (b"DSECBITM", 1, CHUNK, TABLE.data_size, boot_id(), 1)
    assert present[64:] == bytes([0b1010])
    sums = (tmp_path / "entry" / "sums").read_bytes()
    assert sums[:8] == b"DSECSUMS"
    assert struct.unpack_from("<Q", sums, 64 + 8)[0] == xxhash.xxh3_64_intdigest(part(DATA, 1))
    stored = (tmp_path / "entry" / "data").read_bytes()
    assert len(stored) == TABLE.data_size
    assert stored[CHUNK : 2 * CHUNK] == part(DATA, 1)


def test_a_cleanly_closed_entry_keeps_its_chunks(tmp_path: Path) -> None:
    first = CacheEntry(tmp_path / "entry", TABLE)
    first.put(2, part(DATA, 2))
    first.close()
    second = CacheEntry(tmp_path / "entry", TABLE)
    assert second.read(2) == part(DATA, 2)
    assert second.read(0) is None
    second.close()


def test_an_entry_that_was_not_closed_is_thrown_away(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:  # dies with the entry open
        entry = CacheEntry(tmp_path / "entry", TABLE)
        entry.put(0, part(DATA, 0))
        entry.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    entry = CacheEntry(tmp_path / "entry", TABLE)
    assert not entry.has(0)
    assert entry.read(0) is None
    entry.close()


def test_a_second_process_cannot_open_an_open_entry(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "entry", TABLE)
    with pytest.raises(BlockingIOError):
        CacheEntry(tmp_path / "entry", TABLE)
    assert entry.put(0, part(DATA, 0))
    assert entry.read(0) == part(DATA, 0)
    entry.close()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["data", "sums", "present"]),
    position=st.integers(0, TABLE.data_size - 1),
    bit=st.integers(0, 7),
    reopened=st.booleans(),
)
def test_a_flipped_bit_anywhere_never_becomes_a_wrong_byte(
    tmp_path_factory: pytest.TempPathFactory, name: str, position: int, bit: int, reopened: bool
) -> None:
    folder = tmp_path_factory.mktemp("cache") / "entry"
    entry = CacheEntry(folder, TABLE)
    for index in range(len(TABLE)):
        entry.put(index, part(DATA, index))
    if reopened:
        entry.close()
    path = folder / name
    with open(path, "r+b") as file:
        file.seek(position % path.stat().st_size)
        old = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ (1 << bit)]))
    if reopened:
        entry = CacheEntry(folder, TABLE)
    for index in range(len(TABLE)):
        assert entry.read(index) in (None, part(DATA, index))
    entry.close()


def test_a_bit_without_its_data_is_a_miss(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "entry", TABLE)
    entry.close()
    with open(tmp_path / "entry" / "present", "r+b") as file:
        file.seek(64)
        file.write(b"\xff")
    entry = CacheEntry(tmp_path / "entry", TABLE)
    assert [entry.read(index) for index in range(len(TABLE))] == [None] * len(TABLE)
    assert not entry.has(0)
    entry.close()


def test_another_blob_of_another_size_finds_nothing_of_the_old(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "entry", TABLE)
    entry.put(0, part(DATA, 0))
    entry.close()
    other_data, other = blob(2 * CHUNK, seed=1)
    entry = CacheEntry(tmp_path / "entry", other)
    assert entry.read(0) is None
    entry.put(1, part(other_data, 1))
    assert entry.read(1) == part(other_data, 1)
    entry.close()
