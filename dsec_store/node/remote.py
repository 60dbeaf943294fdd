"""What a node asks registries for besides data: manifests and small blobs, whole and checked.

Loopback registries are spoken to in plain HTTP, others in HTTPS unless the caller said otherwise.
"""

from __future__ import annotations

import threading
import time

from dsec_store import media
from dsec_store.digests import digest_of
from dsec_store.errors import BlobUnknown, IntegrityError, ReferenceUnknown, RegistryError, RegistryUnreachable
from dsec_store.manifest import MANIFEST_MAX
from dsec_store.node.http_pool import Answer, HttpPool, TransportError
from dsec_store.node.sources import RegistrySource
from dsec_store.refs import Reference, is_loopback

ACCEPT = ", ".join([media.OCI_INDEX, media.OCI_MANIFEST, media.DOCKER_LIST, media.DOCKER_MANIFEST])
ATTEMPTS = 3


class Registries:
    """All registries of one node, for request threads. ``deadline`` is how long, in seconds, one object may take."""

    def __init__(self, deadline: float) -> None:
        self._pool = HttpPool()
        self._deadline = deadline
        self._lock = threading.Lock()
        self._sources: dict[tuple[str, str], RegistrySource] = {}

    @staticmethod
    def base(host: str, plain_http: bool) -> str:
        return f"{'http' if plain_http or is_loopback(host) else 'https'}://{host}"

    def source(self, host: str, repository: str, plain_http: bool) -> RegistrySource:
        base = self.base(host, plain_http)
        with self._lock:
            return self._sources.setdefault((base, repository), RegistrySource(self._pool, base, host, repository))

    def manifest(self, reference: Reference, plain_http: bool) -> bytes:
        """The bytes of a manifest, checked against the digest where the reference has one.

        Raises ReferenceUnknown, RegistryError, IntegrityError.
        """
        assert reference.host is not None
        base = self.base(reference.host, plain_http)
        url = f"{base}/v2/{reference.name}/manifests/{reference.version}"
        what = f"the manifest of {reference}"
        try:
            with self._pool.get(url, {"Accept": ACCEPT}, time.monotonic() + self._deadline) as answer:
                if answer.status == 404:
                    raise ReferenceUnknown(
                        f"unknown reference {reference}: the registry at {reference.host} has no such manifest"
                    )
                if answer.status != 200:
                    raise RegistryError(f"{what}: status {answer.status} ({answer.reason})", status=answer.status)
                data = _bounded(answer, MANIFEST_MAX, what)
        except TransportError as error:
            raise RegistryUnreachable(f"{what}: {error}") from error
        if reference.digest is not None and digest_of(data) != reference.digest:
            raise IntegrityError(f"{what}: found digest {digest_of(data)}, expected {reference.digest}")
        return data

    def blob(self, source: RegistrySource, digest: str, size: int) -> bytes:
        """A whole small blob, checked by size and digest. A fault that may pass is tried again."""
        end = time.monotonic() + self._deadline
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._blob(source, digest, size, end)
            except (RegistryError, IntegrityError) as error:
                lasting = isinstance(error, RegistryError) and 0 < error.status < 500
                if attempt == ATTEMPTS or lasting or time.monotonic() > end:
                    raise
        raise AssertionError("not reached")

    @staticmethod
    def _blob(source: RegistrySource, digest: str, size: int, end: float) -> bytes:
        what = f"blob {digest} of {source.name}"
        try:
            with source.pool.get(source.url(digest), {"Accept-Encoding": "identity"}, end) as answer:
                if answer.status == 404:
                    raise BlobUnknown(f"{what}: the registry does not have it")
                if answer.status != 200:
                    raise RegistryError(f"{what}: status {answer.status} ({answer.reason})", status=answer.status)
                data = _bounded(answer, size, what)
        except TransportError as error:
            raise RegistryUnreachable(f"{what}: {error}") from error
        if len(data) != size or digest_of(data) != digest:
            raise IntegrityError(f"{what}: found {len(data)} bytes of {digest_of(data)}, expected {size} bytes")
        return data

    def close(self) -> None:
        """Break what is under way."""
        self._pool.close()


def _bounded(answer: Answer, limit: int, what: str) -> bytes:
    data = bytearray()
    while block := answer.read(1 << 18):
        data += block
        if len(data) > limit:
            raise IntegrityError(f"{what}: more than the {limit} bytes expected")
    return bytes(data)
