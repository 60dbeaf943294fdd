"""The benchmark harness: turns, medians, and reading a command's output."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from bench import harness
from bench.coldstart import follow
from bench.harness import Report, Series, alternate


def test_variants_take_turns_and_every_second_round_goes_backwards() -> None:
    order: list[str] = []

    def variant(name: str) -> dict[str, float]:
        order.append(name)
        return {"n": float(len(order))}

    found = alternate({"a": lambda: variant("a"), "b": lambda: variant("b")}, 3)
    assert "".join(order) == "abbaab"
    assert found["a"]["n"].values == [1, 4, 5]
    assert found["b"]["n"].median == 3


def test_a_figure_is_shown_with_its_spread() -> None:
    assert Series([0.003, 0.001, 0.002]).show(1000) == "2.0 (1.0 to 3.0)"
    assert Series([0.5]).show(digits=2) == "0.50"


def test_results_are_json_lines_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "bench")
    report = Report("trial")
    report.record("a", {"ready": Series([1.0, 2.0, 4.0])}, cold="nothing")
    report.record("b", {"ready": Series([8.0])})
    report.goal("a", 2.0, 3.0, "s")
    report.goal("b", 8.0, 3.0, "s")
    lines = [json.loads(line) for line in report.path.read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["a", "b"]
    assert lines[0]["quantities"]["ready"] == {"n": 3, "median": 2.0, "min": 1.0, "max": 4.0}
    assert lines[0]["cold"] == "nothing" and lines[0]["machine"]["cores"] == os.cpu_count()
    assert report.missed == ["b"]
    assert "goal ≤ 3 s: MISSED" in capsys.readouterr().out


def test_output_is_read_to_its_end_and_passed_tests_are_counted_across_pieces() -> None:
    reading, writing = os.pipe()
    with io.FileIO(writing, "w") as end:
        end.write(b"started\nt.py::a PAS")
        end.write(b"SED [ 50%]\nt.py::b PASSED [100%]\nt.py::c FAILED\n")
    with io.FileIO(reading) as output:
        ready, first, passed = follow(output, 0.0)
    assert passed == 2
    assert 0 < ready <= first
