"""Layers and environments with other people's tools: docker-registry as a server, skopeo as a client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_store.home import Home
from dsec_store.layers.build import build_layer
from dsec_store.layers.environment import publish_environment
from dsec_store.layers.store import LayerStore
from dsec_store.refs import Reference, parse_reference
from dsec_store.registry.client import RegistryClient
from dsec_store.registry.transfer import pull, push
from tests.servers import docker_registry, registry_thread


def ref(text: str) -> Reference:
    return parse_reference(text)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> LayerStore:
    """A store with base:1, empty:1 (no contents), and env:1 of both."""
    folder = tmp_path_factory.mktemp("origin")
    store = LayerStore(Home(folder / "home"))
    (folder / "base").mkdir()
    (folder / "base" / "data").write_bytes(bytes(range(256)) * 8000)
    (folder / "empty").mkdir()
    layers = [
        build_layer(store, folder / "base", ref("base:1"), "base"),
        build_layer(store, folder / "empty", ref("empty:1"), "toolkit"),
    ]
    publish_environment(store, [layer.in_environment() for layer in layers], ref("env:1"))
    return store


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("docker") / "registry") as host:
        yield host


def skopeo(*args: str | Path) -> str:
    done = subprocess.run(["skopeo", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["base", "empty", "env"])
def test_docker_registry_keeps_what_we_push(origin: LayerStore, docker: str, tmp_path: Path, name: str) -> None:
    sent = push(origin, ref(f"{name}:1"), ref(f"{docker}/kept/{name}:1"))
    here = LayerStore(Home(tmp_path / "here"))
    got = pull(here, ref(f"{docker}/kept/{name}:1"), raw=True)
    assert (got.id, got.digest) == (sent.id, sent.digest)
    assert here.resolve(ref(f"kept/{name}:1")).id == origin.resolve(ref(f"{name}:1")).id
    for digest in here.backend.blobs():
        assert here.backend.read(digest) == origin.backend.read(digest)
    assert push(origin, ref(f"{name}:1"), ref(f"{docker}/kept/{name}:2")).bytes_sent == 0


def test_docker_registry_answers_our_ranges(origin: LayerStore, docker: str) -> None:
    push(origin, ref("base:1"), ref(f"{docker}/ranges:1"))
    digest = origin.load_layer(origin.backend.get_ref("base", "1")).manifest.data.digest
    with RegistryClient(docker) as client:
        assert client.read_range("ranges", digest, 10, 100) == origin.backend.read(digest, 10, 100)
        assert client.blob_size("ranges", digest) == origin.backend.stat(digest)


def test_docker_registry_mounts_blobs_between_repositories(origin: LayerStore, docker: str, tmp_path: Path) -> None:
    push(origin, ref("base:1"), ref(f"{docker}/from:1"))
    here = LayerStore(Home(tmp_path / "here"))
    layer = origin.load_layer(origin.backend.get_ref("base", "1")).in_environment(f"{docker}/from")
    publish_environment(here, [layer], ref("env:1"))
    sent = push(here, ref("env:1"), ref(f"{docker}/to:1"))
    assert (sent.blobs_sent, sent.blobs_present) == (0, 4)
    assert pull(here, ref(f"{docker}/to:1")).id == sent.id


@pytest.mark.parametrize("name", ["base", "empty"])
def test_skopeo_copies_a_layer_from_us_to_a_layout_and_on(
    origin: LayerStore, docker: str, tmp_path: Path, name: str
) -> None:
    layout, digest = tmp_path / "layout", origin.backend.get_ref(name, "1")
    far = LayerStore(Home(tmp_path / "far"))
    with registry_thread(far.backend) as host:
        push(origin, ref(f"{name}:1"), ref(f"{host}/x/{name}:1"))
        raw = skopeo("inspect", "--raw", "--tls-verify=false", f"docker://{host}/x/{name}:1")
        assert raw.encode() == origin.backend.read(digest)
        skopeo("copy", "--src-tls-verify=false", f"docker://{host}/x/{name}:1", f"oci:{layout}:one")
    index = json.loads((layout / "index.json").read_text())
    assert [one["digest"] for one in index["manifests"]] == [digest]
    skopeo("copy", "--dest-tls-verify=false", f"oci:{layout}:one", f"docker://{docker}/copied/{name}:1")
    here = LayerStore(Home(tmp_path / "here"))
    pull(here, ref(f"{docker}/copied/{name}:1"), raw=True)
    assert here.backend.get_ref(f"copied/{name}", "1") == digest


def test_skopeo_copies_the_layers_of_an_environment(origin: LayerStore, docker: str, tmp_path: Path) -> None:
    """skopeo 1.9 writes an index anew and drops what its version of OCI did not know (artifactType); the layers'
    manifests keep their bytes."""
    with registry_thread(origin.backend) as host:
        where = ["--src-tls-verify=false", f"docker://{host}/env:1", f"oci:{tmp_path / 'layout'}:one"]
        skopeo("copy", "--all", *where)
    target = f"docker://{docker}/copied/env:1"
    skopeo("copy", "--all", "--dest-tls-verify=false", f"oci:{tmp_path / 'layout'}:one", target)
    here = LayerStore(Home(tmp_path / "here"))
    for name in ("base", "empty"):
        digest = origin.backend.get_ref(name, "1")
        pull(here, ref(f"{docker}/copied/env@{digest}"), ref(f"{name}:1"))
        assert here.backend.get_ref(name, "1") == digest
