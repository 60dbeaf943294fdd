"""File contents on their way into the data file: zero blocks left out, equal contents stored once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from erofs_tools.errors import SourceError
from erofs_tools.ondisk import BLOCK, NO_BLOCK
from erofs_tools.tree import Entry

PIECE = 1 << 20
"""Bytes read, looked at and handed on at a time: what bounds the memory of a build."""
_ZERO = bytes(BLOCK)


def nonzero_runs(data: bytes) -> list[tuple[int, int]]:
    """``(first, end)`` block numbers of the stretches of blocks that are not all zero; ``data`` is whole blocks."""
    count = len(data) // BLOCK
    # a zero block begins with a zero byte: one strided copy rules out nearly all blocks of most files
    heads = data[::BLOCK]
    runs: list[tuple[int, int]] = []
    start = 0
    at = heads.find(0)
    while at >= 0:
        if data[at * BLOCK : (at + 1) * BLOCK] == _ZERO:
            if at > start:
                runs.append((start, at))
            start = at + 1
        at = heads.find(0, at + 1)
    if start < count:
        runs.append((start, count))
    return runs


class DataWriter:
    """Puts contents one after the other into the data file.

    ``sink`` gets whole blocks in order, up to about PIECE bytes at a time; call ``flush`` at the end. ``blocks`` is
    the size so far, ``shared`` counts bytes of files that were stored already, ``holes`` bytes of zero blocks left
    out.
    """

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._pending: list[bytes] = []
        self._held = 0
        self._known: dict[tuple[int, bytes], array[int]] = {}
        self.blocks = 0
        self.shared = 0
        self.holes = 0

    def add(self, entry: Entry, may_repeat: bool) -> array[int]:
        """Store a file's contents and say where they are; ``may_repeat``: another file has the same size.

        The array holds triples, ascending: block in the file, block in the data file, number of blocks. Blocks of the
        file that are in no triple are holes.

        Raises SourceError with the entry's path when the contents are shorter than the entry's size.
        """
        if not entry.size:
            return array("Q")
        if not may_repeat:
            return self._store(entry, _pieces(entry))
        held = list(_pieces(entry)) if entry.size <= PIECE else None  # small ones are read once
        key = (entry.size, _digest(_pieces(entry) if held is None else held))
        runs = self._known.get(key)
        if runs is None:
            runs = self._known[key] = self._store(entry, _pieces(entry) if held is None else held)
        else:
            self.shared += sum(runs[2::3]) * BLOCK
        return runs

    def flush(self) -> None:
        if self._pending:
            self._sink(b"".join(self._pending))  # no copy when it is one piece
            self._pending.clear()
            self._held = 0

    def _store(self, entry: Entry, pieces: Iterable[tuple[int, bytes]]) -> array[int]:
        runs: array[int] = array("Q")
        stored = 0
        for block, data in pieces:
            count = len(data) // BLOCK
            _extend(runs, block, self.blocks, count)
            self.blocks += count
            stored += count
            if self._held + len(data) > PIECE:
                self.flush()
            self._pending.append(data)
            self._held += len(data)
        if self.blocks >= NO_BLOCK:
            raise SourceError(
                f"the contents up to here take {self.blocks} blocks; an image holds at most {NO_BLOCK - 1}", entry.path
            )
        self.holes += -(-entry.size // BLOCK) * BLOCK - stored * BLOCK
        return runs


def _digest(pieces: Iterable[tuple[int, bytes]]) -> bytes:
    """Equal for two files of one size exactly when their bytes are equal, however their sources list zeros."""
    digest = hashlib.sha256()
    shape: array[int] = array("Q")
    for block, data in pieces:
        digest.update(data)
        _extend(shape, block, 0, len(data) // BLOCK)
    digest.update(shape.tobytes())  # the same blocks at other places are another file
    return digest.digest()


def _extend(runs: array[int], block: int, address: int, count: int) -> None:
    """Add a run, or lengthen the last one when the file goes on there (addresses always do, being given in order)."""
    if runs and runs[-3] + runs[-1] == block:
        runs[-1] += count
    else:
        runs.extend((block, address, count))


def _pieces(entry: Entry) -> Iterator[tuple[int, bytes]]:
    """``(block in the file, whole nonzero blocks)``, ascending, at most PIECE bytes each, padded with zeros."""
    content = entry.content
    assert content is not None
    with content.open() as reader:
        position = 0
        done = 0  # end of what has been read, a multiple of BLOCK: segments may share a block
        for offset, length in content.segments():
            start = max(offset // BLOCK * BLOCK, done)
            end = min(-(-(offset + length) // BLOCK) * BLOCK, entry.size)
            if start >= end:
                continue
            if start != position:
                reader.seek(start)
            while start < end:
                data = _read_exactly(reader, min(end - start, PIECE), start, entry)
                first = start // BLOCK
                start += len(data)
                if len(data) % BLOCK:
                    data += bytes(-len(data) % BLOCK)
                runs = nonzero_runs(data)
                if len(runs) == 1 and runs[0] == (0, len(data) // BLOCK):
                    yield first, data
                else:
                    for a, b in runs:
                        yield first + a, data[a * BLOCK : b * BLOCK]
            position = start
            done = -(-start // BLOCK) * BLOCK


def _read_exactly(reader: BinaryIO, length: int, offset: int, entry: Entry) -> bytes:
    data = reader.read(length)
    if len(data) == length:
        return data
    parts = [data]
    missing = length - len(data)
    while missing:
        data = reader.read(missing)
        if not data:
            raise SourceError(f"the contents end after {offset + length - missing} of {entry.size} bytes", entry.path)
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)
