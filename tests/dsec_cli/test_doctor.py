"""``dsec doctor`` on this machine, and on machines that lack something."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dsec_linux import features
from dsec_store import doctor
from dsec_store.home import Home
from tests.conftest import ROOT, Dsec


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


def lines(dsec: Dsec, home: Path, **options: Any) -> dict[str, Any]:
    """The checks by name, of a report that says that sandboxes cannot be run."""
    done = dsec("doctor", "--json", check=False, home=home, **options)
    assert (done.returncode, done.stderr) == (1, "")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    table = dsec("doctor", check=False, home=home, **options).stdout
    assert all(name in table for name in found)
    return found


@contextmanager
def disk(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(2 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", ",".join(["loop", *options]), image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_home_on_a_full_disk_is_missing_and_the_rest_is_looked_at(dsec: Dsec, tmp_path: Path) -> None:
    with disk(tmp_path / "small") as small:
        fd = os.open(small / "fill", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while os.write(fd, bytes(65536)):
                pass
        os.close(fd)
        found = lines(dsec, small / "home")
        assert sorted(path.name for path in small.iterdir()) == ["fill", "lost+found"]
    assert found["home"]["status"] == "missing" and "No space left" in found["home"]["found"]
    assert found["EROFS from files"]["status"] == found["overlayfs"]["status"] == "ok"


def test_a_read_only_home_is_missing(dsec: Dsec, tmp_path: Path) -> None:
    with disk(tmp_path / "small", "ro") as small:
        found = lines(dsec, small)
    assert found["home"]["status"] == "missing" and "Read-only file system" in found["home"]["found"]
    assert found["EROFS over FUSE"]["status"] == "ok"


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_home_that_is_no_folder_is_missing(dsec: Dsec, tmp_path: Path, below: str) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    for name, words in (("dangling", "leads to no folder"), ("file", "not a folder"), ("circle", "no folder")):
        found = lines(dsec, tmp_path / name / below)
        assert found["home"]["status"] == "missing" and words in found["home"]["found"]
        assert found["EROFS from files"]["status"] == "ok"


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that every user may look into, which tmp_path is not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_another_users_home_is_missing_with_the_reason(visible: Path) -> None:
    """As a person without privileges sees it: looked at in a child process, since the tests run as root."""
    (visible / "private").mkdir(mode=0o700)
    (visible / "listed").mkdir(mode=0o755)
    script = """
import json, os, sys
from pathlib import Path
from dsec_store import doctor
from dsec_store.home import Home
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps([[c.to_dict() for c in doctor.examine(Home(Path(p)))] for p in sys.argv[1:]]))
"""
    homes = [visible / "private" / "home", visible / "private", visible / "listed", visible / "listed" / "home"]
    done = subprocess.run([sys.executable, "-c", script, *homes], cwd=ROOT, capture_output=True, text=True, check=True)
    for checks in json.loads(done.stdout):
        (home,) = [check for check in checks if check["name"] == "home"]
        assert home["status"] == "missing" and "Permission denied" in home["found"]
        assert {"root", "EROFS from files", "overlayfs", "crun"} <= {check["name"] for check in checks}


def test_without_any_place_for_a_file_the_features_are_not_tried(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SPARE_FOLDERS", (str(tmp_path / "absent"),))
    (tmp_path / "file").touch()
    checks = {check.name: check for check in doctor.examine(Home(tmp_path / "file"))}
    for name in ("EROFS from files", "EROFS over FUSE", "overlayfs", "xattrs"):
        assert checks[name].status == doctor.MISSING and "not tried" in checks[name].found
