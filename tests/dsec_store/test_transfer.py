"""Push and pull: equal ids on both sides, nothing sent twice, nothing visible that is not whole."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec_store import media
from dsec_store.chunks import CHUNK, HEADER_SIZE, RAW, ChunkRecord, ChunkTable
from dsec_store.dataobject import decode_chunk, encode_metadata
from dsec_store.errors import (
    BlobUnknown,
    DsecError,
    IntegrityError,
    ReferenceInvalid,
    ReferenceUnknown,
    RegistryError,
    StoreFull,
    WrongKind,
)
from dsec_store.home import Home
from dsec_store.layers.build import BuiltLayer, build_layer
from dsec_store.layers.environment import publish_environment
from dsec_store.layers.packdiff import pack_diff
from dsec_store.layers.store import Layer, LayerStore
from dsec_store.manifest import EnvironmentIndex, EnvironmentLayer, LayerManifest
from dsec_store.refs import Reference, parse_reference
from dsec_store.registry.transfer import pull, push
from erofs_tools.ondisk import BLOCK, CHECKSUM_OFFSET, SUPER_OFFSET, checksum
from tests import hostile
from tests.conftest import Dsec
from tests.hostile import HostileRegistry
from tests.servers import registry_process, registry_thread


def build(store: LayerStore, folder: Path, name: str, kind: str, seed: int) -> BuiltLayer:
    """A layer with a hole, small files, and 1.5 MB that does not compress."""
    source = folder / f"{name}-source"
    (source / "sub").mkdir(parents=True)
    (source / "random").write_bytes(b"".join(hashlib.sha512(b"%d/%d" % (seed, i)).digest() for i in range(24_000)))
    (source / "zeros").write_bytes(bytes(3 * CHUNK) + b"end")
    for i in range(20):
        (source / "sub" / f"{i}").write_text(f"{seed} {i}\n" * 100)
    return build_layer(store, source, parse_reference(f"{name}:1"), kind)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> LayerStore:
    """A store with base:1, work:1, and env:1 of both."""
    folder = tmp_path_factory.mktemp("origin")
    store = LayerStore(Home(folder / "home"))
    layers = [build(store, folder, "base", "base", 1), build(store, folder, "work", "workspace", 2)]
    publish_environment(store, [layer.in_environment() for layer in layers], parse_reference("env:1"))
    return store


@pytest.fixture
def far(tmp_path: Path) -> LayerStore:
    """The store behind the registry."""
    return LayerStore(Home(tmp_path / "far"))


@pytest.fixture
def host(far: LayerStore) -> Iterator[str]:
    with registry_thread(far.backend) as host:
        yield host


@pytest.fixture
def here(tmp_path: Path) -> LayerStore:
    """An empty store."""
    return LayerStore(Home(tmp_path / "here"))


def ref(text: str) -> Reference:
    return parse_reference(text)


def contents(store: LayerStore) -> set[str]:
    """Every file of a store and its raw folder, and descriptors of this process without a name there."""
    named = {str(path) for top in (store.home.store, store.home.raw) for path in top.rglob("*") if path.is_file()}
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {path for path in named if not path.endswith("/lock")} | {
        link for link in links if link.startswith(str(store.home.path)) and "(deleted)" in link
    }


# Copies


def test_a_layer_comes_back_as_it_was(origin: LayerStore, host: str, here: LayerStore) -> None:
    sent = push(origin, ref("base:1"), ref(f"{host}/x/base:1"))
    assert (sent.blobs_sent, sent.blobs_present) == (4, 0)
    got = pull(here, ref(f"{host}/x/base:1"), ref("copy:1"))
    layer, copy = origin.resolve(ref("base:1")), here.resolve(ref("copy:1"))
    assert (copy.id, copy.digest) == (layer.id, layer.digest) == (got.id, got.digest)
    assert got.bytes_sent == sent.bytes_sent
    for digest in here.backend.blobs():
        assert here.backend.read(digest) == origin.backend.read(digest)
    assert here.show(ref("copy:1"))["counts"] == origin.show(ref("base:1"))["counts"]


def test_an_environment_comes_back_as_it_was(origin: LayerStore, host: str, here: LayerStore) -> None:
    push(origin, ref("env:1"), ref(f"{host}/x/env:1"))
    got = pull(here, ref(f"{host}/x/env:1"))
    assert (got.kind, got.layers) == ("environment", 2)
    environment, copy = origin.resolve(ref("env:1")), here.resolve(ref("x/env:1"))
    assert (copy.id, copy.digest) == (environment.id, environment.digest) == (got.id, got.digest)
    assert [listed.reference for listed in here.list()] == ["x/env:1"]


def test_what_the_target_has_is_not_sent_again(origin: LayerStore, host: str, far: LayerStore) -> None:
    push(origin, ref("base:1"), ref(f"{host}/x/base:1"))
    sent = push(origin, ref("env:1"), ref(f"{host}/x/env:1"))
    assert (sent.blobs_sent, sent.blobs_present) == (4, 4)
    again = push(origin, ref("env:1"), ref(f"{host}/y/env:2"))
    assert (again.blobs_sent, again.bytes_sent, again.blobs_present) == (0, 0, 8)
    assert {listed.reference for listed in far.list()} == {"x/base:1", "x/env:1", "y/env:2"}


def test_what_the_store_has_is_not_fetched_again(origin: LayerStore, here: LayerStore) -> None:
    with HostileRegistry(origin.home.store) as registry:
        pull(here, ref(f"{registry.host}/base:1"))
        registry.forget_requests()
        got = pull(here, ref(f"{registry.host}/env:1"))
        assert (got.blobs_sent, got.blobs_present) == (4, 4)
        assert len([request for request in registry.requests if "/blobs/" in request.path]) == 4
        registry.forget_requests()
        pull(here, ref(f"{registry.host}/env:1"))
        assert len(registry.requests) == 1


def test_progress_ends_at_the_total(origin: LayerStore, host: str, here: LayerStore) -> None:
    for down in (False, True):
        seen: list[tuple[int, int]] = []

        def report(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        if down:
            result = pull(here, ref(f"{host}/x/env:1"), progress=report)
        else:
            result = push(origin, ref("env:1"), ref(f"{host}/x/env:1"), progress=report)
        assert seen == sorted(seen)
        assert seen[-1] == (result.bytes_sent, result.bytes_sent)


def test_a_layer_is_pulled_by_digest(origin: LayerStore, here: LayerStore) -> None:
    digest = origin.backend.get_ref("base", "1")
    with HostileRegistry(origin.home.store) as registry:
        source = ref(f"{registry.host}/base@{digest}")
        with pytest.raises(ReferenceInvalid, match="no tag to be kept under"):
            pull(here, source)
        assert pull(here, source, ref("kept:1")).digest == digest
    assert here.backend.get_ref("kept", "1") == digest


def test_a_pull_replaces_the_tag(origin: LayerStore, here: LayerStore) -> None:
    with HostileRegistry(origin.home.store) as registry:
        pull(here, ref(f"{registry.host}/base:1"), ref("t:1"))
        pull(here, ref(f"{registry.host}/work:1"), ref("t:1"))
    assert here.backend.get_ref("t", "1") == origin.backend.get_ref("work", "1")


def test_raw_files_are_the_data_blobs(origin: LayerStore, here: LayerStore) -> None:
    with HostileRegistry(origin.home.store) as registry:
        pull(here, ref(f"{registry.host}/env:1"), raw=True)
        registry.forget_requests()
        pull(here, ref(f"{registry.host}/env:1"), raw=True)  # both are here
        assert len(registry.requests) == 1
    assert len(list(here.home.raw.iterdir())) == 2
    for path in here.home.raw.iterdir():
        assert path.read_bytes() == origin.home.raw_file(path.name).read_bytes()
    layer = here.load_layer(origin.backend.get_ref("base", "1"))
    zeros = sum(record.zero for record in here.chunk_table(layer))
    raw = here.home.raw_file(layer.id).stat()
    assert raw.st_blocks * 512 <= layer.config.data_size - zeros * CHUNK


# Layers that are elsewhere


def environment_with_sources(store: LayerStore, origin: LayerStore, where: str) -> EnvironmentIndex:
    """env:2 in ``store``, whose layers are only named there."""
    layers = [
        origin.load_layer(origin.backend.get_ref(name, "1")).in_environment(f"{where}/{name}")
        for name in ("base", "work")
    ]
    return publish_environment(store, layers, ref("env:2"))


def test_a_push_copies_through_what_is_only_named_here(
    origin: LayerStore, here: LayerStore, host: str, far: LayerStore
) -> None:
    with HostileRegistry(origin.home.store) as source:
        index = environment_with_sources(here, origin, source.host)
        sent = push(here, ref("env:2"), ref(f"{host}/x/env:2"))
    assert sent.blobs_sent == 8
    assert far.backend.get_ref("x/env", "2") == index.digest
    assert all(layer is not None for layer in far.resolve(ref("x/env:2")).layers)  # type: ignore[union-attr]
    assert list(here.backend.blobs()) == [index.digest], "nothing of it stayed here"


def test_a_push_to_the_registry_that_has_the_layers_moves_no_blob(
    origin: LayerStore, here: LayerStore, host: str
) -> None:
    for name in ("base", "work"):
        push(origin, ref(f"{name}:1"), ref(f"{host}/{name}:1"))
    environment_with_sources(here, origin, host)
    assert push(here, ref("env:2"), ref(f"{host}/elsewhere:2")).bytes_sent == 0


def test_a_pull_follows_the_sources_of_an_environment(origin: LayerStore, here: LayerStore, tmp_path: Path) -> None:
    middle = LayerStore(Home(tmp_path / "middle"))
    with HostileRegistry(origin.home.store) as source, HostileRegistry(middle.home.store) as registry:
        environment_with_sources(middle, origin, source.host)
        pull(here, ref(f"{registry.host}/env:2"))
    assert all(layer is not None for layer in here.resolve(ref("env:2")).layers)  # type: ignore[union-attr]


def test_a_layer_that_is_nowhere_is_named(origin: LayerStore, here: LayerStore, host: str) -> None:
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    index = EnvironmentIndex.build([layer.in_environment()])
    with here.backend.writer() as writer:
        writer.write(index.raw)
        here.publish([writer], ref("broken:1"), index.digest)
    with pytest.raises(BlobUnknown, match=layer.digest):
        push(here, ref("broken:1"), ref(f"{host}/x:1"))


# Damage


def all_files(store: LayerStore, layer: Layer) -> list[Path]:
    digests = [layer.digest, *(blob.digest for blob in layer.manifest.blobs())]
    return [*map(store.backend.local_path, digests), store.home.raw_file(layer.id)]


def test_a_pull_repairs_what_is_damaged_here(origin: LayerStore, here: LayerStore) -> None:
    with HostileRegistry(origin.home.store) as registry:
        for name in ("base", "env"):
            pull(here, ref(f"{registry.host}/{name}:1"), raw=True)
            layer = here.load_layer(origin.backend.get_ref("base", "1"))
            paths = all_files(here, layer)
            whole = [path.read_bytes() for path in paths]
            for damaged, data in zip(paths, whole, strict=True):
                damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                pull(here, ref(f"{registry.host}/{name}:1"), raw=True)
                assert [path.read_bytes() for path in paths] == whole
            for path, data in zip(paths, whole, strict=True):
                path.write_bytes(bytes(len(data)))
            pull(here, ref(f"{registry.host}/{name}:1"), raw=True)
            assert [path.read_bytes() for path in paths] == whole
            assert {path.name for path in here.home.raw.iterdir()} <= {path.name for path in origin.home.raw.iterdir()}


@pytest.mark.parametrize(
    ("part", "reference"),
    [
        *((part, "base:1") for part in ("manifest", "config", "metadata", "chunks", "data")),
        *((part, "env:1") for part in ("manifest", "config", "metadata", "chunks", "data", "index")),
    ],
)
def test_a_push_names_the_reference_and_the_damaged_blob(
    origin: LayerStore, here: LayerStore, host: str, far: LayerStore, reference: str, part: str
) -> None:
    with HostileRegistry(origin.home.store) as registry:
        pull(here, ref(f"{registry.host}/env:1"))
        pull(here, ref(f"{registry.host}/base:1"))
    layer = here.load_layer(here.backend.get_ref("base", "1"))
    if part in ("manifest", "index"):
        digest = layer.digest if part == "manifest" else here.backend.get_ref("env", "1")
    else:
        digest = getattr(layer.manifest, part).digest
    path = here.backend.local_path(digest)
    data = path.read_bytes().replace(b"dev.dsec.id", b"dev.dsec.ID", 1)
    changed = data if data != path.read_bytes() else data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes(changed)
    found = "sha256:" + hashlib.sha256(changed).hexdigest()
    with pytest.raises(IntegrityError, match=f"^{reference}: .*{found}, expected {digest}"):
        push(here, ref(reference), ref(f"{host}/x:1"))
    assert list(far.list()) == []


# Refusals


def test_references_that_cannot_be_are_refused(origin: LayerStore, here: LayerStore, host: str) -> None:
    with pytest.raises(ReferenceInvalid, match="names no registry"):
        push(origin, ref("base:1"), ref("base:2"))
    with pytest.raises(ReferenceInvalid, match="is in a registry"):
        push(origin, ref(f"{host}/base:1"), ref(f"{host}/base:2"))
    with pytest.raises(ReferenceInvalid, match="names no registry"):
        pull(here, ref("base:1"))
    with pytest.raises(ReferenceInvalid, match="is in a registry"):
        pull(here, ref(f"{host}/base:1"), ref(f"{host}/base:1"))
    with pytest.raises(ReferenceUnknown, match="nothing:1"):
        push(origin, ref("nothing:1"), ref(f"{host}/x:1"))
    with pytest.raises(ReferenceUnknown, match="nothing:1"):
        pull(here, ref(f"{host}/nothing:1"))
    with pytest.raises(ReferenceInvalid, match="another digest"):
        push(origin, ref("base:1"), ref(f"{host}/x@sha256:{'0' * 64}"))


def test_an_ordinary_image_is_not_a_layer(here: LayerStore, tmp_path: Path) -> None:
    image = {"schemaVersion": 2, "mediaType": media.OCI_MANIFEST, "config": {}, "layers": []}
    with HostileRegistry(tmp_path) as registry:
        registry.substitute("image:1", json.dumps(image).encode())
        with pytest.raises(WrongKind, match="image:1"):
            pull(here, ref(f"{registry.host}/image:1"))
    assert contents(here) == set()


@pytest.mark.parametrize("blob", ["config", "metadata", "chunks", "data"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (hostile.wrong_byte(20), IntegrityError),
        (hostile.hang_up(50), RegistryError),
        (hostile.short_body(1), IntegrityError),
        (hostile.status(404), BlobUnknown),
        (hostile.status(500), RegistryError),
    ],
)
def test_a_fault_in_any_blob_leaves_nothing(
    origin: LayerStore, here: LayerStore, blob: str, fault: hostile.Fault, error: type[DsecError]
) -> None:
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    with HostileRegistry(origin.home.store) as registry:
        registry.set(getattr(layer.manifest, blob).digest, fault, times=1)
        with pytest.raises(error) as caught:
            pull(here, ref(f"{registry.host}/base:1"), raw=True)
        assert "\n" not in str(caught.value)
        del caught
        assert contents(here) == set()
        pull(here, ref(f"{registry.host}/base:1"), raw=True)
    assert here.backend.get_ref("base", "1") == layer.digest


def test_a_fault_in_the_second_layer_sets_no_reference(origin: LayerStore, here: LayerStore) -> None:
    work = origin.load_layer(origin.backend.get_ref("work", "1"))
    with HostileRegistry(origin.home.store) as registry:
        registry.set(work.manifest.data.digest, hostile.wrong_byte(1000), times=1)
        with pytest.raises(IntegrityError):
            pull(here, ref(f"{registry.host}/env:1"))
        assert list(here.list()) == []
        got = pull(here, ref(f"{registry.host}/env:1"))
        assert (got.blobs_sent, got.blobs_present) == (4, 4), "the first layer was whole and is not fetched again"


class Forge:
    """A layer whose parts do not agree, served by a registry: every blob has its digest, and the lie is inside."""

    def __init__(self, registry: HostileRegistry, origin: LayerStore) -> None:
        layer = origin.load_layer(origin.backend.get_ref("base", "1"))
        self._registry = registry
        self.config = layer.config
        self.table = origin.chunk_table(layer)
        self.manifest = layer.manifest
        self.chunks = self.table.serialize()
        self.annotations: dict[str, str] = {}
        self.zstd: str | None = "zstd"
        self.data = (layer.manifest.data.digest, layer.manifest.data.size)
        self.metadata = (layer.manifest.metadata.digest, layer.manifest.metadata.size)

    def publish(self) -> None:
        self._registry.add_blob(self.config.canonical)
        chunks = (self._registry.add_blob(self.chunks), len(self.chunks))
        manifest = LayerManifest.build(
            self.config, metadata=self.metadata, chunks=chunks, data=self.data, zstd=self.zstd
        ).raw
        if self.annotations:
            document = json.loads(manifest)
            document["annotations"].update(self.annotations)
            manifest = json.dumps(document).encode()
        self._registry.substitute("forged:1", manifest)
        self._registry.substitute("sha256:" + hashlib.sha256(manifest).hexdigest(), manifest)


def other_root(forge: Forge) -> None:
    forge.config = replace(forge.config, data_root="sha256:" + "1" * 64)


def other_size(forge: Forge) -> None:
    forge.config = replace(forge.config, data_size=forge.config.data_size + 4096)


def other_metadata(forge: Forge) -> None:
    forge.config = replace(forge.config, metadata_digest="sha256:" + "2" * 64)


def metadata_bomb(forge: Forge) -> None:
    forge.config = replace(forge.config, metadata_size=1 << 40)


def other_kind(forge: Forge) -> None:
    forge.annotations[media.KIND] = "toolkit"


def other_id(forge: Forge) -> None:
    forge.annotations[media.ID] = "sha256:" + "3" * 64


def one_record_less(forge: Forge) -> None:
    forge.chunks = forge.chunks[:-48]


def a_record_changed(forge: Forge) -> None:
    forge.chunks = forge.chunks[: HEADER_SIZE + 3] + b"!" + forge.chunks[HEADER_SIZE + 4 :]


def beyond_the_data(forge: Forge) -> None:
    records = list(forge.table)
    records[-1] = records[-1]._replace(offset=records[-1].offset + (1 << 30))
    forge.chunks = ChunkTable.build(forge.table.data_size, forge.table.encoding, records).serialize()


def other_encoding(forge: Forge) -> None:
    table = forge.table
    records = [ChunkRecord(r.digest, i * CHUNK, table.chunk_size(i), r.zero) for i, r in enumerate(table)]
    forge.chunks = ChunkTable.build(table.data_size, RAW, records).serialize()
    forge.data = (forge._registry.add_blob(bytes(table.data_size)), table.data_size)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (other_root, "root"),
        (other_size, "chunk table"),
        (other_metadata, "metadata image"),
        (metadata_bomb, "metadata image: 1099511627776 bytes, allowed"),
        (other_kind, "toolkit"),
        (other_id, "dev.dsec.id"),
        (one_record_less, "chunk table"),
        (a_record_changed, "root"),
        (beyond_the_data, "the data object has"),
        (other_encoding, "encoding"),
    ],
)
def test_parts_that_disagree_are_refused_and_leave_nothing(
    origin: LayerStore, here: LayerStore, lie: Callable[[Forge], None], words: str
) -> None:
    with HostileRegistry(origin.home.store) as registry:
        forge = Forge(registry, origin)
        lie(forge)
        forge.publish()
        with pytest.raises(IntegrityError, match=words):
            pull(here, ref(f"{registry.host}/forged:1"))
        assert contents(here) == set()


def test_a_chunk_that_lies_gives_no_raw_file(origin: LayerStore, here: LayerStore) -> None:
    """The data object has the digest that the manifest says, and a chunk in it is not what the chunk table says."""
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    table = origin.chunk_table(layer)
    number, record = next((i, r) for i, r in enumerate(table) if not r.zero)
    data = bytearray(origin.backend.read(layer.manifest.data.digest))
    data[record.offset + record.length - 10] ^= 1
    with pytest.raises(IntegrityError):
        decode_chunk(bytes(data[record.offset :][: record.length]), table.chunk_size(number), record.digest)
    with HostileRegistry(origin.home.store) as registry:
        forge = Forge(registry, origin)
        forge.data = (registry.add_blob(bytes(data)), len(data))
        forge.publish()
        with pytest.raises(IntegrityError, match=f"layer {layer.id}, chunk {number}"):
            pull(here, ref(f"{registry.host}/forged:1"), raw=True)
    assert list(here.list()) == []
    assert list(here.home.raw.iterdir()) == []


def test_metadata_that_a_mount_refuses_is_refused_by_a_pull(origin: LayerStore, here: LayerStore) -> None:
    """Digests and sizes are all right; what lies is the image itself, or the config about it."""
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    image = bytearray(origin.metadata_image(layer))
    image[SUPER_OFFSET + 8] |= 0x40  # a feature that is not known
    image[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = bytes(4)
    image[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = checksum(bytes(image[:BLOCK])).to_bytes(4, "little")
    with HostileRegistry(origin.home.store) as registry:
        for lie, words in ((True, "may not be mounted"), (False, "inodes, the config says")):
            forge = Forge(registry, origin)
            if lie:
                frame = encode_metadata(bytes(image))
                forge.metadata = (registry.add_blob(frame), len(frame))
                digest = "sha256:" + hashlib.sha256(image).hexdigest()
                forge.config = replace(forge.config, metadata_digest=digest)
            else:
                forge.config = replace(forge.config, inodes=forge.config.inodes + 1)
            forge.publish()
            source = f"{registry.host}/forged:1"
            blob = forge.metadata[0]
            with pytest.raises(IntegrityError, match=f"^{source}: layer {forge.config.id}: blob {blob}: .*{words}"):
                pull(here, ref(source))
            assert contents(here) == set()


def test_an_index_that_lies_about_its_own_id_is_refused_before_the_work(origin: LayerStore, here: LayerStore) -> None:
    entry = origin.load_layer(origin.backend.get_ref("base", "1")).in_environment()
    for own, layers in (("sha256:" + "5" * 64, None), (None, "sha256:" + "6" * 64)):
        document = json.loads(EnvironmentIndex.build([replace(entry, id=layers or entry.id)]).raw)
        document["annotations"][media.ID] = own or document["annotations"][media.ID]
        with HostileRegistry(origin.home.store) as registry:
            registry.substitute("forged:1", json.dumps(document).encode())
            with pytest.raises(IntegrityError, match=f"^{registry.host}/forged:1: environment sha256:.*(5555|6666)"):
                pull(here, ref(f"{registry.host}/forged:1"))
            assert not [request for request in registry.requests if "/blobs/" in request.path]
        assert contents(here) == set()


def test_more_layers_than_can_be_mounted_are_refused_before_the_work(origin: LayerStore, here: LayerStore) -> None:
    base, work = (
        origin.load_layer(origin.backend.get_ref(name, "1")).in_environment().descriptor().to_json()
        for name in ("base", "work")
    )
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "artifactType": media.ENVIRONMENT}
    with HostileRegistry(origin.home.store) as registry:
        registry.substitute("deep:1", json.dumps({**index, "manifests": [base, *[work] * 500]}).encode())
        with pytest.raises(IntegrityError, match=r"deep:1: .*found 501 layers, expected at most 500"):
            pull(here, ref(f"{registry.host}/deep:1"))
        assert len(registry.requests) == 1
        registry.substitute("deep:1", json.dumps({**index, "manifests": [base, *[work] * 499]}).encode())
        assert pull(here, ref(f"{registry.host}/deep:1")).layers == 500
    layers = [origin.load_layer(origin.backend.get_ref("base", "1")).in_environment()] * 500
    with pytest.raises(WrongKind, match="501 layers, expected at most 500"):
        pack_diff(here, here.home.path, layers, ref("packed:1"))


def test_an_index_without_its_type_says_what_lost_it(origin: LayerStore, here: LayerStore) -> None:
    document = json.loads(origin.read(origin.backend.get_ref("env", "1")))
    del document["artifactType"]
    with HostileRegistry(origin.home.store) as registry:
        registry.substitute("copied:1", json.dumps(document).encode())
        with pytest.raises(WrongKind, match=r"copied:1: .*no artifactType.*an index copied by skopeo loses it"):
            pull(here, ref(f"{registry.host}/copied:1"))


@pytest.mark.parametrize("part", ["config", "chunks", "metadata"])
def test_junk_in_a_part_is_named_with_reference_and_blob(origin: LayerStore, here: LayerStore, part: str) -> None:
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    junk = b"\xff\0\x1b[31m" * 1000
    with HostileRegistry(origin.home.store) as registry:
        document = json.loads(layer.manifest.raw)
        place = document["config"] if part == "config" else document["layers"][part == "chunks"]
        place.update(digest=registry.add_blob(junk), size=len(junk))
        document["annotations"].pop(media.ID)
        registry.substitute("junk:1", json.dumps(document).encode())
        registry.add_blob(json.dumps(document).encode())
        with pytest.raises(IntegrityError, match=rf"^{registry.host}/junk:1: .*blob {place['digest']}: ") as caught:
            pull(here, ref(f"{registry.host}/junk:1"))
        assert len(str(caught.value)) < 600 and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "toolkit"}, "kind base, the index says toolkit"),
        ({"id": "sha256:" + "4" * 64}, "the index says sha256:4444"),
        ({"manifest_size": 5}, "expected 5"),
    ],
)
def test_an_index_that_lies_about_a_layer_sets_no_reference(
    origin: LayerStore, here: LayerStore, changes: dict[str, Any], words: str
) -> None:
    entry: EnvironmentLayer = origin.load_layer(origin.backend.get_ref("base", "1")).in_environment()
    with HostileRegistry(origin.home.store) as registry:
        registry.substitute("forged:1", EnvironmentIndex.build([replace(entry, **changes)]).raw)
        with pytest.raises(IntegrityError, match=words):
            pull(here, ref(f"{registry.host}/forged:1"))
    assert list(here.list()) == []


def test_an_environment_without_a_base_is_refused(origin: LayerStore, here: LayerStore) -> None:
    work = origin.load_layer(origin.backend.get_ref("work", "1")).in_environment()
    with HostileRegistry(origin.home.store) as registry:
        registry.substitute("forged:1", EnvironmentIndex.build([work]).raw)
        with pytest.raises(WrongKind, match="workspace"):
            pull(here, ref(f"{registry.host}/forged:1"))
    assert list(here.list()) == []


def test_a_push_that_is_cut_off_sets_no_reference(origin: LayerStore, host: str, far: LayerStore) -> None:
    """The registry refuses one blob: what was sent before stays for the next push, and no reference is set."""
    layer = origin.load_layer(origin.backend.get_ref("base", "1"))
    with HostileRegistry(far.home.store) as registry:
        registry.set(layer.manifest.data.digest, hostile.hang_up(1000))
        with pytest.raises(RegistryError):
            push(origin, ref("base:1"), ref(f"{registry.host}/x:1"))
        assert not [
            request for request in registry.requests if request.method == "PUT" and "/manifests/" in request.path
        ]


def test_a_full_disk_leaves_nothing(origin: LayerStore, tmp_path: Path) -> None:
    image, small = tmp_path / "image", tmp_path / "small"
    small.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, small], check=True)
    try:
        store = LayerStore(Home(small / "home"))
        with HostileRegistry(origin.home.store) as registry, pytest.raises(StoreFull, match="no space left"):
            pull(store, ref(f"{registry.host}/env:1"), raw=True)
        assert list(store.list()) == []
        assert {Path(path).suffix for path in contents(store)} <= {""}
    finally:
        subprocess.run(["umount", small], check=True)


# The commands


def test_the_commands_push_and_pull(dsec: Dsec, home: Home, origin: LayerStore, tmp_path: Path) -> None:
    with registry_process(tmp_path / "server") as registry:
        sent = dsec.json("layer", "push", "env:1", f"{registry.host}/x/env:1", home=origin.home.path)
        assert sent["reference"] == f"{registry.host}/x/env:1"
        assert sent["blobs_sent"] == 8
        got = dsec.json("layer", "pull", f"{registry.host}/x/env:1", "--raw")
        assert (got["reference"], got["id"], got["manifest"]) == ("x/env:1", sent["id"], sent["manifest"])
        assert len(list(home.raw.iterdir())) == 2
        text = dsec("layer", "pull", f"{registry.host}/x/env:1", "--ref", "mine:2").stdout
        assert text.startswith("mine:2  environment  sha256:")
        missing = dsec("layer", "pull", f"{registry.host}/x/env:9", check=False)
        assert missing.returncode == 1
        assert missing.stderr.startswith(f"dsec: registry {registry.host} has no x/env:9")
        assert missing.stderr.count("\n") == 1
