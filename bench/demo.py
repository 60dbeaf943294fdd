"""``make demo``: layers built from something real, published, composed, run on demand over a far link, changed, packed.

Beside it runs the control: the same files as one tar.zst over the same link, unpacked, and the same command by crun.
Everything is done by the commands that a person would type.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.coldstart import COLD, MB_PER_S, MS, Outcome, Stage, build_layers, push_layers
from bench.dsec import Cli, registry, stop_nodes
from bench.harness import ROOT, Report, Series, machine
from bench.inputs import PROJECT_FOLDER, TESTS, prepare
from tests.leaks import LeakCheck

PATCHED = "demo/jinja2:patched"
ADDED_TEST = "tests/test_patched.py"
PATCH = f"""
echo 'PATCHED = "by the first sandbox"' >> src/jinja2/__init__.py
rm docs/changes.rst
cat > {ADDED_TEST} <<END
import pathlib, jinja2
def test_the_change_is_there():
    assert jinja2.PATCHED == "by the first sandbox"
    assert not pathlib.Path("docs/changes.rst").exists()
END
exec python3 -m pytest -q -p no:cacheprovider {ADDED_TEST}
"""
CHECK = ("sh", "-c", f"git diff --no-index --stat /dev/null {ADDED_TEST}; exec python3 -m pytest -v {ADDED_TEST}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo", help="inputs are kept there")
    parser.add_argument("--rounds", type=int, default=2, help="cold starts of each side")
    arguments = parser.parse_args()
    # One width for a terminal and for a log.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    check = LeakCheck()
    try:
        with ExitStack() as stack:
            run(arguments.work, arguments.rounds, console, stack)
    except RuntimeError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    left, ours = check.finish()
    if left and ours:
        sys.exit("demo: left behind:\n  " + "\n  ".join(left))
    if left:
        console.print(
            "new on this machine since the start; another run uses it too, so they may be its:", *left, sep="\n  "
        )
    else:
        console.rule("clean: no mount, device, cgroup, namespace or process is left")


def run(work: Path, rounds: int, console: Console, stack: ExitStack) -> None:
    """The whole story. Raises RuntimeError with the line of what failed."""
    facts = machine()
    console.print(f"Linux {facts['kernel']}, {facts['cores']} cores, {facts['disk']}, load {facts['load']:.2f}")
    homes = work.absolute() / "homes"
    shutil.rmtree(homes, ignore_errors=True)
    homes.mkdir(parents=True)
    stack.callback(shutil.rmtree, homes)
    stack.callback(stop_nodes, homes)
    builder, server = Cli(homes / "builder"), Cli(homes / "registry")
    builder.run("doctor")

    console.rule("1  input from Debian and PyPI")
    inputs = prepare(work, console)

    console.rule("2  three layers, built and published")
    layers = build_layers(builder, inputs)
    stage = Stage(homes, inputs, stack.enter_context(registry(server)), server.home / "store", stack)
    console.print(f"a registry listens behind a link of {MB_PER_S:g} MB/s and {MS:g} ms each way: {stage.link.host}")
    push_layers(builder, stage.link.host)

    console.rule(f"3  {TESTS} tests of the project on an empty cache, {rounds} × each side")
    console.print(f"dsec run {' '.join(stage.layers)} -- python3 -m pytest -v", soft_wrap=True)
    mine: list[Outcome] = []
    control: list[Outcome] = []
    stats: dict[str, Any] = {}
    sides: list[Callable[[], None]] = [
        lambda: stats.update(_with_dsec(stage, mine, console)),
        lambda: _by_download(stage, control, console),
    ]
    for number in range(rounds):
        for side in sides[:: 1 if number % 2 == 0 else -1]:
            side()
    _show_layers(layers, stats, console)
    _compare(mine, control, inputs.archive.stat().st_size, console)

    console.rule("4  a change, packed, and a second sandbox that starts from it")
    _change(stage, console)


def _with_dsec(stage: Stage, outcomes: list[Outcome], console: Console) -> dict[str, Any]:
    home = stage.fresh("node")
    outcome, stats = stage.with_dsec(home)
    _say("dsec", outcome, console)
    outcomes.append(outcome)
    return stats


def _by_download(stage: Stage, outcomes: list[Outcome], console: Console) -> None:
    outcome = stage.by_download()
    _say("control", outcome, console)
    outcomes.append(outcome)


def _say(side: str, outcome: Outcome, console: Console) -> None:
    if outcome.passed != TESTS:
        raise RuntimeError(f"{side}: {outcome.passed} tests passed, expected {TESTS}")
    console.print(f"  {side:8} {outcome.passed} passed, first after {outcome.first:.2f} s, last {outcome.last:.2f} s")


def _show_layers(layers: list[dict[str, Any]], stats: dict[str, Any], console: Console) -> None:
    """Sizes as built, beside what the last node fetched of each."""
    table = Table(title="layers, and what the tests touched of them", title_justify="left")
    for name in ("layer", "kind", "entries", "data", "stored", "fetched", "requests", "chunks touched"):
        table.add_column(name, justify="left" if name in ("layer", "kind") else "right")
    by_id = {layer["layer"]: layer for layer in stats["layers"]}
    for layer in layers:
        counts, fetched = layer["counts"], by_id[layer["id"]]
        table.add_row(
            layer["reference"],
            layer["kind"],
            f"{counts['inodes']:,}",
            _mb(layer["sizes"]["data"]),
            _mb(layer["sizes"]["stored"]),
            *_touched(fetched),
        )
    sums = [sum(layer["sizes"][key] for layer in layers) for key in ("data", "stored")]
    total = stats["total"]
    entries = f"{sum(layer['counts']['inodes'] for layer in layers):,}"
    table.add_section()
    table.add_row("all", "", entries, *map(_mb, sums), *_touched(total))
    console.print(table)


def _touched(figures: dict[str, Any]) -> tuple[str, str, str]:
    touched, chunks = figures["chunks_touched"], figures["chunks"]
    share = f"{touched:,} of {chunks:,} = {touched / chunks:.1%}"
    return _mb(figures["bytes_fetched"]), f"{figures['requests']:,}", share


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def _compare(mine: list[Outcome], control: list[Outcome], archive: int, console: Console) -> None:
    report = Report("demo")
    rows: list[tuple[str, str, float, int, str]] = [
        ("ready: the command's first byte", "ready", 1, 2, "s"),
        ("first passed test", "first", 1, 2, "s"),
        ("last test, sandbox gone", "last", 1, 2, "s"),
        ("bytes over the link", "link_bytes", 1e-6, 1, "MB"),
        ("CPU, without the servers", "cpu", 1, 1, "s"),
    ]
    title = f"median of {len(mine)} (lowest to highest); control: {archive / 1e6:,.0f} MB of tar.zst, tar, crun"
    table = Table(title=title, title_justify="left")
    for name in ("", "dsec", "control", "control / dsec"):
        table.add_column(name, justify="right" if name else "left")
    series: dict[str, dict[str, Series]] = {"dsec": {}, "control": {}}
    for label, name, scale, digits, unit in rows:
        ours, theirs = (Series([getattr(one, name) for one in side]) for side in (mine, control))
        series["dsec"][name], series["control"][name] = ours, theirs
        ratio = f"{theirs.median / ours.median:.1f} ×"
        table.add_row(label, f"{ours.show(scale, digits)} {unit}", f"{theirs.show(scale, digits)} {unit}", ratio)
    console.print(table)
    console.print(COLD, style="dim")
    for side, quantities in series.items():
        report.record(side, quantities, cold=COLD, link=f"{MB_PER_S:g} MB/s, {MS:g} ms", archive=archive)
    first, data = series["dsec"]["first"].median, series["dsec"]["link_bytes"].median
    report.goal(
        "first result sooner than the control", series["control"]["first"].median / first, 3, "×", at_least=True
    )
    report.goal("share of the control's bytes", 100 * data / series["control"]["link_bytes"].median, 25, "%")


def _change(stage: Stage, console: Console) -> None:
    """Change the project in one sandbox, pack what changed to the registry, start another machine's sandbox from it."""
    first, second = Cli(stage.fresh("node")), Cli(stage.fresh("node"))
    target = f"{stage.link.host}/{PATCHED}"
    work = ["--workdir", PROJECT_FOLDER]
    console.print("$ dsec run --keep --name first …  (edits a module, deletes a file, adds a test)")
    print(first.run("run", "--keep", "--name", "first", *stage.layers, *work, "--", "sh", "-c", PATCH).strip())
    first.run("pack-diff", "first", "--ref", target, show=True)
    first.run("rm", "first", show=True)
    console.print("on another, empty node:")
    second.run("run", target, *work, "--", *CHECK, show=True)


if __name__ == "__main__":
    main()
