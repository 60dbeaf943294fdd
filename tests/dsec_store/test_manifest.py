from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from dsec_store import media
from dsec_store.canonical import canonical_json
from dsec_store.config import LayerConfig
from dsec_store.digests import digest_of
from dsec_store.errors import IntegrityError, WrongKind
from dsec_store.manifest import (
    Descriptor,
    EnvironmentIndex,
    EnvironmentLayer,
    LayerManifest,
    environment_id,
    parse_manifest,
)

CONFIG = LayerConfig("toolkit", "sha256:" + "a" * 64, 4096, 0, "sha256:" + hashlib.sha256(b"").hexdigest(), 1)
BLOB = ("sha256:" + "c" * 64, 10)


def manifest(zstd: str | None = "zstd 1.5.7 level 3") -> LayerManifest:
    return LayerManifest.build(CONFIG, metadata=BLOB, chunks=BLOB, data=BLOB, zstd=zstd)


def environment() -> EnvironmentIndex:
    return EnvironmentIndex.build(
        [
            EnvironmentLayer("sha256:" + "1" * 64, 100, "base", "sha256:" + "2" * 64, "127.0.0.1:5000/base"),
            EnvironmentLayer("sha256:" + "3" * 64, 101, "diff", "sha256:" + "4" * 64),
        ]
    )


def changed(data: bytes, change: Any) -> bytes:
    value = json.loads(data)
    change(value)
    return canonical_json(value)


def refuse(data: bytes, *words: str) -> None:
    with pytest.raises((IntegrityError, WrongKind)) as caught:
        parse_manifest(data)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_layer_is_an_artifact_with_three_layers_in_order() -> None:
    made = manifest()
    value = json.loads(made.raw)
    assert value["schemaVersion"] == 2
    assert value["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert value["artifactType"] == "application/vnd.dsec.layer.v1"
    assert value["config"] == {
        "mediaType": "application/vnd.dsec.layer.config.v1+json",
        "digest": CONFIG.id,
        "size": len(CONFIG.canonical),
    }
    assert [layer["mediaType"] for layer in value["layers"]] == [
        "application/vnd.dsec.layer.metadata.v1.erofs+zstd",
        "application/vnd.dsec.layer.chunks.v1",
        "application/vnd.dsec.layer.data.v1+zstd",
    ]
    assert value["annotations"] == {
        "dev.dsec.kind": "toolkit",
        "dev.dsec.id": CONFIG.id,
        "dev.dsec.zstd": "zstd 1.5.7 level 3",
    }
    assert made.digest == digest_of(made.raw)
    assert parse_manifest(made.raw) == made
    assert made.zstd and not manifest(None).zstd
    assert [blob.digest for blob in made.blobs()] == [CONFIG.id, BLOB[0], BLOB[0], BLOB[0]]


def test_an_environment_is_an_index_of_its_layers_base_first() -> None:
    made = environment()
    value = json.loads(made.raw)
    assert value["mediaType"] == "application/vnd.oci.image.index.v1+json"
    assert value["artifactType"] == "application/vnd.dsec.environment.v1"
    assert [item["digest"][7] for item in value["manifests"]] == ["1", "3"]
    assert value["manifests"][0]["annotations"]["dev.dsec.source"] == "127.0.0.1:5000/base"
    assert "dev.dsec.source" not in value["manifests"][1]["annotations"]
    assert parse_manifest(made.raw) == made
    joined = bytes.fromhex("2" * 64) + bytes.fromhex("4" * 64)
    assert made.id == environment_id(["sha256:" + "2" * 64, "sha256:" + "4" * 64])
    assert made.id == "sha256:" + hashlib.sha256(joined).hexdigest()


def test_an_index_of_another_writer_may_leave_our_annotations_out() -> None:
    def drop(value: dict[str, Any]) -> None:
        del value["annotations"]
        for item in value["manifests"]:
            del item["annotations"]
            del item["artifactType"]

    read = EnvironmentIndex.parse(changed(environment().raw, drop))
    assert read.id is None
    assert [layer.id for layer in read.layers] == [None, None]


def test_a_subject_is_kept() -> None:
    subject = Descriptor(media.OCI_MANIFEST, "sha256:" + "9" * 64, 5)
    made = EnvironmentIndex.build(environment().layers, subject=subject)
    assert EnvironmentIndex.parse(made.raw).subject == subject


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda v: v.update(schemaVersion=1), "schemaVersion"),
        (lambda v: v.update(mediaType=media.OCI_INDEX), "media type"),
        (lambda v: v.update(artifactType="application/x"), "artifact type"),
        (lambda v: v.pop("artifactType"), "no artifactType"),
        (lambda v: v["layers"].pop(), "2 layers"),
        (lambda v: v["layers"].append(v["layers"][0]), "4 layers"),
        (lambda v: v["layers"].reverse(), "layer 0"),
        (lambda v: v.update(layers={}), "layers"),
        (lambda v: v["layers"][1].update(size=-1), "size"),
        (lambda v: v["layers"][1].update(size=True), "size"),
        (lambda v: v["layers"][1].update(digest="sha256:../../etc/passwd"), "digest"),
        (lambda v: v["layers"][1].pop("mediaType"), "mediaType"),
        (lambda v: v["config"].update(mediaType="application/vnd.oci.image.config.v1+json"), "config"),
        (lambda v: v.pop("config"), "config"),
        (lambda v: v["annotations"].update({"dev.dsec.id": "sha256:" + "0" * 64}), "dev.dsec.id"),
        (lambda v: v["annotations"].update({"x": 1}), "annotations"),
    ],
)
def test_a_layer_manifest_that_is_wrong_is_refused_by_what_is_wrong(change: Any, word: str) -> None:
    refuse(changed(manifest().raw, change), word)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda v: v.update(manifests=[]), "at least one"),
        (lambda v: v.update(manifests=None), "at least one"),
        (lambda v: v["manifests"][0].update(mediaType=media.OCI_INDEX), "layer 0"),
        (lambda v: v["manifests"][1].update(digest="sha512:" + "0" * 128), "layer 1"),
        (lambda v: v["manifests"][1]["annotations"].update({"dev.dsec.kind": "hat"}), "hat"),
        (lambda v: v["manifests"][1]["annotations"].update({"dev.dsec.id": "x"}), "id"),
        (lambda v: v.update(subject={}), "subject"),
    ],
)
def test_an_environment_that_is_wrong_is_refused_by_what_is_wrong(change: Any, word: str) -> None:
    refuse(changed(environment().raw, change), word)


def test_an_ordinary_image_is_of_another_kind() -> None:
    with pytest.raises(WrongKind, match="a layer or an environment"):
        parse_manifest(b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json"}')


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b"\x00" * 100, b'{"artifactType":1,"artifactType":1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    refuse(data)
