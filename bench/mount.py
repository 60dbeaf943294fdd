"""Mounting an environment, and packing what changed: both cost by what they do, not by how large the layers are.

Measured in this process, with the node in its own: the call, the answer with the mount's descriptor, and move_mount.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from bench.coldstart import BASE, TOOLKIT, WORKSPACE, Stage
from bench.dsec import Cli
from bench.harness import Report, alternate, timed
from dsec_linux.mounts import attach, umount
from dsec_store.home import Home
from dsec_store.layers.packdiff import layer_of_mount, pack_diff
from dsec_store.layers.store import LayerStore
from dsec_store.manifest import EnvironmentLayer
from dsec_store.node.client import LayerArg, Mounted, MountRequest, NodeClient
from dsec_store.refs import parse_reference

ROUNDS = 15
ROLES = ("base", "workspace", "toolkit")
DIFF_BYTES = 10_000_000
SMALL_BASE = "bench/small:1"


def run(stage: Stage, builder: Path) -> Report:
    """All figures of this page; ``builder`` is a home with the layers in its own store."""
    report = Report("mount")
    _mounts(stage, builder, report)
    _packs(stage, builder, report)
    return report


def _mounts(stage: Stage, builder: Path, report: Report) -> None:
    target = stage.fresh("target")
    target.mkdir()
    remote = stage.fresh("mount")
    tags = (BASE, WORKSPACE, TOOLKIT)
    digests = [Cli(builder).json("layer", "show", tag)["manifest"] for tag in tags]
    pinned = [f"{tag.rpartition(':')[0]}@{digest}" for tag, digest in zip(tags, digests, strict=True)]
    sources = {
        "whole on disk": (builder, list(tags)),
        "of a registry, by digest": (remote, [f"{stage.link.host}/{name}" for name in pinned]),
        "of a registry, by tag": (remote, [f"{stage.link.host}/{name}" for name in tags]),
    }
    first: dict[str, Callable[[], dict[str, float]]] = {}
    again: dict[str, Callable[[], dict[str, float]]] = {}
    for name, (home, references) in sources.items():
        first[f"{name}, first use"] = lambda home=home, refs=references: _mount_first(home, refs, target)  # type: ignore[misc]
        again[f"{name}, in use"] = lambda home=home, refs=references: _mount(Home(home), refs, target)  # type: ignore[misc]
    for home in (builder, remote):
        Cli(home).start_node()
    results = alternate(first, 5)
    held = [_hold(Home(home), references) for home, references in sources.values()]  # keeps the layers mounted
    results |= alternate(again, ROUNDS)
    for fd in held:
        os.close(fd)
    for name, series in results.items():
        print(f"  3 layers, {name}: {series['mount'].show(1000, 2)} ms, {series['unmount'].show(1000, 2)} ms to undo")
        report.record(name, series, layers=3, cold="nothing; first use: no layer is mounted, metadata is there")
    for name in list(again)[:2]:  # a tag is looked up in the registry each time: a round trip or two of the link
        report.goal(f"mounting 3 layers, {name}", results[name]["mount"].median * 1000, 5, "ms")
    for home in (builder, remote):
        Cli(home).stop_node()


def _request(references: list[str], owner: Path) -> MountRequest:
    layers = [LayerArg(reference, role) for reference, role in zip(references, ROLES, strict=True)]
    return MountRequest(f"bench-{random.getrandbits(64):016x}", layers, None, None, {"target": str(owner)})


def _mount(home: Home, references: list[str], target: Path) -> dict[str, float]:
    client = NodeClient.connect(home)
    request = _request(references, target)

    def mount() -> None:
        _, fd = client.mount(request)
        attach(fd, str(target))
        os.close(fd)

    def unmount() -> None:
        # Detached: the node may be about to close its copy of the descriptor, and until then it would be busy.
        umount(str(target), detach=True)
        client.release(request.id)

    return {"mount": timed(mount), "unmount": timed(unmount)}


def _mount_first(home: Path, references: list[str], target: Path) -> dict[str, float]:
    """With a node that has mounted nothing yet; its home knows the layers' metadata."""
    Cli(home).stop_node()
    Cli(home).start_node()
    return _mount(Home(home), references, target)


def _hold(home: Home, references: list[str]) -> int:
    return _mounted(home, references)[1]


def _mounted(home: Home, references: list[str]) -> tuple[Mounted, int]:
    return NodeClient.connect(home).mount(_request(references, home.path))


def _packs(stage: Stage, builder: Path, report: Report) -> None:
    """Pack 10 MB of changes on the whole environment (base 2 GB), and on a base of 1 MB under the same others."""
    home = Home(builder)
    dsec = Cli(builder)
    dsec.run("layer", "build", stage.inputs.base / "etc", "--ref", SMALL_BASE, "--kind", "base")
    dsec.start_node()
    store = LayerStore(home)
    chains: dict[str, list[EnvironmentLayer]] = {}
    for base in (BASE, SMALL_BASE):
        name = f"on a base of {dsec.json('layer', 'show', base)['sizes']['data'] / 1e6:,.0f} MB"
        mounted, fd = _mounted(home, [base, WORKSPACE, TOOLKIT])
        os.close(fd)
        NodeClient(home).release(mounted.id)
        chains[name] = [layer_of_mount(store, layer) for layer in mounted.layers]
    uppers = iter([_upper(stage, number) for number in range(2 * ROUNDS)])
    os.sync()  # a sandbox's changes are in the page cache when they are packed; their writing back is not measured

    def pack(layers: list[EnvironmentLayer]) -> dict[str, float]:
        upper = next(uppers)
        reference = parse_reference(f"bench/diff:{upper.name}")
        return {"pack": timed(lambda: pack_diff(store, upper, layers, reference))}

    results = alternate({name: lambda chain=chain: pack(chain) for name, chain in chains.items()}, ROUNDS)  # type: ignore[misc]
    for name, series in results.items():
        print(f"  pack-diff of 10 MB {name}: {series['pack'].show(1000)} ms")
        report.record(f"pack-diff {name}", series, upper_bytes=DIFF_BYTES, cold="nothing: the changes are new")
    large, small = (series["pack"].median for series in results.values())
    report.goal("pack-diff of 10 MB", large * 1000, 150, "ms")
    report.goal("pack-diff, large base against small", large / small, 1.25, "×")
    dsec.stop_node()


def _upper(stage: Stage, number: int) -> Path:
    """10 MB of the base's own Python modules, each time other bytes: equal contents would be published already."""
    upper = stage.fresh("upper")
    size = 0
    for source in sorted((stage.inputs.base / "usr/lib/python3.11").rglob("*.py")):
        if size >= DIFF_BYTES:
            break
        target = upper / "opt" / source.relative_to(stage.inputs.base)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = b"# %d\n" % number + source.read_bytes()
        target.write_bytes(content)
        size += len(content)
    assert size >= DIFF_BYTES, f"only {size} bytes of modules in {stage.inputs.base}"
    return upper
