"""The config of a layer: canonical JSON whose sha256 is the layer's id (docs/formats.md §1).

It says what the layer is, not how its data is stored, so compressing a layer in another way does not change its id. It
holds no time and no host name: equal input gives an equal id.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsec_store.canonical import canonical_json, parse_json_object
from dsec_store.chunks import BLOCK, CHUNK
from dsec_store.digests import is_digest
from dsec_store.errors import IntegrityError
from dsec_store.media import KINDS
from erofs_tools.errors import show

SCHEMA = 1
_MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "i686": "386",
    "riscv64": "riscv64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
}
_RUN_EMPTY: dict[str, Any] = {"Env": [], "Entrypoint": [], "Cmd": [], "User": "", "WorkingDir": "", "Labels": {}}


def this_architecture() -> str:
    """This machine's name in OCI's words (``amd64``, ``arm64``)."""
    return _MACHINES.get(platform.machine(), platform.machine())


def empty_run() -> dict[str, Any]:
    """The execution part of a layer that says nothing about how to run it."""
    return {key: type(value)() for key, value in _RUN_EMPTY.items()}


def check_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The OCI image config's execution part with every key present; raises IntegrityError on another key or type."""
    unknown = set(run) - set(_RUN_EMPTY)
    if unknown:
        raise IntegrityError(f"layer config: run has unknown keys {show(sorted(unknown))}, expected {list(_RUN_EMPTY)}")
    full = empty_run()
    for key, value in run.items():
        if value is None:  # OCI writes null for an absent list
            continue
        expected = type(_RUN_EMPTY[key])
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, expected) or not all(isinstance(item, str) for item in items):
            raise IntegrityError(f"layer config: run.{key} is {show(value)}, expected a {expected.__name__} of text")
        full[key] = value
    return full


def _number(value: Any, what: str, expected: str = "a number of bytes") -> int:
    if type(value) is not int or value < 0:
        raise IntegrityError(f"layer config: {what} is {show(value)}, expected {expected}")
    return value


def _digest(value: Any, what: str) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise IntegrityError(f"layer config: {what} is {show(value)}, expected sha256: and 64 hexadecimal digits")
    return value


def _keys(value: Any, expected: set[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != expected:
        found = sorted(value) if isinstance(value, dict) else value
        raise IntegrityError(f"layer config: {what} has {show(found)}, expected the keys {sorted(expected)}")
    return value


@dataclass(frozen=True)
class LayerConfig:
    """Kind, the pair's two blobs by digest and size (bytes, uncompressed), number of inodes, platform, execution
    part.
    """

    kind: str
    metadata_digest: str
    metadata_size: int
    data_size: int
    data_root: str
    inodes: int
    os: str = "linux"
    architecture: str = field(default_factory=this_architecture)
    run: dict[str, Any] = field(default_factory=empty_run)

    @cached_property
    def canonical(self) -> bytes:
        """The config blob."""
        return canonical_json(
            {
                "schema": SCHEMA,
                "kind": self.kind,
                "metadata": {"digest": self.metadata_digest, "size": self.metadata_size},
                "data": {"size": self.data_size, "chunk_size": CHUNK, "root": self.data_root},
                "inodes": self.inodes,
                "os": self.os,
                "architecture": self.architecture,
                "run": self.run,
            }
        )

    @cached_property
    def id(self) -> str:
        """``sha256:…`` of the config blob."""
        return "sha256:" + hashlib.sha256(self.canonical).hexdigest()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise IntegrityError(f"layer config: kind is {show(self.kind)}, expected one of {', '.join(KINDS)}")
        object.__setattr__(self, "run", check_run(self.run))
        if self.kind != "base" and any(self.run.values()):
            raise IntegrityError(f"layer config: a layer of kind {self.kind} carries a run part; only a base may")
        if self.data_size % BLOCK:
            raise IntegrityError(f"layer config: data.size is {self.data_size}, expected a multiple of {BLOCK}")

    @classmethod
    def parse(cls, data: bytes) -> LayerConfig:
        """Parse a config blob strictly; raises IntegrityError on a newer schema, other keys, or bytes not in canonical
        form.
        """
        value = parse_json_object(data, "layer config")
        schema = value.get("schema")
        if schema != SCHEMA or type(schema) is not int:
            raise IntegrityError(f"layer config: found schema {show(schema)}, this program reads schema {SCHEMA}")
        _keys(value, {"schema", "kind", "metadata", "data", "inodes", "os", "architecture", "run"}, "the object")
        metadata = _keys(value["metadata"], {"digest", "size"}, "metadata")
        blob = _keys(value["data"], {"size", "chunk_size", "root"}, "data")
        if blob["chunk_size"] != CHUNK:
            raise IntegrityError(f"layer config: data.chunk_size is {show(blob['chunk_size'])}, expected {CHUNK}")
        for key in ("kind", "os", "architecture"):
            if not isinstance(value[key], str):
                raise IntegrityError(f"layer config: {key} is {show(value[key])}, expected text")
        if not isinstance(value["run"], dict):
            raise IntegrityError(f"layer config: run is {show(value['run'])}, expected an object")
        if canonical_json(value) != data:
            raise IntegrityError("layer config: the bytes are not canonical JSON (RFC 8785)")
        config = cls(
            kind=value["kind"],
            metadata_digest=_digest(metadata["digest"], "metadata.digest"),
            metadata_size=_number(metadata["size"], "metadata.size"),
            data_size=_number(blob["size"], "data.size"),
            data_root=_digest(blob["root"], "data.root"),
            inodes=_number(value["inodes"], "inodes", "how many there are"),
            os=value["os"],
            architecture=value["architecture"],
            run=value["run"],
        )
        # The id is the digest of these bytes, also where a foreign writer left run's empty keys out.
        config.__dict__["canonical"] = bytes(data)
        return config
