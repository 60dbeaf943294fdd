"""Descriptors over sockets, namespaces, processes by descriptor, and what importing all this costs."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from dsec_linux import mounts, namespaces, process, sockets
from dsec_linux.errors import LinuxError

from tests.dsec_linux.conftest import MakePair, open_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        yield one, two


def python(script: str, *arguments: str, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=fds)


def test_descriptors_arrive_close_on_exec_and_are_the_same_files(pair: Pair, tmp_path: os.PathLike[str]) -> None:
    sent = [os.open(tmp_path, os.O_PATH), os.open("/dev/null", os.O_RDONLY)]
    sockets.send_with_fds(pair[0], b"hello", sent)
    payload, got = sockets.receive_with_fds(pair[1], 2)
    assert payload == b"hello" and len(got) == 2
    for ours, theirs in zip(sent, got, strict=True):
        assert os.fstat(ours).st_ino == os.fstat(theirs).st_ino and not os.get_inheritable(theirs)
        os.close(ours)
        os.close(theirs)


def test_messages_keep_their_borders_and_the_end_is_empty(pair: Pair) -> None:
    sockets.send_with_fds(pair[0], b"one")
    sockets.send_with_fds(pair[0], b"two")
    pair[0].close()
    assert [sockets.receive_with_fds(pair[1], 0) for _ in range(3)] == [(b"one", []), (b"two", []), (b"", [])]
    with pytest.raises(LinuxError) as caught:
        sockets.send_with_fds(pair[1], b"three")
    assert caught.value.errno == errno.EPIPE  # and no SIGPIPE
    with pytest.raises(ValueError, match="without a byte"):
        sockets.send_with_fds(pair[1], b"")


@pytest.mark.parametrize(("sent", "room"), [(1, 0), (2, 1), (3, 2), (4, 1)])
def test_more_descriptors_than_expected_are_an_error_and_none_is_kept(pair: Pair, sent: int, room: int) -> None:
    before = open_descriptors()
    sockets.send_with_fds(pair[0], b"x", [pair[0].fileno()] * sent)
    with pytest.raises(LinuxError, match=f"more than {room} descriptors"):
        sockets.receive_with_fds(pair[1], room)
    assert open_descriptors() == before


def test_a_longer_message_than_expected_is_an_error_and_its_descriptors_are_closed(pair: Pair) -> None:
    before = open_descriptors()
    sockets.send_with_fds(pair[0], b"x" * 100, [pair[0].fileno()])
    with pytest.raises(LinuxError, match="more than 99 bytes"):
        sockets.receive_with_fds(pair[1], 1, size=99)
    assert open_descriptors() == before


def test_as_many_descriptors_as_the_kernel_takes(pair: Pair) -> None:
    sockets.send_with_fds(pair[0], b"x", [pair[0].fileno()] * sockets.MAX_FDS)
    _, got = sockets.receive_with_fds(pair[1], sockets.MAX_FDS)
    assert len(got) == sockets.MAX_FDS
    for fd in got:
        os.close(fd)


def test_a_timeout_is_a_timeout(pair: Pair) -> None:
    pair[1].settimeout(0.001)
    with pytest.raises(TimeoutError):
        sockets.receive_with_fds(pair[1], 1)


def test_the_peers_credentials_are_the_kernels(pair: Pair) -> None:
    assert sockets.peer_credentials(pair[0]) == (os.getpid(), os.geteuid(), os.getegid())


def test_a_finished_overlay_is_handed_into_another_mount_namespace(
    pair: Pair, make_pair: MakePair, tmp_path: os.PathLike[str]
) -> None:
    """The maker's mount survives the maker's descriptor, and shows only in the receiver's namespace."""
    image = make_pair("layer", {"file": b"content"})
    upper, work, target = (f"{os.fspath(tmp_path)}/{name}" for name in ("upper", "work", "target"))
    for folder in (upper, work, target):
        os.mkdir(folder)
    layer = mounts.mount_erofs(image.meta, [image.blob])
    overlay = mounts.mount_overlay([layer], upper, work)
    sockets.send_with_fds(pair[0], b"overlay", [overlay])
    os.close(overlay)
    os.close(layer)
    done = python(
        """
        import os, socket, sys
        from dsec_linux import mounts, namespaces, sockets
        sock = socket.socket(fileno=int(sys.argv[1]))
        namespaces.unshare(namespaces.CLONE_NEWNS)
        mounts.make_slave()
        _, [fd] = sockets.receive_with_fds(sock, 1)
        mounts.attach(fd, sys.argv[2])
        os.close(fd)
        open(sys.argv[2] + "/new", "w").write("x")
        print(open(sys.argv[2] + "/file").read())
        mounts.umount(sys.argv[2])
        sock.close()
        """,
        str(pair[1].fileno()),
        target,
        fds=(pair[1].fileno(),),
    )
    assert done.stdout == "content\n" and os.listdir(upper) == ["new"] and os.listdir(target) == []


def test_a_child_that_asked_for_it_is_killed_with_its_parent(pair: Pair) -> None:
    script = """
    import os, signal, socket, sys
    from dsec_linux import namespaces, sockets
    sock = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getpid()
    if os.fork() == 0:
        namespaces.set_pdeathsig(signal.SIGKILL)
        sockets.send_with_fds(sock, b"child", [namespaces.pidfd_open(os.getpid())])
        signal.pause()
    signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(pair[1].fileno())]
    with subprocess.Popen(command, pass_fds=[pair[1].fileno()]) as parent:
        _, [child] = sockets.receive_with_fds(pair[0], 1)
        assert not process.wait_ended(child, 0)
        parent.kill()
    assert process.wait_ended(child, 10)
    os.close(child)


def test_a_subreaper_takes_the_orphans_and_their_status() -> None:
    done = python(
        """
        import os, signal
        from dsec_linux import namespaces, process
        namespaces.set_subreaper()
        middle = os.fork()
        if middle == 0:
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)  # until the middle has ended
                os._exit(42)
            os._exit(0)
        os.waitpid(middle, 0)
        [orphan] = process.children(os.getpid())
        fd = namespaces.pidfd_open(orphan)
        ended = process.wait_child(fd)
        print(ended.pid == orphan, ended.code, ended.signal, process.reap_children())
        """
    )
    assert done.stdout == "True 42 None []\n"


def test_exit_code_and_signal_are_told_apart() -> None:
    for command, code, number in (("exit 137", 137, None), ("kill -9 $$", None, signal.SIGKILL)):
        child = subprocess.Popen(["sh", "-c", command])
        fd = namespaces.pidfd_open(child.pid)
        ended = process.wait_child(fd)
        assert (ended.pid, ended.code, ended.signal) == (child.pid, code, number)
        with pytest.raises(ChildProcessError):
            process.wait_child(fd)
        with pytest.raises(ProcessLookupError):
            process.pidfd_send_signal(fd, signal.SIGTERM)
        os.close(fd)
        child.returncode = 0  # its status was taken here


def test_a_signal_by_descriptor_reaches_the_process() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        fd = namespaces.pidfd_open(child.pid)
        assert process.start_time(child.pid) > process.start_time(os.getpid()) > 0
        process.pidfd_send_signal(fd, process.SIGTERM)
        assert process.wait_ended(fd)
        assert select.select([fd], [], [], 0)[0]
        os.close(fd)
        assert child.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        process.start_time(child.pid)
    with pytest.raises(ProcessLookupError, match="pidfd_open on process"):
        namespaces.pidfd_open(child.pid)
    assert process.children(child.pid) == []


def test_a_process_says_of_itself_what_it_was_told() -> None:
    done = python(
        """
        from dsec_linux import process
        process.set_name("dsec-keeper-name-too-long")
        process.set_no_new_privs()
        process.set_dumpable(False)
        status = dict(line.split(":", 1) for line in open("/proc/thread-self/status"))
        print(status["Name"].strip(), status["NoNewPrivs"].strip())
        """
    )
    assert done.stdout == "dsec-keeper-nam 1\n"


def test_a_namespace_is_entered_by_its_descriptor() -> None:
    done = python(
        """
        import os, socket
        from dsec_linux import namespaces
        socket.sethostname  # (the name of this machine stays)
        before = os.readlink("/proc/self/ns/uts")
        fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
        namespaces.unshare(namespaces.CLONE_NEWUTS)
        between = os.readlink("/proc/self/ns/uts")
        namespaces.setns(fd, namespaces.CLONE_NEWUTS)
        print(before != between, os.readlink("/proc/self/ns/uts") == before)
        try:
            namespaces.setns(fd, namespaces.CLONE_NEWNET)
        except OSError as error:
            print(error)
        """
    )
    assert done.stdout.startswith("True True\nsetns on descriptor ")


def test_the_light_modules_import_no_heavy_ones() -> None:
    heavy = ("asyncio", "dataclasses", "enum", "inspect", "logging", "pathlib", "socket", "subprocess", "typing")
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
            "from dsec_linux import bdi, mounts, namespaces, process, sockets\n"
            f"print([name for name in {heavy!r} if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
