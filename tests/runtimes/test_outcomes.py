"""How a command ends, and what dsec run makes of it (docs/formats.md §10)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import DSEC
from tests.runtimes.conftest import Box, gone, processes_with

RUNC = {"DSEC_OCI_RUNTIME": "/usr/sbin/runc"}


def kept(stream: dict[str, str], end: str = "head") -> bytes:
    return base64.b64decode(stream[end])


@pytest.mark.parametrize("code", [0, 1, 2, 124, 125, 126, 127, 137, 255])
def test_the_exit_status_is_the_commands_and_the_record_says_that_it_exited(box: Box, code: int) -> None:
    done, record = box.run("--", "sh", "-c", f"exit {code}")
    assert done.returncode == code
    assert record["outcome"] == {"kind": "exited", "code": code}
    assert done.stderr == ""


def test_the_record_says_what_ran_where_and_when(box: Box) -> None:
    done, record = box.run("--workdir", "/tmp", "--", "sh", "-c", "echo out; echo err >&2")
    assert set(record) == {
        *("id", "sandbox", "session", "argv", "cwd", "user", "started_at", "ended_at", "outcome", "stdout", "stderr")
    }
    assert record["argv"] == ["sh", "-c", "echo out; echo err >&2"]
    assert record["cwd"] == "/tmp" and record["user"] == "root" and record["session"] is None
    assert record["sandbox"].startswith("local-") and len(record["sandbox"]) == len("local-") + 26
    assert record["started_at"] < record["ended_at"]
    assert record["stdout"] == {"total": 4, "head": base64.b64encode(b"out\n").decode(), "tail": "", "dropped": 0}
    assert kept(record["stderr"]) == b"err\n"
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_death_by_a_signal_is_told_apart_from_the_exit_code_of_the_same_number(box: Box, tmp_path: Path) -> None:
    # From inside, nothing kills the first process of a namespace; the machine can.
    marker, result = f"{os.getpid()}777", tmp_path / "r.json"
    script = f"echo ready; while :; do sleep 0.05; done; : {marker}"
    with box.start("--result", str(result), "--", "sh", "-c", script) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (inside,) = [pid for pid in processes_with(marker) if _in_a_container(pid)]
        os.kill(inside, signal.SIGKILL)
        process.wait(30)
    assert process.returncode == 137
    assert json.loads(result.read_text())["outcome"] == {"kind": "signalled", "signal": 9}


def _in_a_container(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return numbers[-1] == "1" and len(numbers) >= 3


@pytest.mark.parametrize("runtime", [{}, RUNC], ids=["crun", "runc"])
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("nosuch", 127),
        ("/bin/nosuch", 127),
        ("/etc", 126),
        ("/bin/plain", 126),
        ("garbage", 126),
        ("lost", 127),
        ("/etc/passwd/x", 126),
    ],
)
def test_a_command_that_cannot_be_started_is_126_or_127_and_one_line(
    box: Box, program: str, code: int, runtime: dict[str, str]
) -> None:
    done, record = box.run("--", program, "argument", env=runtime)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"dsec: cannot start {program!r}: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert record["outcome"]["kind"] == "unknown" and program in record["outcome"]["reason"]
    assert record["stderr"]["total"] == 0


def test_runc_runs_commands_too(box: Box) -> None:
    done, record = box.run("--memory", "64m", "--", "sh", "-c", "echo hi; exit 3", env=RUNC)
    assert (done.returncode, done.stdout) == (3, "hi\n"), done.stderr
    assert record["outcome"] == {"kind": "exited", "code": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory", "lots", "--", "true"),
        ("--memory", "1k", "--", "true"),
        ("--timeout", "0", "--", "true"),
        ("--pids", "-1", "--", "true"),
        ("--network", "bridge", "--", "true"),
        ("--name", "a/b", "--", "true"),
        ("--nosuch", "--", "true"),
        ("--result", "/no/such/folder/r.json", "--", "true"),
        ("--env", "=x", "--", "true"),
        ("--user", "nobody-here", "--", "true"),
        ("--user", "ann:nogroup-here", "--", "true"),
        ("--user", "99999999999", "--", "true"),
        ("--workdir", "relative", "--", "true"),
        ("--workdir", "/etc/passwd", "--", "true"),
        ("--workdir", "/etc/passwd/below", "--", "true"),
        ("--toolkit", "no/such:ref", "--", "true"),
        ("-i", "-t", "--", "true"),
        (),
    ],
    ids=" ".join,
)
def test_a_failure_of_ours_is_125_and_one_line(box: Box, arguments: tuple[str, ...]) -> None:
    done = box.dsec("run", "test/busybox:1", *arguments, check=False)
    assert done.returncode == 125, done.stderr
    assert done.stderr.startswith("dsec: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_no_base_at_all_is_125(box: Box) -> None:
    done = box.dsec("run", check=False)
    assert done.returncode == 125 and done.stderr.count("\n") == 1


def test_an_unknown_reference_is_125_and_the_record_is_written_all_the_same(box: Box) -> None:
    done, record = box.run("--", "true", base="no/such:base")
    assert done.returncode == 125 and "no/such:base" in done.stderr and done.stderr.count("\n") == 1
    assert record["outcome"]["kind"] == "unknown" and "no/such:base" in record["outcome"]["reason"]
    assert record["started_at"] is None


def test_a_timeout_kills_what_went_into_the_background_and_holds_the_pipes(box: Box) -> None:
    marker = f"{os.getpid()}881"
    script = (
        f"(setsid sleep {marker}1 &) & (sleep {marker}2 & ) ; setsid sh -c 'sleep {marker}3' & echo hi; sleep {marker}4"
    )
    started = time.monotonic()
    done, record = box.run("--timeout", "0.7", "--", "sh", "-c", script)
    assert time.monotonic() - started < 20
    assert (done.returncode, done.stdout) == (124, "hi\n")
    assert record["outcome"] == {"kind": "timeout"}
    gone(marker)


def test_a_timeout_kills_a_process_that_ignores_every_signal(box: Box) -> None:
    done, record = box.run("--timeout", "0.5", "--", "sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done")
    assert done.returncode == 124 and record["outcome"] == {"kind": "timeout"}


def test_the_end_of_the_command_is_the_end_whatever_it_left_in_the_background(box: Box) -> None:
    marker = f"{os.getpid()}882"
    done, record = box.run("--timeout", "60", "--", "sh", "-c", f"setsid sleep {marker} & echo done")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert record["outcome"] == {"kind": "exited", "code": 0}
    gone(marker)


def test_out_of_memory_is_137_and_the_record_tells_it_from_a_kill(box: Box) -> None:
    done, record = box.run("--memory", "20m", "--", "tail", "/dev/zero")
    assert done.returncode == 137 and record["outcome"] == {"kind": "oom"}
    assert "out of memory" in done.stderr


def test_a_command_that_fails_because_its_child_ran_out_of_memory_is_out_of_memory(box: Box) -> None:
    done, record = box.run("--memory", "20m", "--", "sh", "-c", "tail /dev/zero || exit 2")
    assert done.returncode == 137 and record["outcome"] == {"kind": "oom"}


def test_a_command_that_copes_with_a_child_out_of_memory_has_exited(box: Box) -> None:
    done, record = box.run("--memory", "20m", "--", "sh", "-c", "tail /dev/zero || echo coped")
    assert (done.returncode, done.stdout) == (0, "coped\n")
    assert record["outcome"] == {"kind": "exited", "code": 0}


def test_a_failure_below_the_memory_limit_is_no_out_of_memory(box: Box) -> None:
    done, record = box.run("--memory", "64m", "--", "sh", "-c", "exit 137")
    assert done.returncode == 137 and record["outcome"] == {"kind": "exited", "code": 137}


def test_no_more_processes_than_asked_for(box: Box) -> None:
    script = "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done; echo all"
    done, _ = box.run("--pids", "20", "--", "sh", "-c", script)
    assert done.returncode != 0 and "fork" in done.stderr and "all" not in done.stdout
    done, _ = box.run("--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "all\n")


def test_a_flood_of_output_is_counted_exactly_and_kept_at_both_ends_in_bounded_memory(box: Box) -> None:
    size = 300_000_000
    read_end, write_end = os.pipe()
    result = box.home.path / "flood.json"
    process = box.start("--result", str(result), "--", "sh", "-c", f"yes 0123456 | head -c {size}", stdout=write_end)
    os.close(write_end)
    seen = peak = 0
    while block := os.read(read_end, 1 << 20):
        seen += len(block)
        if seen >= size - (1 << 20):  # nearly all has gone through it; wait4's figure counts our own memory at the fork
            peak = max(peak, high_water_mark(process.pid))
    os.close(read_end)
    process.wait(30)
    assert process.stderr is not None
    process.stderr.close()
    record = json.loads(result.read_text())
    result.unlink()
    assert process.returncode == 0 and seen == size
    stdout = record["stdout"]
    head, tail = kept(stdout), kept(stdout, "tail")
    assert stdout["total"] == size and len(head) == len(tail) == 65536
    assert stdout["dropped"] == size - 2 * 65536
    assert head == (b"0123456\n" * 8192) and tail == (b"0123456\n" * 8193)[size % 8 :][:65536]
    assert 0 < peak < 80_000  # KiB


def high_water_mark(pid: int) -> int:
    """The most memory that a process had at once, KiB; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def test_a_reader_that_goes_away_is_told_to_the_command_as_without_us(box: Box) -> None:
    result = box.home.path / "closed.json"
    with box.start("--result", str(result), "--", "yes") as process:
        assert process.stdout is not None and process.stdout.read(2) == b"y\n"
        process.stdout.close()
        process.wait(30)
    record = json.loads(result.read_text())
    result.unlink()
    assert process.returncode == 1 and record["outcome"] == {"kind": "exited", "code": 1}  # EPIPE


def test_a_reader_that_never_reads_does_not_hold_up_the_timeout(box: Box) -> None:
    started = time.monotonic()
    with box.start("--timeout", "0.7", "--", "yes") as process:
        process.wait(30)
        assert process.returncode == 124
        assert time.monotonic() - started < 20
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_what_does_not_end_is_killed(
    box: Box, tmp_path: Path, number: signal.Signals
) -> None:
    marker, result = f"{os.getpid()}883{number.value}", tmp_path / "r.json"
    with box.start("--result", str(result), "--", "sh", "-c", f"echo ready; sleep {marker} & wait; wait") as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        process.wait(30)
    assert process.returncode == 128 + number
    assert json.loads(result.read_text())["outcome"] == {"kind": "stopped"}
    gone(marker)


def test_a_command_may_handle_the_signal(box: Box) -> None:
    script = "trap 'echo bye; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    with box.start("--", "sh", "-c", script) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"bye\n"
        process.wait(30)
    assert process.returncode == 130


def test_a_second_signal_kills_at_once(box: Box) -> None:
    with box.start("--", "sh", "-c", "trap 'echo one' INT; echo ready; while :; do sleep 0.01; done") as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"one\n"
        process.send_signal(signal.SIGINT)
        process.wait(30)
    assert process.returncode == 130


def test_the_output_of_ten_at_once_is_not_mixed_up(box: Box) -> None:
    processes = [box.start("--", "sh", "-c", f"echo {i}; exit {i}") for i in range(10)]
    for i, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (i, f"{i}\n".encode(), b"")


def test_stdin_is_passed_on_to_its_end(box: Box) -> None:
    data = os.urandom(3_000_000)
    process = box.start("--", "md5sum", stdin=subprocess.PIPE)
    out, _ = process.communicate(data, timeout=60)
    assert out.split()[0].decode() == hashlib.md5(data).hexdigest() and process.returncode == 0


def test_stdin_of_a_file_is_not_the_file_itself(box: Box, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"line\n")
    with open(tmp_path / "input", "rb") as file:
        process = box.start("--", "sh", "-c", "cat; (echo x >> /proc/self/fd/0) 2>/dev/null; true", stdin=file)
        out, _ = process.communicate(timeout=60)
    assert out == b"line\n" and (tmp_path / "input").read_bytes() == b"line\n"


def test_no_stdin_is_dev_null_of_the_sandbox(box: Box) -> None:
    process = box.start("--", "stat", "-L", "-c", "%t:%T %d", "/dev/stdin", "/dev/null")
    out, _ = process.communicate(timeout=60)
    one, other = out.decode().splitlines()
    assert one == other and one.startswith("1:3 ")


def test_a_command_that_does_not_read_stdin_ends_all_the_same(box: Box) -> None:
    with box.start("--", "true", stdin=subprocess.PIPE) as process:
        process.wait(30)
        assert process.returncode == 0


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_descriptors_are_no_trouble(box: Box, closed: str) -> None:
    script = f"exec {DSEC} run test/busybox:1 -- sh -c 'exit 5' {closed}"
    done = subprocess.run(
        ["sh", "-c", script], env={**os.environ, "DSEC_HOME": str(box.home.path)}, timeout=60, check=False
    )
    assert done.returncode == 5


def test_the_result_of_a_run_may_go_to_dev_stdout(box: Box) -> None:
    done = box.dsec("run", "test/busybox:1", "--result", "/dev/stdout", "--", "true")
    assert '"kind": "exited"' in done.stdout


def test_kill_9_of_dsec_run_ends_everything_at_once(box: Box) -> None:
    marker = f"{os.getpid()}884"
    with box.start("--", "sh", "-c", f"setsid sleep {marker} & echo ready; sleep {marker}") as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait(30)
    gone(marker)
    assert box.ps() == []
    box.nothing_left()


@pytest.mark.parametrize("share", [i / 12 for i in range(14)])
def test_kill_9_at_any_moment_leaves_nothing_after_the_next_command(box: Box, share: float) -> None:
    marker = f"{os.getpid()}885"
    started = time.monotonic()
    box.run("--", "true")
    whole = time.monotonic() - started
    with box.start("--", "sleep", f"{marker}") as process:
        try:
            process.wait(share * whole)
        except subprocess.TimeoutExpired:
            pass
        process.kill()
        process.wait(30)
    box.ps()
    assert processes_with(marker) == []
    box.nothing_left()


@pytest.mark.parametrize("share", [i / 6 for i in range(7)])
def test_a_signal_at_any_moment_leaves_nothing_and_no_traceback(box: Box, share: float) -> None:
    marker = f"{os.getpid()}886"
    started = time.monotonic()
    box.run("--", "true")
    whole = time.monotonic() - started
    with box.start("--", "sleep", f"{marker}") as process:
        try:
            process.wait(share * whole)
        except subprocess.TimeoutExpired:
            pass
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)  # the latter: before Python ran our code
    gone(marker)
    box.nothing_left()
