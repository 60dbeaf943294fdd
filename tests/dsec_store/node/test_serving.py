"""What readers of an environment on demand get, from good and from bad registries."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsec_store.chunks import CHUNK
from dsec_store.home import Home
from dsec_store.layers.store import Layer, LayerStore
from dsec_store.node.core import Node
from dsec_store.refs import parse_reference
from tests import hostile
from tests.dsec_store.node.conftest import FILE_SIZE, FILES, content, mounting
from tests.hostile import HostileRegistry
from tests.waiting import until

MakeNode = Callable[..., Node]


def data_digest(publisher: Home, reference: str) -> str:
    layer = LayerStore(publisher).resolve(parse_reference(reference))
    assert isinstance(layer, Layer)
    return layer.manifest.data.digest


def test_an_environment_is_read_without_being_pulled(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    names = [f"{registry.host}/{name}" for name in ("base:1", "work:1", "tool:1")]
    with mounting(node, tmp_path / "at", *names) as at:
        assert (at.path / "hello").read_text() == "from the workspace\n"
        assert (at.path / "big" / "3").read_bytes() == content("base-3")
        assert sorted(os.listdir(at.path)) == ["big", "hello", "source", "tool"]
        assert [layer["export"] for layer in at.mounted.layers] == ["fuse"] * 3
        stats = node.stats()
        base = stats["layers"][0]
        assert 3 <= base["chunks_touched"] < base["chunks"] / 2
        assert FILE_SIZE <= base["bytes_fetched"] < base["size"] / 2
    assert stats["total"]["errors"] == 0


def test_a_chunk_is_fetched_once_however_many_readers_wait(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    digest = data_digest(publisher, "base:1")
    registry.set(digest, hostile.delay(0.2))
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: (at.path / "big" / "0").read_bytes(), range(16)))
        assert set(found) == {content("base-0")}
    asked: list[int] = []
    table = LayerStore(publisher).chunk_table(LayerStore(publisher).load_layer(at.mounted.layers[0]["manifest"]))
    for request in registry.requests_for(digest):
        assert request.range is not None
        first, last = (int(text) for text in request.range.removeprefix("bytes=").split("-"))
        asked += [index for index, record in enumerate(table) if first <= record.offset <= last]
    assert len(asked) == len(set(asked))


def test_adjacent_misses_go_in_one_request(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        for number in range(FILES):
            assert (at.path / "big" / f"{number}").read_bytes() == content(f"base-{number}")
    base = node.stats()["layers"][0]
    assert base["chunks_touched"] == base["chunks"]
    assert base["requests"] < base["chunks"] / 2


def test_a_second_environment_shares_the_layer_and_what_was_fetched(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    reference = f"{registry.host}/base:1"
    with mounting(node, tmp_path / "one", reference, mount_id="one") as one:
        for number in range(FILES):  # all of it: the kernel may still be reading ahead of a part
            (one.path / "big" / f"{number}").read_bytes()
        fetched = node.stats()["total"]["bytes_fetched"]
        with mounting(node, tmp_path / "two", reference, mount_id="two") as two:
            assert two.mounted.device == one.mounted.device
            assert (two.path / "big" / "1").read_bytes() == content("base-1")
    assert node.stats()["total"]["bytes_fetched"] == fetched
    assert len(node.stats()["layers"]) == 1


@pytest.mark.parametrize(
    "fault",
    [
        hostile.wrong_byte(1000),
        hostile.hang_up(5000),
        hostile.reset(5000),
        hostile.status(503),
        hostile.short_body(700),
    ],
    ids=["wrong-byte", "hang-up", "reset", "503", "short-body"],
)
def test_a_fault_that_passes_is_not_seen_by_readers(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path, fault: hostile.Fault
) -> None:
    registry.set(data_digest(publisher, "base:1"), fault, times=1)
    with mounting(make_node(), tmp_path / "at", f"{registry.host}/base:1") as at:
        assert (at.path / "big" / "0").read_bytes() == content("base-0")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (hostile.wrong_byte(1000), "expected sha256:"),
        (hostile.hang_up(5000), "hung up"),
        (hostile.range_ignored(), "answered the range with 200"),
        (hostile.status(404), "404"),
        (hostile.status(503), "503"),
        (hostile.wrong_content_range(), "the answer holds bytes"),
        (hostile.short_body(700), "hung up after"),
    ],
    ids=["wrong-byte", "hang-up", "range-as-200", "404", "503", "content-range", "short-body"],
)
def test_a_fault_that_stays_is_eio_and_the_log_says_why(
    make_node: MakeNode,
    registry: HostileRegistry,
    publisher: Home,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: hostile.Fault,
    said: str,
) -> None:
    registry.set(data_digest(publisher, "base:1"), fault)
    node = make_node(deadline=2.0)
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        started = time.monotonic()
        failed = 0
        for number in range(FILES):
            try:
                assert (at.path / "big" / f"{number}").read_bytes() == content(f"base-{number}")
            except OSError as error:
                assert error.errno == errno.EIO
                failed += 1
        assert failed
        assert time.monotonic() - started < 30
        assert os.listdir(at.path / "big")
    assert said in caplog.text
    assert node.stats()["total"]["errors"] > 0


def test_an_unreachable_registry_delays_a_reader_no_longer_than_the_deadline(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node(deadline=1.0)
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        registry.set(data_digest(publisher, "base:1"), hostile.delay(30))
        started = time.monotonic()
        with pytest.raises(OSError) as caught:
            (at.path / "big" / "7").read_bytes()
        assert caught.value.errno == errno.EIO
        assert time.monotonic() - started < 10


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def test_damage_in_the_cache_is_fetched_again(
    make_node: MakeNode, home: Home, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        assert (at.path / "big" / "0").read_bytes() == content("base-0")
        entry = home.cache_entry(at.mounted.layers[0]["data_root"])
        with open(entry / "data", "r+b") as file:
            for offset in range(0, FILE_SIZE, CHUNK):
                file.seek(offset + 77)
                byte = file.read(1)[0]
                file.seek(offset + 77)
                file.write(bytes([byte ^ 0x40]))
        drop_caches()
        before = node.stats()["total"]["bytes_fetched"]
        assert (at.path / "big" / "0").read_bytes() == content("base-0")
        assert node.stats()["total"]["bytes_fetched"] > before


def test_a_warm_cache_survives_a_clean_restart_and_is_used(
    home: Home, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    for turn in ("cold", "warm"):
        node = Node(home)
        try:
            with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
                assert (at.path / "big" / "2").read_bytes() == content("base-2")
            fetched = node.stats()["total"]["bytes_fetched"]
            assert (fetched > FILE_SIZE) is (turn == "cold"), turn
        finally:
            node.close()


def test_a_full_disk_makes_reads_bypass_the_cache(
    make_node: MakeNode, home: Home, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        blob = node._layers.blobs()[0]
        assert blob.cache is not None
        full = os.open("/dev/full", os.O_RDWR)
        kept = os.dup(blob.cache._data)
        os.dup2(full, blob.cache._data)  # every write to the entry's data says ENOSPC from now on
        try:
            assert (at.path / "big" / "4").read_bytes() == content("base-4")
            assert node.stats()["total"]["chunks_not_kept"] > 0
            with open(at.path / "big" / "5", "rb") as file:  # page by page: not a fetch for each
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                requests = node.stats()["total"]["requests"]
                for offset in range(0, CHUNK, 4096):
                    os.pread(file.fileno(), 100, offset)
            assert node.stats()["total"]["requests"] - requests <= 3
        finally:
            os.dup2(kept, blob.cache._data)
            os.close(kept)
            os.close(full)
        assert (at.path / "big" / "4").read_bytes() == content("base-4")


def test_a_small_layer_is_fetched_whole_in_one_request(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    digest = data_digest(publisher, "work:1")
    registry.forget_requests()
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1", f"{registry.host}/work:1") as at:
        work = at.mounted.layers[1]
        until(lambda: _of_layer(node, work["id"])["bytes_fetched"] > FILE_SIZE, "the layer to be fetched")
        assert (at.path / "source").read_bytes() == content("source")
        stats = _of_layer(node, work["id"])
        assert stats["chunks_ahead"] == stats["chunks"] == stats["chunks_ahead_used"] == 3
    assert len(registry.requests_for(digest)) == 1


def test_what_lies_behind_a_miss_is_fetched_with_it_and_not_when_nobody_reads_on(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        base = at.mounted.layers[0]["id"]
        with open(at.path / "big" / "0", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.read(100)
            assert (_of_layer(node, base)["chunks_touched"], _of_layer(node, base)["chunks_ahead"]) == (1, 2)
            os.pread(file.fileno(), 100, CHUNK)
        stats = _of_layer(node, base)
        assert (stats["chunks_touched"], stats["chunks_ahead_used"], stats["requests"]) == (2, 1, 2)
        [blob] = node._layers.blobs()
        blob.stats.add(ahead=100)  # as if none of many had been used
        with open(at.path / "big" / "4", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.read(100)
        assert _of_layer(node, base)["chunks_ahead"] == 102


def _of_layer(node: Node, layer: str) -> dict[str, Any]:
    [found] = [each for each in node.stats()["layers"] if each["layer"] == layer]
    assert isinstance(found, dict)
    return found


def test_connections_are_kept_between_requests(
    make_node: MakeNode, registry: HostileRegistry, publisher: Home, tmp_path: Path
) -> None:
    node = make_node()
    with mounting(node, tmp_path / "at", f"{registry.host}/base:1") as at:
        for number in range(0, FILES, 2):
            with open(at.path / "big" / f"{number}", "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                file.read(100)
        stats = node.stats()["total"]
    assert stats["requests"] >= 4
    assert registry.connections <= 3  # one after the other: manifest and small blobs side by side, then one for all
