"""What a command finds in its sandbox: user, variables, network, devices, rights, files."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.conftest import BASE, Box, make_busybox

_C_LIBRARYS_OWN = 1 << 31 | 1 << 32
"""Signals 32 and 33, which posix_spawn of glibc sets to be ignored."""

DOCKER_CAPABILITIES = "00000000a80425fb"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def output(box: Box, *arguments: str, base: str = BASE) -> str:
    done, _ = box.run(*arguments, base=base)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_variables_are_dockers_then_the_given_ones(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "from outside")
    monkeypatch.setenv("SECRET", "stays outside")
    given = ("--env", "A=1=2", "--env", "PASSED", "--env", "UNSET_HERE", "-e", "EMPTY=")
    found = dict(line.split("=", 1) for line in output(box, *given, "--", "env").splitlines())
    hostname = found.pop("HOSTNAME")
    assert hostname.startswith("local-")
    assert found == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "A": "1=2",
        "PASSED": "from outside",
        "EMPTY": "",
    }
    assert output(box, "--", "hostname").startswith("local-")
    assert output(box, "--env", "PATH=/bin", "--env", "HOME=/x", "--", "sh", "-c", "echo $PATH $HOME") == "/bin /x\n"


@pytest.mark.parametrize(
    ("user", "ids", "home"),
    [
        ("ann", "uid=1000(ann) gid=1001(ann) groups=10(wheel),50(staff)", "/home/ann"),
        ("1000", "uid=1000(ann) gid=1001(ann) groups=10(wheel),50(staff)", "/home/ann"),
        ("ann:staff", "uid=1000(ann) gid=50(staff)", "/home/ann"),
        ("ann:77", "uid=1000(ann) gid=77", "/home/ann"),
        ("4242", "uid=4242 gid=0(root)", "/"),
        ("4242:4243", "uid=4242 gid=4243", "/"),
        ("root", "uid=0(root) gid=0(root) groups=0(root),10(wheel)", "/root"),
    ],
)
def test_users_are_those_of_the_image_as_docker_reads_them(box: Box, user: str, ids: str, home: str) -> None:
    lines = output(box, "--user", user, "--", "sh", "-c", "id; echo $HOME; grep Cap /proc/self/status").splitlines()
    assert lines[0].replace("groups=0(root),10(wheel)", "groups=0(root),10(wheel)") == ids or (
        user == "root" and lines[0] == "uid=0(root) gid=0(root) groups=10(wheel)"
    )
    assert lines[1] == home
    capabilities = dict(line.split(":\t") for line in lines[2:])
    assert capabilities["CapBnd"] == DOCKER_CAPABILITIES
    assert capabilities["CapEff"] == (DOCKER_CAPABILITIES if user == "root" else "0" * 16)
    assert capabilities["CapInh"] == capabilities["CapAmb"] == "0" * 16


def test_a_passwd_that_points_out_of_the_image_is_read_inside_it(box: Box, images: Path) -> None:
    root = images / "pointing"
    make_busybox(root)
    (root / "etc" / "passwd").unlink()
    (root / "etc" / "passwd").symlink_to("../../../../../../etc/shadow-of-the-host")
    (root / "etc" / "group").unlink()
    (root / "etc" / "group").symlink_to("/etc/hostname")
    box.build(root, "test/pointing:1")
    done, _ = box.run("--user", "daemon", "--", "true", base="test/pointing:1")
    assert done.returncode == 125 and "no user 'daemon'" in done.stderr
    assert output(box, "--user", "5", "--", "id", "-u", base="test/pointing:1") == "5\n"


def test_a_fifo_in_place_of_passwd_does_not_hang(box: Box, images: Path) -> None:
    root = images / "fifo"
    make_busybox(root)
    (root / "etc" / "passwd").unlink()
    os.mkfifo(root / "etc" / "passwd")
    box.build(root, "test/fifo:1")
    done, _ = box.run("--user", "ann", "--", "true", base="test/fifo:1")
    assert done.returncode == 125


@pytest.mark.parametrize("given", ["/new/deep/dir", "/tmp/../tmp/./x/", "//srv", "/link/below"])
def test_a_missing_working_directory_is_made(box: Box, images: Path, given: str) -> None:
    root = images / "linked"
    if not root.exists():
        make_busybox(root)
        (root / "link").symlink_to("/home")
        box.build(root, "test/linked:1")
    real = "/home/below" if given == "/link/below" else os.path.normpath("/" + given.strip("/"))
    script = "pwd -P; stat -c '%a %u:%g' ."
    assert output(box, "-w", given, "--", "sh", "-c", script, base="test/linked:1") == f"{real}\n755 0:0\n"


def test_without_a_network_there_is_loopback_up_and_nothing_else(box: Box) -> None:
    script = "ls /sys/class/net; ip -o link; ping -c1 -w2 127.0.0.1 >/dev/null && echo pong"
    lines = output(box, "--", "sh", "-c", script).splitlines()
    assert lines[0] == "lo" and "LOOPBACK,UP" in lines[1] and lines[2] == "pong"
    assert len([line for line in lines if ": lo:" in line]) == 1


def test_localhost_has_an_address_when_the_image_names_none(box: Box) -> None:
    text = output(box, "--", "sh", "-c", "cat /etc/hosts; ping -c1 -w2 localhost | head -1; echo x >> /etc/hosts")
    assert "127.0.0.1\tlocalhost" in text and "(127.0.0.1)" in text


def test_the_hosts_file_of_an_image_stays_the_images_own(box: Box, images: Path) -> None:
    root = images / "hosts"
    make_busybox(root)
    (root / "etc" / "hosts").write_text("10.1.2.3 mine\n")
    box.build(root, "test/hosts:1")
    done, record = box.run("--keep", "--", "sh", "-c", "cat /etc/hosts; echo >> /etc/hosts", base="test/hosts:1")
    assert done.stdout == "10.1.2.3 mine\n"
    upper = box.home.sandbox(record["sandbox"]) / "upper"
    assert (upper / "etc" / "hosts").read_text() == "10.1.2.3 mine\n\n"


@contextlib.contextmanager
def greeting_server() -> Iterator[int]:
    """Answers one connection on loopback; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"hello\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_only_the_hosts_network_reaches_a_server_of_the_host(box: Box) -> None:
    with greeting_server() as port:
        done, _ = box.run("--", "nc", "-w", "2", "127.0.0.1", str(port))
        assert done.returncode != 0 and done.stdout == ""
        assert output(box, "--network", "host", "--", "nc", "127.0.0.1", str(port)) == "hello\n"


def test_the_hosts_network_comes_with_its_resolver(box: Box) -> None:
    text = output(box, "--network", "host", "--", "cat", "/etc/resolv.conf")
    assert text == Path("/etc/resolv.conf").read_text()


def test_devices_of_the_machine_do_not_open(box: Box) -> None:
    device = next(
        os.stat(f"/dev/{name}").st_rdev for name in sorted(os.listdir("/sys/block")) if os.path.exists(f"/dev/{name}")
    )
    node = f"b {os.major(device)} {os.minor(device)}"
    script = f"for f in /dev/disk /disk; do mknod $f {node} && dd if=$f of=/dev/null bs=512 count=1 2>&1; done; true"
    text = output(box, "--", "sh", "-c", script)
    assert text.count("Operation not permitted") == 2
    assert "records" not in text


def test_the_usual_devices_open(box: Box) -> None:
    script = (
        "head -c 3 /dev/zero | wc -c; head -c 2 /dev/urandom | wc -c; echo x > /dev/null; echo x > /dev/full; "
        "ls /dev | tr '\\n' ' '; mknod /tmp/null c 1 3 && echo made; echo x > /tmp/null"
    )
    done, _ = box.run("--", "sh", "-c", script)
    assert done.stdout.split()[:2] == ["3", "2"]
    assert "made" in done.stdout and "No space left" in done.stderr
    for name in ("fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty"):
        assert name in done.stdout.split()


def test_system_calls_are_filtered_as_dockers_are(box: Box) -> None:
    script = "grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status; unshare -m true; mount -t tmpfs x /tmp; dmesg; "
    script += "chroot / true && echo root"
    done, _ = box.run("--", "sh", "-c", script)
    assert "Seccomp:\t2" in done.stdout and "NoNewPrivs:\t0" in done.stdout and done.stdout.endswith("root\n")
    assert done.stderr.count("Operation not permitted") + done.stderr.count("permission denied") == 3, done.stderr


def test_the_machine_below_is_hidden(box: Box) -> None:
    script = (
        "cat /proc/kcore /proc/keys /proc/timer_list 2>/dev/null | wc -c; ls /sys/firmware | wc -l; "
        "(echo 1 > /proc/sys/kernel/panic) 2>&1; mkdir /sys/x 2>&1; "
        "ls /proc/self/fd | wc -w; ps | wc -l; "
        "ls -d /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; true"
    )
    lines = output(box, "--", "sh", "-c", script).splitlines()
    assert lines[:2] == ["0", "0"]
    assert all("Read-only file system" in line for line in lines[2:4])
    assert lines[4] == "4"  # stdin, stdout, stderr, the folder itself: nothing of ours is inherited
    assert int(lines[5]) <= 5
    assert len(lines) == 7


def test_signals_are_not_inherited_as_ignored(box: Box) -> None:
    process = box.dsec.start("run", BASE, "--", "grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")
    out, _ = process.communicate(timeout=60)
    for line in out.decode().splitlines():
        assert int(line.split()[1], 16) & ~_C_LIBRARYS_OWN == 0


def test_what_a_sandbox_writes_is_its_own(box: Box) -> None:
    script = (
        "echo changed > /etc/passwd; rm /bin/true; mkdir /made; touch /bin/ls; test ! -e /bin/true && cat /etc/passwd"
    )
    assert output(box, "--", "sh", "-c", script) == "changed\n"
    again = "ls -d /bin/true; test ! -e /made; head -1 /etc/passwd"
    assert output(box, "--", "sh", "-c", again) == "/bin/true\nroot:x:0:0:root:/root:/bin/sh\n"


def test_layers_are_stacked_in_the_order_given(box: Box, images: Path) -> None:
    for name in ("w", "t1", "t2"):
        (images / name / "opt").mkdir(parents=True)
        (images / name / "opt" / "who").write_text(name)
        (images / name / "opt" / name).touch()
        box.build(images / name, f"test/{name}:1", "workspace" if name == "w" else "toolkit")
    layers = ("--workspace", "test/w:1", "--toolkit", "test/t1:1", "--toolkit", "test/t2:1")
    assert output(box, *layers, "--", "sh", "-c", "cat /opt/who; ls /opt").split() == ["t2t1", "t2", "w", "who"]
    done, _ = box.run("--workspace", "test/t1:1", "--", "true")
    assert done.returncode == 125 and done.stderr.count("\n") == 1


def test_a_base_without_mount_points_runs_and_gets_none(box: Box, images: Path) -> None:
    root = images / "bare"
    make_busybox(root)
    for name in ("proc", "sys", "dev"):
        (root / name).rmdir()
    os.utime(root, (1_000_000_000, 1_000_000_000))
    box.build(root, "test/bare:1")
    done, record = box.run("--keep", "--", "sh", "-c", "ls -d /proc/1 /dev/null /sys/class", base="test/bare:1")
    assert done.stdout == "/dev/null\n/proc/1\n/sys/class\n", done.stderr
    upper = box.home.sandbox(record["sandbox"]) / "upper"
    assert [path.name for path in upper.iterdir()] in ([], ["etc"])
    assert [path.name for path in upper.rglob("*/*")] == []


def test_a_command_that_changes_nothing_leaves_an_empty_upper(box: Box) -> None:
    _, record = box.run("--keep", "--", "true")
    upper = box.home.sandbox(record["sandbox"]) / "upper"
    assert [path.relative_to(upper).as_posix() for path in upper.rglob("*")] in ([], ["etc"])


def test_entry_point_command_and_variables_of_the_image_hold_unless_others_are_given(box: Box, images: Path) -> None:
    from dsec_store.node.protocol import Mounted, MountRequest
    from runtimes.settings import RunOptions
    from runtimes.supervisor import run

    settings = {
        "Env": ["A=image", "PATH=/bin"],
        "Entrypoint": ["sh", "-c"],
        "Cmd": ["echo $A $HOME; pwd; id -u; exit 9"],
        "User": "ann",
        "WorkingDir": "/home/ann",
    }
    from dsec_store.node.client import NodeClient

    class WithSettings:
        def __init__(self, home: object) -> None:
            self._node = NodeClient.connect(box.home)

        def mount(self, request: MountRequest) -> tuple[Mounted, int]:
            mounted, fd = self._node.mount(request)
            mounted.run = settings
            return mounted, fd

        def release(self, mount_id: str) -> None:
            self._node.release(mount_id)

    def text(options: RunOptions) -> tuple[int, str]:
        done = run(box.home, options, connect=WithSettings)
        import base64

        return done.exit_code, base64.b64decode(done.record["stdout"]["head"]).decode()

    assert text(RunOptions(BASE)) == (9, "image /home/ann\n/home/ann\n1000\n")
    given = RunOptions(BASE, ["echo $A; pwd; id -u"], env=["A=mine"], workdir="/tmp", user="0")
    assert text(given) == (0, "mine\n/tmp\n0\n")
