"""How long a sandbox takes to be ready, against bare crun; and how soon a far environment gives its first result.

Ready is the first byte that the command writes. Bare crun gets the same specification and the base as a plain
directory. The machine's cgroup2 is hidden from the whole experiment where crun refuses it, so that neither side pays.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import crun
from bench.coldstart import BASE, COLD, TOOLKIT, WORKSPACE, Outcome, Stage
from bench.dsec import Cli
from bench.harness import Report, alternate
from dsec_linux import cgroups
from dsec_linux.mounts import make_slave, umount
from dsec_linux.namespaces import CLONE_NEWNS, unshare
from dsec_store.home import Home
from runtimes.container import find_runtime
from runtimes.settings import RunOptions
from runtimes.supervisor import run as run_sandbox

ROUNDS = 15
COLD_ROUNDS = 3
WORDS = ("sh", "-c", "echo ready")


def hide_cgroup2() -> None:
    """Give this process a mount namespace without an unused cgroup2, which crun does not run beside."""
    layout = cgroups.detect()
    if layout.kind == "hybrid" and layout.unified is not None:
        unshare(CLONE_NEWNS)
        make_slave("/")
        umount(layout.unified, detach=True)


def run(stage: Stage, builder: Path) -> Report:
    """All figures of this page; ``builder`` is a home with the layers in its own store."""
    report = Report("start")
    hide_cgroup2()
    dsec = Cli(builder)
    dsec.start_node()
    layers = [BASE, "--workspace", WORKSPACE, "--toolkit", TOOLKIT]
    options = RunOptions(BASE, WORDS, workspaces=[WORKSPACE], toolkits=[TOOLKIT])
    bundle = crun.make_bundle(stage.fresh("bundle"), stage.inputs.base.absolute(), WORDS, "/", "bare")
    bare = [find_runtime().path, "--root", str(bundle / "state"), "run", "--bundle", str(bundle), "bare"]
    results = alternate(
        {
            "dsec run, from the shell": lambda: _from_shell(
                dsec.command("run", *layers, "--", *WORDS), dsec.environment
            ),
            "dsec run, in-process": lambda: _in_process(Home(builder), options),
            "bare crun": lambda: _from_shell(bare, dict(os.environ)),
        },
        ROUNDS,
    )
    dsec.stop_node()
    for name, series in results.items():
        print(f"  {name}: ready {series['ready'].show(1000)} ms, all over {series['end'].show(1000)} ms")
        report.record(name, series, environment="the demo's three layers, whole on disk", cold="nothing")
    inside, crun_alone = results["dsec run, in-process"]["ready"].median, results["bare crun"]["ready"].median
    report.goal("ready from the shell", results["dsec run, from the shell"]["ready"].median * 1000, 150, "ms")
    report.goal("ready in-process against bare crun", inside / crun_alone, 1.5, "×")
    _far(stage, report)
    return report


def _from_shell(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        ready = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {process.returncode}")
    return {"ready": ready, "end": time.perf_counter() - start}


def _in_process(home: Home, options: RunOptions) -> dict[str, float]:
    """``runtimes.supervisor.run`` itself, its stdout on a pipe that another thread watches."""
    reading, writing = os.pipe()
    kept = os.dup(1)
    ready: list[float] = []

    def watch() -> None:
        os.read(reading, 1)
        ready.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        watcher.start()
        start = time.perf_counter()
        result = run_sandbox(home, options)
        end = time.perf_counter() - start
    finally:
        os.dup2(kept, 1)  # closes the last copy of the pipe's end
        os.close(kept)
        watcher.join()
        os.close(reading)
    if result.exit_code:
        raise RuntimeError(f"the sandbox ended with {result.exit_code}: {result.message}")
    return {"ready": ready[0] - start, "end": end}


def _far(stage: Stage, report: Report) -> None:
    """The project's tests over a far link on an empty cache, in turns with download, unpack, crun."""
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "far, dsec": lambda: _quantities(stage.with_dsec(stage.fresh("node"))[0]),
        "far, download": lambda: _quantities(stage.by_download()),
    }
    results = alternate(sides, COLD_ROUNDS)
    for name, series in results.items():
        shown = [f"{what} {series[what].show(1, 2)} s" for what in ("ready", "first", "last")]
        print(f"  {name}: {', '.join(shown)}, {series['link_bytes'].show(1e-6)} MB, CPU {series['cpu'].show()} s")
        report.record(name, series, cold=COLD, environment="the demo's three layers")
    ours, theirs = results["far, dsec"], results["far, download"]
    sooner = theirs["first"].median / ours["first"].median
    report.goal("first result sooner than by download", sooner, 3, "×", at_least=True)
    share = 100 * ours["link_bytes"].median / theirs["link_bytes"].median
    report.goal("share of the download's bytes", share, 25, "%")


def _quantities(outcome: Outcome) -> dict[str, float]:
    return {name: float(getattr(outcome, name)) for name in ("ready", "first", "last", "link_bytes", "cpu")}
