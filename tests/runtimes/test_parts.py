"""The pieces of a run that need no container."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.container import clean_message, failure
from runtimes.errors import CannotStart, SettingsError
from runtimes.ids import is_sandbox_id, sandbox_id, ulid
from runtimes.records import KEPT, HeadTail, exit_code, of_status, write_json
from runtimes.rootfs import make_missing, make_workdir, plan, remove_missing
from runtimes.seccomp import allowed_names
from runtimes.seccomp_bpf import compile_policy, filter_text
from runtimes.settings import check_name, parse_size
from runtimes.trees import remove_tree
from runtimes.users import resolve_user


@given(st.lists(st.binary(max_size=3 * KEPT), max_size=8))
def test_every_kept_byte_of_a_stream_has_its_offset(blocks: list[bytes]) -> None:
    stream, whole = HeadTail(), b"".join(blocks)
    for block in blocks:
        stream.add(block)
    said = stream.to_dict()
    head, tail = base64.b64decode(str(said["head"])), base64.b64decode(str(said["tail"]))
    assert said["total"] == len(whole)
    assert head == whole[:KEPT]
    assert tail == whole[max(KEPT, len(whole) - KEPT) :]
    assert said["dropped"] == len(whole) - len(head) - len(tail)


@pytest.mark.parametrize(
    ("status", "kills", "kind", "code"),
    [
        (0, 0, "exited", 0),
        (7 << 8, 0, "exited", 7),
        (137 << 8, 0, "exited", 137),
        (9, 0, "signalled", 137),
        (15, 0, "signalled", 143),
        (139, 0, "signalled", 139),  # 11 with a core file
        (9, 1, "oom", 137),
        (2 << 8, 1, "oom", 137),
        (0, 3, "exited", 0),
    ],
)
def test_a_wait_status_becomes_an_outcome(status: int, kills: int, kind: str, code: int) -> None:
    outcome = of_status(status, kills)
    assert outcome["kind"] == kind and exit_code(outcome) == code


def test_other_outcomes_have_their_exit_codes() -> None:
    assert exit_code({"kind": "timeout"}) == 124
    assert exit_code({"kind": "stopped"}, stopped_by=2) == 130
    assert exit_code({"kind": "unknown", "reason": ""}) == 125


def test_ids_sort_by_time_and_are_told_from_names() -> None:
    ids = [ulid() for _ in range(3)]
    time.sleep(0.002)
    assert max(ids) < ulid()
    assert is_sandbox_id(sandbox_id()) and is_sandbox_id(sandbox_id("edge7"))
    for text in ("local", "local-", f"-{ulid()}", f"Local-{ulid()}", f"local-{ulid()[:-1]}u", f"{'e' * 17}-{ulid()}"):
        assert not is_sandbox_id(text), text
    for name in ("a", "My.name_1-x"):
        assert check_name(name) == name
    for name in ("", "-a", "a b", "é", "a" * 65, sandbox_id()):
        with pytest.raises(SettingsError):
            check_name(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6m", 6 << 20),
        ("512m", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("8388608", 8 << 20),
        ("1 tb", 1 << 40),
    ],
)
def test_sizes_are_read_as_docker_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "m", "-1m", "1x", "1e9", "0", "5m", "1mm"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_size(text)


def test_messages_of_the_oci_runtimes_are_understood() -> None:
    crun = "2026-11-29T18:30:09.123456Z: executable file `x` not found in $PATH: No such file or directory"
    assert clean_message(crun).startswith("executable file `x`")
    runc = 'time="2026-11-29T18:30:09Z" level=error msg="runc run failed: exec: \\"x\\": permission denied"'
    assert clean_message(runc) == 'runc run failed: exec: "x": permission denied'
    for text, code in ((clean_message(crun), 127), (clean_message(runc), 126)):
        error = failure(text)
        assert isinstance(error, CannotStart) and error.code == code
    assert not isinstance(failure("mount `proc` to `/proc`: No such file or directory"), CannotStart)
    assert "without a message" in str(failure(""))


def test_a_record_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    (tmp_path / "link").symlink_to(path)
    write_json(str(tmp_path / "link"), {"a": "é"})
    assert path.read_text() == '{"a": "\\u00e9"}\n' and (tmp_path / "link").is_symlink()
    with pytest.raises(TypeError):
        write_json(str(path), {"a": object()})
    assert path.read_text().startswith('{"a"') and len(list(tmp_path.iterdir())) == 2


def test_a_tree_of_any_depth_is_removed_and_nothing_behind_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(tmp_path / "outside")
    (tree / "full" / "er").mkdir(parents=True)
    (tree / "full" / "er" / os.fsdecode(b"\xff\n")).touch()
    os.mkfifo(tree / "full" / "fifo")
    (tree / "lock").touch()
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(3000):  # deeper than a path can be long, and than Python recurses
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    remove_tree(str(tree), "lock")
    assert not tree.exists() and (tmp_path / "outside" / "file").exists()
    remove_tree(str(tree))


@pytest.mark.parametrize("changed", [False, True])
def test_mount_points_that_were_made_are_taken_out_again_with_no_trace(tmp_path: Path, changed: bool) -> None:
    root, bundle = tmp_path / "root", tmp_path / "bundle"
    (root / "etc").mkdir(parents=True)
    bundle.mkdir()
    for folder in (root, root / "etc"):
        os.utime(folder, ns=(10**18, 10**18 + 7))
    fd = os.open(root, os.O_PATH)
    old = os.umask(0o077)
    try:
        made = plan(fd, str(bundle), host_network=False, hostname="box")
        assert made.missing == ["proc/", "dev/", "sys/", "etc/hosts"]
        assert sorted(path.name for path in root.iterdir()) == ["etc"]
        make_missing(fd, made.missing)
    finally:
        os.umask(old)
        os.close(fd)
    assert (root / "proc").stat().st_mode & 0o777 == 0o755
    assert "localhost" in (bundle / "hosts").read_text()
    (root / "sys" / "mine").touch()  # somebody else's: stays
    if changed:
        (root / "etc").chmod(0o700)
    remove_missing(str(root), made.missing, made.parents)
    # an etc that is as the image has it was copied up for our file alone
    assert sorted(path.name for path in root.rglob("*")) == ([*(["etc"] if changed else []), "mine", "sys"])
    assert root.stat().st_mtime_ns == 10**18 + 7
    assert not changed or (root / "etc").stat().st_mtime_ns == 10**18 + 7


def test_an_etc_that_leads_out_of_the_root_is_left_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "etc").symlink_to(outside)
    (root / "home").symlink_to(outside)
    fd = os.open(root, os.O_PATH)
    try:
        assert plan(fd, str(tmp_path), host_network=True, hostname="box").binds == []
        with pytest.raises(SettingsError):
            make_workdir(fd, "/home/x")  # the symlink's target is not in the root
        with pytest.raises(SettingsError):
            resolve_user(fd, "root")
        assert make_workdir(fd, "/../../up") == "/up"
    finally:
        os.close(fd)
    assert list(outside.iterdir()) == [] and (root / "up").is_dir() and not (tmp_path / "up").exists()


def test_the_filter_program_is_made_once_and_kept(tmp_path: Path) -> None:
    first = filter_text(str(tmp_path))
    (kept,) = tmp_path.iterdir()
    assert first is not None and base64.b64decode(first) == kept.read_bytes()
    os.utime(kept, (1, 1))
    assert filter_text(str(tmp_path)) == first and kept.stat().st_mtime == 1


def test_a_policy_without_a_known_architecture_still_compiles() -> None:
    from runtimes.seccomp import policy

    program = compile_policy(policy("riscv64"))
    assert program is not None and len(program) % 8 == 0


def test_dangerous_calls_are_not_in_the_list_and_no_name_is_there_twice() -> None:
    for machine in ("x86_64", "aarch64"):
        names = allowed_names(machine)
        assert len(names) == len(set(names))
        dangerous = (
            "mount umount2 pivot_root setns unshare bpf perf_event_open kexec_load init_module open_by_handle_at"
        )
        dangerous += " io_uring_setup userfaultfd keyctl add_key reboot swapon fsopen move_mount process_madvise ptrace"
        assert set(names) & set(dangerous.split()) == {"ptrace"}  # docker allows it since Linux 4.8


def test_a_run_imports_only_the_standard_library_and_ours() -> None:
    code = (
        "import sys; before = set(sys.modules); import runtimes.supervisor; "
        "print('\\n'.join(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {"runtimes", "dsec_linux", "dsec_store"}
    others = {
        name for name in done.stdout.split() if name not in ours and name.lstrip("_") not in sys.stdlib_module_names
    }
    assert {name for name in others if name not in sys.stdlib_module_names} == set()
    slow = {"subprocess", "asyncio", "logging", "http", "email", "shutil", "tempfile", "argparse", "httpx", "rich"}
    assert not slow & set(done.stdout.split())
