"""Layer mounts: each layer is mounted once per node, detached, and shared by every environment that uses it.

A layer whose data blob is whole on this disk (``raw/<id>``) is given to the kernel as it is (``direct``); any other
one through the node's FUSE session (``fuse``). A mount that nobody uses stays for the next environment until there
are too many of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from dsec_linux import bdi
from dsec_linux.mounts import mount_erofs
from dsec_store.chunks import ChunkTable
from dsec_store.errors import DsecError
from dsec_store.home import Home
from dsec_store.node import metadata
from dsec_store.node.cache import CacheEntry
from dsec_store.node.exports import READ_AHEAD_KIB, Blob, FuseExport
from dsec_store.node.fetch import DEADLINE, SMALL_LAYER, Fetcher, Slots
from dsec_store.node.log import Log
from dsec_store.node.resolve import ResolvedLayer, Resolver
from dsec_store.node.sources import Source
from dsec_store.node.stats import LayerStats

REQUEST_THREADS = 32
"""Requests to all sources together; each source has its own, smaller limit."""
IDLE_MAX = 256
"""Layer mounts without a user that are kept for the next one."""

log = Log("dsec.node")


class MountedLayer:
    """A mounted layer: the descriptor of its detached mount and, when served on demand, its blob."""

    def __init__(
        self,
        key: tuple[str, str],
        fd: int,
        export: str,
        blob: Blob | None,
        stats: LayerStats,
        image_path: Path,
        image: tuple[int, ...],
    ) -> None:
        self.key = key
        self.image_path = image_path
        self.image = image
        self.fd = fd
        self.export = export
        self.blob = blob
        self.stats = stats
        self.users = 0


def _signature(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return ()
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _key(layer: ResolvedLayer) -> tuple[str, str]:
    """What makes two layers one mount: the same image over the same data, whatever their kinds."""
    return layer.config.metadata_digest, layer.config.data_root


class LayerMounts:
    """All layer mounts of a node. Safe for several request threads; a layer that is being mounted blocks only who
    wants it too.
    """

    def __init__(
        self, home: Home, resolver: Resolver, fuse: Callable[[], FuseExport], *, deadline: float = DEADLINE
    ) -> None:
        self._home = home
        self._resolver = resolver
        self._fuse = fuse
        self._deadline = deadline
        self._layers: dict[tuple[str, str], MountedLayer] = {}
        self._building: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._bdi_lock = threading.Lock()
        self._slots: dict[str, Slots] = {}
        self._executor = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="request")
        self._ahead = ThreadPoolExecutor(8, thread_name_prefix="layers")
        self._retired: list[LayerStats] = []

    def acquire_all(self, layers: list[ResolvedLayer], plain_http: bool, held: list[MountedLayer]) -> None:
        """Fill ``held`` with the layers' mounts, in order; after an error it holds those that the caller must release.

        Layers that are not mounted yet are prepared side by side: each may wait for a registry.
        """
        with self._lock:
            missing = [layer for layer in layers if _key(layer) not in self._layers]
        if len(missing) > 1:
            ahead = [self._ahead.submit(self.acquire, layer, plain_http) for layer in missing]
            wait(ahead)
        try:
            for layer in layers:
                held.append(self.acquire(layer, plain_http))
        finally:
            if len(missing) > 1:
                for future in ahead:
                    if future.exception() is None:
                        self.release(future.result())

    def acquire(self, layer: ResolvedLayer, plain_http: bool) -> MountedLayer:
        """The layer's mount, made when it is not there yet; counts one more user. Raises DsecError, LinuxError."""
        key = _key(layer)
        with self._lock:
            turn = self._building.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                found = self._layers.get(key)
                if found is not None and (found.users or found.image == _signature(found.image_path)):
                    found.users += 1
                    return found
                if found is not None:  # its image was changed while nobody used it
                    self._close(self._layers.pop(key))
            mounted = self._mount(key, layer, plain_http)
            mounted.users = 1
            with self._lock:
                self._layers[key] = mounted
            return mounted

    def release(self, mounted: MountedLayer) -> None:
        """One user less. The longest idle mounts beyond IDLE_MAX are closed."""
        with self._lock:
            mounted.users -= 1
            self._layers[mounted.key] = self._layers.pop(mounted.key)  # the last released stands last
            idle = [layer for layer in self._layers.values() if layer.users == 0]
            for layer in idle[: max(0, len(idle) - IDLE_MAX)]:
                self._close(self._layers.pop(layer.key))

    def _mount(self, key: tuple[str, str], layer: ResolvedLayer, plain_http: bool) -> MountedLayer:
        stats = LayerStats(layer.id, layer.reference, layer.source.name, layer.config.data_size, 0)
        image = self._home.meta_file(layer.config.metadata_digest)
        table: ChunkTable | None = None
        raw = self._raw_file(layer)
        if raw is None:
            table = self._resolver.chunk_table(layer, plain_http)
            stats = LayerStats(layer.id, layer.reference, layer.source.name, table.data_size, len(table))
        if not metadata.usable(image, layer.config, layer.reference):
            stored = self._resolver.metadata_object(layer, plain_http)
            if layer.place is not None:
                stats.add(metadata_fetched=len(stored), requests=1)
            metadata.unpack(self._home, layer.config, stored, layer.reference)
        signature = _signature(image)
        if raw is not None:
            stats.export = "direct"
            return MountedLayer(key, self._mount_erofs(str(image), raw), "direct", None, stats, image, signature)
        assert table is not None
        blob = self._blob(layer, table, stats)
        fuse = self._fuse()
        try:
            fd = self._mount_erofs(str(image), str(fuse.add(blob)))
        except BaseException:
            fuse.remove(blob)
            if blob.cache is not None:
                blob.cache.close()
            raise
        if layer.place is not None and layer.manifest.data.size <= SMALL_LAYER:
            fuse.soon(blob.fetcher.prefetch_all)
        return MountedLayer(key, fd, "fuse", blob, stats, image, signature)

    def _raw_file(self, layer: ResolvedLayer) -> str | None:
        """The whole data blob on this disk, or None."""
        if layer.config.data_size == 0:
            empty = self._home.run / "empty"
            empty.touch(mode=0o400)
            return str(empty)
        path = self._home.raw_file(layer.id)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        if size != layer.config.data_size:
            log.warning(
                "a raw file has a wrong size and is not used",
                path=str(path),
                found=size,
                expected=layer.config.data_size,
            )
            return None
        return str(path)

    def _blob(self, layer: ResolvedLayer, table: ChunkTable, stats: LayerStats) -> Blob:
        try:
            cache: CacheEntry | None = CacheEntry(self._home.cache_entry(layer.config.data_root), table)
        except (DsecError, OSError) as error:
            log.warning("reads of a layer bypass the cache", layer=layer.id, reason=str(error))
            cache = None
        fetcher = Fetcher(
            layer=layer.id,
            digest=layer.manifest.data.digest,
            table=table,
            source=layer.source,
            slots=self._source_slots(layer.source),
            cache=cache,
            stats=stats,
            executor=self._executor,
            deadline=self._deadline,
        )
        return Blob(layer.config.data_root, table, cache, fetcher, stats)

    def _source_slots(self, source: Source) -> Slots:
        with self._lock:
            return self._slots.setdefault(source.name.partition("/")[0], Slots(source.concurrency))

    def _mount_erofs(self, image: str, device: str) -> int:
        """The mount's readahead device is named by a global counter: it is the one that the mount added."""
        with self._bdi_lock:
            before = bdi.names()
            fd = mount_erofs(image, [device])
            for name in bdi.names() - before:
                if name.startswith("erofs"):
                    bdi.set_read_ahead(name, READ_AHEAD_KIB)
        return fd

    def stats(self) -> list[LayerStats]:
        with self._lock:
            return [*self._retired, *(layer.stats for layer in self._layers.values())]

    def blobs(self) -> list[Blob]:
        with self._lock:
            return [layer.blob for layer in self._layers.values() if layer.blob is not None]

    def _close(self, layer: MountedLayer) -> None:
        os.close(layer.fd)
        self._retired.append(layer.stats)
        if layer.blob is not None:
            self._fuse().remove(layer.blob)
            if layer.blob.cache is not None:
                layer.blob.cache.close()

    def close_mounts(self) -> None:
        """Close every mount descriptor: what environments still use lives on in the kernel."""
        with self._lock:
            for layer in self._layers.values():
                os.close(layer.fd)

    def end_requests(self) -> None:
        """Wait for the request threads; their connections have been broken before."""
        self._executor.shutdown()
        self._ahead.shutdown()

    def close_caches(self) -> None:
        """After the session and the requests have ended: mark the cache entries as clean."""
        for blob in self.blobs():
            if blob.cache is not None:
                blob.cache.close()
