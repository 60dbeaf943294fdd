"""Digest strings, ``sha256:`` and 64 lower-case hexadecimal digits (standard library only)."""

from __future__ import annotations

import hashlib
import re

from dsec_store.errors import ReferenceInvalid
from erofs_tools.errors import show

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def check_digest(text: str) -> str:
    """The same text; raises ReferenceInvalid when it is not a sha256 digest."""
    if not is_digest(text):
        raise ReferenceInvalid(f"not a digest: {show(text)}; expected sha256: and 64 hexadecimal digits")
    return text


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_from_bytes(raw: bytes) -> str:
    return "sha256:" + raw.hex()


def digest_bytes(digest: str) -> bytes:
    """The 32 raw bytes of a digest string."""
    return bytes.fromhex(check_digest(digest)[7:])
