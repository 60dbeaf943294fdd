"""The Range header (RFC 9110 §14), as far as a registry answers it: one range of bytes."""

from __future__ import annotations

import re

# 18 digits are more than any size, and fewer than int() refuses to parse.
_SPEC = re.compile(r"([0-9]{0,18})[ \t]*-[ \t]*([0-9]{0,18})")
_CONTENT_RANGE = re.compile(r"bytes[ =]([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


class Unsatisfiable(Exception):
    """A well-formed range with no byte in the blob: to be answered with 416 and ``Content-Range: bytes */SIZE``."""


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(offset, length) of the bytes to be sent with 206, or None where the whole blob is to be sent with 200.

    header: the value as it came. size: bytes of the blob. A header that is malformed, of another unit, or asks for
    several ranges is ignored, as the RFC allows: a client that must not get the whole blob sees the 200
    and hangs up. Raises Unsatisfiable.
    """
    if header is None:
        return None
    unit, equals, text = header.partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    match = _SPEC.fullmatch(text.strip())
    if match is None or match[0] == "-" or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        if length == 0:
            raise Unsatisfiable
        return size - length, length
    first = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < first:
        return None
    if first >= size:
        raise Unsatisfiable
    return first, min(last, size - 1) - first + 1


def parse_content_range(header: str | None) -> tuple[int, int, int | None] | None:
    """(offset, length, size of the whole or None for ``*``) of a 206's Content-Range, or None when it is not one."""
    match = _CONTENT_RANGE.fullmatch((header or "").strip())
    if match is None or int(match[2]) < int(match[1]):
        return None
    return int(match[1]), int(match[2]) - int(match[1]) + 1, None if match[3] == "*" else int(match[3])
