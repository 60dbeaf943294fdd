"""Copying layers and environments between this machine's store and a registry, whole and never re-encoded.

Blobs go before manifests, manifests before references. What the other side has is not sent again. A layer becomes
visible in the local store in one step, after its parts were found to agree; an environment's reference is set last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from dsec_store import media
from dsec_store.backends.base import BlobWriter
from dsec_store.chunks import RAW, ZSTD, ChunkTable
from dsec_store.config import LayerConfig
from dsec_store.dataobject import METADATA_MAX, decode_metadata
from dsec_store.digests import digest_bytes, digest_of
from dsec_store.errors import BlobUnknown, IntegrityError, ReferenceInvalid, ReferenceUnknown
from dsec_store.layers.environment import build_environment
from dsec_store.layers.store import Layer, LayerStore, about, local_tag
from dsec_store.manifest import (
    MANIFEST_MAX,
    Descriptor,
    EnvironmentIndex,
    EnvironmentLayer,
    LayerManifest,
    environment_id,
    parse_manifest,
)
from dsec_store.refs import Reference, parse_reference
from dsec_store.registry.client import RegistryClient
from dsec_store.registry.rawfile import make_raw
from erofs_tools.errors import ErofsError, show
from erofs_tools.verify import verify

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, as often as a megabyte comes."""

_LIMITS = {media.LAYER_CONFIG: MANIFEST_MAX, media.LAYER_CHUNKS: 256 << 20, media.LAYER_METADATA: METADATA_MAX}
"""Bytes of the largest blobs that are taken into memory; the chunk table of 1.4 TB of data has 256 MiB."""


@dataclass
class Transferred:
    """What a push or a pull did. ``digest`` is the manifest's; ``id`` the layer's or environment's."""

    digest: str
    id: str
    kind: str
    layers: int
    blobs_sent: int = 0
    bytes_sent: int = 0
    blobs_present: int = 0
    bytes_present: int = 0


class _Origin(Protocol):
    """Where the blobs of a layer are read from."""

    def manifest(self, digest: str) -> bytes: ...

    def stream(self, blob: Descriptor) -> Iterable[bytes]: ...


@dataclass(frozen=True)
class _Local:
    store: LayerStore

    def manifest(self, digest: str) -> bytes:
        return self.store.read(digest)

    def stream(self, blob: Descriptor) -> Iterable[bytes]:
        """The last piece comes only when all of them were right: a damaged blob is named here, and not there."""
        summed, last = hashlib.sha256(), b""
        for piece in self.store.backend.stream(blob.digest):
            if last:
                yield last
            summed.update(piece)
            last = piece
        found = "sha256:" + summed.hexdigest()
        if found != blob.digest:
            where = self.store.backend.local_path(blob.digest)
            raise IntegrityError(f"damaged blob {where}: found {found}, expected {blob.digest}")
        if last:
            yield last


@dataclass(frozen=True)
class _Remote:
    client: RegistryClient
    name: str

    def manifest(self, digest: str) -> bytes:
        return self.client.get_manifest(self.name, digest)[0]

    def stream(self, blob: Descriptor) -> Iterable[bytes]:
        return self.client.stream_blob(self.name, blob.digest, blob.size)


class _Clients:
    """One client for each registry that takes part; a context manager."""

    def __init__(self, plain_http: bool | None) -> None:
        self._plain_http = plain_http
        self._stack = ExitStack()
        self._clients: dict[str, RegistryClient] = {}

    def __enter__(self) -> _Clients:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def at(self, host: str) -> RegistryClient:
        if host not in self._clients:
            self._clients[host] = self._stack.enter_context(RegistryClient(host, plain_http=self._plain_http))
        return self._clients[host]

    def source(self, text: str) -> _Remote:
        """The origin that an annotation ``dev.dsec.source`` names."""
        reference = parse_reference(text)
        if reference.host is None:
            raise IntegrityError(f"annotation {media.SOURCE}: found {show(text)}, expected HOST[:PORT]/NAME")
        return _Remote(self.at(reference.host), reference.name)


@dataclass
class _Counter:
    """Bytes and blobs as they go by."""

    result: Transferred
    total: int
    progress: Progress | None
    done: int = 0

    def pieces(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self.add(len(piece))

    def add(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)

    def sent(self, size: int) -> None:
        self.result.blobs_sent += 1
        self.result.bytes_sent += size

    def present(self, size: int) -> None:
        self.result.blobs_present += 1
        self.result.bytes_present += size


@dataclass
class _Planned:
    """One layer to be copied, and the blobs of it that the other side lacks."""

    manifest: LayerManifest
    origin: _Origin
    missing: list[Descriptor] = field(default_factory=list)
    whole: bool = False
    """All of it is here, and was read."""


def _find_missing(plan: Iterable[_Planned], counter: _Counter, has: Callable[[_Planned, Descriptor], bool]) -> None:
    """Ask once for each blob whether the other side has it, and note those that it lacks."""
    seen: set[str] = set()
    for layer in plan:
        for blob in layer.manifest.blobs():
            if blob.digest in seen:
                continue
            seen.add(blob.digest)
            if has(layer, blob):
                counter.present(blob.size)
            else:
                layer.missing.append(blob)
                counter.total += blob.size


def _host(reference: Reference) -> str:
    if reference.host is None:
        raise ReferenceInvalid(f"{reference} names no registry, expected HOST[:PORT]/NAME:TAG")
    return reference.host


# Push


def push(
    store: LayerStore,
    reference: Reference,
    target: Reference,
    *,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """Copy a layer or an environment of the store to a registry.

    A layer of an environment that is not here is copied through from the registry that its ``dev.dsec.source`` names.
    Raises ReferenceUnknown, BlobUnknown (a layer is nowhere), WrongKind, RegistryError, IntegrityError.
    """
    host = _host(target)
    if reference.host is not None:
        raise ReferenceInvalid(f"{reference} is in a registry, expected a reference of the local store: NAME:TAG")
    with about(str(reference)):
        return _push(store, reference, host, target, plain_http, progress)


def _push(
    store: LayerStore,
    reference: Reference,
    host: str,
    target: Reference,
    plain_http: bool | None,
    progress: Progress | None,
) -> Transferred:
    digest = reference.digest or store.backend.get_ref(reference.name, reference.version)
    root = _parse(store.read(digest), digest)
    if target.digest is not None and target.digest != digest:
        raise ReferenceInvalid(f"{target} names another digest than {reference}, which is {digest}")
    with _Clients(plain_http) as clients:
        client = clients.at(host)
        plan = [_Planned(*_where(store, clients, one, digest)) for one in _entries(root)]
        _check_claims(root, plan)
        result = _result(root, digest, [layer.manifest.layer_id for layer in plan])
        counter = _Counter(result, 0, progress)

        def has(layer: _Planned, blob: Descriptor) -> bool:
            return client.blob_size(target.name, blob.digest) == blob.size or _mounted(client, target, layer, blob)

        _find_missing(plan, counter, has)
        for layer in plan:
            for blob in layer.missing:
                content = _sender(counter, layer.origin, blob)
                client.put_blob(target.name, blob.digest, blob.size, content, ask=False)
                counter.sent(blob.size)
            manifest = layer.manifest
            if isinstance(root, EnvironmentIndex) and not client.has_manifest(target.name, manifest.digest):
                client.put_manifest(target.name, manifest.digest, manifest.raw, media.OCI_MANIFEST)
        kind = media.OCI_INDEX if isinstance(root, EnvironmentIndex) else media.OCI_MANIFEST
        client.put_manifest(target.name, target.version, root.raw, kind)
    return result


def _sender(counter: _Counter, origin: _Origin, blob: Descriptor) -> Callable[[], Iterable[bytes]]:
    return lambda: counter.pieces(origin.stream(blob))


def _mounted(client: RegistryClient, target: Reference, layer: _Planned, blob: Descriptor) -> bool:
    origin = layer.origin
    if not isinstance(origin, _Remote) or origin.client is not client or origin.name == target.name:
        return False
    return client.mount_blob(target.name, blob.digest, origin.name)


def _where(store: LayerStore, clients: _Clients, entry: EnvironmentLayer, within: str) -> tuple[LayerManifest, _Origin]:
    """A layer's manifest and where its blobs are: here, or where the environment says."""
    origin: _Origin
    if _is_whole(store, entry.manifest_digest):
        origin = _Local(store)
    elif entry.source is not None:
        origin = clients.source(entry.source)
    else:
        raise BlobUnknown(f"{within}: layer {entry.manifest_digest} is not whole in this store, and it names no source")
    return _layer_manifest(origin.manifest(entry.manifest_digest), entry.manifest_digest), origin


def _layer_manifest(data: bytes, digest: str) -> LayerManifest:
    with about(f"blob {digest}"):
        return LayerManifest.parse(_checked(data, digest))


def _is_whole(store: LayerStore, manifest_digest: str) -> bool:
    if not store.backend.has(manifest_digest):
        return False
    manifest = _layer_manifest(store.read(manifest_digest), manifest_digest)
    return all(_has(store, blob) for blob in manifest.blobs())


def _has(store: LayerStore, blob: Descriptor) -> bool:
    try:
        return store.backend.stat(blob.digest) == blob.size
    except BlobUnknown:
        return False


# Pull


def pull(
    store: LayerStore,
    source: Reference,
    reference: Reference | None = None,
    *,
    raw: bool = False,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """Copy a layer or an environment of a registry to the store, under ``reference``.

    reference: None stands for the source's name and tag. raw: make ``raw/<id>`` of each layer too, which mounts read in
    place. A layer that the source lacks is read where the environment says. Before anything of a layer becomes visible,
    its config, chunk table, metadata image and kind are checked against each other, and the image like before a mount.
    What is here is read, and fetched again where its bytes are wrong. Raises ReferenceUnknown,
    BlobUnknown, WrongKind, IntegrityError, RegistryError, StoreFull.
    """
    host = _host(source)
    if reference is None:
        if source.digest is not None:
            raise ReferenceInvalid(f"{source} has no tag to be kept under: give a reference NAME:TAG")
        reference = source.local()
    local_tag(reference)
    with about(str(source)):
        return _pull(store, source, host, reference, raw, plain_http, progress)


def _pull(
    store: LayerStore,
    source: Reference,
    host: str,
    reference: Reference,
    raw: bool,
    plain_http: bool | None,
    progress: Progress | None,
) -> Transferred:
    with _Clients(plain_http) as clients:
        origin = _Remote(clients.at(host), source.name)
        data, _, digest = origin.client.get_manifest(source.name, source.version)
        root = _parse(data, digest)
        plan = [_plan_pull(store, clients, origin, entry, digest) for entry in _entries(root)]
        _check_claims(root, plan)
        result = _result(root, digest, [layer.manifest.layer_id for layer in plan])
        counter = _Counter(result, 0, progress)
        _find_missing(plan, counter, lambda layer, blob: layer.whole or store.backend.sound(blob.digest, blob.size))
        layers = [_pull_layer(store, layer, counter) for layer in plan]
        if isinstance(root, EnvironmentIndex):
            _check_environment(root, layers)
        for layer_here in layers if raw else ():
            make_raw(store, layer_here)
        with store.backend.writer() as writer:
            writer.write(root.raw)
            store.publish([writer], reference, digest)
    return result


def _plan_pull(store: LayerStore, clients: _Clients, origin: _Remote, entry: EnvironmentLayer, within: str) -> _Planned:
    if store.backend.sound(entry.manifest_digest):
        manifest = _layer_manifest(store.read(entry.manifest_digest), entry.manifest_digest)
        if all(store.backend.sound(blob.digest, blob.size) for blob in manifest.blobs()):
            return _Planned(manifest, _Local(store), whole=True)
    try:
        data = origin.manifest(entry.manifest_digest)
    except ReferenceUnknown:
        if entry.source is None:
            raise
        origin = clients.source(entry.source)
        data = origin.manifest(entry.manifest_digest)
    if len(data) != entry.manifest_size:
        raise IntegrityError(
            f"{within}: layer manifest {entry.manifest_digest} has {len(data)} bytes, expected {entry.manifest_size}"
        )
    return _Planned(_layer_manifest(data, entry.manifest_digest), origin)


def _pull_layer(store: LayerStore, layer: _Planned, counter: _Counter) -> Layer:
    """Fetch what is missing of a layer, check that its parts agree, and publish them at once."""
    manifest = layer.manifest
    for blob in layer.missing:
        limit = _LIMITS.get(blob.media_type)
        if limit is not None and blob.size > limit:
            raise IntegrityError(f"layer {manifest.layer_id}: {blob.size} bytes of {blob.media_type}, at most {limit}")
    with ExitStack() as stack:
        writers: dict[str, BlobWriter] = {}
        for blob in layer.missing:
            writer = writers[blob.digest] = stack.enter_context(store.backend.writer())
            for piece in counter.pieces(layer.origin.stream(blob)):
                writer.write(piece)
            counter.sent(blob.size)
        found = _agreed(store, manifest, writers)
        if writers or not store.backend.sound(manifest.digest):
            last = stack.enter_context(store.backend.writer())
            last.write(manifest.raw)
            store.publish([*writers.values(), last], None, manifest.digest)
        return found


def _agreed(store: LayerStore, manifest: LayerManifest, writers: dict[str, BlobWriter]) -> Layer:
    """The layer, when config, chunk table, metadata image and manifest say the same; else IntegrityError."""

    def load(blob: Descriptor) -> bytes:
        writer = writers.get(blob.digest)
        return store.read(blob.digest) if writer is None else _checked(_written(writer), blob.digest)

    what = f"layer {manifest.layer_id}"
    with about(what):
        with about(f"blob {manifest.config.digest}"):
            config = LayerConfig.parse(load(manifest.config))
        kind = manifest.annotations.get(media.KIND, config.kind)
        if kind != config.kind:
            raise IntegrityError(f"{what}: the manifest says kind {kind}, the config {config.kind}")
        with about(f"blob {manifest.chunks.digest}"):
            table = ChunkTable.parse(load(manifest.chunks), root=config.data_root, stored_size=manifest.data.size)
            if table.data_size != config.data_size:
                raise IntegrityError(f"chunk table: found {table.data_size} bytes, expected {config.data_size}")
            if table.encoding != (ZSTD if manifest.zstd else RAW):
                raise IntegrityError(f"chunk table: encoding {table.encoding} for {manifest.data.media_type}")
        with about(f"blob {manifest.metadata.digest}"):
            frame = load(manifest.metadata)
            image = decode_metadata(frame, config.metadata_size, digest_bytes(config.metadata_digest))
            _check_image(image, config)
    return Layer(manifest, config)


def _check_image(image: bytes, config: LayerConfig) -> None:
    """Refuse here what a mount would refuse."""
    try:
        verified = verify(image, data_size=config.data_size)
    except ErofsError as error:
        raise IntegrityError(f"may not be mounted: {error}") from error
    if verified.inodes != config.inodes:
        raise IntegrityError(f"the metadata image has {verified.inodes} inodes, the config says {config.inodes}")


def _written(writer: BlobWriter) -> bytes:
    pieces, offset = [], 0
    while piece := os.pread(writer.fileno(), 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _check_claims(root: LayerManifest | EnvironmentIndex, plan: list[_Planned]) -> None:
    """Whether an index tells the truth about its layers as far as their manifests say it, before the work."""
    if not isinstance(root, EnvironmentIndex):
        return
    where = f"environment {root.digest}"
    ids = [layer.manifest.layer_id for layer in plan]
    for number, (entry, layer) in enumerate(zip(root.layers, plan, strict=True)):
        _check_claim(where, number, "id", entry.id, layer.manifest.layer_id)
        _check_claim(where, number, "kind", entry.kind, layer.manifest.annotations.get(media.KIND, entry.kind))
    said, found = root.annotations.get(media.ID), environment_id(ids)
    if said is not None and said != found:
        raise IntegrityError(f"{where}: annotation {media.ID} is {show(said)}, its layers give {found}")


def _check_claim(where: str, number: int, what: str, said: str | None, found: str | None) -> None:
    if said is not None and said != found:
        raise IntegrityError(f"{where}: layer {number} is of {what} {found}, the index says {said}")


def _check_environment(index: EnvironmentIndex, layers: list[Layer]) -> None:
    """The same with what their configs say, and whether they make an environment."""
    for number, (entry, layer) in enumerate(zip(index.layers, layers, strict=True)):
        _check_claim(f"environment {index.digest}", number, "kind", entry.kind, layer.kind)
    build_environment([layer.in_environment() for layer in layers])


# Both


def _parse(data: bytes, digest: str) -> LayerManifest | EnvironmentIndex:
    with about(f"blob {digest}"):
        return parse_manifest(data)


def _entries(root: LayerManifest | EnvironmentIndex) -> Iterable[EnvironmentLayer]:
    if isinstance(root, EnvironmentIndex):
        return root.layers
    return [EnvironmentLayer(root.digest, len(root.raw))]


def _result(root: LayerManifest | EnvironmentIndex, digest: str, layer_ids: list[str]) -> Transferred:
    if isinstance(root, EnvironmentIndex):
        return Transferred(digest, environment_id(layer_ids), "environment", len(layer_ids))
    return Transferred(digest, root.layer_id, root.annotations.get(media.KIND, "layer"), 1)


def _checked(data: bytes, digest: str) -> bytes:
    if digest_of(data) != digest:
        raise IntegrityError(f"blob {digest}: found {digest_of(data)}")
    return data
