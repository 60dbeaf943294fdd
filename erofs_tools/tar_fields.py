"""The fields of tar headers: numbers, strings, pax records and pax times.

Formats: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Extended Header"; base-256 numbers as GNU tar and star.
"""

from __future__ import annotations

import re

from erofs_tools.errors import SourceError

_TIME = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")
_INTEGER = re.compile(rb"-?\d{1,20}")


def number(field: bytes, where: str) -> int:
    """An octal number between spaces or NULs (0 when there is none), or a two's complement one with the top bit set."""
    first = field[0]
    if first & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if first & 0x40 else value
    text = field[:-1]
    if not text.isdigit() or field[-1] not in b"\0 ":  # (digits and one terminator: nearly always)
        text = _unpadded(field)
    if not text:
        return 0
    try:
        if text.isdigit():
            return int(text, 8)
    except ValueError:  # an 8 or a 9
        pass
    raise SourceError(f"{where}: {text!r} in a header; expected an octal number")


def _unpadded(field: bytes) -> bytes:
    text = field.strip(b" \0")
    end = text.find(b"\0")
    if end >= 0:
        text = text[:end].rstrip(b" ")
    return text


def string(field: bytes) -> bytes:
    """The bytes up to the first NUL."""
    end = field.find(b"\0")
    return field if end < 0 else field[:end]


def pax_records(data: bytes, where: str) -> list[tuple[bytes, bytes]]:
    """The ``length keyword=value`` records of an extended header, in order, values as raw bytes."""
    records = []
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 21)
        digits = data[position:space]
        if space < 0 or not digits.isdigit():
            raise SourceError(
                f"{where}: {data[position : position + 20]!r} in a pax header; expected a record's length"
            )
        end = position + int(digits)
        equals = data.find(b"=", space + 1, end)
        if end > len(data) or equals <= space + 1 or data[end - 1] != 0x0A:
            raise SourceError(
                f"{where}: {data[position : position + 20]!r} in a pax header; expected 'length keyword=value\\n'"
            )
        records.append((data[space + 1 : equals], data[equals + 1 : end - 1]))
        position = end
    return records


def pax_integer(text: bytes, where: str) -> int:
    """A decimal number of a pax record."""
    if not _INTEGER.fullmatch(text):
        raise SourceError(f"{where}: {text[:40]!r} in a pax header; expected a decimal number")
    return int(text)


def pax_time(text: bytes, where: str) -> tuple[int, int]:
    """Seconds and nanoseconds of a decimal time, exact; digits beyond the ninth are rounded towards the past."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise SourceError(f"{where}: the time {text[:40]!r} in a pax header; expected decimal seconds")
    sign, whole, fraction = found.groups()
    seconds = int(whole)
    fraction = fraction or b""
    nanoseconds = int(fraction[:9].ljust(9, b"0"))
    if not sign:
        return seconds, nanoseconds
    if fraction[9:].strip(b"0"):
        nanoseconds += 1
    total = -(seconds * 1_000_000_000 + nanoseconds)
    return total // 1_000_000_000, total % 1_000_000_000
