"""The data object of a layer: one zstd frame a chunk, then the seek table (formats/dsec.md §3).

The seek table is that of zstd's seekable format (contrib/seekable_format in zstd's source), in a skippable frame, so
that plain ``zstd -d`` restores the data blob and other seekable readers can use the object.

Frames come from registries and cannot be trusted: before a byte is decompressed, the frame's header must declare the
size that the chunk table gives and a window of at most 256 KiB. An output limit of the binding alone does not bound the
memory.
"""

from __future__ import annotations

import hashlib
import threading

import zstandard

from dsec_store.chunks import CHUNK
from dsec_store.errors import IntegrityError

LEVEL = 3
"""zstd level of new objects: 1.5× the speed of level 5 for 3% more bytes on a Debian root."""
METADATA_MAX = 1 << 30
"""Bytes of the largest metadata image that is decompressed: about eight million inodes."""

_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_local = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    # A zstd context serves one thread at a time.
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def _decode(frame: bytes, size: int, digest: bytes, window_max: int, what: str) -> bytes:
    if bytes(frame[:4]) != _FRAME_MAGIC:
        raise IntegrityError(f"{what}: no zstd frame: found {bytes(frame[:4]).hex() or 'nothing'}")
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: bad zstd frame header: {error}") from error
    if header.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise IntegrityError(f"{what}: the frame does not declare its size, expected {size} bytes")
    if header.content_size != size:
        raise IntegrityError(f"{what}: the frame declares {header.content_size} bytes, expected {size}")
    if header.window_size > window_max:
        raise IntegrityError(
            f"{what}: the frame wants a window of {header.window_size} bytes, allowed are {window_max}"
        )
    if header.dict_id:
        raise IntegrityError(f"{what}: the frame wants the dictionary {header.dict_id}, expected none")
    try:
        data = _decompressor().decompress(frame, max_output_size=size, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: bad zstd frame of {len(frame)} bytes: {error}") from error
    if len(data) != size:
        raise IntegrityError(f"{what}: the frame gave {len(data)} bytes, expected {size}")
    found = hashlib.sha256(data).digest()
    if found != digest:
        raise IntegrityError(f"{what}: found sha256:{found.hex()}, expected sha256:{digest.hex()}")
    return data


def decode_chunk(frame: bytes, expected_size: int, expected_digest: bytes) -> bytes:
    """The bytes of one chunk from its stored frame.

    frame: exactly the stored bytes. expected_size: bytes of the chunk. expected_digest: 32 bytes of sha256. Raises
    IntegrityError unless the frame is one whole frame of that size and digest, with a window of at most 256 KiB and
    nothing after it.
    """
    return _decode(frame, expected_size, expected_digest, CHUNK, "chunk")


def decode_raw_chunk(data: bytes, expected_size: int, expected_digest: bytes) -> bytes:
    """The same for a raw data object: the bytes themselves, checked."""
    if len(data) != expected_size:
        raise IntegrityError(f"chunk: found {len(data)} bytes, expected {expected_size}")
    found = hashlib.sha256(data).digest()
    if found != expected_digest:
        raise IntegrityError(f"chunk: found sha256:{found.hex()}, expected sha256:{expected_digest.hex()}")
    return data


def decode_metadata(frame: bytes, expected_size: int, expected_digest: bytes, *, cap: int = METADATA_MAX) -> bytes:
    """The metadata image from its one frame; a size above ``cap`` bytes is refused before anything is decompressed."""
    if expected_size > cap:
        raise IntegrityError(f"metadata image: {expected_size} bytes, allowed are {cap}")
    return _decode(frame, expected_size, expected_digest, max(cap, CHUNK), "metadata image")
