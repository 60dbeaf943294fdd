"""``dsec doctor`` on this machine, and on machines that lack something."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from dsec_linux import features
from dsec_store import doctor
from dsec_store.home import Home
from tests.conftest import Dsec


def test_this_machine_can_run_sandboxes_and_every_line_says_what_it_is_for(dsec: Dsec) -> None:
    report = dsec.json("doctor")
    assert report["able"]
    by_name = {check["name"]: check for check in report["checks"]}
    assert len(by_name) == len(report["checks"])
    for name in ("kernel", "EROFS from files", "EROFS over FUSE", "overlayfs", "cgroups", "namespaces", "home"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert all(check["found"] and check["needed_for"] for check in report["checks"])
    text = dsec("doctor").stdout
    assert all(name in text for name in by_name)
    assert text.endswith("Sandboxes can be run here.\n")


def test_a_home_on_tmpfs_is_refused_with_the_reason(dsec: Dsec) -> None:
    done = dsec("doctor", "--json", check=False, home=Path("/dev/shm/dsec-doctor-none"))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert found["home"]["status"] == "missing"
    assert "tmpfs" in found["home"]["found"]
    assert found["EROFS from files"]["status"] == "missing"  # an image cannot be mounted from there
    assert not Path("/dev/shm/dsec-doctor-none").exists()


def test_nothing_is_made_in_a_home_that_does_not_exist(dsec: Dsec, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    dsec("doctor", home=tmp_path / "absent" / "home")
    assert sorted(tmp_path.iterdir()) == before


def test_an_old_kernel_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "kernel_version", lambda: (6, 6))
    checks = {check.name: check for check in doctor.examine(home)}
    assert checks["kernel"].status == doctor.MISSING
    assert checks["FUSE resend"].status == doctor.LIMITED
    assert not doctor.able(list(checks.values()))


def test_a_feature_that_fails_is_a_line_and_not_a_traceback(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise OSError(errno.ENODEV, "no such file system")

    monkeypatch.setattr(features, "probe_erofs_file", broken)
    checks = {check.name: check for check in doctor.examine(home)}
    assert (checks["EROFS from files"].status, checks["EROFS from files"].found) == ("missing", "no such file system")


def test_without_crun_and_runc_there_are_no_sandboxes(dsec: Dsec, tmp_path: Path) -> None:
    done = dsec("doctor", "--json", check=False, env={"PATH": str(tmp_path)})
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert {check["name"] for check in report["checks"] if check["required"] and check["status"] == "missing"} == {
        "crun"
    }
