"""The node's one HTTP client for registries: manifests and small blobs; data goes through RegistrySource.

Connections are shared by everything the node reads. Loopback registries are spoken to in plain HTTP, others in
HTTPS unless the caller said otherwise.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

from dsec_store import media
from dsec_store.digests import digest_of
from dsec_store.errors import BlobUnknown, IntegrityError, ReferenceUnknown, RegistryError
from dsec_store.manifest import MANIFEST_MAX
from dsec_store.node.sources import RegistrySource, transport_error
from dsec_store.refs import Reference, is_loopback

if TYPE_CHECKING:
    import httpx

ACCEPT = ", ".join([media.OCI_INDEX, media.OCI_MANIFEST, media.DOCKER_LIST, media.DOCKER_MANIFEST])
TIMEOUT = 20.0
"""Seconds that a connection, or a silence within an answer, may last."""

T = TypeVar("T")


class Registries:
    """All registries of one node. The methods are called from request threads and run on the node's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._client: httpx.AsyncClient | None = None
        self._lock = threading.Lock()
        self._sources: dict[tuple[str, str], RegistrySource] = {}

    def _http(self) -> httpx.AsyncClient:
        """Made at its first use: importing httpx costs as much as the rest of the node's start."""
        with self._lock:
            if self._client is None:
                from dsec_store.node.transport import make_client

                self._client = make_client(TIMEOUT)
            return self._client

    @staticmethod
    def base(host: str, plain_http: bool) -> str:
        return f"{'http' if plain_http or is_loopback(host) else 'https'}://{host}"

    def source(self, host: str, repository: str, plain_http: bool) -> RegistrySource:
        base = self.base(host, plain_http)
        client = self._http()
        with self._lock:
            return self._sources.setdefault((base, repository), RegistrySource(client, base, host, repository))

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run on the event loop and wait; for request threads only."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def manifest(self, reference: Reference, plain_http: bool) -> bytes:
        """The bytes of a manifest, checked against the digest where the reference has one. Raises ReferenceUnknown or
        RegistryError.
        """
        return self.call(self._manifest(reference, plain_http))

    async def _manifest(self, reference: Reference, plain_http: bool) -> bytes:
        import httpx

        assert reference.host is not None
        base = self.base(reference.host, plain_http)
        url = f"{base}/v2/{reference.name}/manifests/{reference.version}"
        try:
            async with self._http().stream("GET", url, headers={"Accept": ACCEPT}) as response:
                if response.status_code == 404:
                    raise ReferenceUnknown(
                        f"unknown reference {reference}: the registry at {reference.host} has no such manifest"
                    )
                if response.status_code != 200:
                    raise RegistryError(
                        f"{reference}: status {response.status_code} for its manifest", status=response.status_code
                    )
                data = await _bounded(response, MANIFEST_MAX, f"the manifest of {reference}")
        except httpx.HTTPError as error:
            raise transport_error(f"the manifest of {reference}", error) from error
        if reference.digest is not None and digest_of(data) != reference.digest:
            raise IntegrityError(
                f"the manifest of {reference}: found digest {digest_of(data)}, expected {reference.digest}"
            )
        return data

    def blob(self, source: RegistrySource, digest: str, size: int) -> bytes:
        """A whole small blob, checked by size and digest."""
        return self.call(self._blob(source, digest, size))

    async def _blob(self, source: RegistrySource, digest: str, size: int) -> bytes:
        import httpx

        what = f"blob {digest} of {source.name}"
        for attempt in (1, 2, 3):
            try:
                async with self._http().stream(
                    "GET", source.url(digest), headers={"Accept-Encoding": "identity"}
                ) as response:
                    if response.status_code == 404:
                        raise BlobUnknown(f"{what}: the registry does not have it")
                    if response.status_code != 200:
                        raise RegistryError(f"{what}: status {response.status_code}", status=response.status_code)
                    data = await _bounded(response, size, what)
                if len(data) != size or digest_of(data) != digest:
                    raise IntegrityError(f"{what}: found {len(data)} bytes of {digest_of(data)}, expected {size} bytes")
                return data
            except httpx.HTTPError as error:
                if attempt == 3:
                    raise transport_error(what, error) from error
            except IntegrityError:
                if attempt == 3:
                    raise
            except RegistryError as error:
                if attempt == 3 or error.status < 500:
                    raise
        raise AssertionError("not reached")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def _bounded(response: httpx.Response, limit: int, what: str) -> bytes:
    data = bytearray()
    async for block in response.aiter_bytes():
        data += block
        if len(data) > limit:
            raise IntegrityError(f"{what}: more than the {limit} bytes expected")
    return bytes(data)
