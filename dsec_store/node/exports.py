"""The node's FUSE session: one file per data blob, for the kernel's EROFS to read from.

The file system has a flat root; each file is named by the hex of its data root and has a node id that is a function
of that root, so that it means the same to every incarnation of the node. The mount stays detached: nothing but
EROFS (and who holds the descriptor) reaches it, and it fails closed when the node dies.

Reader threads answer hits themselves; a read that misses is handed to the event loop, which fetches and answers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from dsec_linux import bdi, fuse
from dsec_linux.mounts import mount_fuse
from dsec_store.chunks import CHUNK, ChunkTable
from dsec_store.errors import DsecError, NodeError
from dsec_store.node.cache import CacheEntry
from dsec_store.node.fetch import Fetcher, chunk_range
from dsec_store.node.log import Log
from dsec_store.node.stats import LayerStats

READER_THREADS = 4
READ_AHEAD_KIB = 1024
ROOT_NODE = 1
CLOSE_SECONDS = 30.0
"""How long a reader thread may still be in a read of the cache when the session ends."""

log = Log("dsec.node")


def node_id(root: str) -> int:
    """The FUSE node id of a data root: 62 bits of it, never 0 or 1."""
    return int.from_bytes(bytes.fromhex(root.removeprefix("sha256:"))[:8], "little") & (2**62 - 1) | 2**62


class Blob:
    """A data blob that is served on demand."""

    def __init__(
        self, root: str, table: ChunkTable, cache: CacheEntry | None, fetcher: Fetcher, stats: LayerStats
    ) -> None:
        self.root = root
        self.table = table
        self.cache = cache
        self.fetcher = fetcher
        self.stats = stats

    def _local(self, index: int) -> bytes | None:
        if self.cache is not None and (data := self.cache.read(index)) is not None:
            return data
        if self.table.record(index).zero:
            return bytes(self.table.chunk_size(index))
        return self.fetcher.recent.get(index)

    def read_cached(self, chunks: range) -> list[bytes] | None:
        """All the chunks without a fetch, or None when one is missing."""
        found: list[bytes] = []
        for index in chunks:
            data = self._local(index)
            if data is None:
                return None
            found.append(data)
        return found

    async def read(self, chunks: range) -> list[bytes]:
        """The chunks, from the cache or fetched. Raises DsecError."""
        have = {index: data for index in chunks if (data := self._local(index)) is not None}
        missing = [index for index in chunks if index not in have]
        have.update(zip(missing, await self.fetcher.get(missing), strict=True))
        return [have[index] for index in chunks]


class FuseExport:
    """The session and its blobs. ``path(blob)`` is what EROFS takes as ``device=``, valid while the export is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._blobs: dict[int, Blob] = {}
        self._names: dict[bytes, int] = {}
        self._device = fuse.open_device()
        self._session = fuse.Session(self._device, self, _log_failure)
        self._threads: list[threading.Thread] = []
        self.mount_fd = -1
        try:
            self.mount_fd = mount_fuse(self._device)
            for number in range(READER_THREADS):
                thread = threading.Thread(target=self._session.serve, name=f"fuse-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            bdi.set_read_ahead(bdi.name_of(self.mount_fd), READ_AHEAD_KIB)
        except BaseException:
            self.close()
            raise

    def add(self, blob: Blob) -> Path:
        """Serve a blob; the path for ``device=``. Raises NodeError when another blob has the same node id."""
        number = node_id(blob.root)
        other = self._blobs.get(number)
        if other is not None and other.root != blob.root:
            raise NodeError(f"the data roots {blob.root} and {other.root} share a node id; one of them was made to")
        self._blobs[number] = blob
        name = blob.root.removeprefix("sha256:")
        self._names[name.encode()] = number
        return Path(f"/proc/self/fd/{self.mount_fd}/{name}")

    def soon(self, work: Callable[[], None]) -> None:
        """Run on the loop that fetches."""
        self._loop.call_soon_threadsafe(work)

    def remove(self, blob: Blob) -> None:
        """Forget a blob that no mount uses any more."""
        self._blobs.pop(node_id(blob.root), None)
        self._names.pop(blob.root.removeprefix("sha256:").encode(), None)

    def close(self) -> None:
        """End the session; readers get an error. The EROFS mounts over it are closed before."""
        if self.mount_fd >= 0:
            os.close(self.mount_fd)
            self.mount_fd = -1
        self._session.close(CLOSE_SECONDS)
        for thread in self._threads:
            thread.join()
        os.close(self._device)

    # what the session asks, in its threads

    def _attr(self, number: int, blob: Blob) -> fuse.Attr:
        return fuse.Attr(node=number, mode=stat.S_IFREG | 0o400, size=blob.table.data_size)

    def lookup(self, parent: int, name: bytes) -> fuse.Attr | None:
        number = self._names.get(name) if parent == ROOT_NODE else None
        blob = self._blobs.get(number) if number is not None else None
        return self._attr(number, blob) if number is not None and blob is not None else None

    def getattr(self, node: int) -> fuse.Attr | None:
        if node == ROOT_NODE:
            return fuse.Attr(node=ROOT_NODE, mode=stat.S_IFDIR | 0o500, size=0)
        blob = self._blobs.get(node)
        return self._attr(node, blob) if blob is not None else None

    def open(self, node: int) -> int:
        if node not in self._blobs:
            raise OSError(errno.ENOENT, "no such blob")
        return fuse.FOPEN_KEEP_CACHE

    def readdir(self, node: int) -> list[tuple[bytes, int, int]]:
        return [(name, number, stat.S_IFREG | 0o400) for name, number in list(self._names.items())]

    def read(self, request: fuse.Read) -> None:
        blob = self._blobs.get(request.node)
        if blob is None:
            self._session.error(request.unique, errno.EIO)
            return
        chunks = chunk_range(request.offset, request.size, blob.table.data_size)
        blob.stats.reads += 1
        for index in chunks:
            blob.stats.touched[index] = 1
            blob.fetcher.used(index)
        found = blob.read_cached(chunks)
        if found is not None:
            self._answer(request, chunks, found)
        else:
            self._loop.call_soon_threadsafe(self._miss, blob, request, chunks)

    def _miss(self, blob: Blob, request: fuse.Read, chunks: range) -> None:
        task = self._loop.create_task(self._answer_later(blob, request, chunks))
        _KEEP.add(task)
        task.add_done_callback(_KEEP.discard)

    async def _answer_later(self, blob: Blob, request: fuse.Read, chunks: range) -> None:
        try:
            found = await blob.read(chunks)
        except DsecError:  # the fetcher has said why
            self._session.error(request.unique, errno.EIO)
        except BaseException as error:
            self._session.error(request.unique, errno.EIO)
            log.error("a read failed by a fault of ours", layer=blob.stats.layer, error=repr(error))
            raise
        else:
            self._answer(request, chunks, found)

    def _answer(self, request: fuse.Read, chunks: range, found: list[bytes]) -> None:
        start = request.offset - chunks.start * CHUNK if len(chunks) else 0
        left = request.size
        parts: list[memoryview] = []
        for data in found:
            part = memoryview(data)[start : start + left]
            parts.append(part)
            left -= len(part)
            start = 0
        self._session.data(request, *parts)


def _log_failure(text: str, error: BaseException) -> None:
    log.error("the FUSE session failed by a fault of ours", what=text, error=repr(error))


_KEEP: set[asyncio.Task[None]] = set()
"""Tasks under way: the event loop itself holds only weak references."""
