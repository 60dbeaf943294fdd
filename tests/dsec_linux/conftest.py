"""Fixtures of the system call tests: split EROFS pairs made by mkfs.erofs, and the check that no descriptor is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def open_descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    """Every test here ends with the descriptors that it began with."""
    before = open_descriptors()
    yield
    left = {fd: name for fd, name in open_descriptors().items() if before.get(fd) != name}
    assert not left


class Pair:
    """A split EROFS image: metadata, one data blob, and the folder that both were made from."""

    def __init__(self, meta: Path, blob: Path, source: Path) -> None:
        self.meta = str(meta)
        self.blob = str(blob)
        self.source = source


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(tmp_path: Path, erofs_utils: Path) -> MakePair:
    """``make_pair("name", {"path": content})`` makes a pair."""

    def make(name: str, content: dict[str, bytes]) -> Pair:
        source = tmp_path / f"{name}.source"
        source.mkdir()
        for path, data in content.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(data)
        meta, blob = tmp_path / f"{name}.erofs", tmp_path / f"{name}.blob"
        command: list[str | Path] = [
            erofs_utils / "mkfs.erofs",
            "--quiet",
            "--chunksize=4096",
            f"--blobdev={blob}",
            meta,
            source,
        ]
        subprocess.run(command, check=True, capture_output=True)
        return Pair(meta, blob, source)

    return make
