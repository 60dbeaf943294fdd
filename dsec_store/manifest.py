"""Layers and environments as OCI artifacts (docs/formats.md §1 and §4): building and strict parsing.

A manifest's digest is that of its bytes, so a parsed manifest is never written again: whoever copies it copies the
bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsec_store import media
from dsec_store.canonical import canonical_json, parse_json_object
from dsec_store.config import LayerConfig
from dsec_store.digests import digest_bytes, digest_of, is_digest
from dsec_store.errors import IntegrityError, WrongKind
from erofs_tools.errors import show

MANIFEST_MAX = 4 << 20
"""Bytes of the largest manifest that is read; the limit that registries name (distribution-spec 1.1)."""


@dataclass(frozen=True)
class Descriptor:
    """An OCI content descriptor: media type, digest, size in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type is not None:
            value["artifactType"] = self.artifact_type
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value

    @classmethod
    def parse(cls, value: Any, what: str) -> Descriptor:
        if not isinstance(value, dict):
            raise IntegrityError(f"{what}: found {show(value)}, expected a descriptor")
        media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
        if not isinstance(media_type, str) or not media_type:
            raise IntegrityError(f"{what}: mediaType is {show(media_type)}, expected text")
        if not isinstance(digest, str) or not is_digest(digest):
            raise IntegrityError(f"{what}: digest is {show(digest)}, expected sha256: and 64 hexadecimal digits")
        if type(size) is not int or size < 0:
            raise IntegrityError(f"{what}: size is {show(size)}, expected a number of bytes")
        artifact_type = value.get("artifactType")
        if artifact_type is not None and not isinstance(artifact_type, str):
            raise IntegrityError(f"{what}: artifactType is {show(artifact_type)}, expected text")
        return cls(media_type, digest, size, artifact_type, _annotations(value, what))


def _annotations(value: Mapping[str, Any], what: str) -> dict[str, str]:
    found = value.get("annotations")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise IntegrityError(f"{what}: annotations are {show(found)}, expected an object of text")
    return found


def _artifact(data: bytes, what: str, media_type: str, artifact_type: str) -> dict[str, Any]:
    if len(data) > MANIFEST_MAX:
        raise IntegrityError(f"{what}: found {len(data)} bytes, expected at most {MANIFEST_MAX}")
    value = parse_json_object(data, what)
    if value.get("schemaVersion") != 2:
        raise IntegrityError(f"{what}: found schemaVersion {show(value.get('schemaVersion'))}, expected 2")
    if value.get("mediaType") != media_type:
        raise IntegrityError(f"{what}: found media type {show(value.get('mediaType'))}, expected {media_type}")
    if value.get("artifactType") != artifact_type:
        raise IntegrityError(f"{what}: found artifact type {show(value.get('artifactType'))}, expected {artifact_type}")
    return value


@dataclass(frozen=True)
class LayerManifest:
    """A layer's manifest: its config and its three blobs. ``raw`` are the bytes that ``digest`` names."""

    config: Descriptor
    metadata: Descriptor
    chunks: Descriptor
    data: Descriptor
    annotations: Mapping[str, str]
    raw: bytes = field(repr=False)
    digest: str

    @classmethod
    def build(
        cls,
        config: LayerConfig,
        *,
        metadata: tuple[str, int],
        chunks: tuple[str, int],
        data: tuple[str, int],
        zstd: str | None,
        annotations: Mapping[str, str] | None = None,
    ) -> LayerManifest:
        """The manifest of these stored blobs, each given by digest and size (bytes as stored).

        zstd: version and level of the library for chunk frames, or None for a raw data object. annotations: more of
        them.
        """
        notes = {media.KIND: config.kind, media.ID: config.id, **(annotations or {})}
        if zstd is not None:
            notes[media.ZSTD] = zstd
        data_type = media.LAYER_DATA_RAW if zstd is None else media.LAYER_DATA_ZSTD
        value = {
            "schemaVersion": 2,
            "mediaType": media.OCI_MANIFEST,
            "artifactType": media.LAYER,
            "config": Descriptor(media.LAYER_CONFIG, config.id, len(config.canonical)).to_json(),
            "layers": [
                Descriptor(media.LAYER_METADATA, *metadata).to_json(),
                Descriptor(media.LAYER_CHUNKS, *chunks).to_json(),
                Descriptor(data_type, *data).to_json(),
            ],
            "annotations": notes,
        }
        return cls.parse(canonical_json(value))

    @classmethod
    def parse(cls, data: bytes) -> LayerManifest:
        """Parse a layer's manifest; raises IntegrityError with what was found and what was expected."""
        what = "layer manifest"
        value = _artifact(data, what, media.OCI_MANIFEST, media.LAYER)
        config = Descriptor.parse(value.get("config"), f"{what}: config")
        if config.media_type != media.LAYER_CONFIG:
            raise IntegrityError(f"{what}: found config type {show(config.media_type)}, expected {media.LAYER_CONFIG}")
        layers = value.get("layers")
        if not isinstance(layers, list) or len(layers) != 3:
            found = len(layers) if isinstance(layers, list) else layers
            raise IntegrityError(f"{what}: found {show(found)} layers, expected 3 (metadata, chunks, data)")
        blobs = [Descriptor.parse(layer, f"{what}: layer {index}") for index, layer in enumerate(layers)]
        expected = [(media.LAYER_METADATA,), (media.LAYER_CHUNKS,), (media.LAYER_DATA_ZSTD, media.LAYER_DATA_RAW)]
        for index, (blob, types) in enumerate(zip(blobs, expected, strict=True)):
            if blob.media_type not in types:
                raise IntegrityError(f"{what}: layer {index} is {show(blob.media_type)}, expected {' or '.join(types)}")
        notes = _annotations(value, what)
        if notes.get(media.ID, config.digest) != config.digest:
            raise IntegrityError(
                f"{what}: annotation {media.ID} is {show(notes[media.ID])}, the config is {config.digest}"
            )
        metadata, chunks, blob = blobs
        return cls(config, metadata, chunks, blob, notes, bytes(data), digest_of(data))

    @property
    def layer_id(self) -> str:
        return self.config.digest

    @property
    def zstd(self) -> bool:
        """Whether the data object is chunk frames (else raw)."""
        return self.data.media_type == media.LAYER_DATA_ZSTD

    def blobs(self) -> list[Descriptor]:
        """Everything the manifest names, small things first."""
        return [self.config, self.chunks, self.metadata, self.data]


def environment_id(layer_ids: Iterable[str]) -> str:
    """``sha256:…`` of the concatenated layer ids (32 raw bytes each), base first."""
    return "sha256:" + hashlib.sha256(b"".join(map(digest_bytes, layer_ids))).hexdigest()


@dataclass(frozen=True)
class EnvironmentLayer:
    """One layer of an environment. ``source``: ``HOST[:PORT]/NAME`` where it can be read when this store lacks it.

    ``kind`` and ``id`` are what the index says; a foreign writer may have left them out, and the layer's manifest
    decides.
    """

    manifest_digest: str
    manifest_size: int
    kind: str | None = None
    id: str | None = None
    source: str | None = None

    def descriptor(self) -> Descriptor:
        notes = {media.KIND: self.kind, media.ID: self.id, media.SOURCE: self.source}
        present = {key: text for key, text in notes.items() if text is not None}
        return Descriptor(media.OCI_MANIFEST, self.manifest_digest, self.manifest_size, media.LAYER, present)


@dataclass(frozen=True)
class EnvironmentIndex:
    """An environment: its layers, base first. ``raw`` are the bytes that ``digest`` names."""

    layers: tuple[EnvironmentLayer, ...]
    subject: Descriptor | None
    annotations: Mapping[str, str]
    raw: bytes = field(repr=False)
    digest: str

    @classmethod
    def build(
        cls,
        layers: Sequence[EnvironmentLayer],
        *,
        subject: Descriptor | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> EnvironmentIndex:
        value: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": media.OCI_INDEX,
            "artifactType": media.ENVIRONMENT,
            "manifests": [layer.descriptor().to_json() for layer in layers],
        }
        if subject is not None:
            value["subject"] = subject.to_json()
        notes = dict(annotations or {})
        ids = [layer.id for layer in layers if layer.id is not None]
        if len(ids) == len(layers):
            notes[media.ID] = environment_id(ids)
        if notes:
            value["annotations"] = notes
        return cls.parse(canonical_json(value))

    @classmethod
    def parse(cls, data: bytes) -> EnvironmentIndex:
        """Parse an environment's index; raises IntegrityError with what was found and what was expected."""
        what = "environment"
        value = _artifact(data, what, media.OCI_INDEX, media.ENVIRONMENT)
        manifests = value.get("manifests")
        if not isinstance(manifests, list) or not manifests:
            raise IntegrityError(f"{what}: manifests are {show(manifests)}, expected at least one layer")
        if len(manifests) > media.MAX_LAYERS:
            raise IntegrityError(f"{what}: found {len(manifests)} layers, expected at most {media.MAX_LAYERS}")
        layers = []
        for index, item in enumerate(manifests):
            descriptor = Descriptor.parse(item, f"{what}: layer {index}")
            if descriptor.media_type != media.OCI_MANIFEST:
                raise IntegrityError(
                    f"{what}: layer {index} is {show(descriptor.media_type)}, expected {media.OCI_MANIFEST}"
                )
            notes = descriptor.annotations
            layer_id, kind = notes.get(media.ID), notes.get(media.KIND)
            if layer_id is not None and not is_digest(layer_id):
                raise IntegrityError(f"{what}: layer {index} has the id {show(layer_id)}, expected a digest")
            if kind is not None and kind not in media.KINDS:
                raise IntegrityError(
                    f"{what}: layer {index} has kind {show(kind)}, expected one of {', '.join(media.KINDS)}"
                )
            layers.append(EnvironmentLayer(descriptor.digest, descriptor.size, kind, layer_id, notes.get(media.SOURCE)))
        subject = value.get("subject")
        return cls(
            tuple(layers),
            None if subject is None else Descriptor.parse(subject, f"{what}: subject"),
            _annotations(value, what),
            bytes(data),
            digest_of(data),
        )

    @property
    def id(self) -> str | None:
        """The environment's id, when the index names every layer's id."""
        ids = [layer.id for layer in self.layers if layer.id is not None]
        return environment_id(ids) if len(ids) == len(self.layers) else None


def parse_manifest(data: bytes) -> LayerManifest | EnvironmentIndex:
    """Parse whichever of the two it is; raises WrongKind for another artifact, IntegrityError for one that is
    malformed.
    """
    if len(data) > MANIFEST_MAX:
        raise IntegrityError(f"manifest: found {len(data)} bytes, expected at most {MANIFEST_MAX}")
    kind = parse_json_object(data, "manifest").get("artifactType")
    if kind == media.LAYER:
        return LayerManifest.parse(data)
    if kind == media.ENVIRONMENT:
        return EnvironmentIndex.parse(data)
    if kind is None:
        raise WrongKind(
            "manifest: no artifactType, expected a layer or an environment of dsec; an index copied by skopeo loses it"
        )
    raise WrongKind(f"manifest: found artifact type {show(kind)}, expected a layer or an environment of dsec")
