"""The test harness itself: it must see what a test leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec_store.home import Home
from tests import leaks
from tests.waiting import until


def test_a_detached_orphan_is_seen_as_a_process_of_the_run() -> None:
    script = "import os, sys\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  sys.stdin.read()\n os._exit(0)\n"
    reading, writing = os.pipe()
    before = leaks.snapshot()
    try:
        subprocess.run([sys.executable, "-c", script], stdin=reading, check=True)
        until(
            lambda: any("sys.stdin.read" in line for line in leaks.snapshot().minus(before)["processes"]), "the orphan"
        )
    finally:
        os.close(reading)
        os.close(writing)  # end of input ends it


def test_a_cgroup_of_ours_is_seen() -> None:
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    group = next(root for root in roots if (root / "cgroup.procs").exists()) / "dsec-harness-test"
    before = leaks.snapshot()
    group.mkdir()
    try:
        assert str(group) in leaks.snapshot().minus(before)["cgroups"]
    finally:
        group.rmdir()


def test_every_test_has_a_home_of_its_own_on_a_disk(home: Home, tmp_path: Path) -> None:
    assert os.environ["DSEC_HOME"] == str(home.path) == str(tmp_path / "home")
    assert (home.path / "store").is_dir()


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match="the moon"):
        until(lambda: False, "the moon", seconds=0.01)
