"""Which environments may be composed, and what a refused one leaves behind."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_linux.mounts import attach, umount
from dsec_store.errors import DsecError, NodeError, ReferenceUnknown, WrongKind
from dsec_store.home import Home
from dsec_store.layers.store import LayerStore
from dsec_store.manifest import EnvironmentIndex
from dsec_store.node.core import Node
from dsec_store.node.protocol import LayerArg, MountRequest
from dsec_store.node.records import read_records
from dsec_store.refs import parse_reference
from tests.dsec_store.node.conftest import build, content, mounting
from tests.hostile import ANY, HostileRegistry, status

MakeNode = Callable[..., Node]


def request(*layers: tuple[str, str | None] | str, mount_id: str = "test") -> MountRequest:
    arguments = [LayerArg(layer) if isinstance(layer, str) else LayerArg(*layer) for layer in layers]
    return MountRequest(mount_id, arguments, None, None, {"target": "/nowhere"})


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (["work:1"], "kind workspace; expected a base layer or an environment first"),
        (["tool:1", "base:1"], "kind toolkit; expected a base layer or an environment first"),
        (["base:1", "base:1"], "expected a workspace, toolkit or diff"),
        ([("base:1", "base"), ("work:1", "toolkit")], "work:1 is of kind workspace; expected a layer of kind toolkit"),
        ([], "no layer was named"),
    ],
    ids=["workspace-alone", "toolkit-first", "two-bases", "wrong-role", "nothing"],
)
def test_layers_of_the_wrong_kind_are_refused_with_the_name(
    publisher: Home, layers: list[tuple[str, str | None] | str], said: str
) -> None:
    node = Node(publisher)
    try:
        with pytest.raises(WrongKind, match=said):
            node.mount(request(*layers))
        assert read_records(publisher) == []
    finally:
        node.close()


def test_an_unknown_reference_is_named(publisher: Home) -> None:
    node = Node(publisher)
    try:
        with pytest.raises(ReferenceUnknown, match="absent"):
            node.mount(request("base:1", "absent:2"))
        assert read_records(publisher) == []
    finally:
        node.close()


def test_an_unknown_reference_of_a_registry_is_named(
    make_node: MakeNode, home: Home, registry: HostileRegistry
) -> None:
    with pytest.raises(ReferenceUnknown, match=f"{registry.host}/absent:2"):
        make_node().mount(request(f"{registry.host}/absent:2"))


def test_a_registry_that_is_down_is_one_clear_error(make_node: MakeNode, registry: HostileRegistry) -> None:
    registry.set(ANY, status(503))
    node = make_node()
    with pytest.raises(DsecError, match="503"):
        node.mount(request(f"{registry.host}/base:1"))
    registry.clear()
    mounted, fd = node.mount(request(f"{registry.host}/base:1"))  # and it heals
    os.close(fd)
    node.release(mounted.id)


def test_whole_local_layers_are_given_to_the_kernel_directly(publisher: Home, tmp_path: Path) -> None:
    node = Node(publisher)
    try:
        with mounting(node, tmp_path / "at", "base:1", "work:1") as at:
            assert [layer["export"] for layer in at.mounted.layers] == ["direct", "direct"]
            assert (at.path / "big" / "0").read_bytes() == content("base-0")
            assert node.stats()["layers"][0]["chunks_touched"] is None
    finally:
        node.close()


def test_a_local_layer_without_its_raw_file_is_served_from_the_store(publisher: Home, tmp_path: Path) -> None:
    for path in publisher.raw.iterdir():
        path.unlink()
    node = Node(publisher)
    try:
        with mounting(node, tmp_path / "at", "base:1") as at:
            assert at.mounted.layers[0]["export"] == "fuse"
            assert (at.path / "big" / "0").read_bytes() == content("base-0")
    finally:
        node.close()


def test_a_damaged_blob_of_the_store_is_eio_and_not_wrong_bytes(publisher: Home, tmp_path: Path) -> None:
    for path in publisher.raw.iterdir():
        path.unlink()
    layer = LayerStore(publisher).resolve(parse_reference("base:1"))
    store = publisher.store / "blobs" / "sha256"
    digest = layer.manifest.data.digest.removeprefix("sha256:")  # type: ignore[union-attr]
    data = store / digest[:2] / digest
    data.chmod(0o600)
    with open(data, "r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 64)
    node = Node(publisher, deadline=2)
    try:
        with mounting(node, tmp_path / "at", "base:1") as at, pytest.raises(OSError):
            (at.path / "big" / "0").read_bytes()
    finally:
        node.close()


def test_a_damaged_metadata_image_is_made_again(publisher: Home, tmp_path: Path) -> None:
    for turn in range(2):
        node = Node(publisher)
        try:
            with mounting(node, tmp_path / "at", "base:1", "work:1") as at:
                assert (at.path / "hello").read_text() == "from the workspace\n", turn
        finally:
            node.close()
        for image in publisher.meta.glob("*.erofs"):
            with open(image, "r+b") as file:
                file.seek(1300)
                file.write(os.urandom(200))


def test_devices_of_a_layer_cannot_be_opened(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "devices"
    folder.mkdir()
    os.mknod(folder / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    build(home, folder, "devices:1", "base")
    (tmp_path / "more").mkdir()
    build(home, tmp_path / "more", "more:1", "workspace")
    node = Node(home)
    try:
        for references in (["devices:1"], ["devices:1", "more:1"]):
            with mounting(node, tmp_path / "at", *references) as at:
                assert stat.S_ISCHR((at.path / "zero").stat().st_mode)
                with pytest.raises(PermissionError):
                    (at.path / "zero").read_bytes()
    finally:
        node.close()


def test_a_record_names_the_layers_while_the_environment_is_mounted(publisher: Home, tmp_path: Path) -> None:
    node = Node(publisher)
    try:
        with mounting(node, tmp_path / "at", "base:1", "work:1") as at:
            [record] = read_records(publisher)
            assert [layer["id"] for layer in record["layers"]] == [layer["id"] for layer in at.mounted.layers]
            assert record["owner"] == {"target": str(at.path)}
            with pytest.raises(NodeError, match="exists already"):
                node.mount(request("base:1"))
        assert read_records(publisher) == []
    finally:
        node.close()


def test_an_environment_whose_owner_is_gone_is_released(publisher: Home, tmp_path: Path) -> None:
    node = Node(publisher)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        mounted, fd = node.mount(request("base:1"), pid=child)
        os.close(fd)
        assert node.reap() == [mounted.id]
        assert read_records(publisher) == []
        target = tmp_path / "at"
        target.mkdir()
        attached = MountRequest("attached", [LayerArg("base:1")], None, None, {"target": str(target)})
        mounted, fd = node.mount(attached, pid=child)
        attach(fd, str(target))
        os.close(fd)
        assert node.reap() == []
        umount(str(target))
        assert node.reap() == ["attached"]
    finally:
        node.close()


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "ü", "a" * 3 + "\n"])
def test_a_mount_id_is_a_plain_file_name(publisher: Home, bad: str) -> None:
    node = Node(publisher)
    try:
        with pytest.raises(NodeError, match="not a mount id"):
            node.mount(request("base:1", mount_id=bad))
    finally:
        node.close()


def test_an_image_that_was_changed_while_nobody_used_it_is_made_again(publisher: Home, tmp_path: Path) -> None:
    node = Node(publisher)
    try:
        with mounting(node, tmp_path / "at", "base:1") as at:
            assert (at.path / "hello").read_text() == "from the base\n"
        image = publisher.meta_file(node._resolver.resolve([LayerArg("base:1")], False)[0].config.metadata_digest)
        good = image.read_bytes()
        with open(image, "r+b") as file:
            file.seek(2000)
            file.write(bytes(500))
        with mounting(node, tmp_path / "at", "base:1") as at:
            assert (at.path / "hello").read_text() == "from the base\n"
            assert image.read_bytes() == good
    finally:
        node.close()


def test_a_layer_named_twice_counts_once(publisher: Home, tmp_path: Path) -> None:
    node = Node(publisher)
    try:
        with mounting(node, tmp_path / "at", "base:1", "work:1", "tool:1", "work:1") as at:
            assert (at.path / "hello").read_text() == "from the workspace\n"
            assert (at.path / "tool").exists()
    finally:
        node.close()


def test_a_manifest_that_was_changed_in_the_store_is_named(publisher: Home) -> None:
    digest = LayerStore(publisher).resolve(parse_reference("base:1")).digest.removeprefix("sha256:")
    path = publisher.store / "blobs" / "sha256" / digest[:2] / digest
    text = path.read_bytes()
    path.unlink()
    path.write_bytes(text.replace(b"zstd ", b"zsTd ", 1))
    node = Node(publisher)
    try:
        with pytest.raises(DsecError, match=rf"base:1.*{digest}"):
            node.mount(request("base:1"))
    finally:
        node.close()


def test_an_environment_that_says_other_kinds_than_its_layers_have_is_refused(publisher: Home) -> None:
    store = LayerStore(publisher)
    base = store.resolve(parse_reference("base:1"))
    entry = base.in_environment()  # type: ignore[union-attr]
    lie = EnvironmentIndex.build([replace(entry, kind="toolkit")])
    with store.backend.writer() as blob:
        blob.write(lie.raw)
        store.backend.publish([blob], "lie", "1", lie.digest)
    node = Node(publisher)
    try:
        with pytest.raises(DsecError, match=r"lie:1.*toolkit"):
            node.mount(request("lie:1"))
    finally:
        node.close()


def test_a_reference_by_digest_is_mounted_again_without_the_registry(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    digest = LayerStore(publisher).resolve(parse_reference("base:1")).digest
    node = make_node()
    by_digest = f"{registry.host}/base@{digest}"
    with mounting(node, tmp_path / "at", by_digest) as at:
        assert (at.path / "hello").read_text() == "from the base\n"
    registry.set(ANY, status(503))
    with mounting(node, tmp_path / "at", by_digest) as at:
        assert (at.path / "hello").read_text() == "from the base\n"
    with pytest.raises(DsecError, match="503"):
        node.mount(request(f"{registry.host}/base:1"))
