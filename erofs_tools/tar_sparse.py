"""Sparse members of tar archives: where the stored bytes belong in the file.

Formats: GNU tar manual, "Storing Sparse Files". Old GNU (type S: four entries in the header, 21 in each extension
block), pax 0.0 (repeated GNU.sparse.offset and GNU.sparse.numbytes), 0.1 (GNU.sparse.map), 1.0 (decimal
lines before the data).
"""

from __future__ import annotations

from erofs_tools.content import Archive, Piece
from erofs_tools.errors import SourceError
from erofs_tools.tar_fields import number

BLOCK = 512
Pairs = list[tuple[int, int]]
"""(offset in the file, length) in stored order."""

_MAX_DIGITS = 20


def old_gnu_pairs(archive: Archive, header: bytes, offset: int) -> tuple[Pairs, int]:
    """The map of a type S header and the offset behind its extension blocks; ``offset`` is that of what follows it."""
    pairs: Pairs = []
    more = header[482]
    _take_entries(archive, header, 386, 4, pairs, offset - BLOCK)
    while more:
        block = archive.read(offset, BLOCK, "a sparse map")
        _take_entries(archive, block, 0, 21, pairs, offset)
        more = block[504]
        offset += BLOCK
    return pairs, offset


def _take_entries(archive: Archive, block: bytes, start: int, count: int, pairs: Pairs, offset: int) -> None:
    for at in range(start, start + 24 * count, 24):
        if not block[at] and not block[at + 12]:
            return
        where = f"{archive.name}: sparse map at byte {offset}"
        pairs.append((number(block[at : at + 12], where), number(block[at + 12 : at + 24], where)))


def pairs_from_text(numbers: list[bytes], where: str) -> Pairs:
    """Pairs from decimal numbers, offset and length in turn."""
    if len(numbers) % 2:
        raise SourceError(f"{where}: a sparse map of {len(numbers)} numbers; expected pairs")
    values = []
    for text in numbers:
        if not text.isdigit() or len(text) > _MAX_DIGITS:
            raise SourceError(f"{where}: {text[:40]!r} in a sparse map; expected a decimal number")
        values.append(int(text))
    return list(zip(values[::2], values[1::2], strict=True))


def pax_1_0_pairs(archive: Archive, offset: int, stored: int, where: str) -> tuple[Pairs, int]:
    """The map in front of the data of a pax 1.0 sparse member and its length in the archive (a multiple of 512)."""
    text = b""
    used = 0
    wanted: int | None = None
    numbers: list[bytes] = []
    while True:
        if used + BLOCK > stored:
            raise SourceError(f"{where}: a sparse map longer than the member")
        text += archive.read(offset + used, BLOCK, "a sparse map")
        used += BLOCK
        *lines, text = text.split(b"\n")
        numbers += lines
        if wanted is None and numbers:
            ((count, _),) = pairs_from_text([numbers.pop(0), b"0"], where)
            wanted = 2 * count
        if wanted is not None and len(numbers) >= wanted:
            break
        if len(text) > _MAX_DIGITS:
            raise SourceError(f"{where}: {text[:40]!r} in a sparse map; expected a decimal number")
    return pairs_from_text(numbers[:wanted], where), used


def place(pairs: Pairs, size: int, data: int, stored: int, where: str) -> list[Piece]:
    """Pieces of a file of ``size`` bytes whose ``stored`` bytes begin at ``data`` in the archive.

    Raises SourceError for a map that overlaps itself, leaves the file, or speaks of another number of stored bytes.
    """
    pieces: list[Piece] = []
    end = used = 0
    for offset, length in pairs:
        if offset < end or length < 0 or offset + length > size:
            raise SourceError(
                f"{where}: a sparse map with {length} bytes at {offset}; expected ascending pieces within {size} bytes"
            )
        if length:
            pieces.append((offset, length, data + used))
        end = offset + length
        used += length
    if used != stored:
        raise SourceError(f"{where}: a sparse map for {used} bytes; {stored} are stored")
    return pieces
