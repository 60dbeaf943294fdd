"""What every benchmark shares: variants that take turns, medians with spread, facts about the machine, JSON lines.

Absolute times of a shared machine vary by a factor within minutes; ratios of variants that alternate within one run do
not. So every comparison runs its variants in turns, and a figure is a median with minimum and maximum.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench"
DSEC = ROOT / ".venv" / "bin" / "dsec"


def machine() -> dict[str, Any]:
    """Kernel, processor, cores, memory, load and the disk of the results: what a figure means nothing without."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    device = next((fields for fields in map(str.split, _lines("/proc/mounts")) if fields[1] == "/"), ["?", "/", "?"])
    return {
        "kernel": platform.release(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e6, 1),
        "load": os.getloadavg()[0],
        "disk": f"{device[2]} on {device[0]}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def drop_caches() -> str:
    """Write back and drop the page cache, dentries and inodes; says what is cold afterwards."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        return f"page cache not dropped ({error.strerror})"
    return "page cache dropped"


def warm(*paths: Path) -> None:
    """Read files whole, so that a server's disk is not what is measured."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 20):
                    pass


@contextmanager
def cpu_seconds() -> Iterator[Callable[[], float]]:
    """User and system seconds of the children that end within the block, with all that they waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def spent() -> float:
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime

    yield spent


@dataclass
class Series:
    """Measured values of one quantity of one variant, in the order in which they were taken."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, scale: float = 1.0, digits: int = 1) -> str:
        """``median (min to max)``."""
        low, middle, high = (f"{v * scale:,.{digits}f}" for v in (min(self.values), self.median, max(self.values)))
        return middle if len(self.values) == 1 else f"{middle} ({low} to {high})"

    def to_dict(self) -> dict[str, Any]:
        return {"n": len(self.values), "median": self.median, "min": min(self.values), "max": max(self.values)}


Variant = Callable[[], Mapping[str, float]]


def alternate(variants: Mapping[str, Variant], rounds: int) -> dict[str, dict[str, Series]]:
    """Call each variant once a round; every second round goes backwards, so that none is always the first.

    A variant returns its quantities by name. The result has a Series for each variant and quantity.
    """
    found: dict[str, dict[str, Series]] = {name: {} for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            for quantity, value in variants[name]().items():
                found[name].setdefault(quantity, Series()).values.append(value)
    return found


def timed(action: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Report:
    """Results of one experiment: lines on the terminal, and JSON lines in ``build/bench/<experiment>.jsonl``."""

    def __init__(self, experiment: str) -> None:
        self.experiment = experiment
        self._facts = machine()
        self._missed: list[str] = []
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.path = RESULTS / f"{experiment}.jsonl"
        facts = self._facts
        print(f"\n{experiment}: {facts['kernel']}, {facts['cores']} × {facts['cpu']}, load {facts['load']:.2f}")

    def record(self, variant: str, series: Mapping[str, Series], **facts: object) -> None:
        """Append one line: the variant, its quantities, and what was cold or how large."""
        line = {
            "experiment": self.experiment,
            "variant": variant,
            "time": time.time(),
            "quantities": {name: one.to_dict() for name, one in series.items()},
            **facts,
            "machine": self._facts,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def goal(self, what: str, value: float, bound: float, unit: str, *, at_least: bool = False) -> None:
        """Print a figure beside what it ought to be."""
        met = value >= bound if at_least else value <= bound
        if not met:
            self._missed.append(what)
        sign = "≥" if at_least else "≤"
        print(f"  {what}: {value:.2f} {unit}, goal {sign} {bound:g} {unit}: {'met' if met else 'MISSED'}")

    @property
    def missed(self) -> Sequence[str]:
        """The goals that were not met."""
        return self._missed
