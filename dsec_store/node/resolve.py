"""From references to layers: manifests, configs and chunk tables, from this machine's store or a registry.

Small objects of remote layers are kept below ``meta/`` under their digest and checked again whenever they are read,
so that a warm node asks a registry for the manifest of a tag and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec_linux.files import link_fd, unnamed_file, write_all
from dsec_store import media
from dsec_store.backends.local import LocalBackend
from dsec_store.chunks import ChunkTable
from dsec_store.config import LayerConfig
from dsec_store.digests import digest_of
from dsec_store.errors import IntegrityError, WrongKind
from dsec_store.home import Home
from dsec_store.manifest import EnvironmentIndex, LayerManifest, parse_manifest
from dsec_store.node.protocol import LayerArg
from dsec_store.node.remote import Registries
from dsec_store.node.sources import Source, StoreSource
from dsec_store.refs import Reference, parse_reference

CONFIG_MAX = 4 << 20
CHUNKS_MAX = 512 << 20
"""Bytes of the largest chunk table that is read: 2.8 TB of data."""


@dataclass(frozen=True)
class ResolvedLayer:
    """A layer and where its blobs come from. ``place`` is ``HOST[:PORT]/NAME``, or None for this machine's store."""

    reference: str
    manifest: LayerManifest
    config: LayerConfig
    place: str | None
    source: Source

    @property
    def id(self) -> str:
        return self.config.id


class Resolver:
    """Finds layers. Safe for several request threads."""

    def __init__(self, home: Home, store: LocalBackend, registries: Registries) -> None:
        self._home = home
        self._store = store
        self._store_source = StoreSource(store)
        self._registries = registries
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="resolve")

    def resolve(self, arguments: list[LayerArg], plain_http: bool) -> list[ResolvedLayer]:
        """The layers of an environment, base first, by the rules of composition.

        First a base layer or an environment, then workspaces, toolkits and diffs, each on top of what stands before
        it. Raises WrongKind, ReferenceUnknown, IntegrityError, RegistryError.
        """
        if not arguments:
            raise WrongKind("no layer was named; expected a base layer or an environment first")
        groups = list(self._pool.map(lambda argument: self._argument(argument, plain_http), arguments))
        for position, (argument, group) in enumerate(zip(arguments, groups, strict=True)):
            _check_place(argument, group, first=position == 0)
        return [layer for group in groups for layer in group[1]]

    def _argument(self, argument: LayerArg, plain_http: bool) -> tuple[bool, list[ResolvedLayer]]:
        """Whether it is an environment, and its layers."""
        reference = parse_reference(argument.reference)
        if reference.host is None:
            digest = reference.digest or self._store.get_ref(reference.name, reference.version)
            data = self._checked(self._store.read(digest), digest, argument.reference)
        elif reference.digest is not None:  # what it names never changes: no need to ask again
            data = self._small(reference.digest, 0, reference, plain_http, manifest=True)
        else:
            data = self._registries.manifest(reference, plain_http)
        with naming(argument.reference):
            parsed = parse_manifest(data)
            if isinstance(parsed, LayerManifest):
                return False, [self._layer(argument.reference, parsed, reference, plain_http)]
            return True, list(self._environment(argument.reference, parsed, reference, plain_http))

    def _environment(
        self, text: str, index: EnvironmentIndex, reference: Reference, plain_http: bool
    ) -> list[ResolvedLayer]:
        found = []
        for entry in index.layers:
            place = reference.local()
            host = reference.host
            if host is None and entry.source is not None and not self._store.has(entry.manifest_digest):
                other = parse_reference(entry.source)
                place, host = other.local(), other.host
            layer_reference = Reference(place.name, None, entry.manifest_digest, host)
            data = self._small(entry.manifest_digest, entry.manifest_size, layer_reference, plain_http, manifest=True)
            parsed = parse_manifest(data)
            if not isinstance(parsed, LayerManifest):
                raise IntegrityError(f"environment {text}: {entry.manifest_digest} is an environment; expected a layer")
            layer = self._layer(text, parsed, layer_reference, plain_http)
            if entry.id not in (None, layer.id) or entry.kind not in (None, layer.config.kind):
                raise IntegrityError(
                    f"environment {text}: it lists {entry.manifest_digest} as {entry.kind} {entry.id}; the layer is "
                    f"{layer.config.kind} {layer.id}"
                )
            found.append(layer)
        return found

    def _layer(self, text: str, manifest: LayerManifest, reference: Reference, plain_http: bool) -> ResolvedLayer:
        config_data = self._small(manifest.config.digest, manifest.config.size, reference, plain_http)
        config = LayerConfig.parse(config_data)
        said = manifest.annotations.get(media.KIND, config.kind)
        if said != config.kind:
            raise IntegrityError(f"layer manifest {manifest.digest}: it says kind {said}, its config {config.kind}")
        if reference.host is None:
            return ResolvedLayer(text, manifest, config, None, self._store_source)
        source = self._registries.source(reference.host, reference.name, plain_http)
        return ResolvedLayer(text, manifest, config, f"{reference.host}/{reference.name}", source)

    def _small(
        self, digest: str, size: int, reference: Reference, plain_http: bool, *, manifest: bool = False
    ) -> bytes:
        """A manifest, config or chunk table by its digest: from the store, from meta/, or from the registry (and then
        kept).
        """
        if size > CHUNKS_MAX:
            raise IntegrityError(f"{reference}: {digest} has {size} bytes; expected at most {CHUNKS_MAX}")
        if reference.host is None:
            return self._checked(self._store.read(digest), digest, str(reference))
        kept = self._home.meta / f"{digest.removeprefix('sha256:')}.blob"
        try:
            data = kept.read_bytes()
            if digest_of(data) == digest:
                return data
            kept.unlink()  # damaged on this disk: fetched again
        except OSError:
            pass
        if manifest:
            data = self._registries.manifest(Reference(reference.name, None, digest, reference.host), plain_http)
        else:
            data = self._registries.blob(
                self._registries.source(reference.host, reference.name, plain_http), digest, size
            )
        keep(kept, data)
        return data

    @staticmethod
    def _checked(data: bytes, digest: str, what: str) -> bytes:
        if digest_of(data) != digest:
            raise IntegrityError(
                f"{what}: the store's blob {digest} has the digest {digest_of(data)}; it was damaged on disk"
            )
        return data

    def chunk_table(self, layer: ResolvedLayer, plain_http: bool) -> ChunkTable:
        """The layer's chunk table, checked against its config."""
        data = self._small(layer.manifest.chunks.digest, layer.manifest.chunks.size, self._where(layer), plain_http)
        with naming(layer.reference):
            table = ChunkTable.parse(data, root=layer.config.data_root, stored_size=layer.manifest.data.size)
        if table.data_size != layer.config.data_size:
            raise IntegrityError(
                f"{layer.reference}: the chunk table is for {table.data_size} bytes, not for {layer.config.data_size}"
            )
        return table

    def metadata_object(self, layer: ResolvedLayer, plain_http: bool) -> bytes:
        """The stored (compressed) metadata image, checked against its digest; not kept."""
        descriptor, where = layer.manifest.metadata, self._where(layer)
        if where.host is None:
            return self._checked(self._store.read(descriptor.digest), descriptor.digest, layer.reference)
        source = self._registries.source(where.host, where.name, plain_http)
        return self._registries.blob(source, descriptor.digest, descriptor.size)

    @staticmethod
    def _where(layer: ResolvedLayer) -> Reference:
        if layer.place is None:
            return Reference("local", None, layer.manifest.digest)
        host, _, name = layer.place.partition("/")
        return Reference(name, None, layer.manifest.digest, host)

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def naming(reference: str) -> Iterator[None]:
    """Say which reference an error of a format is about."""
    try:
        yield
    except IntegrityError as error:
        if reference in str(error):
            raise
        raise IntegrityError(f"{reference}: {error}") from error


def _check_place(argument: LayerArg, group: tuple[bool, list[ResolvedLayer]], *, first: bool) -> None:
    environment, layers = group
    kind = "environment" if environment else layers[0].config.kind
    if first:
        if not environment and kind != "base":
            raise WrongKind(
                f"{argument.reference} is a layer of kind {kind}; expected a base layer or an environment first"
            )
        if environment and layers[0].config.kind != "base":
            raise WrongKind(
                f"environment {argument.reference} starts with a layer of kind {layers[0].config.kind}; expected a base"
            )
        if argument.role not in (None, "base"):
            raise WrongKind(f"{argument.reference} stands first; expected a base layer or an environment there")
        return
    if argument.role is not None and kind != argument.role:
        raise WrongKind(f"{argument.reference} is of kind {kind}; expected a layer of kind {argument.role}")
    if environment or kind == "base":
        what = "an environment" if environment else "a layer of kind base"
        raise WrongKind(f"{argument.reference} is {what}; expected a workspace, toolkit or diff on top of the first")


def keep(path: Path, data: bytes) -> None:
    """Write a rebuildable file, whole or not at all; a full disk is no error, as the bytes are at hand."""
    try:
        fd = unnamed_file(str(path.parent))
        try:
            write_all(fd, data)
            link_fd(fd, str(path))
        finally:
            os.close(fd)
    except OSError:
        pass
