"""What nobody types and an image may hold all the same: one line that says what is wrong, and nothing runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_store.home import Home
from runtimes.errors import SettingsError
from runtimes.oci import Process
from runtimes.settings import check_timeout, command_line, environment, parse_size
from runtimes.users import MAX_GROUPS, User, resolve_user
from tests.conftest import DSEC, Dsec
from tests.runtimes.conftest import BASE, Box

HUGE = "9" * 5000


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Callable[[str, str, str], User]]:
    """``user(passwd, group, text)``: the user of an image with these files."""
    (tmp_path / "etc").mkdir()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)

    def resolve(passwd: str, group: str, text: str) -> User:
        (tmp_path / "etc" / "passwd").write_text(passwd)
        (tmp_path / "etc" / "group").write_text(group)
        return resolve_user(root, text)

    yield resolve
    os.close(root)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 125, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("dsec: "), done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""


def test_an_id_of_the_image_that_is_out_of_range_does_not_become_root(box: Box, tmp_path: Path) -> None:
    root = tmp_path / "image"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "passwd").write_text("ann:x:4294967295:1::/:\n")
    reference = box.build(root, "test/range:1", "toolkit")
    done, _ = box.run("--toolkit", reference, "--user", "ann", "--", "id")
    refused(done, "not a user: 'ann': ids go to 2147483647", "its uid in /etc/passwd is beyond")


@pytest.mark.parametrize("number", ["2147483648", "4294967295", "4294967296", HUGE])
def test_ids_out_of_range_are_refused_wherever_they_are_used(
    user: Callable[[str, str, str], User], number: str
) -> None:
    for passwd, group, text in [
        (f"ann:x:{number}:1::/:", "", "ann"),
        (f"ann:x:1:{number}::/:", "", "ann"),
        (f"ann:x:1:{number}::/:", "", "1"),
        ("ann:x:1:1::/:", f"big:x:{number}:", "ann:big"),
        ("ann:x:1:1::/:", f"big:x:{number}:bob,ann", "ann"),
        ("", "", number),
        ("", "", f"0:{number}"),
    ]:
        with pytest.raises(SettingsError, match="ids go to 2147483647") as error:
            user(passwd, group, text)
        assert len(str(error.value)) < 400
    others = user(f"big:x:{number}:1::/:\nann:x:1:2147483647::/:", f"big:x:{number}:bob", "ann")
    assert (others.uid, others.gid, others.groups) == (1, 2147483647, [])
    assert user("ann:x:1:1::/:", "", "0" * 5000 + "1").uid == 1


def test_more_groups_than_a_process_can_have_are_refused(user: Callable[[str, str, str], User]) -> None:
    lines = [f"g{n}:x:{n}:ann" for n in range(MAX_GROUPS + 1)]
    assert len(user("ann:x:1:1::/:", "\n".join(lines[1:]), "ann").groups) == MAX_GROUPS
    with pytest.raises(SettingsError, match="'ann' is in 65537 groups"):
        user("ann:x:1:1::/:", "\n".join(lines), "ann")


def test_a_directory_in_place_of_passwd_or_group_has_no_entries(tmp_path: Path) -> None:
    (tmp_path / "etc" / "passwd").mkdir(parents=True)
    (tmp_path / "etc" / "group").mkdir()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    found = resolve_user(root, "7:8")
    assert (found.uid, found.gid, found.groups, found.home) == (7, 8, [], "/")
    with pytest.raises(SettingsError, match="no user 'ann'"):
        resolve_user(root, "ann")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(root)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--", "echo", b"a\xff"], r"an argument 'a\xff'"),
        (["--env", b"X=\xfe", "--", "env"], r"the variable 'X=\xfe'"),
        (["--workdir", b"/\xfd", "--", "pwd"], r"the working directory '/\xfd'"),
    ],
)
def test_what_is_not_utf_8_is_refused_rather_than_changed(box: Box, arguments: list[str | bytes], what: str) -> None:
    done, record = box.run(*map(os.fsdecode, arguments))
    refused(done, f"{what} is not UTF-8")
    assert record["outcome"]["kind"] == "unknown"


def test_values_of_the_image_that_are_not_text_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"the home directory in the sandbox's /etc/passwd '/\\xff'"):
        environment({}, [], home="/\udcff", hostname="h", terminal=False)
    assert "HOME=/" in environment({}, ["HOME=/"], home="/\udcff", hostname="h", terminal=False)
    with pytest.raises(SettingsError, match="an argument"):
        command_line({"Cmd": ["\ud800"]}, [])
    with pytest.raises(SettingsError, match="the working directory"):
        Process(["a"], [], "/\udc01", 0, 0, [])


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e300", "1e10", "0", "-1"])
def test_a_time_limit_is_a_number_of_seconds_up_to_thirty_days(box: Box, text: str) -> None:
    refused(box.dsec("run", BASE, "--timeout", text, "--", "true", check=False), "--timeout", "up to 2592000")
    assert check_timeout(2592000) == 2592000


def test_a_size_beyond_any_number_is_refused() -> None:
    for text in (HUGE, "8388608t"):
        with pytest.raises(SettingsError, match="more than a limit can be"):
            parse_size(text)


def test_a_result_that_could_not_be_written_is_refused_before_the_run(box: Box, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "socket", "loop"):
        done = box.dsec("run", BASE, "--result", tmp_path / name, "--", "echo", "ran", check=False)
        refused(done, "--result", str(tmp_path / name))
    for name in ("/dev/null", "/dev/stdout", "/proc/self/fd/2"):
        done = box.dsec("run", BASE, "--result", name, "--", "true")
        assert ('"exited"' in done.stdout + done.stderr) == (name != "/dev/null")


@pytest.mark.parametrize(
    ("module", "status", "arguments"),
    [("click", -signal.SIGINT, ["--help"]), ("httpx", 130, ["layer", "pull", "127.0.0.1:1/no:1"])],
)
def test_ctrl_c_during_the_imports_is_quiet(
    tmp_path: Path, home: Home, module: str, status: int, arguments: list[str]
) -> None:
    """The module is one that interrupts its own import; before the command line is known, the signal itself ends us."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([DSEC, *arguments], env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (status, b"", b"")


def test_any_number_of_stops_of_a_node_at_once_are_all_well(home: Home) -> None:
    dsec = Dsec(home.path)
    dsec("layer", "ls")
    from dsec_store.node.client import NodeClient

    for _ in range(2):
        NodeClient.connect(home)
        stops = [dsec.start("node", "stop", stderr=subprocess.PIPE) for _ in range(6)]
        for process in stops:
            _, complaint = process.communicate(timeout=60)
            assert process.returncode == 0, complaint
            assert complaint in (b"", b"no node runs\n")
