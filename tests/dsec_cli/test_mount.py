"""``dsec mount``, ``umount``, ``node`` and ``stats`` as a user types them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dsec_linux.mounts import mountinfo
from dsec_store.home import Home
from tests.conftest import Dsec
from tests.servers import registry_process
from tests.waiting import until


@pytest.fixture
def layers(dsec: Dsec, tmp_path: Path) -> None:
    for name, kind, files in (
        ("base", "base", {"hello": "base\n", "etc/conf": "x=1\n"}),
        ("work", "workspace", {"hello": "work\n"}),
        ("tool", "toolkit", {"bin/tool": "tool\n"}),
    ):
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        dsec("layer", "build", tmp_path / name, "--ref", f"{name}:1", "--kind", kind)


def mounted_at(path: Path) -> bool:
    return any(mount.target == str(path) for mount in mountinfo())


def test_layers_are_mounted_on_top_of_each_other_and_unmounted(
    dsec: Dsec, home: Home, layers: None, tmp_path: Path
) -> None:
    at = tmp_path / "at"
    at.mkdir()
    dsec("mount", "base:1", "work:1", "tool:1", "--at", at)
    assert (at / "hello").read_text() == "work\n"
    assert (at / "bin" / "tool").read_text() == "tool\n"
    with pytest.raises(OSError):
        (at / "new").write_text("x")
    [mount] = dsec.json("node", "status")["mounts"]
    assert mount["owner"] == {"target": str(at)} and mount["in_use"]
    refused = dsec("node", "stop", check=False)
    assert refused.returncode == 1 and "1 environment is still mounted" in refused.stderr
    dsec("umount", at)
    assert not mounted_at(at)
    assert dsec.json("node", "status")["mounts"] == []
    dsec("node", "stop")
    assert not home.node_socket.exists()


def test_changes_of_a_writable_mount_are_kept_and_can_be_packed(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    at = tmp_path / "at"
    at.mkdir()
    dsec("mount", "base:1", "work:1", "--at", at, "--rw", "--name", "edit")
    (at / "new").write_text("new\n")
    (at / "hello").unlink()
    busy = dsec("pack-diff", "edit", "--ref", "edited:1", check=False)
    assert busy.returncode == 1 and "is mounted at" in busy.stderr
    [sandbox] = dsec.json("ps")
    assert (sandbox["name"], sandbox["state"]) == ("edit", "running")
    assert "dsec pack-diff edit" in dsec("umount", at).stdout
    dsec("pack-diff", "edit", "--ref", "edited:1")
    dsec("rm", "edit")
    dsec("mount", "edited:1", "--at", at)
    assert (at / "new").read_text() == "new\n"
    assert not (at / "hello").exists()
    assert (at / "etc" / "conf").read_text() == "x=1\n"
    dsec("umount", at)
    assert dsec.json("ps") == []


def test_a_writable_mount_without_changes_leaves_nothing(dsec: Dsec, home: Home, layers: None, tmp_path: Path) -> None:
    at = tmp_path / "at"
    at.mkdir()
    dsec("mount", "base:1", "--at", at, "--rw")
    assert dsec("umount", at).stdout == ""
    assert dsec.json("ps") == []
    assert [path for path in home.sandboxes.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["absent:1"], 1, "absent:1"),
        (["work:1"], 1, "kind workspace; expected a base layer or an environment first"),
        (["base:1", "base:1"], 1, "expected a workspace, toolkit or diff"),
        (["Not A Ref"], 1, "not a reference"),
        (["127.0.0.1:9/x:1"], 1, "cannot connect"),
        ([], 2, "REF"),
    ],
    ids=["unknown", "kind", "two-bases", "grammar", "no-registry", "usage"],
)
@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_a_refused_mount_is_one_line_and_leaves_nothing(
    dsec: Dsec, home: Home, layers: None, tmp_path: Path, mode: str, arguments: list[str], code: int, said: str
) -> None:
    at = tmp_path / "at"
    at.mkdir()
    failed = dsec("mount", *arguments, "--at", at, *(["--rw"] if mode == "rw" else []), check=False)
    assert failed.returncode == code
    assert said in failed.stderr
    assert len(failed.stderr.splitlines()) == 1, failed.stderr
    assert not mounted_at(at)
    assert list(home.mounts.glob("*")) == []
    assert [path for path in home.sandboxes.glob("*") if not path.name.startswith(".")] == []


def test_unmounting_what_is_not_ours_is_refused(dsec: Dsec, home: Home, tmp_path: Path) -> None:
    for target in (tmp_path, Path("/proc"), tmp_path / "absent"):
        failed = dsec("umount", target, check=False)
        assert failed.returncode == 1 and "nothing that dsec mounted is at" in failed.stderr
    assert mounted_at(Path("/proc"))


def test_readers_get_an_error_and_no_other_bytes_when_the_node_is_killed(
    dsec: Dsec, home: Home, tmp_path: Path, layers: None
) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (big / "file").write_bytes(os.urandom(6_000_000))
    dsec("layer", "build", big, "--ref", "big:1", "--kind", "base")
    node_home = Home(tmp_path / "node").ensure()
    at = tmp_path / "at"
    at.mkdir()
    with registry_process(home.path) as registry:
        dsec("mount", f"{registry.host}/big:1", "--at", at, home=node_home.path)
        with open(at / "file", "rb") as file:
            start = file.read(4096)
            pid = dsec.json("node", "status", home=node_home.path)["pid"]
            pidfd = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            signal_gone = until(lambda: not Path(f"/proc/{pid}/fd").exists() or _is_zombie(pid), "the node to die")
            assert signal_gone
            os.close(pidfd)
            Path("/proc/sys/vm/drop_caches").write_text("3")
            with pytest.raises(OSError):
                file.seek(5_000_000)
                file.read(4096)
        assert start == (big / "file").read_bytes()[:4096]
        # another node starts on need, what was mounted can be unmounted, and mounting works again
        dsec("umount", at, home=node_home.path)
        dsec("mount", f"{registry.host}/big:1", "--at", at, home=node_home.path)
        assert (at / "file").read_bytes() == (big / "file").read_bytes()
        stats = dsec.json("stats", home=node_home.path)
        assert stats["layers"][0]["chunks_touched"] == stats["layers"][0]["chunks"] == 23
        dsec("umount", at, home=node_home.path)
        dsec("node", "stop", home=node_home.path)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def test_commands_that_start_the_node_at_once_find_one(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    places = [tmp_path / f"at{number}" for number in range(6)]
    for place in places:
        place.mkdir()
    running = [dsec.start("mount", "base:1", "work:1", "--at", str(place)) for place in places]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    status = dsec.json("node", "status")
    assert len(status["mounts"]) == 6
    assert len(status["layers"]) == 2  # each layer is mounted once
    for place in places:
        assert (place / "hello").read_text() == "work\n"
        dsec("umount", place)


def test_a_second_node_for_a_home_is_refused(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    dsec("mount", "base:1", "--at", tmp_path / "at")
    second = dsec("node", check=False)
    assert second.returncode == 1 and "a node runs already" in second.stderr
    dsec("umount", tmp_path / "at")


def test_stats_without_a_node_is_one_line(dsec: Dsec) -> None:
    failed = dsec("stats", "--json", check=False)
    assert failed.returncode == 1 and "no node runs" in failed.stderr


def test_sockets_are_for_their_owner_only(dsec: Dsec, home: Home, layers: None, tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    dsec("mount", "base:1", "--at", tmp_path / "at")
    for path in (home.node_socket, home.node_fd_socket):
        assert path.stat().st_mode & 0o777 == 0o600
    dsec("umount", tmp_path / "at")


def test_the_total_is_the_sum_of_the_layers(dsec: Dsec, home: Home, layers: None, tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    node_home = Home(tmp_path / "node").ensure()
    with registry_process(home.path) as registry:
        names = [f"{registry.host}/{name}:1" for name in ("base", "work", "tool")]
        dsec("mount", *names, "--at", tmp_path / "at", home=node_home.path)
        assert (tmp_path / "at" / "hello").read_text() == "work\n"
        stats = json.loads(dsec("stats", "--json", home=node_home.path).stdout)
        for key in ("size", "bytes_fetched", "requests", "chunks"):
            assert stats["total"][key] == sum(layer[key] for layer in stats["layers"]), key
        assert dsec("stats", home=node_home.path).stdout.splitlines()[0].split()[0] == "LAYER"
        dsec("umount", tmp_path / "at", home=node_home.path)
        dsec("node", "stop", home=node_home.path)


def test_nothing_is_imported_from_the_callers_directory(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    (evil / "at").mkdir(parents=True)
    for name in ("http", "logging", "types", "dsec_cli", "json"):
        (evil / f"{name}.py").write_text(f"open({str(evil / 'ran')!r}, 'w').close()\n")
    dsec("mount", "base:1", "--at", "at", cwd=evil, env={"PYTHONSTARTUP": str(evil / "json.py")})
    dsec("stats", cwd=evil)
    dsec("umount", "at", cwd=evil)
    assert not (evil / "ran").exists()


def test_a_path_that_is_not_utf8_is_listed(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    at = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\nx"))
    at.mkdir()
    dsec("mount", "base:1", "--at", at)
    [mount] = dsec.json("node", "status")["mounts"]
    assert os.fsencode(mount["owner"]["target"]) == os.fsencode(at)
    shown = dsec("node", "status").stdout
    dsec("umount", at)
    assert len(shown.splitlines()) == 6  # two tables of one row


@pytest.mark.parametrize("change", ["mode", "xattr"])
def test_a_change_of_the_root_directory_alone_is_kept(dsec: Dsec, layers: None, tmp_path: Path, change: str) -> None:
    at = tmp_path / "at"
    at.mkdir()
    dsec("mount", "base:1", "--at", at, "--rw")
    if change == "mode":
        at.chmod(0o711)
    else:
        os.setxattr(at, "user.key", b"value")
    assert "the changes are kept" in dsec("umount", at).stdout
    [sandbox] = dsec.json("ps")
    dsec("pack-diff", sandbox["id"], "--ref", "root:1")
    dsec("rm", sandbox["id"])
    dsec("mount", "root:1", "--at", at)
    if change == "mode":
        assert at.stat().st_mode & 0o777 == 0o711
    else:
        assert os.getxattr(at, "user.key") == b"value"
    dsec("umount", at)


def test_a_named_mount_stays_until_it_is_removed(dsec: Dsec, layers: None, tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    dsec("mount", "base:1", "--at", tmp_path / "at", "--rw", "--name", "mine")
    dsec("umount", tmp_path / "at")
    assert [sandbox["name"] for sandbox in dsec.json("ps")] == ["mine"]
    dsec("rm", "mine")


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_a_mount_is_found_where_its_folder_was_moved_to(dsec: Dsec, layers: None, tmp_path: Path, mode: str) -> None:
    (tmp_path / "p" / "at").mkdir(parents=True)
    options = ["--rw", "--name", "n"] if mode == "rw" else []
    dsec("mount", "base:1", "--at", tmp_path / "p" / "at", *options)
    (tmp_path / "p").rename(tmp_path / "q")
    assert [mount["in_use"] for mount in dsec.json("node", "status")["mounts"]] == [True]
    if mode == "rw":
        assert str(tmp_path / "q" / "at") in dsec("rm", "n", check=False).stderr
    dsec("umount", tmp_path / "q" / "at")
    if mode == "rw":
        dsec("rm", "n")


def test_the_home_can_be_unmounted_as_soon_as_the_node_has_stopped(dsec: Dsec, tmp_path: Path, layers: None) -> None:
    (tmp_path / "at").mkdir()
    dsec("mount", "base:1", "--at", tmp_path / "at")
    pid = dsec.json("node", "status")["pid"]
    dsec("umount", tmp_path / "at")
    dsec("node", "stop")
    assert not Path(f"/proc/{pid}").exists() or _is_zombie(pid)
