"""Where the bytes of a blob come from: this machine's store, or a registry.

A source gives a byte range of one blob as a stream; whoever reads checks what came. A source's errors say what
happened on the way, so that the reader's log line can name it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from dsec_store.backends.base import Backend
from dsec_store.errors import BlobUnknown, RegistryError, RegistryUnreachable

if TYPE_CHECKING:
    import httpx

BLOCK = 1 << 20


class Source(ABC):
    """A place that holds a blob. ``name`` is for log lines and statistics; ``concurrency`` bounds the requests under
    way.
    """

    name: str
    concurrency: int

    @abstractmethod
    def stream(self, digest: str, offset: int, length: int) -> AsyncIterator[bytes]:
        """Exactly ``length`` bytes of the blob from ``offset`` on, or DsecError."""


class StoreSource(Source):
    """This machine's own store."""

    name = "store"
    concurrency = 2

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def stream(self, digest: str, offset: int, length: int) -> AsyncIterator[bytes]:
        end = offset + length
        while offset < end:
            block = await asyncio.to_thread(self._backend.read, digest, offset, min(BLOCK, end - offset))
            if not block:
                raise BlobUnknown(f"{digest} in the store ends at byte {offset}; expected {end}")
            offset += len(block)
            yield block


class RegistrySource(Source):
    """A repository of a registry, read with range requests. One per ``HOST[:PORT]/NAME``; the connections are shared
    per node.
    """

    concurrency = 8

    def __init__(self, client: httpx.AsyncClient, base: str, host: str, repository: str) -> None:
        self.client = client
        self._base = base
        self.name = f"{host}/{repository}"
        self._repository = repository

    def url(self, digest: str) -> str:
        return f"{self._base}/v2/{self._repository}/blobs/{digest}"

    async def stream(self, digest: str, offset: int, length: int) -> AsyncIterator[bytes]:
        import httpx

        what = f"bytes {offset}-{offset + length - 1} of {digest} from {self.name}"
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        received = 0
        try:
            async with self.client.stream("GET", self.url(digest), headers=headers) as response:
                if response.status_code != 206:
                    raise _refused(what, response)
                found = response.headers.get("Content-Range", "")
                if not found.startswith(f"bytes {offset}-{offset + length - 1}/"):
                    raise RegistryError(
                        f"{what}: the answer holds {found or 'no Content-Range'}; expected the range asked for",
                        status=206,
                    )
                async for block in response.aiter_raw():
                    received += len(block)
                    if received > length:
                        raise RegistryError(f"{what}: more bytes came than the {length} asked for", status=206)
                    yield block
        except httpx.HTTPError as error:
            raise transport_error(what, error, received) from error
        if received != length:
            raise RegistryError(f"{what}: the answer ended after {received} bytes; expected {length}", status=206)


def _refused(what: str, response: httpx.Response) -> RegistryError:
    if response.status_code == 200:
        return RegistryError(
            f"{what}: the registry answered the range with 200, the whole blob; it cannot be read on demand", status=200
        )
    hint = {
        401: "not logged in",
        403: "not allowed",
        404: "unknown there",
        416: "shorter than it must be",
        429: "too many requests",
    }
    note = hint.get(response.status_code, response.reason_phrase)
    return RegistryError(f"{what}: status {response.status_code} ({note})", status=response.status_code)


def transport_error(what: str, error: httpx.HTTPError, received: int = 0) -> RegistryError:
    """Name what broke under HTTP: DNS, TLS, refused, time-out, hung up."""
    import httpx

    cause = str(error.__cause__ or error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout | httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
        reason = "no answer in time"
    elif isinstance(error, httpx.ConnectError):
        lower = cause.lower()
        if "name or service" in lower or "getaddrinfo" in lower or "name resolution" in lower or "nodename" in lower:
            reason = f"the host's name has no address ({cause})"
        elif "ssl" in lower or "certificate" in lower or "tls" in lower:
            reason = f"TLS failed ({cause})"
        else:
            reason = f"cannot connect ({cause})"
    elif isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        reason = f"the registry hung up after {received} bytes ({cause})"
    else:
        reason = cause
    return RegistryUnreachable(f"{what}: {reason}")
