"""The chunk table: for each 256 KiB of a data blob its sha256, and where its stored bytes lie (docs/formats.md §2).

Little-endian. Header of 64 bytes, then one record of 48 bytes a chunk. The records stay one ``bytes`` object, so that a
table of a large layer costs its size and no more; they are all checked once, when the table is made.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dsec_store.errors import IntegrityError

CHUNK = 262144
"""Bytes of a data blob in one chunk: the unit of fetching, checking, caching and eviction."""
BLOCK = 4096
"""A data blob is a whole number of these: the kernel answers EIO for a short last block."""
MAGIC = b"DSECCHNK"
VERSION = 1
RAW, ZSTD = 0, 1
ENCODINGS = {RAW: "raw", ZSTD: "zstd"}
ZERO = 1
"""Record flag: every byte of the chunk is zero, so that it need not be fetched."""
STORED_MAX = CHUNK + 1024

_HEADER = struct.Struct("<8sIIQQI28s")
_RECORD = struct.Struct("<32sQII")
HEADER_SIZE, RECORD_SIZE = _HEADER.size, _RECORD.size
assert HEADER_SIZE == 64 and RECORD_SIZE == 48


class ChunkRecord(NamedTuple):
    """One chunk: sha256 of its uncompressed bytes, and offset and length (bytes) in the data object."""

    digest: bytes
    offset: int
    length: int
    zero: bool


def chunk_count(data_size: int) -> int:
    return (data_size + CHUNK - 1) // CHUNK


def _zero_digest(size: int) -> bytes:
    return hashlib.sha256(bytes(size)).digest()


@dataclass(frozen=True)
class ChunkTable:
    """A checked chunk table. ``records`` are the raw records; use ``build`` or ``parse`` to make one."""

    data_size: int
    encoding: int
    records: bytes = field(repr=False)

    @classmethod
    def build(cls, data_size: int, encoding: int, records: Iterable[ChunkRecord]) -> ChunkTable:
        """A table of these records, in order; raises IntegrityError when they do not make one."""
        packed = b"".join(_RECORD.pack(r.digest, r.offset, r.length, ZERO if r.zero else 0) for r in records)
        return cls._checked(data_size, encoding, packed, None)

    @classmethod
    def parse(
        cls, data: bytes, *, root: str | None = None, data_size: int | None = None, stored_size: int | None = None
    ) -> ChunkTable:
        """Parse and check a table.

        root, data_size: the config's ``data.root`` (``sha256:…``) and ``data.size``. stored_size: bytes of the data
        object; no chunk may lie beyond it. Raises IntegrityError with what was found and what was expected.
        """
        if len(data) < HEADER_SIZE:
            raise IntegrityError(f"chunk table: found {len(data)} bytes, expected a header of {HEADER_SIZE}")
        magic, version, chunk_size, size, count, encoding, zero = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise IntegrityError(f"chunk table: found magic {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise IntegrityError(f"chunk table: found version {version}, this program reads version {VERSION}")
        if chunk_size != CHUNK:
            raise IntegrityError(f"chunk table: found a chunk size of {chunk_size}, expected {CHUNK}")
        if any(zero):
            raise IntegrityError("chunk table: the header's last 28 bytes are not zero")
        if data_size is not None and size != data_size:
            raise IntegrityError(f"chunk table: found {size} bytes of data, expected {data_size}")
        if count != chunk_count(size):
            raise IntegrityError(
                f"chunk table: found {count} chunks, expected {chunk_count(size)} for {size} bytes of data"
            )
        if len(data) != HEADER_SIZE + count * RECORD_SIZE:
            raise IntegrityError(
                f"chunk table: found {len(data)} bytes, expected {HEADER_SIZE + count * RECORD_SIZE} for {count} chunks"
            )
        table = cls._checked(size, encoding, bytes(memoryview(data)[HEADER_SIZE:]), stored_size)
        if root is not None and table.root() != root:
            raise IntegrityError(f"chunk table: found root {table.root()}, expected {root}")
        return table

    @classmethod
    def _checked(cls, data_size: int, encoding: int, records: bytes, stored_size: int | None) -> ChunkTable:
        if encoding not in ENCODINGS:
            raise IntegrityError(f"chunk table: found encoding {encoding}, expected 0 (raw) or 1 (zstd)")
        if data_size % BLOCK:
            raise IntegrityError(f"chunk table: found a data size of {data_size}, expected a multiple of {BLOCK}")
        if len(records) != chunk_count(data_size) * RECORD_SIZE:
            raise IntegrityError(
                f"chunk table: found {len(records) // RECORD_SIZE} records, expected {chunk_count(data_size)}"
            )
        table = cls(data_size, encoding, records)
        end = 0
        for index, (digest, offset, length, flags) in enumerate(_RECORD.iter_unpack(records)):
            size = table.chunk_size(index)
            if flags & ~ZERO:
                raise IntegrityError(f"chunk table: chunk {index} has flags {flags:#x}, expected only {ZERO:#x}")
            if offset < end:
                raise IntegrityError(
                    f"chunk table: chunk {index} begins at {offset}, inside the one before (ends {end})"
                )
            if not 0 < length <= STORED_MAX:
                raise IntegrityError(
                    f"chunk table: chunk {index} is stored in {length} bytes, expected 1 to {STORED_MAX}"
                )
            if encoding == RAW and (offset, length) != (index * CHUNK, size):
                raise IntegrityError(
                    f"chunk table: raw chunk {index} is {length} bytes at {offset}, expected {size} at {index * CHUNK}"
                )
            # A reader does not fetch such a chunk, so the flag alone must never decide what it reads.
            if flags & ZERO and digest != _zero_digest(size):
                raise IntegrityError(f"chunk table: chunk {index} is marked as zero, and its digest says otherwise")
            end = offset + length
        if stored_size is not None and end > stored_size:
            raise IntegrityError(f"chunk table: chunks end at {end}, the data object has {stored_size} bytes")
        return table

    def __len__(self) -> int:
        return len(self.records) // RECORD_SIZE

    def chunk_size(self, index: int) -> int:
        """Uncompressed bytes of a chunk: 256 KiB, the last one may be shorter."""
        return min(CHUNK, self.data_size - index * CHUNK)

    def record(self, index: int) -> ChunkRecord:
        """Chunk ``index``; raises IndexError outside the table."""
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        digest, offset, length, flags = _RECORD.unpack_from(self.records, index * RECORD_SIZE)
        return ChunkRecord(digest, offset, length, bool(flags & ZERO))

    def __iter__(self) -> Iterator[ChunkRecord]:
        for digest, offset, length, flags in _RECORD.iter_unpack(self.records):
            yield ChunkRecord(digest, offset, length, bool(flags & ZERO))

    def root(self) -> str:
        """``sha256:…`` over the chunks' 32-byte digests, in order; sha256 of nothing for an empty blob."""
        return "sha256:" + hashlib.sha256(b"".join(r[0] for r in _RECORD.iter_unpack(self.records))).hexdigest()

    @property
    def stored_end(self) -> int:
        """Where the last chunk's stored bytes end in the data object."""
        if not self.records:
            return 0
        last = self.record(len(self) - 1)
        return last.offset + last.length

    def serialize(self) -> bytes:
        header = _HEADER.pack(MAGIC, VERSION, CHUNK, self.data_size, len(self), self.encoding, bytes(28))
        return header + self.records
