"""Canonical JSON (RFC 8785): sorted keys, no spaces, UTF-8. What is hashed is always in this form."""

from __future__ import annotations

import json
from typing import Any

import rfc8785

from dsec_store.errors import IntegrityError


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value.

    Raises IntegrityError where there is none: text that is not Unicode, integers beyond 2^53, NaN.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeError) as error:
        raise IntegrityError(f"no canonical JSON for this value: {error}") from error


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object; ``what`` names it in the error. A key given twice is refused: readers would differ."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) != len(items):
            raise IntegrityError(f"{what}: a key is given twice")
        return value

    try:
        value = json.loads(data, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{what}: found a JSON {type(value).__name__}, expected an object")
    return value
