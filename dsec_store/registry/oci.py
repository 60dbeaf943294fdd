"""What server and client share of the OCI Distribution API (distribution-spec 1.1): errors, and what manifests say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsec_store import media
from dsec_store.digests import is_digest
from dsec_store.errors import IntegrityError
from erofs_tools.errors import show

MANIFEST_TYPES = (media.OCI_MANIFEST, media.OCI_INDEX, media.DOCKER_MANIFEST, media.DOCKER_LIST)

API_VERSION = ("Docker-Distribution-Api-Version", "registry/2.0")
"""Docker's clients take a server without this header for one of the first API."""


class Code:
    """Error codes: the spec's table, and UNKNOWN of docker's registry for what the table has no word for."""

    BLOB_UNKNOWN = "BLOB_UNKNOWN"
    BLOB_UPLOAD_INVALID = "BLOB_UPLOAD_INVALID"
    BLOB_UPLOAD_UNKNOWN = "BLOB_UPLOAD_UNKNOWN"
    DIGEST_INVALID = "DIGEST_INVALID"
    MANIFEST_BLOB_UNKNOWN = "MANIFEST_BLOB_UNKNOWN"
    MANIFEST_INVALID = "MANIFEST_INVALID"
    MANIFEST_UNKNOWN = "MANIFEST_UNKNOWN"
    NAME_INVALID = "NAME_INVALID"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    SIZE_INVALID = "SIZE_INVALID"
    TAG_INVALID = "TAG_INVALID"
    UNSUPPORTED = "UNSUPPORTED"
    UNKNOWN = "UNKNOWN"


class Problem(Exception):
    """A request that is answered with an error: HTTP status, code, one line, and headers to send along."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        return json.dumps({"errors": [{"code": self.code, "message": str(self), "detail": None}]}).encode()


@dataclass(frozen=True)
class Needed:
    """Something that a manifest refers to and that must be there before it."""

    digest: str
    size: int
    manifest: bool


def media_type_of(document: dict[str, Any]) -> str | None:
    """A manifest's media type: its own word, else by its shape (OCI lets it be left out). None: this is no manifest."""
    if document.get("schemaVersion") != 2:
        return None
    named = document.get("mediaType")
    if named is not None:
        return named if isinstance(named, str) and named in MANIFEST_TYPES else None
    if "manifests" in document:
        return media.OCI_INDEX
    return media.OCI_MANIFEST if "config" in document and "layers" in document else None


def needed_by(document: dict[str, Any]) -> Iterator[Needed]:
    """Everything a manifest or an index refers to, but its ``subject`` (which may come later) and foreign layers.

    Raises IntegrityError with what is wrong with a descriptor.
    """
    index = media_type_of(document) in (media.OCI_INDEX, media.DOCKER_LIST)
    if index:
        found = document.get("manifests")
        where = [("manifests", found)]
    else:
        where = [("config", [document.get("config")]), ("layers", document.get("layers"))]
    for key, descriptors in where:
        if not isinstance(descriptors, list):
            raise IntegrityError(f"manifest: {key} is {show(descriptors)}, expected a list of descriptors")
        for number, descriptor in enumerate(descriptors):
            if not isinstance(descriptor, dict):
                raise IntegrityError(f"manifest: {key}[{number}] is {show(descriptor)}, expected a descriptor")
            digest, size = descriptor.get("digest"), descriptor.get("size")
            if not isinstance(digest, str) or not is_digest(digest):
                raise IntegrityError(
                    f"manifest: {key}[{number}].digest is {show(digest)}, expected sha256: and 64 hexadecimal digits"
                )
            if type(size) is not int or size < 0:
                raise IntegrityError(f"manifest: {key}[{number}].size is {show(size)}, expected a number of bytes")
            kind = str(descriptor.get("mediaType"))
            if descriptor.get("urls") and ("foreign" in kind or "nondistributable" in kind):
                continue
            yield Needed(digest, size, index)
