"""The node without its sockets: resolve, mount, compose, hand over, release.

``Node`` owns the event loop on which misses are fetched, the FUSE session, the layer mounts and the mount records.
The service puts sockets in front of it; the benchmarks use it in their own process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from dsec_linux.errors import LinuxError
from dsec_linux.files import statx
from dsec_linux.mounts import clone_mount, mount_overlay
from dsec_store.backends.local import LocalBackend
from dsec_store.errors import NodeError
from dsec_store.home import Home
from dsec_store.manifest import environment_id
from dsec_store.node.exports import FuseExport
from dsec_store.node.fetch import DEADLINE
from dsec_store.node.layers import LayerMounts, MountedLayer
from dsec_store.node.log import Log
from dsec_store.node.protocol import Mounted, MountRequest
from dsec_store.node.records import in_use, read_records, record_path, remove_record, write_record
from dsec_store.node.remote import Registries
from dsec_store.node.resolve import ResolvedLayer, Resolver
from dsec_store.node.stats import total

FLUSH_SECONDS = 5.0

log = Log("dsec.node")


class Node:
    """One node of one home; ``close`` it. ``deadline`` is how long, in seconds, a reader waits for a store at most."""

    def __init__(self, home: Home, *, deadline: float = DEADLINE) -> None:
        self.home = home.ensure()
        self.started = time.time()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fetch", daemon=True)
        self._thread.start()
        self._registries = Registries(deadline)
        self._store = LocalBackend(home.store)
        self._resolver = Resolver(home, self._store, self._registries)
        self._export: FuseExport | None = None
        self._export_lock = threading.Lock()
        self._layers = LayerMounts(home, self._resolver, self._fuse, deadline=deadline)
        self._environments: dict[str, list[MountedLayer]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_caches, name="flush", daemon=True)
        self._flusher.start()

    def _fuse(self) -> FuseExport:
        """The session, made when the first layer needs it."""
        with self._export_lock:
            if self._export is None:
                self._export = FuseExport(self._loop)
            return self._export

    def mount(self, request: MountRequest, pid: int = 0) -> tuple[Mounted, int]:
        """Compose an environment; returns it and the descriptor of its detached mount, which the caller closes.

        ``pid`` is the caller's, for the record. Raises DsecError, LinuxError; nothing is left behind then.
        """
        path = record_path(self.home, request.id)
        with self._lock:
            if request.id in self._environments or path.exists():
                raise NodeError(f"the mount {request.id} exists already")
            self._environments[request.id] = []
        held: list[MountedLayer] = []
        fd = -1
        try:
            layers = self._resolver.resolve(request.layers, request.plain_http)
            self._layers.acquire_all(layers, request.plain_http, held)
            fd = self._compose(held, request)
            mounted = _describe(request, layers, held, fd)
            write_record(self.home, {**mounted.to_dict(), "owner": request.owner, "upper": request.upper, "pid": pid})
        except BaseException:
            if fd >= 0:
                os.close(fd)
            for layer_mount in held:
                self._layers.release(layer_mount)
            with self._lock:
                self._environments.pop(request.id, None)
            raise
        with self._lock:
            self._environments[request.id] = held
        return mounted, fd

    def _compose(self, held: list[MountedLayer], request: MountRequest) -> int:
        # overlayfs refuses a layer twice; the lower of two equal ones adds nothing to what the higher shows
        lowers = list(dict.fromkeys(layer.fd for layer in reversed(held)))
        if request.upper is not None:
            _dress_upper(request.upper, lowers[0])
        if request.upper is None and len(lowers) == 1:
            try:
                return clone_mount(lowers[0])
            except LinuxError as error:
                if error.errno != errno.EINVAL:  # before Linux 6.15 a detached mount cannot be cloned
                    raise
            empty = os.open(self._empty_folder(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return mount_overlay([*lowers, empty])
            finally:
                os.close(empty)
        return mount_overlay(lowers, request.upper, request.work)

    def _empty_folder(self) -> str:
        folder = self.home.run / "empty.d"
        folder.mkdir(mode=0o755, exist_ok=True)
        return str(folder)

    def release(self, mount_id: str) -> bool:
        """Forget an environment: its layers have one user less, its record goes. False when it was not known."""
        with self._lock:
            held = self._environments.pop(mount_id, None)
        for layer in held or ():
            self._layers.release(layer)
        return remove_record(self.home, mount_id) or held is not None

    def reap(self) -> list[str]:
        """Release every environment whose owner is gone; returns their ids."""
        gone = [record["id"] for record in read_records(self.home) if not in_use(self.home, record)]
        for mount_id in gone:
            self.release(mount_id)
        return gone

    def status(self) -> dict[str, Any]:
        """``pid``, the environments by their records, and the layer mounts."""
        records = read_records(self.home)
        return {
            "pid": os.getpid(),
            "started_at": self.started,
            "home": str(self.home.path),
            "mounts": [
                {
                    "id": record["id"],
                    "owner": record["owner"],
                    "environment": record["environment"],
                    "layers": [
                        {key: layer[key] for key in ("id", "kind", "reference", "export")} for layer in record["layers"]
                    ],
                    "in_use": in_use(self.home, record),
                }
                for record in records
            ],
            "layers": [{"id": s.layer, "reference": s.reference, "export": s.export} for s in self._layers.stats()],
        }

    def stats(self) -> dict[str, Any]:
        """Per layer and in total; see :class:`dsec_store.node.stats.LayerStats`."""
        layers = [stats.to_dict() for stats in self._layers.stats()]
        return {"layers": layers, "total": total(layers)}

    def busy(self) -> list[str]:
        """Ids of environments that somebody uses."""
        return [record["id"] for record in read_records(self.home) if in_use(self.home, record)]

    def _flush_caches(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            for blob in self._layers.blobs():
                if blob.cache is not None:
                    try:
                        blob.cache.flush()
                    except OSError as error:
                        log.warning("the cache's bits could not be written", layer=blob.stats.layer, reason=str(error))

    def close(self) -> None:
        """End the session (its readers get an error), stop fetching, close the cache entries cleanly."""
        self._closing.set()
        self._flusher.join()
        blobs = self._layers.blobs()
        self._layers.close_mounts()
        if self._export is not None:
            self._export.close()

        async def stop() -> None:
            for blob in blobs:
                await blob.fetcher.close()

        self._registries.close()
        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._layers.end_requests()  # they tell the loop until they have ended
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._layers.close_caches()
        self._resolver.close()


def _dress_upper(upper: str, top: int) -> None:
    """Give a fresh upper the attributes of the highest layer's root: overlayfs shows the upper's as those of ``/``."""
    folder = Path(upper)
    if any(folder.iterdir()):
        return
    root = f"/proc/self/fd/{top}"
    info = Path(root).stat()
    os.chown(upper, info.st_uid, info.st_gid)
    folder.chmod(info.st_mode & 0o7777)
    for name in os.listxattr(root):
        if not name.startswith("trusted.overlay."):
            os.setxattr(upper, name, os.getxattr(root, name))
    os.utime(upper, ns=(info.st_mtime_ns, info.st_mtime_ns))


def _describe(request: MountRequest, layers: list[ResolvedLayer], held: list[MountedLayer], fd: int) -> Mounted:
    info = statx(fd, sync=False)
    return Mounted(
        id=request.id,
        layers=[
            {
                "id": layer.id,
                "kind": layer.config.kind,
                "manifest": layer.manifest.digest,
                "manifest_size": len(layer.manifest.raw),
                "reference": layer.reference,
                "source": layer.place,
                "data_root": layer.config.data_root,
                "export": mount.export,
            }
            for layer, mount in zip(layers, held, strict=True)
        ],
        run=dict(layers[0].config.run),
        environment=environment_id(layer.id for layer in layers),
        device=f"{info.dev_major}:{info.dev_minor}",
        mount_id=info.mnt_id or 0,
    )
