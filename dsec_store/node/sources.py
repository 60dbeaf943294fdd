"""Where the bytes of a blob come from: this machine's store, or a registry.

A source gives a byte range of one blob piece by piece, in the thread that asks; whoever reads checks what came. A
source's errors say what happened on the way, so that the reader's log line can name it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dsec_store.backends.base import Backend
from dsec_store.errors import BlobUnknown, RegistryError, RegistryUnreachable
from dsec_store.node.http_pool import Answer, HttpPool, TransportError

BLOCK = 1 << 18


class Source(ABC):
    """A place that holds a blob.

    ``name`` is for log lines and statistics; ``concurrency`` bounds the requests under way.
    """

    name: str
    concurrency: int

    @abstractmethod
    def stream(self, digest: str, offset: int, length: int, end: float) -> Iterator[bytes]:
        """Exactly ``length`` bytes of the blob from ``offset`` on, or DsecError; ``end`` is the deadline, as of
        time.monotonic()."""


class StoreSource(Source):
    """This machine's own store."""

    name = "store"
    concurrency = 2

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def stream(self, digest: str, offset: int, length: int, end: float) -> Iterator[bytes]:
        stop = offset + length
        while offset < stop:
            block = self._backend.read(digest, offset, min(BLOCK, stop - offset))
            if not block:
                raise BlobUnknown(f"{digest} in the store ends at byte {offset}; expected {stop}")
            offset += len(block)
            yield block


class RegistrySource(Source):
    """A repository of a registry, read with range requests; the connections are shared per node."""

    concurrency = 8

    def __init__(self, pool: HttpPool, base: str, host: str, repository: str) -> None:
        self.pool = pool
        self._base = base
        self.name = f"{host}/{repository}"
        self._repository = repository

    def url(self, digest: str) -> str:
        return f"{self._base}/v2/{self._repository}/blobs/{digest}"

    def stream(self, digest: str, offset: int, length: int, end: float) -> Iterator[bytes]:
        span = f"bytes {offset}-{offset + length - 1}"
        what = f"{span} of {digest} from {self.name}"
        headers = {"Range": span.replace(" ", "="), "Accept-Encoding": "identity"}
        try:
            with self.pool.get(self.url(digest), headers, end) as answer:
                if answer.status != 206:
                    raise _refused(what, answer)
                found = answer.header("Content-Range")
                if not found.startswith(f"{span}/"):
                    expected = f"{span} of the blob"
                    found = found or "no Content-Range"
                    raise RegistryError(f"{what}: the answer holds {found}; expected {expected}", status=206)
                while block := answer.read(BLOCK):
                    if answer.received > length:
                        raise RegistryError(f"{what}: more bytes came than the {length} asked for", status=206)
                    yield block
                if answer.received != length:
                    raise RegistryError(
                        f"{what}: the registry hung up after {answer.received} bytes; expected {length}", status=206
                    )
        except TransportError as error:
            raise RegistryUnreachable(f"{what}: {error}") from error


def _refused(what: str, answer: Answer) -> RegistryError:
    if answer.status == 200:
        text = f"{what}: the registry answered the range with 200, the whole blob; it cannot be read on demand"
        return RegistryError(text, status=200)
    hint = {401: "not logged in", 403: "not allowed", 404: "unknown there", 416: "shorter than it must be"}
    note = hint.get(answer.status, answer.reason)
    return RegistryError(f"{what}: status {answer.status} ({note})", status=answer.status)
