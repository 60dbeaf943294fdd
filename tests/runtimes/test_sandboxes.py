"""Sandboxes that are kept, listed, removed, and those whose supervisor died."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dsec_store.home import Home
from runtimes.errors import SandboxBusy, SandboxUnknown
from runtimes.ids import sandbox_id
from runtimes.sandboxes import open_finished, reap_stale
from runtimes.supervisor import run  # noqa: F401  (imported here, so that the time of reap_stale alone is measured)
from tests.conftest import DSEC
from tests.runtimes.conftest import BASE, Box, gone


@contextlib.contextmanager
def running(box: Box, *options: str, marker: str = "86399") -> Iterator[subprocess.Popen[bytes]]:
    """A sandbox whose command waits."""
    with box.start(*options, "--", "sh", "-c", f"echo ready; exec sleep {marker}") as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_kept_sandbox_is_listed_and_can_be_packed_and_removed(box: Box) -> None:
    done, record = box.run("--keep", "--name", "mine", "--", "sh", "-c", "echo new > /made; exit 4")
    assert done.returncode == 4
    (entry,) = box.ps()
    assert entry["id"] == record["sandbox"] and entry["name"] == "mine" and entry["state"] == "finished"
    assert entry["outcome"] == {"kind": "exited", "code": 4} and entry["pid"] is None
    assert entry["refs"] == [BASE] and entry["command"][0] == "sh"
    assert entry["started_at"] < entry["ended_at"]
    for name in ("mine", record["sandbox"]):
        with open_finished(box.home, name) as finished:
            assert (finished.upper / "made").read_text() == "new\n"
            assert [layer["kind"] for layer in finished.layers] == ["base"]
            assert all(layer["manifest"].startswith("sha256:") for layer in finished.layers)
    kept = json.loads((box.home.sandbox(entry["id"]) / "records" / f"{record['id']}.json").read_text())
    assert kept == record
    table = box.dsec("ps").stdout
    assert "mine" in table and "exited 4" in table
    assert box.dsec("rm", "mine").stdout.strip() == entry["id"]
    assert box.ps() == []


def test_a_sandbox_that_is_not_kept_leaves_nothing(box: Box) -> None:
    box.run("--", "sh", "-c", "mkdir -p /a/b/c; echo > /a/b/c/d")
    assert box.ps() == []


def test_a_running_sandbox_is_listed_and_cannot_be_packed_or_removed(box: Box) -> None:
    with running(box, "--name", "busy") as process:
        (entry,) = box.ps()
        assert entry["state"] == "running" and entry["pid"] == process.pid and entry["outcome"] is None
        done = box.dsec("rm", "busy", check=False)
        assert done.returncode == 1 and "runs" in done.stderr and done.stderr.count("\n") == 1
        with pytest.raises(SandboxBusy), open_finished(box.home, "busy"):
            pass
        box.dsec("rm", "--force", "busy")
        process.wait(30)
        assert process.returncode == 143
    assert box.ps() == []


def test_a_kept_sandbox_that_runs_is_killed_and_removed_by_force(box: Box) -> None:
    marker = f"{os.getpid()}990"
    with running(box, "--keep", "--name", "held", marker=marker) as process:
        process.send_signal(19)  # SIGSTOP: a supervisor that does not react
        try:
            done = subprocess.Popen(
                [box.dsec("--version").args[0], "rm", "--force", "held"], env={**os.environ}, stdout=subprocess.PIPE
            )
            out, _ = done.communicate(timeout=60)
        finally:
            process.send_signal(18)
        assert done.returncode == 0 and out
        process.wait(30)
    gone(marker)
    assert box.ps() == []


def test_a_name_in_use_is_refused_until_its_sandbox_is_removed(box: Box) -> None:
    box.run("--keep", "--name", "taken", "--", "true")
    done, _ = box.run("--name", "taken", "--", "true")
    assert done.returncode == 125 and "taken" in done.stderr and done.stderr.count("\n") == 1
    box.dsec("rm", "taken")
    done, _ = box.run("--name", "taken", "--", "true")
    assert done.returncode == 0


def test_ten_with_one_name_at_once_give_one_sandbox(box: Box) -> None:
    processes = [box.start("--keep", "--name", "one", "--", "true") for _ in range(10)]
    codes = []
    for process in processes:
        process.communicate(timeout=120)
        codes.append(process.returncode)
    assert sorted(codes) == [0] + [125] * 9
    assert len(box.ps()) == 1


def test_unknown_sandboxes_are_one_line(box: Box) -> None:
    for name in ("nobody", sandbox_id(), "../../etc"):
        done = box.dsec("rm", name, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and name in done.stderr
    with pytest.raises(SandboxUnknown), open_finished(box.home, "nobody"):
        pass


def test_a_kept_sandbox_of_a_killed_supervisor_is_dead_and_keeps_its_files(box: Box) -> None:
    marker = f"{os.getpid()}991"
    with box.start(
        "--keep", "--name", "left", "--", "sh", "-c", f"echo x > /made; echo ready; sleep {marker}"
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait(30)
    (entry,) = box.ps()
    assert entry["state"] == "dead" and entry["outcome"]["kind"] == "unknown"
    gone(marker)
    with open_finished(box.home, "left") as finished:
        assert (finished.upper / "made").read_text() == "x\n"
    box.dsec("rm", "left")


def test_two_reapers_at_once_share_the_work(box: Box) -> None:
    dead = 6
    processes = [box.start("--", "sh", "-c", "echo ready; sleep 86398") for _ in range(dead)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        process.kill()
        process.communicate(timeout=30)
    reaped: list[str] = []
    errors: list[BaseException] = []

    def reap() -> None:
        try:
            reaped.extend(reap_stale(box.home))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reap) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(reaped) == len(set(reaped)) == dead
    box.nothing_left()


def test_a_half_made_sandbox_is_reaped(box: Box) -> None:
    for step in ("", "lock", "config.json"):
        folder = box.home.sandbox(sandbox_id())
        folder.mkdir()
        if step:
            (folder / "lock").touch()
        if step == "config.json":
            (folder / "config.json").write_text('{"version": 1, "keep": tr')
    assert len(reap_stale(box.home)) == 3
    box.nothing_left()


def test_looking_for_the_dead_is_cheap_when_there_are_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = Home(tmp_path_factory.mktemp("quiet")).ensure()
    for _ in range(20):
        folder = home.sandbox(sandbox_id())
        folder.mkdir()
        (folder / "ended.json").write_text("{}")
    times = []
    for _ in range(20):
        started = time.perf_counter()
        assert reap_stale(home) == []
        times.append(time.perf_counter() - started)
    assert min(times) < 0.002


def test_while_a_sandbox_runs_nobody_reaps_it(box: Box) -> None:
    with running(box) as process:
        for _ in range(5):
            assert reap_stale(box.home) == []
        assert process.poll() is None


def test_the_mount_is_in_no_mount_table_of_the_machine(box: Box) -> None:
    with running(box):
        with open("/proc/self/mountinfo", "rb") as file:
            assert os.fsencode(box.home.path) not in file.read()
        (entry,) = box.ps()
        status = box.dsec.json("node", "status")
        assert [mount["id"] for mount in status["mounts"] if mount["id"] == entry["id"]]
    box.ps()
    status = box.dsec.json("node", "status")
    assert not [mount for mount in status["mounts"] if mount["id"] == entry["id"]]


def test_a_node_that_was_stopped_is_started_again(box: Box) -> None:
    box.dsec("node", "stop")
    done, _ = box.run("--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_the_callers_environment_and_descriptors_stay_outside(box: Box) -> None:
    env = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "NOTIFY_SOCKET": "/run/none.sock", "LD_PRELOAD": ""}
    done, _ = box.run("--", "sh", "-c", "env; ls /proc/self/fd | wc -l", env=env)
    assert done.returncode == 0, done.stderr
    assert not any(name in done.stdout for name in env)
    assert int(done.stdout.split()[-1]) <= 4  # three, and the folder that ls reads


def test_a_caller_that_ignores_its_children_can_run_commands(box: Box) -> None:
    script = "import os, signal, sys; signal.signal(17, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", script, str(DSEC), "run", BASE, "--", "sh", "-c", "exit 3"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr


def test_a_run_that_never_started_keeps_nothing_and_no_name(box: Box) -> None:
    for arguments in (["--", "/absent"], ["--user", "nobody-there", "--", "true"]):
        done, _ = box.run("--keep", "--name", "never", *arguments)
        assert done.returncode in (125, 127)
        assert box.ps() == []


def test_a_kept_run_keeps_its_outcome_when_the_node_dies_meanwhile(box: Box) -> None:
    command = ("sh", "-c", "echo up; read line; exit 3")
    with box.start("--keep", "--name", "left", "--", *command, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        pid = box.dsec.json("node", "status")["pid"]
        os.kill(pid, signal.SIGKILL)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(30) == 3
    [sandbox] = [each for each in box.ps() if each["name"] == "left"]
    assert (sandbox["state"], sandbox["outcome"]) == ("finished", {"kind": "exited", "code": 3})
    assert len(list((box.home.sandbox(sandbox["id"]) / "records").iterdir())) == 1


def test_removing_by_force_signals_nobody_but_the_supervisor(box: Box) -> None:
    """The number of a supervisor that ended may be another process's by now, and the lock another command's."""
    box.run("--keep", "--name", "reused", "--", "true")
    [sandbox] = box.ps()
    path = box.home.sandbox(sandbox["id"])
    with subprocess.Popen(["sleep", "60"]) as bystander:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "pid": bystander.pid}))
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            failed = box.dsec("rm", "--force", "reused", check=False)
        assert failed.returncode == 1 and "another command works on it" in failed.stderr
        assert bystander.poll() is None
        bystander.kill()
