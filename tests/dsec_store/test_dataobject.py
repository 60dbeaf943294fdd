from __future__ import annotations

import hashlib
import io
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.chunks import BLOCK, CHUNK, ChunkTable
from dsec_store.dataobject import (
    DataObjectWriter,
    decode_chunk,
    decode_metadata,
    decode_raw_chunk,
    encode_metadata,
)
from dsec_store.errors import IntegrityError


def blob(size: int, seed: int = 1) -> bytes:
    """Half text, half noise, with a zero chunk's worth of zeros in the middle."""
    source = random.Random(seed)
    half = size // 2
    text = b"the quick brown fox %d jumps\n" % seed
    data = bytearray((text * (half // len(text) + 1))[:half] + source.randbytes(size - half))
    if size >= 4 * CHUNK:
        data[CHUNK : 2 * CHUNK] = bytes(CHUNK)
    return bytes(data)


def encode(
    data: bytes, *, threads: int = 2, piece: int = 1 << 20, raw_out: int | None = None
) -> tuple[bytes, ChunkTable]:
    out = io.BytesIO()
    with DataObjectWriter(out, raw_out, threads) as writer:
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
        table, stats = writer.finish()
    assert (stats.data_size, stats.stored_size, stats.chunks) == (len(data), len(out.getvalue()), len(table))
    return out.getvalue(), table


def decode(stored: bytes, table: ChunkTable) -> bytes:
    return b"".join(
        decode_chunk(stored[r.offset : r.offset + r.length], table.chunk_size(i), r.digest) for i, r in enumerate(table)
    )


@given(st.integers(0, 200), st.integers(1, 3 * CHUNK), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_back_whatever_the_pieces(blocks: int, piece: int, threads: int) -> None:
    data = blob(blocks * BLOCK, blocks)
    stored, table = encode(data, threads=threads, piece=piece)
    assert decode(stored, ChunkTable.parse(table.serialize(), root=table.root(), stored_size=len(stored))) == data


@pytest.mark.parametrize("size", [0, BLOCK, CHUNK, CHUNK + BLOCK, 9 * CHUNK])
def test_plain_zstd_restores_the_data_blob(size: int, tmp_path: Path) -> None:
    data = blob(size)
    stored, _ = encode(data)
    (tmp_path / "data.zst").write_bytes(stored)
    done = subprocess.run(["zstd", "-dc", tmp_path / "data.zst"], capture_output=True, check=True)
    assert done.stdout == data
    subprocess.run(["zstd", "-t", tmp_path / "data.zst"], capture_output=True, check=True)


def test_the_seek_table_is_that_of_the_seekable_format() -> None:
    stored, table = encode(blob(5 * CHUNK + BLOCK))
    frames, descriptor, magic = struct.unpack("<IBI", stored[-9:])
    assert (frames, descriptor, magic) == (len(table), 0, 0x8F92EAB1)
    start = len(stored) - 9 - 8 * frames - 8
    assert struct.unpack_from("<II", stored, start) == (0x184D2A5E, 8 * frames + 9)
    entries = [struct.unpack_from("<II", stored, start + 8 + 8 * i) for i in range(frames)]
    assert entries == [(r.length, table.chunk_size(i)) for i, r in enumerate(table)]
    assert table.stored_end == start


def test_the_bytes_do_not_depend_on_threads_or_pieces() -> None:
    data = blob(20 * CHUNK)
    first = encode(data, threads=1, piece=BLOCK * 7)
    assert encode(data, threads=4, piece=len(data)) == first


def test_zero_chunks_are_marked_and_stored_like_any_other() -> None:
    data = blob(4 * CHUNK)
    stored, table = encode(data)
    assert [record.zero for record in table] == [False, True, False, False]
    assert decode(stored, table) == data


def test_the_raw_file_is_the_data_blob(tmp_path: Path) -> None:
    data = blob(7 * CHUNK + BLOCK)
    with (tmp_path / "raw").open("w+b") as raw:
        encode(data, raw_out=raw.fileno(), piece=100_000)
        assert (tmp_path / "raw").read_bytes() == data


def test_a_blob_that_is_not_whole_blocks_is_refused() -> None:
    with DataObjectWriter(io.BytesIO()) as writer:
        writer.write(b"x" * (BLOCK + 1))
        with pytest.raises(IntegrityError, match="multiple of 4096"):
            writer.finish()


def test_an_error_of_the_raw_file_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "raw").touch()
    read_only = os.open(tmp_path / "raw", os.O_RDONLY)
    try:
        with pytest.raises(OSError), DataObjectWriter(io.BytesIO(), read_only) as writer:
            writer.write(blob(8 * CHUNK))
            writer.finish()
    finally:
        os.close(read_only)


def peak_growth(first: str, then: str) -> int:
    """KiB that the peak of resident memory grows in ``then``, in a process of its own."""
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    script = f"import resource\n{first}\nbefore = {peak}\n{then}\nprint({peak} - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_of_writing_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    grown = peak_growth(
        f"""
import random
from dsec_store.dataobject import DataObjectWriter
piece = random.Random(1).randbytes(1 << 20)
out = open({str(tmp_path / "out")!r}, "wb")
writer = DataObjectWriter(out)
for _ in range(8): writer.write(piece)  # the threads' contexts exist now
""",
        """
for _ in range(150): writer.write(piece)
writer.finish()
""",
    )
    assert grown < 16 * 1024


# Frames of a registry that lies

DATA = blob(CHUNK)
DIGEST = hashlib.sha256(DATA).digest()
FRAME = zstandard.ZstdCompressor(level=3).compress(DATA)


def refuse(frame: bytes, *words: str, size: int = CHUNK, digest: bytes = DIGEST) -> None:
    with pytest.raises(IntegrityError) as caught:
        decode_chunk(frame, size, digest)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_right_frame_is_decoded() -> None:
    assert decode_chunk(FRAME, CHUNK, DIGEST) == DATA
    assert decode_chunk(memoryview(FRAME).tobytes(), CHUNK, DIGEST) == DATA


@pytest.mark.parametrize("level", [-5, 1, 9, 19, 22])
def test_frames_of_any_level_are_decoded(level: int) -> None:
    assert decode_chunk(zstandard.ZstdCompressor(level=level).compress(DATA), CHUNK, DIGEST) == DATA


def forged_bomb(declared: int) -> bytes:
    """A frame of 512 MiB of zeros that declares ``declared`` bytes in a field of 8."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=(8 << 30) + 1)  # above 4 GiB the field has 8 bytes
    piece = bytes(1 << 20)
    frame = bytearray(b"".join(compressor.compress(piece) for _ in range(512)))
    frame += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert frame[4] >> 6 == 3 and not frame[4] & 0x20
    struct.pack_into("<Q", frame, 6, declared)
    return bytes(frame)


@pytest.mark.parametrize("declared", [512 << 20, CHUNK])
def test_a_bomb_costs_no_memory_whatever_it_declares(declared: int, tmp_path: Path) -> None:
    (tmp_path / "frame").write_bytes(forged_bomb(declared))
    grown = peak_growth(
        f"""
from dsec_store.dataobject import decode_chunk
from dsec_store.errors import IntegrityError
frame = open({str(tmp_path / "frame")!r}, "rb").read()
""",
        f"""
try:
    decode_chunk(frame, {CHUNK}, bytes(32))
except IntegrityError as error:
    pass
else:
    raise SystemExit("not refused")
""",
    )
    assert grown < 4 * 1024


def test_a_frame_that_gives_more_than_it_declares_is_refused() -> None:
    # One raw block more than the size in the header, within the window: only the decoder can notice.
    header = b"\x28\xb5\x2f\xfd" + b"\x80" + bytes([8 << 3]) + struct.pack("<I", BLOCK)
    blocks = b"".join(struct.pack("<I", (BLOCK << 3) | last)[:3] + DATA[:BLOCK] for last in (0, 1))
    assert zstandard.get_frame_parameters(header + blocks).window_size == CHUNK
    refuse(header + blocks, "too small", size=BLOCK, digest=hashlib.sha256(DATA[:BLOCK]).digest())
    less = header[:6] + struct.pack("<I", 3 * BLOCK) + blocks
    refuse(less, size=3 * BLOCK, digest=hashlib.sha256(DATA[: 3 * BLOCK]).digest())


def test_a_frame_without_its_size_is_refused() -> None:
    refuse(zstandard.ZstdCompressor(level=3, write_content_size=False).compress(DATA), "does not declare its size")


def test_a_frame_that_declares_less_is_refused() -> None:
    refuse(zstandard.ZstdCompressor().compress(DATA[:BLOCK]), "declares 4096")


def test_a_window_above_256_kib_is_refused() -> None:
    # Magic, descriptor without single segment and with an 4-byte size, window descriptor of 8 MiB, one raw block.
    block = struct.pack("<I", (BLOCK << 3) | 1)[:3] + DATA[:BLOCK]
    frame = b"\x28\xb5\x2f\xfd" + b"\x80" + bytes([13 << 3]) + struct.pack("<I", BLOCK) + block
    assert zstandard.get_frame_parameters(frame).window_size == 8 << 20
    refuse(frame, "window", str(8 << 20), size=BLOCK, digest=hashlib.sha256(DATA[:BLOCK]).digest())


def test_a_frame_that_wants_a_dictionary_is_refused() -> None:
    # Dictionary id flag 1: one byte after the descriptor (single segment, 4-byte size).
    frame = b"\x28\xb5\x2f\xfd" + b"\xa1\x07" + struct.pack("<I", CHUNK) + FRAME[9:]
    refuse(frame, "dictionary 7")


@pytest.mark.parametrize("tail", [b"\0", b"x" * 100, FRAME, struct.pack("<II", 0x184D2A50, 0)])
def test_bytes_after_the_frame_are_refused(tail: bytes) -> None:
    refuse(FRAME + tail, "unused data")


@pytest.mark.parametrize("cut", [1, 10, len(FRAME) // 2, len(FRAME) - 3, len(FRAME)])
def test_a_truncated_frame_is_refused(cut: int) -> None:
    refuse(FRAME[:-cut])


def test_a_skippable_frame_first_is_refused() -> None:
    refuse(struct.pack("<II", 0x184D2A50, 4) + b"skip" + FRAME, "no zstd frame")


def test_a_right_frame_of_other_bytes_is_refused_with_both_digests() -> None:
    other = blob(CHUNK, 2)
    refuse(
        zstandard.ZstdCompressor().compress(other),
        f"sha256:{hashlib.sha256(other).hexdigest()}",
        f"sha256:{DIGEST.hex()}",
    )


@given(st.integers(0, len(FRAME) * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_a_frame_with_any_bit_flipped_gives_the_right_bytes_or_an_error(bit: int) -> None:
    frame = bytearray(FRAME)
    frame[bit // 8] ^= 1 << bit % 8
    try:
        assert decode_chunk(bytes(frame), CHUNK, DIGEST) == DATA
    except IntegrityError:
        pass


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    refuse(data)
    refuse(b"\x28\xb5\x2f\xfd" + data)


def test_raw_chunks_are_checked_too() -> None:
    assert decode_raw_chunk(DATA, CHUNK, DIGEST) == DATA
    with pytest.raises(IntegrityError, match="expected 262144"):
        decode_raw_chunk(DATA[:-1], CHUNK, DIGEST)
    with pytest.raises(IntegrityError, match="expected sha256:"):
        decode_raw_chunk(blob(CHUNK, 2), CHUNK, DIGEST)


def test_metadata_is_decoded_up_to_its_cap() -> None:
    image = blob(40 * CHUNK)
    digest = hashlib.sha256(image).digest()
    frame = encode_metadata(image)
    assert decode_metadata(frame, len(image), digest) == image
    with pytest.raises(IntegrityError, match="allowed are 4096"):
        decode_metadata(frame, len(image), digest, cap=4096)
    with pytest.raises(IntegrityError, match="declares"):
        decode_metadata(frame, len(image) + BLOCK, digest)
