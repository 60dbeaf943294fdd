"""``make bench``: the experiments, on the demo's input. Figures on the terminal, JSON lines in ``build/bench``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from bench import mount, start
from bench.coldstart import published
from bench.dsec import stop_nodes
from bench.harness import ROOT
from bench.inputs import prepare
from tests.leaks import LeakCheck

EXPERIMENTS = {"mount": mount.run, "start": start.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo", help="inputs are kept there")
    arguments = parser.parse_args()
    # `start` leaves its mount namespace behind for the rest of the process, so it is last.
    chosen = [name for name in EXPERIMENTS if name in (arguments.experiments or EXPERIMENTS)]
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    check = LeakCheck()
    inputs = prepare(arguments.work, Console())
    homes = arguments.work.absolute() / "bench"
    shutil.rmtree(homes, ignore_errors=True)
    homes.mkdir()
    missed: list[str] = []
    try:
        with published(homes, inputs) as stage:
            for name in chosen:
                missed += EXPERIMENTS[name](stage, homes / "builder").missed
    finally:
        stop_nodes(homes)
        shutil.rmtree(homes)
    left, ours = check.finish()
    print("\nall goals met" if not missed else f"\ngoals missed: {'; '.join(missed)}")
    if left and ours:
        sys.exit("left behind:\n  " + "\n  ".join(left))


if __name__ == "__main__":
    main()
