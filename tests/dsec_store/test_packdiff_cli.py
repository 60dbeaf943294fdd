"""``dsec pack-diff`` of a real sandbox, into the local store and a registry."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_store.home import Home
from tests.conftest import Dsec
from tests.servers import registry_process

BASE = "base:1"
CHANGE = "echo changed > /etc/new; rm /etc/old; echo done"


@pytest.fixture
def busybox(dsec: Dsec, tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "busybox"
    for folder in ("bin", "etc", "proc", "dev", "sys", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for name in ("sh", "cat", "rm", "ls", "echo"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "old").write_text("old")
    dsec("layer", "build", root, "--ref", BASE, "--kind", "base")
    yield root
    for sandbox in dsec.json("ps"):
        dsec("rm", sandbox["id"])


def test_a_second_sandbox_starts_from_what_the_first_one_left(dsec: Dsec, busybox: Path) -> None:
    dsec("run", BASE, "--name", "first", "--keep", "--", "sh", "-c", CHANGE)
    packed = dsec.json("pack-diff", "first", "--ref", "result:1")
    assert packed["diff"]["kind"] == "diff"
    shown = dsec.json("layer", "show", "result:1")
    assert [layer["kind"] for layer in shown["layers"]] == ["base", "diff"]
    assert shown["id"] == packed["environment"]["id"]
    assert dsec("run", "result:1", "--", "sh", "-c", "cat /etc/new; ls /etc").stdout.splitlines()[0] == "changed"
    assert "old" not in dsec("run", "result:1", "--", "ls", "/etc").stdout
    # and the first one's sandbox is as it was
    assert dsec.json("pack-diff", "first", "--ref", "again:1")["diff"]["id"] == packed["diff"]["id"]


def test_an_unknown_sandbox_is_one_line(dsec: Dsec, home: Home) -> None:
    done = dsec("pack-diff", "nobody", "--ref", "a:1", check=False)
    assert done.returncode == 1
    assert "nobody" in done.stderr and done.stderr.count("\n") == 1


def test_a_running_sandbox_is_refused(dsec: Dsec, busybox: Path) -> None:
    with dsec.start(
        "run", BASE, "--name", "busy", "--keep", "-i", "--", "sh", "-c", "echo up; cat", stdin=-1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        done = dsec("pack-diff", "busy", "--ref", "a:1", check=False)
        assert done.returncode == 1
        assert "busy" in done.stderr and done.stderr.count("\n") == 1
        process.communicate()
    assert [item["reference"] for item in dsec.json("layer", "ls")] == [BASE]


def test_the_result_goes_to_a_registry_with_the_layers_it_needs(dsec: Dsec, busybox: Path, tmp_path: Path) -> None:
    other = Home(tmp_path / "registry").ensure()
    with registry_process(other.path) as registry:
        dsec("run", BASE, "--name", "first", "--keep", "--", "sh", "-c", CHANGE)
        packed = dsec.json("pack-diff", "first", "--ref", f"{registry.host}/team/result:1")
        assert packed["reference"] == f"{registry.host}/team/result:1"
        assert "team/result:1" not in [item["reference"] for item in dsec.json("layer", "ls")]
        (there,) = dsec.json("layer", "ls", home=other.path)
        assert (there["kind"], there["manifest"]) == ("environment", packed["environment"]["manifest"])
        again = dsec("run", f"{registry.host}/team/result:1", "--", "cat", "/etc/new")
        assert again.stdout == "changed\n"


def test_layers_of_a_registry_are_named_and_not_copied(dsec: Dsec, busybox: Path, tmp_path: Path) -> None:
    other = Home(tmp_path / "registry").ensure()
    with registry_process(other.path) as registry:
        dsec("layer", "push", BASE, f"{registry.host}/base:1")
        here = Home(tmp_path / "empty-handed").ensure()
        away = Dsec(here.path)
        try:
            away("run", f"{registry.host}/base:1", "--name", "first", "--keep", "--", "sh", "-c", CHANGE)
            away("pack-diff", "first", "--ref", "result:1")
            layers = away.json("layer", "show", "result:1")["layers"]
            assert [layer["source"] for layer in layers] == [f"{registry.host}/base", None]
            assert [layer["local"] for layer in layers] == [False, True]
            assert away("run", "result:1", "--", "cat", "/etc/new").stdout == "changed\n"
            away("rm", "first")
        finally:
            away("node", "stop", "--force", check=False)
            shutil.rmtree(here.path)


def test_a_registry_that_cannot_be_reached_loses_nothing(dsec: Dsec, busybox: Path) -> None:
    dsec("run", BASE, "--name", "first", "--keep", "--", "sh", "-c", CHANGE)
    done = dsec("pack-diff", "first", "--ref", "localhost:1/result:1", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    digest = done.stderr.split("push result@")[1].split()[0]
    assert dsec.json("layer", "show", f"any@{digest}")["kind"] == "environment"
