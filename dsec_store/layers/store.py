"""The layers and environments of this machine's store: publishing, resolving, listing, describing, removing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IFDIR, S_IFLNK, S_IFMT, S_IFREG
from typing import Any

from dsec_linux.files import fsync_dir, link_fd
from dsec_store import media
from dsec_store.backends.base import ANY, STREAM_BLOCK, AnyDigest, BlobWriter
from dsec_store.backends.local import LocalBackend, replace_by_fd, storing
from dsec_store.chunks import ChunkTable
from dsec_store.config import LayerConfig
from dsec_store.dataobject import decode_metadata
from dsec_store.digests import digest_bytes, digest_of
from dsec_store.errors import BlobUnknown, DsecError, IntegrityError, ReferenceInvalid, RegistryError, WrongKind
from dsec_store.home import Home
from dsec_store.manifest import EnvironmentIndex, EnvironmentLayer, LayerManifest, environment_id, parse_manifest
from dsec_store.refs import Reference, parse_reference
from erofs_tools.errors import escape


@dataclass(frozen=True)
class Layer:
    """A layer of the store; ``digest`` is its manifest's."""

    manifest: LayerManifest
    config: LayerConfig

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def kind(self) -> str:
        return self.config.kind

    @property
    def stored_size(self) -> int:
        """Bytes of the three blobs as they are stored and sent."""
        return self.manifest.metadata.size + self.manifest.chunks.size + self.manifest.data.size

    def in_environment(self, source: str | None = None) -> EnvironmentLayer:
        return EnvironmentLayer(self.digest, len(self.manifest.raw), self.kind, self.id, source)


@dataclass(frozen=True)
class Environment:
    """An environment of the store. ``layers`` are base first; those that this store lacks are None."""

    index: EnvironmentIndex
    layers: tuple[Layer | None, ...]

    @property
    def digest(self) -> str:
        return self.index.digest

    @property
    def id(self) -> str:
        if self.index.id is not None:
            return self.index.id
        ids = [layer.id for layer in self.layers if layer is not None]
        if len(ids) != len(self.layers):
            raise IntegrityError(f"environment {self.digest}: it does not name its layers' ids, and they are not here")
        return environment_id(ids)


@dataclass(frozen=True)
class Listed:
    """One line of the listing. ``kind`` is a layer's kind or ``environment``; sizes in bytes, uncompressed and as
    stored.
    """

    reference: str
    kind: str
    id: str
    manifest: str
    data_size: int
    stored_size: int


class LayerStore:
    """The store below a home, which is made when it is missing. Raises StoreUnusable where it cannot be."""

    def __init__(self, home: Home) -> None:
        self.home = home.ensure()
        self.backend = LocalBackend(home.store)

    # Reading

    def load_layer(self, digest: str) -> Layer:
        """The layer whose manifest has this digest; raises BlobUnknown, IntegrityError, WrongKind (an environment)."""
        found = self._load(digest)
        if not isinstance(found, Layer):
            raise WrongKind(f"{digest} is an environment, expected a layer")
        return found

    def resolve(self, reference: Reference) -> Layer | Environment:
        """What a reference of this store names.

        Raises ReferenceInvalid for a reference to a registry, ReferenceUnknown, BlobUnknown, IntegrityError.
        """
        if reference.host is not None:
            raise ReferenceInvalid(f"{reference} is in a registry, expected a reference of the local store: NAME:TAG")
        with about(str(reference)):
            return self._load(reference.digest or self.backend.get_ref(reference.name, reference.version))

    def _load(self, digest: str) -> Layer | Environment:
        raw = self.read(digest)
        with about(f"blob {digest}"):
            parsed = parse_manifest(raw)
        if isinstance(parsed, LayerManifest):
            raw = self.read(parsed.config.digest)
            with about(f"blob {parsed.config.digest}"):
                return Layer(parsed, LayerConfig.parse(raw))
        layers: list[Layer | None] = []
        for entry in parsed.layers:
            layers.append(self.load_layer(entry.manifest_digest) if self.backend.has(entry.manifest_digest) else None)
        return Environment(parsed, tuple(layers))

    def read(self, digest: str) -> bytes:
        """A small blob, whole and checked; raises IntegrityError with where it lies."""
        data = self.backend.read(digest)
        if digest_of(data) != digest:
            where = self.backend.local_path(digest)
            raise IntegrityError(f"damaged blob {where}: found {digest_of(data)}, expected {digest}")
        return data

    def chunk_table(self, layer: Layer) -> ChunkTable:
        """The layer's chunk table, checked against its config and its data object."""
        blob = layer.manifest.chunks.digest
        with about(f"layer {layer.id}"):
            data = self.read(blob)
            with about(f"blob {blob}"):
                return ChunkTable.parse(
                    data,
                    root=layer.config.data_root,
                    data_size=layer.config.data_size,
                    stored_size=layer.manifest.data.size,
                )

    def metadata_image(self, layer: Layer) -> bytes:
        """The layer's EROFS metadata image, uncompressed and checked."""
        blob = layer.manifest.metadata.digest
        with about(f"layer {layer.id}"):
            frame = self.read(blob)
            with about(f"blob {blob}"):
                return decode_metadata(frame, layer.config.metadata_size, digest_bytes(layer.config.metadata_digest))

    def list(self) -> Iterator[Listed]:
        """Every reference, in order of name and tag."""
        for name, tag, digest in self.backend.refs():
            yield self._listed(f"{name}:{tag}", digest)

    def find(self, text: str) -> tuple[str, str]:
        """Name and tag of a reference as it is typed, or as the listing shows it: also one that could not be set here.

        Raises ReferenceUnknown, ReferenceInvalid.
        """
        try:
            name, tag = local_tag(parse_reference(text))
        except ReferenceInvalid:
            for found in self.backend.refs():
                if text in (shown := f"{found.name}:{found.tag}", escape(shown)):
                    return found.name, found.tag
            raise
        with suppress(IntegrityError):
            self.backend.get_ref(name, tag)
        return name, tag

    def _listed(self, reference: str, digest: str) -> Listed:
        # One bad reference must not hide the others.
        try:
            if not digest:
                return Listed(reference, "damaged", "", "", 0, 0)
            found = self._load(digest)
            layers = [found] if isinstance(found, Layer) else [layer for layer in found.layers if layer is not None]
            return Listed(
                reference=reference,
                kind=found.kind if isinstance(found, Layer) else "environment",
                id=found.id,
                manifest=digest,
                data_size=sum(layer.config.data_size for layer in layers),
                stored_size=sum(layer.stored_size for layer in layers),
            )
        except WrongKind:
            return Listed(reference, "other", "", digest, 0, 0)
        except (DsecError, OSError):
            return Listed(reference, "damaged", "", digest, 0, 0)

    def show(self, reference: Reference) -> dict[str, Any]:
        """Everything about a layer or environment, as ``dsec layer show --json`` prints it."""
        with about(str(reference)):
            return self._show(reference, self.resolve(reference))

    def _show(self, reference: Reference, found: Layer | Environment) -> dict[str, Any]:
        if isinstance(found, Environment):
            return {
                "reference": str(reference),
                "kind": "environment",
                "id": found.id,
                "manifest": found.digest,
                "layers": [
                    _show_entry(entry, layer) for entry, layer in zip(found.index.layers, found.layers, strict=True)
                ],
                "index": _document(found.index.raw),
            }
        return {"reference": str(reference), **self._show_layer(found)}

    def _show_layer(self, layer: Layer) -> dict[str, Any]:
        table = self.chunk_table(layer)
        config, manifest = layer.config, layer.manifest
        raw = self.home.raw_file(layer.id)
        return {
            "kind": layer.kind,
            "id": layer.id,
            "manifest": layer.digest,
            "sizes": {
                "metadata": config.metadata_size,
                "data": config.data_size,
                "stored": layer.stored_size,
                "stored_metadata": manifest.metadata.size,
                "stored_chunks": manifest.chunks.size,
                "stored_data": manifest.data.size,
            },
            "counts": {**_count_inodes(self.metadata_image(layer)), "chunks": len(table)},
            "zstd": manifest.annotations.get(media.ZSTD),
            "raw": str(raw) if raw.exists() else None,
            "config": _document(config.canonical),
            "manifest_document": _document(manifest.raw),
        }

    # Changing

    def publish(
        self,
        blobs: Sequence[BlobWriter],
        reference: Reference | None,
        digest: str,
        *,
        raw: tuple[str, int] | None = None,
        expected: str | AnyDigest | None = ANY,
    ) -> None:
        """Make blobs visible and set the reference to the manifest ``digest``: all of it or nothing.

        raw: a layer's id and a descriptor of its data blob as it is, to be kept as ``raw/<id>``. It gets its name last:
        it can be made again from the rest, and must not be there without it.
        """
        sync_also = () if raw is None else (raw[1],)
        if reference is None:
            self.backend.publish(blobs, sync_also=sync_also)
        else:
            name, tag = local_tag(reference)
            self.backend.publish(blobs, name, tag, digest, expected=expected, sync_also=sync_also)
        if raw is not None:
            self._keep_raw(*raw)

    def _keep_raw(self, layer_id: str, fd: int) -> None:
        path = self.home.raw_file(layer_id)
        try:
            link_fd(fd, str(path))
        except FileExistsError:
            if not _same_bytes(path, fd):
                # A layer is whole without its raw file, but not with a wrong one.
                with storing(self.home.raw, "replacing a damaged raw file"), self.backend.lock():
                    replace_by_fd(fd, path, self.home.raw / "replacement")
        except OSError:
            return
        with suppress(OSError):
            fsync_dir(str(self.home.raw))

    def remove(self, name: str, tag: str) -> None:
        """Remove a reference, also a damaged one. Its blobs stay until they are collected."""
        self.backend.delete_ref(name, tag)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Put what it is about before the message of an error that does not say so."""
    try:
        yield
    except (IntegrityError, WrongKind, BlobUnknown) as error:
        if what in str(error):
            raise
        raise type(error)(f"{what}: {error}") from error
    except RegistryError as error:
        if what in str(error):
            raise
        raise type(error)(f"{what}: {error}", status=error.status, code=error.code) from error


def _same_bytes(path: Path, fd: int) -> bool:
    """Whether a file has exactly the bytes of an open one."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            if os.fstat(file.fileno()).st_size != size:
                return False
            return all(
                os.pread(file.fileno(), STREAM_BLOCK, at) == os.pread(fd, STREAM_BLOCK, at)
                for at in range(0, size, STREAM_BLOCK)
            )
    except OSError:
        return False


def local_tag(reference: Reference) -> tuple[str, str]:
    """Name and tag of a reference that can be set; raises ReferenceInvalid for another one."""
    if reference.host is not None:
        raise ReferenceInvalid(f"{reference} is in a registry, expected a reference of the local store: NAME:TAG")
    if reference.digest is not None or reference.tag is None:
        raise ReferenceInvalid(f"{reference} is a digest, expected a tag: NAME:TAG")
    return reference.name, reference.tag


def _document(data: bytes) -> Any:
    import json

    return json.loads(data)


def _show_entry(entry: EnvironmentLayer, layer: Layer | None) -> dict[str, Any]:
    return {
        "kind": entry.kind if layer is None else layer.kind,
        "id": entry.id if layer is None else layer.id,
        "manifest": entry.manifest_digest,
        "source": entry.source,
        "local": layer is not None,
        "data": None if layer is None else layer.config.data_size,
        "stored": None if layer is None else layer.stored_size,
    }


def _count_inodes(image: bytes) -> dict[str, int]:
    from erofs_tools.reader import Image

    with Image(image) as opened:
        kinds = Counter({inode.nid: S_IFMT(inode.mode) for _, inode in opened.walk()}.values())
    known = kinds[S_IFREG] + kinds[S_IFDIR] + kinds[S_IFLNK]
    return {
        "inodes": kinds.total(),
        "files": kinds[S_IFREG],
        "directories": kinds[S_IFDIR],
        "symlinks": kinds[S_IFLNK],
        "others": kinds.total() - known,
    }
