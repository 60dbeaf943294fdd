"""Sandbox ids ``<edge>-<ulid>`` and command ids ``<ulid>`` (docs/formats.md §10).

A ULID is 48 bits of milliseconds and 80 random ones in Crockford's base 32, here in lower case, so that an id is
also a host name.
"""

from __future__ import annotations

import os
import time

EDGE = "local"
"""The edge of sandboxes that ``dsec run`` makes itself."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26


def ulid() -> str:
    """26 characters that sort by the time they were made (to the millisecond)."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))


def sandbox_id(edge: str = EDGE) -> str:
    return f"{edge}-{ulid()}"


def is_sandbox_id(text: str) -> bool:
    """Whether it has the form of an id: the edge is 1 to 16 of ``[a-z0-9]``, what follows the last ``-`` is a
    ULID.
    """
    edge, dash, tail = text.rpartition("-")
    return (
        bool(dash)
        and 1 <= len(edge) <= 16
        and edge.isascii()
        and edge.isalnum()
        and edge == edge.lower()
        and len(tail) == _LENGTH
        and all(c in _ALPHABET for c in tail)
    )
