"""Layers to serve, a registry that can misbehave, and a node of its own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec_linux.mounts import attach, umount
from dsec_store.home import Home
from dsec_store.layers.build import BuiltLayer, build_layer
from dsec_store.layers.store import LayerStore
from dsec_store.node.core import Node
from dsec_store.node.protocol import LayerArg, Mounted, MountRequest
from dsec_store.refs import parse_reference
from tests.hostile import HostileRegistry

FILE_SIZE = 700_000
FILES = 8


def content(name: str, size: int = FILE_SIZE) -> bytes:
    """Bytes that do not compress, the same in every run."""
    return random.Random(name).randbytes(size)


@pytest.fixture
def publisher(tmp_path: Path) -> Home:
    """A home with ``base:1`` (eight files of 700 kB), ``work:1`` and ``tool:1``, which nobody's node uses."""
    here = Home(tmp_path / "publisher").ensure()
    base = tmp_path / "base"
    (base / "big").mkdir(parents=True)
    for number in range(FILES):
        (base / "big" / f"{number}").write_bytes(content(f"base-{number}"))
    (base / "hello").write_text("from the base\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello").write_text("from the workspace\n")
    (work / "source").write_bytes(content("source"))
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "tool").write_bytes(content("tool", 5000))
    for name, folder, kind in (("base:1", base, "base"), ("work:1", work, "workspace"), ("tool:1", tool, "toolkit")):
        build(here, folder, name, kind)
    return here


def build(home: Home, folder: Path, reference: str, kind: str) -> BuiltLayer:
    return build_layer(LayerStore(home), folder, parse_reference(reference), kind)


@pytest.fixture
def registry(publisher: Home) -> Iterator[HostileRegistry]:
    with HostileRegistry(publisher.store) as server:
        yield server


@pytest.fixture
def make_node(home: Home) -> Iterator[Callable[..., Node]]:
    """Nodes in this process; all are closed at the end."""
    nodes: list[Node] = []

    def make(**options: float) -> Node:
        nodes.append(Node(home, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


Mount = Callable[..., "Mounting"]


class Mounting:
    """An environment that is attached while the context lasts."""

    def __init__(self, mounted: Mounted, path: Path) -> None:
        self.mounted = mounted
        self.path = path


@contextmanager
def mounting(node: Node, folder: Path, *references: str, mount_id: str = "test") -> Iterator[Mounting]:
    folder.mkdir(exist_ok=True)
    layers = [LayerArg(reference) for reference in references]
    mounted, fd = node.mount(MountRequest(mount_id, layers, None, None, {"target": str(folder)}), os.getpid())
    try:
        attach(fd, str(folder))
    finally:
        os.close(fd)
    try:
        yield Mounting(mounted, folder)
    finally:
        umount(str(folder))
        node.release(mount_id)
