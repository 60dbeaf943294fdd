from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from dsec_store.digests import digest_of
from dsec_store.errors import BlobUnknown, ReferenceConflict, WrongKind
from dsec_store.home import Home
from dsec_store.layers.build import build_layer
from dsec_store.layers.environment import publish_environment
from dsec_store.layers.packdiff import layer_of_mount, pack_diff
from dsec_store.layers.store import Environment, Layer, LayerStore
from dsec_store.manifest import EnvironmentIndex, EnvironmentLayer
from dsec_store.refs import Reference
from erofs_tools.errors import SourceError

BASE, RESULT = Reference("base", "1"), Reference("result", "1")
ELSEWHERE = EnvironmentLayer("sha256:" + "1" * 64, 700, "base", "sha256:" + "2" * 64, "127.0.0.1:5000/base")


@pytest.fixture
def store(home: Home) -> LayerStore:
    return LayerStore(home)


@pytest.fixture
def base(store: LayerStore, tmp_path: Path) -> EnvironmentLayer:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "file").write_text("base")
    return build_layer(store, tmp_path / "base", BASE, "base").in_environment()


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "new").write_text("new")
    return tmp_path / "upper"


def files(store: LayerStore) -> list[Path]:
    return sorted(p for p in store.home.path.rglob("*") if p.is_file() and p.name != "lock")


def test_the_environment_is_the_sandbox_s_layers_and_the_diff(
    store: LayerStore, base: EnvironmentLayer, upper: Path
) -> None:
    packed = pack_diff(store, upper, [base], RESULT)
    found = store.resolve(RESULT)
    assert isinstance(found, Environment)
    assert found.index == packed.environment
    below, diff = found.layers
    assert below is not None and below.digest == base.manifest_digest
    assert diff is not None
    assert (diff.kind, diff.id, diff.digest) == ("diff", packed.layer.id, packed.layer.manifest_digest)
    assert not any(diff.config.run.values())
    assert store.home.raw_file(diff.id).stat().st_size == diff.config.data_size
    assert [layer.source for layer in found.index.layers] == [None, None]


def test_the_same_changes_give_the_same_layer_and_environment(
    store: LayerStore, base: EnvironmentLayer, upper: Path
) -> None:
    first = pack_diff(store, upper, [base], RESULT)
    before = files(store)
    second = pack_diff(store, upper, [base], Reference("other", "1"))
    assert (second.layer.id, second.environment.digest) == (first.layer.id, first.environment.digest)
    assert set(files(store)) - set(before) == {store.backend.ref_root / "other/_tags/1"}


def test_layers_that_are_not_here_keep_their_source_and_others_lose_it(
    store: LayerStore, base: EnvironmentLayer, upper: Path
) -> None:
    here = EnvironmentLayer(base.manifest_digest, base.manifest_size, "workspace", base.id, "127.0.0.1:5000/base")
    packed = pack_diff(store, upper, [ELSEWHERE, here], RESULT)
    assert [layer.source for layer in packed.environment.layers] == [ELSEWHERE.source, None, None]
    assert packed.environment.layers[0] == ELSEWHERE


def test_a_layer_that_is_nowhere_is_refused(store: LayerStore, upper: Path) -> None:
    before = files(store)
    nowhere = EnvironmentLayer(ELSEWHERE.manifest_digest, 700, "base", ELSEWHERE.id)
    with pytest.raises(BlobUnknown, match=ELSEWHERE.manifest_digest):
        pack_diff(store, upper, [nowhere], RESULT)
    assert files(store) == before


def test_without_a_reference_everything_is_there_by_digest(
    store: LayerStore, base: EnvironmentLayer, upper: Path
) -> None:
    packed = pack_diff(store, upper, [base], None)
    assert [r.name for r in store.backend.refs()] == ["base"]
    found = store.resolve(Reference("any", digest=packed.environment.digest))
    assert isinstance(found, Environment)


def test_an_upper_without_changes_gives_an_empty_diff(
    store: LayerStore, base: EnvironmentLayer, tmp_path: Path
) -> None:
    (tmp_path / "untouched").mkdir()
    packed = pack_diff(store, tmp_path / "untouched", [base], RESULT)
    assert (packed.layer.counts["inodes"], packed.layer.data_size) == (1, 0)


@pytest.mark.parametrize("name", ["trusted.overlay.redirect", "trusted.overlay.metacopy"])
def test_an_upper_that_lacks_content_is_refused_with_the_path(
    store: LayerStore, base: EnvironmentLayer, upper: Path, name: str
) -> None:
    os.setxattr(upper / "new", name, b"/elsewhere")
    before = files(store)
    with pytest.raises(SourceError, match="new"):
        pack_diff(store, upper, [base], RESULT)
    assert files(store) == before


def test_the_node_s_answer_names_the_layers(store: LayerStore, base: EnvironmentLayer) -> None:
    answer = {"id": base.id, "kind": "base", "manifest": base.manifest_digest, "source": None, "export": "direct"}
    assert layer_of_mount(store, answer) == base
    assert layer_of_mount(store, {**answer, "manifest_size": 5, "source": "h:1/n"}).source == "h:1/n"


def test_ten_megabytes_are_packed_in_150_ms_without_touching_what_is_below(store: LayerStore, tmp_path: Path) -> None:
    """None of the layers below is on this machine: time cannot depend on them."""
    upper = tmp_path / "upper"
    source = random.Random(1)
    for index in range(40):
        (upper / f"d{index % 5}").mkdir(parents=True, exist_ok=True)
        (upper / f"d{index % 5}" / f"f{index}").write_bytes(source.randbytes(125_000) + b"text and text\n" * 9000)
    layers = [ELSEWHERE] + [
        EnvironmentLayer(digest_of(bytes([i])), 700, "workspace", digest_of(b"%d" % i), "127.0.0.1:5000/w")
        for i in range(30)
    ]
    times = []
    for attempt in range(7):
        (upper / "changed").write_bytes(b"%d" % attempt)  # else the blobs are there already
        start = time.perf_counter()
        packed = pack_diff(store, upper, layers, RESULT)
        times.append(time.perf_counter() - start)
    assert packed.layer.data_size > 10_000_000
    # The smallest: other work on the machine only adds.
    assert min(times) < 0.150, times


# Environments


def test_an_environment_begins_with_its_only_base(store: LayerStore, base: EnvironmentLayer) -> None:
    tool = EnvironmentLayer(base.manifest_digest, base.manifest_size, "toolkit", base.id)
    index = publish_environment(store, [base, tool], RESULT)
    assert store.backend.get_ref("result", "1") == index.digest
    for layers, word in (([], "without layers"), ([tool, base], "kind toolkit"), ([base, base], "place 2")):
        with pytest.raises(WrongKind, match=word):
            publish_environment(store, layers, Reference("bad", "1"))


def test_an_environment_of_layers_that_are_nowhere_is_refused(store: LayerStore) -> None:
    nowhere = EnvironmentLayer(ELSEWHERE.manifest_digest, 700, "base", ELSEWHERE.id)
    with pytest.raises(BlobUnknown):
        publish_environment(store, [nowhere], RESULT)
    assert list(store.list()) == []


def test_an_environment_is_listed_and_shown_with_what_is_here(
    store: LayerStore, base: EnvironmentLayer, upper: Path
) -> None:
    packed = pack_diff(store, upper, [ELSEWHERE, EnvironmentLayer(**{**vars(base), "kind": "workspace"})], RESULT)
    (listed,) = [item for item in store.list() if item.reference == "result:1"]
    assert (listed.kind, listed.id, listed.manifest) == (
        "environment",
        packed.environment.id,
        packed.environment.digest,
    )
    shown = store.show(RESULT)
    assert [layer["local"] for layer in shown["layers"]] == [False, True, True]
    assert shown["layers"][0]["source"] == "127.0.0.1:5000/base"
    assert EnvironmentIndex.build(packed.environment.layers).digest == shown["manifest"]


def test_a_layer_is_not_an_environment(store: LayerStore, base: EnvironmentLayer) -> None:
    assert isinstance(store.load_layer(base.manifest_digest), Layer)
    index = publish_environment(store, [base], RESULT)
    with pytest.raises(WrongKind, match="environment"):
        store.load_layer(index.digest)
    with pytest.raises(ReferenceConflict), store.backend.writer() as blob:
        blob.write(index.raw)
        store.publish([blob], RESULT, index.digest, expected=None)
