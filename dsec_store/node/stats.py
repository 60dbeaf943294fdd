"""What the node counts for each layer that it serves on demand."""

from __future__ import annotations

import threading
from typing import Any


class LayerStats:
    """Counters of one data blob since the node started. Sizes are bytes; ``touched`` has one byte a chunk, so that
    readers in several threads mark it without a lock.
    """

    def __init__(self, layer: str, reference: str, source: str, data_size: int, chunks: int) -> None:
        self.layer = layer
        self.reference = reference
        self.source = source
        self.data_size = data_size
        self.chunks = chunks
        self.export = "fuse"
        self.bytes_fetched = 0
        self.metadata_fetched = 0
        self.requests = 0
        self.ahead = 0
        self.ahead_used = 0
        self.reads = 0
        self.wrong_chunks = 0
        self.not_kept = 0
        self.errors = 0
        self.touched = bytearray(chunks)
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to counters by name, from any thread."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, Any]:
        """``chunks_touched`` is None for a layer that the kernel reads without the node (``direct``)."""
        direct = self.export == "direct"
        return {
            "layer": self.layer,
            "reference": self.reference,
            "source": self.source,
            "export": self.export,
            "size": self.data_size,
            "chunks": self.chunks,
            "chunks_touched": None if direct else sum(self.touched),
            "bytes_fetched": self.bytes_fetched + self.metadata_fetched,
            "metadata_bytes_fetched": self.metadata_fetched,
            "requests": self.requests,
            "chunks_ahead": self.ahead,
            "chunks_ahead_used": self.ahead_used,
            "reads": self.reads,
            "wrong_chunks": self.wrong_chunks,
            "chunks_not_kept": self.not_kept,
            "errors": self.errors,
        }


def total(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum over layers of every count."""
    return {key: sum(layer[key] or 0 for layer in layers) for key in _SUMMED}


_SUMMED = (
    "size",
    "chunks",
    "chunks_touched",
    "bytes_fetched",
    "metadata_bytes_fetched",
    "requests",
    "chunks_ahead",
    "chunks_ahead_used",
    "reads",
    "wrong_chunks",
    "chunks_not_kept",
    "errors",
)
