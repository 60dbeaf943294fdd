from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from dsec_store.canonical import canonical_json
from dsec_store.config import LayerConfig, this_architecture
from dsec_store.errors import IntegrityError

META, ROOT = "sha256:" + "a" * 64, "sha256:" + "b" * 64
RUN = {
    "Env": ["A=1"],
    "Entrypoint": ["sh"],
    "Cmd": ["-c", "true"],
    "User": "u",
    "WorkingDir": "/w",
    "Labels": {"k": "v"},
}


def config(**changes: Any) -> LayerConfig:
    values: dict[str, Any] = {
        "kind": "base",
        "metadata_digest": META,
        "metadata_size": 8192,
        "data_size": 4096,
        "data_root": ROOT,
        "inodes": 7,
        "run": RUN,
    }
    return LayerConfig(**{**values, **changes})


def document(**changes: Any) -> bytes:
    value = json.loads(config().canonical)
    value.update(changes)
    return canonical_json(value)


def refuse(data: bytes, *words: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        LayerConfig.parse(data)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_config_is_the_canonical_json_of_the_format_page() -> None:
    assert config(kind="diff", run={}).canonical.decode() == (
        f'{{"architecture":"{this_architecture()}","data":{{"chunk_size":262144,"root":"{ROOT}","size":4096}},"inodes":7,'
        f'"kind":"diff","metadata":{{"digest":"{META}","size":8192}},"os":"linux","run":{{"Cmd":[],"Entrypoint":[],"Env":[],'
        '"Labels":{},"User":"","WorkingDir":""},"schema":1}'
    )


def test_the_id_is_the_digest_of_the_config() -> None:
    made = config()
    assert made.id == "sha256:" + hashlib.sha256(made.canonical).hexdigest()
    read = LayerConfig.parse(made.canonical)
    assert read == made
    assert read.id == made.id


def test_a_newer_schema_is_refused_by_number() -> None:
    refuse(document(schema=2, surprise=1), "schema 2", "schema 1")


@pytest.mark.parametrize("schema", [None, "1", 1.5, True, 0])
def test_another_schema_is_refused(schema: Any) -> None:
    refuse(document(schema=schema), "schema")


def test_unknown_and_missing_keys_are_refused() -> None:
    refuse(document(extra=1), "extra")
    value = json.loads(config().canonical)
    del value["inodes"]
    refuse(canonical_json(value), "inodes")
    refuse(document(data={"size": 0, "chunk_size": 262144, "root": ROOT, "x": 1}), "data")
    refuse(document(run={"Env": [], "Volumes": {}}), "Volumes")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kind": "image"}, "kind"),
        ({"kind": 3}, "kind"),
        ({"inodes": -1}, "inodes"),
        ({"inodes": True}, "inodes"),
        ({"os": None}, "os"),
        ({"metadata": {"digest": "sha256:0", "size": 1}}, "metadata.digest"),
        ({"metadata": {"digest": META, "size": "1"}}, "metadata.size"),
        ({"metadata": []}, "metadata"),
        ({"data": {"size": 100, "chunk_size": 262144, "root": ROOT}}, "4096"),
        ({"data": {"size": 0, "chunk_size": 4096, "root": ROOT}}, "chunk_size"),
        ({"data": {"size": 0, "chunk_size": 262144, "root": META.upper()}}, "data.root"),
        ({"run": []}, "run"),
        ({"run": {"Env": "A=1"}}, "run.Env"),
        ({"run": {"Env": [1]}}, "run.Env"),
        ({"run": {"Labels": {"a": 1}}}, "run.Labels"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], word: str) -> None:
    refuse(document(**changes), word)


@pytest.mark.parametrize("kind", ["workspace", "toolkit", "diff"])
def test_only_a_base_carries_a_run_part(kind: str) -> None:
    refuse(document(kind=kind), kind, "run")


def test_bytes_that_are_not_canonical_are_refused() -> None:
    refuse(json.dumps(json.loads(config().canonical)).encode(), "canonical")
    refuse(config().canonical + b"\n", "canonical")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"schema":1,"schema":1}', b"[" * 100_000])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    refuse(data)


def test_text_that_is_not_unicode_has_no_canonical_form() -> None:
    with pytest.raises(IntegrityError, match="canonical"):
        _ = config(run={"Env": ["A=\udcff"]}).canonical
