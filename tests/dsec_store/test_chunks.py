from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.chunks import (
    BLOCK,
    CHUNK,
    HEADER_SIZE,
    RAW,
    RECORD_SIZE,
    STORED_MAX,
    ZSTD,
    ChunkRecord,
    ChunkTable,
    chunk_count,
)
from dsec_store.errors import IntegrityError

DIGEST = hashlib.sha256(b"chunk").digest()
# magic, version, chunk size, data size, count, encoding: byte offsets of docs/formats.md §2
MAGIC_AT, VERSION_AT, CHUNK_SIZE_AT, DATA_SIZE_AT, COUNT_AT, ENCODING_AT, ZERO_AT = 0, 8, 12, 16, 24, 32, 36


def table(count: int = 3, last: int = BLOCK, length: int = 100) -> ChunkTable:
    data_size = max(0, (count - 1) * CHUNK + last) if count else 0
    records = [ChunkRecord(hashlib.sha256(bytes([i % 256])).digest(), i * length, length, False) for i in range(count)]
    return ChunkTable.build(data_size, ZSTD, records)


def patched(data: bytes, offset: int, form: str, *values: Any) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, *values)
    return bytes(changed)


def refuse(data: bytes, *words: str, **checks: Any) -> None:
    with pytest.raises(IntegrityError) as caught:
        ChunkTable.parse(data, **checks)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@st.composite
def tables(draw: st.DrawFn) -> ChunkTable:
    blocks = draw(st.integers(0, 300))
    data_size = blocks * BLOCK
    encoding = draw(st.sampled_from([RAW, ZSTD]))
    records, offset = [], 0
    for index in range(chunk_count(data_size)):
        size = min(CHUNK, data_size - index * CHUNK)
        zero = draw(st.booleans())
        digest = hashlib.sha256(bytes(size)).digest() if zero else draw(st.binary(min_size=32, max_size=32))
        length = size if encoding == RAW else draw(st.integers(1, STORED_MAX))
        gap = 0 if encoding == RAW else draw(st.integers(0, 9))
        records.append(ChunkRecord(digest, offset + gap, length, zero))
        offset += gap + length
    return ChunkTable.build(data_size, encoding, records)


@given(tables())
def test_a_serialized_table_parses_to_the_same_table(made: ChunkTable) -> None:
    data = made.serialize()
    assert len(data) == HEADER_SIZE + RECORD_SIZE * len(made)
    read = ChunkTable.parse(data, root=made.root(), stored_size=made.stored_end)
    assert read == made
    assert list(read) == [read.record(i) for i in range(len(read))]


@given(tables(), st.data())
@settings(max_examples=300)
def test_a_table_with_any_bit_flipped_is_refused_or_keeps_every_bound(made: ChunkTable, data: st.DataObject) -> None:
    serialized = bytearray(made.serialize())
    bit = data.draw(st.integers(0, len(serialized) * 8 - 1))
    serialized[bit // 8] ^= 1 << bit % 8
    try:
        read = ChunkTable.parse(
            bytes(serialized), root=made.root(), data_size=made.data_size, stored_size=made.stored_end
        )
    except IntegrityError:
        return
    # The digests are bound by the root; the places of the bytes are not, and stay inside the object.
    assert [r.digest for r in read] == [r.digest for r in made]
    end = 0
    for record in read:
        assert record.offset >= end
        assert 0 < record.length <= STORED_MAX
        end = record.offset + record.length
    assert end <= made.stored_end


@given(st.binary(max_size=400))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        ChunkTable.parse(data)


@given(st.binary(max_size=200))
def test_garbage_after_a_right_header_is_refused(tail: bytes) -> None:
    data = table(2).serialize()[:HEADER_SIZE] + tail
    if len(tail) != 2 * RECORD_SIZE:
        with pytest.raises(IntegrityError):
            ChunkTable.parse(data)


def test_the_layout_is_that_of_the_format_page() -> None:
    data = table(2, last=BLOCK, length=77).serialize()
    assert data[:8] == b"DSECCHNK"
    assert struct.unpack_from("<IIQQI", data, 8) == (1, 262144, 262144 + 4096, 2, 1)
    assert data[36:64] == bytes(28)
    assert data[64 + 48 : 64 + 48 + 32] == hashlib.sha256(b"\x01").digest()
    assert struct.unpack_from("<QII", data, 64 + 48 + 32) == (77, 77, 0)


def test_an_empty_blob_has_no_records_and_the_root_of_nothing() -> None:
    empty = table(0)
    assert len(empty) == 0
    assert empty.root() == "sha256:" + hashlib.sha256(b"").hexdigest()
    assert ChunkTable.parse(empty.serialize(), stored_size=0) == empty


def test_the_root_is_the_digest_of_the_digests() -> None:
    made = table(3)
    joined = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(3))
    assert made.root() == "sha256:" + hashlib.sha256(joined).hexdigest()


def test_a_newer_version_is_refused_by_number() -> None:
    refuse(patched(table().serialize(), VERSION_AT, "<I", 2), "version 2", "version 1")


@pytest.mark.parametrize(
    ("offset", "form", "value", "word"),
    [
        (MAGIC_AT, "<8s", b"DSECSUMS", "magic"),
        (CHUNK_SIZE_AT, "<I", 4096, "chunk size"),
        (DATA_SIZE_AT, "<Q", 1, "chunks"),
        (DATA_SIZE_AT, "<Q", 2 * CHUNK + 1, "multiple"),
        (DATA_SIZE_AT, "<Q", (1 << 64) - 4096, "chunks"),
        (COUNT_AT, "<Q", 4, "chunks"),
        (COUNT_AT, "<Q", (1 << 64) - 1, "chunks"),
        (ENCODING_AT, "<I", 2, "encoding"),
        (ZERO_AT, "<I", 1, "zero"),
    ],
)
def test_a_wrong_header_field_is_named(offset: int, form: str, value: Any, word: str) -> None:
    refuse(patched(table().serialize(), offset, form, value), word)


def test_truncated_and_longer_tables_are_refused() -> None:
    data = table().serialize()
    refuse(data[:-1], str(len(data) - 1), str(len(data)))
    refuse(data + b"\0", str(len(data) + 1), str(len(data)))
    refuse(data[:63], "header")
    refuse(b"", "header")


def test_overlapping_and_descending_chunks_are_refused() -> None:
    data = table(3, length=100).serialize()
    second = HEADER_SIZE + RECORD_SIZE + 32
    refuse(patched(data, second, "<Q", 99), "chunk 1", "99", "100")
    refuse(patched(data, second, "<Q", 0), "chunk 1")


def test_an_offset_that_wraps_around_is_refused() -> None:
    data = table(2).serialize()
    refuse(patched(data, HEADER_SIZE + RECORD_SIZE + 32, "<Q", (1 << 64) - 1), "end at", stored_size=1 << 40)


@pytest.mark.parametrize("length", [0, STORED_MAX + 1, 0xFFFFFFFF])
def test_a_stored_length_out_of_bounds_is_refused(length: int) -> None:
    refuse(patched(table(1).serialize(), HEADER_SIZE + 40, "<I", length), "chunk 0", str(length))


def test_a_chunk_beyond_the_data_object_is_refused() -> None:
    refuse(table(3, length=100).serialize(), "300", "299", stored_size=299)


def test_a_wrong_root_is_refused_with_both() -> None:
    made = table()
    other = table(4)
    refuse(made.serialize(), made.root(), other.root(), root=other.root())


def test_another_data_size_than_the_config_says_is_refused() -> None:
    refuse(table(3, last=BLOCK).serialize(), str(2 * CHUNK + BLOCK), "532480", data_size=532480)


def test_unknown_flags_are_refused() -> None:
    refuse(patched(table(1).serialize(), HEADER_SIZE + 44, "<I", 2), "flags")


def test_a_zero_flag_on_a_chunk_that_is_not_zero_is_refused() -> None:
    refuse(patched(table(1).serialize(), HEADER_SIZE + 44, "<I", 1), "chunk 0", "zero")


def test_raw_chunks_lie_at_their_index() -> None:
    records = [ChunkRecord(DIGEST, 0, CHUNK, False), ChunkRecord(DIGEST, CHUNK, BLOCK, False)]
    data = ChunkTable.build(CHUNK + BLOCK, RAW, records).serialize()
    refuse(patched(data, HEADER_SIZE + RECORD_SIZE + 32, "<Q", CHUNK + 1), "raw chunk 1")
    refuse(patched(data, HEADER_SIZE + RECORD_SIZE + 40, "<I", BLOCK - 1), "raw chunk 1")


def test_a_record_outside_the_table_is_an_index_error() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError):
            table(3).record(index)
