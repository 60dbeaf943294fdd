"""The cold start over a far link, with dsec and by download: one stage for the demo and the benchmarks.

Cold: the node's home, or the folder that is unpacked into, is new and empty, and the page cache is dropped. Warm, on
both sides: what the far servers read, and the programs (dsec and its running node; tar, zstd), as on a machine that is
at work.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench import crun
from bench.control import download_and_unpack, file_server
from bench.dsec import Cli, registry
from bench.farlink import FarLink
from bench.harness import cpu_seconds, drop_caches, warm
from bench.inputs import PROJECT_FOLDER, TEST_COMMAND, TEST_ENV, Inputs

MB_PER_S, MS = 50.0, 5.0
BASE, WORKSPACE, TOOLKIT = "demo/debian:12", "demo/jinja2:3.1.6", "demo/pytest:8"
COLD = "cold: dsec's home or the unpacking folder, the page cache; warm: the servers' files, the programs, the node"


@dataclass
class Outcome:
    """Seconds since the start: first byte of the command, first passed test, its end. Bytes that came over the link,
    CPU seconds of everything that took part but the servers, and how many tests passed."""

    ready: float
    first: float
    last: float
    link_bytes: int
    cpu: float
    passed: int


def follow(output: IO[bytes], start: float) -> tuple[float, float, int]:
    """Read a command's output to its end; when its first byte and the first passed test came, and how many passed."""
    ready = first = 0.0
    passed = 0
    pending = b""
    while block := os.read(output.fileno(), 65536):
        moment = time.monotonic() - start
        ready = ready or moment
        pending += block
        complete, _, pending = pending.rpartition(b"\n")
        found = sum(1 for line in complete.split(b"\n") if b" PASSED" in line)
        if found:
            first = first or moment
        passed += found
    return ready, first, passed


class Stage:
    """A registry with the published layers, and a file server with the same as one archive, each behind its link."""

    def __init__(self, work: Path, inputs: Inputs, registry_host: str, store: Path, stack: ExitStack) -> None:
        self.work = work
        self.inputs = inputs
        self.store = store
        self.link = stack.enter_context(FarLink(registry_host, MB_PER_S, MS))
        server = stack.enter_context(file_server(inputs.archive.parent))
        self.archive_link = stack.enter_context(FarLink(server, MB_PER_S, MS))
        self._rounds = 0

    @property
    def layers(self) -> list[str]:
        """The arguments of ``dsec run`` that name the three layers in the registry."""
        host = self.link.host
        return [f"{host}/{BASE}", "--workspace", f"{host}/{WORKSPACE}", "--toolkit", f"{host}/{TOOLKIT}"]

    def settle(self) -> None:
        """The same state of caches before either side starts."""
        drop_caches()
        warm(self.store, self.inputs.archive)

    def fresh(self, what: str) -> Path:
        self._rounds += 1
        return self.work / f"{what}-{self._rounds}"

    def with_dsec(self, home: Path) -> tuple[Outcome, dict[str, Any]]:
        """Run the tests from the registry with a new home; the outcome, and the node's figures. The node stays."""
        dsec = Cli(home)
        self.settle()
        dsec.run("run", "--help")
        dsec.start_node()
        before, node_before = self.link.stats().bytes_down, dsec.node_cpu()
        options = [word for one in TEST_ENV for word in ("--env", one)]
        with cpu_seconds() as cpu:
            start = time.monotonic()
            command = ["run", *self.layers, "--workdir", PROJECT_FOLDER, *options, "--", *TEST_COMMAND]
            with dsec.popen(*command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                ready, first, passed = follow(process.stdout, start)
            last = time.monotonic() - start
            spent = cpu() + dsec.node_cpu() - node_before
        if process.returncode:
            raise RuntimeError(f"the tests in the sandbox ended with {process.returncode}")
        fetched = self.link.stats().bytes_down - before
        return Outcome(ready, first, last, fetched, spent, passed), dsec.json("stats")

    def by_download(self) -> Outcome:
        """Download, unpack and run the tests with crun."""
        root, bundle = self.fresh("unpacked"), self.fresh("bundle")
        name = f"control{self._rounds}"
        crun.make_bundle(bundle, root, TEST_COMMAND, PROJECT_FOLDER, name, TEST_ENV)
        self.settle()
        for program in (["tar", "--version"], ["zstd", "--version"], ["crun", "--version"]):
            subprocess.run(program, capture_output=True, check=True)
        before = self.archive_link.stats().bytes_down
        with cpu_seconds() as cpu:
            start = time.monotonic()
            download_and_unpack(self.archive_link.host, self.inputs.archive.name, root)
            with crun.start(bundle, name) as process:
                assert process.stdout is not None
                ready, first, passed = follow(process.stdout, start)
            last = time.monotonic() - start
            spent = cpu()
        if process.returncode:
            raise RuntimeError(f"the tests of the control ended with {process.returncode}")
        return Outcome(ready, first, last, self.archive_link.stats().bytes_down - before, spent, passed)


def build_layers(dsec: Cli, inputs: Inputs, show: bool = True) -> list[dict[str, Any]]:
    """Build the three layers in ``dsec``'s home; what ``dsec layer show`` says of each."""
    sources = (
        (inputs.base, BASE, "base"),
        (inputs.workspace, WORKSPACE, "workspace"),
        (inputs.toolkit, TOOLKIT, "toolkit"),
    )
    for tree, reference, kind in sources:
        dsec.run("layer", "build", tree, "--ref", reference, "--kind", kind, show=show)
    return [dsec.json("layer", "show", reference) for _, reference, _ in sources]


def push_layers(
    dsec: Cli, host: str, references: Sequence[str] = (BASE, WORKSPACE, TOOLKIT), show: bool = True
) -> None:
    for reference in references:
        dsec.run("layer", "push", reference, f"{host}/{reference}", show=show)


@contextmanager
def published(work: Path, inputs: Inputs, *, show: bool = False) -> Iterator[Stage]:
    """A stage below ``work`` whose registry has the layers already; for benchmarks."""
    with ExitStack() as stack:
        store = Cli(work / "registry")
        stage = Stage(work, inputs, stack.enter_context(registry(store)), store.home / "store", stack)
        builder = Cli(work / "builder")
        build_layers(builder, inputs, show)
        push_layers(builder, stage.link.target, show=show)
        yield stage
