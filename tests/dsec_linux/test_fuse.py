"""The FUSE session under the kernel: alone, and as the data device of an EROFS mount."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from dsec_linux import bdi, fuse, mounts, sockets

from tests.dsec_linux.conftest import MakePair, Pair

MIB = 1 << 20


class Files:
    """Operations over named byte strings; nodes are 2, 3, … ``on_read`` replaces the answer."""

    def __init__(self, content: dict[bytes, bytes]) -> None:
        self.names = list(content)
        self.content = list(content.values())
        self.reads: list[tuple[int, int]] = []
        self.session: fuse.Session
        self.on_read: Callable[[fuse.Read], None] = self.answer

    def attr(self, index: int) -> fuse.Attr:
        return fuse.Attr(index + 2, stat.S_IFREG | 0o444, len(self.content[index]), mtime_ns=1_500_000_000_000_000_007)

    def lookup(self, parent: int, name: bytes) -> fuse.Attr | None:
        return self.attr(self.names.index(name)) if parent == fuse.ROOT and name in self.names else None

    def getattr(self, node: int) -> fuse.Attr | None:
        return fuse.Attr(fuse.ROOT, stat.S_IFDIR | 0o555, nlink=2) if node == fuse.ROOT else self.attr(node - 2)

    def open(self, node: int) -> int:
        return fuse.FOPEN_KEEP_CACHE

    def readdir(self, node: int) -> Sequence[tuple[bytes, int, int]]:
        return [(name, i + 2, stat.S_IFREG) for i, name in enumerate(self.names)]

    def answer(self, request: fuse.Read) -> None:
        data = memoryview(self.content[request.node - 2])[request.offset : request.offset + request.size]
        self.session.data(request, data)

    def read(self, request: fuse.Read) -> None:
        self.reads.append((request.offset, request.size))
        self.on_read(request)


class Served:
    def __init__(self, session: fuse.Session, mount: int, log: list[str]) -> None:
        self.session = session
        self.mount = mount
        self.root = f"/proc/self/fd/{mount}"
        self.log = log


@contextmanager
def serving(files: Files, threads: int = 2) -> Iterator[Served]:
    device = fuse.open_device()
    log: list[str] = []
    session = files.session = fuse.Session(device, files, lambda text, error: log.append(f"{text}: {error!r}"))
    workers = [threading.Thread(target=session.serve) for _ in range(threads)]
    mount = mounts.mount_fuse(device)
    try:
        for worker in workers:
            worker.start()
        yield Served(session, mount, log)
    finally:
        session.close()
        for worker in workers:
            worker.join(1)
            assert not worker.is_alive()
        os.close(device)
        os.close(mount)


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    small = {f"small/{i}": os.urandom(1 + i * 97) for i in range(200)}
    return make_pair("layer", {"big": os.urandom(6 * MIB + 12345), "exact": os.urandom(MIB), **small})


def blob_of(pair: Pair) -> bytes:
    with open(pair.blob, "rb") as file:
        return file.read()


def compare(root: str, pair: Pair) -> None:
    for source in pair.source.rglob("*"):
        if source.is_file():
            with open(f"{root}/{source.relative_to(pair.source)}", "rb") as file:
                assert file.read() == source.read_bytes(), source


def test_an_erofs_mount_reads_its_data_device_through_a_detached_session(pair: Pair) -> None:
    with serving(Files({b"blob": blob_of(pair)})) as served:
        layer = mounts.mount_erofs(pair.meta, [f"{served.root}/blob"])
        try:
            compare(f"/proc/self/fd/{layer}", pair)
        finally:
            os.close(layer)
        assert served.log == []


def test_the_layer_of_a_session_is_a_lower_of_a_writable_overlay(pair: Pair, tmp_path: os.PathLike[str]) -> None:
    upper, work = f"{os.fspath(tmp_path)}/upper", f"{os.fspath(tmp_path)}/work"
    os.mkdir(upper)
    os.mkdir(work)
    with serving(Files({b"blob": blob_of(pair)})) as served:
        layer = mounts.mount_erofs(pair.meta, [f"{served.root}/blob"])
        overlay = mounts.mount_overlay([layer], upper, work)
        os.close(layer)
        try:
            compare(f"/proc/self/fd/{overlay}", pair)
            with open(f"/proc/self/fd/{overlay}/big", "ab") as file:  # copy-up reads the whole file
                file.write(b"!")
        finally:
            os.close(overlay)
    with open(f"{upper}/big", "rb") as file:
        assert file.read() == (pair.source / "big").read_bytes() + b"!"


def test_readahead_of_1_mib_makes_reads_of_1_mib() -> None:
    files = Files({b"blob": os.urandom(32 * MIB)})
    with serving(files) as served:
        name = bdi.name_of(served.mount)
        assert name in bdi.names()
        bdi.set_read_ahead(name, 1024)
        assert bdi.read_ahead(name) == 1024
        with open(f"{served.root}/blob", "rb", buffering=0) as file:
            for offset in range(0, 32 * MIB, MIB):
                assert file.read(MIB) == files.content[0][offset : offset + MIB]
    sizes = [size for _, size in files.reads]
    assert sizes.count(MIB) >= 30
    assert sum(sizes) == 32 * MIB  # nothing is asked for twice


def test_readahead_of_1_mib_reaches_through_erofs(make_pair: MakePair) -> None:
    pair = make_pair("large", {"one": os.urandom(16 * MIB)})
    files = Files({b"blob": blob_of(pair)})
    with serving(files) as served:
        bdi.set_read_ahead(bdi.name_of(served.mount), 1024)
        before = bdi.names()
        layer = mounts.mount_erofs(pair.meta, [f"{served.root}/blob"])
        try:
            [new] = [name for name in bdi.names() - before if name.startswith("erofs-")]
            bdi.set_read_ahead(new, 1024)
            compare(f"/proc/self/fd/{layer}", pair)
        finally:
            os.close(layer)
    assert [size for _, size in files.reads].count(MIB) >= 14


def test_requests_overlap_and_are_answered_from_other_threads_in_any_order(pair: Pair) -> None:
    """No READ is answered before three wait, and then the last one first."""
    files = Files({b"blob": os.urandom(64 * MIB)})
    waiting: list[fuse.Read] = []
    lock = threading.Lock()
    with ThreadPoolExecutor(1) as answerer, ThreadPoolExecutor(3) as readers, serving(files, threads=1) as served:

        def hold(request: fuse.Read) -> None:
            with lock:
                waiting.append(request)
                if len(waiting) == 3:
                    for held in reversed(waiting):
                        answerer.submit(files.answer, held)

        files.on_read = hold

        def read_at(offset: int) -> bytes:
            fd = os.open(f"{served.root}/blob", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            try:
                return os.pread(fd, 4096, offset)
            finally:
                os.close(fd)

        offsets = [0, 20 * MIB, 40 * MIB]
        assert list(readers.map(read_at, offsets)) == [files.content[0][o : o + 4096] for o in offsets]


def test_names_attributes_and_listings_are_those_of_the_operations() -> None:
    names = {f"file-{i:04}-{'x' * (i % 200)}".encode(): b"c" * i for i in range(600)}
    with serving(Files(names)) as served:
        assert sorted(os.listdir(served.root)) == sorted(name.decode() for name in names)
        info = os.stat(f"{served.root}/{list(names)[7].decode()}")
        assert (info.st_size, info.st_mode, info.st_ino) == (7, stat.S_IFREG | 0o444, 9)
        assert info.st_mtime_ns == 1_500_000_000_000_000_007
        assert not os.path.exists(f"{served.root}/none")
        assert os.statvfs(served.root).f_namemax == 255
        assert served.session.flags & fuse.ASYNC_READ and served.session.flags & fuse.MAX_PAGES
        assert served.session.flags & fuse.HAS_RESEND  # of every kernel from 6.9 on


def test_what_would_write_is_refused() -> None:
    with serving(Files({b"blob": b"x" * 4096})) as served:
        for attempt in (
            lambda: os.open(f"{served.root}/blob", os.O_RDWR),
            lambda: os.open(f"{served.root}/new", os.O_RDWR | os.O_CREAT),
            lambda: os.unlink(f"{served.root}/blob"),
            lambda: os.mkdir(f"{served.root}/d"),
        ):
            with pytest.raises(OSError) as caught:
                attempt()
            assert caught.value.errno == errno.EROFS


def read_error(path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.read(fd, 4096)
    except OSError as error:
        return error.errno or -1
    finally:
        os.close(fd)
    return 0


def test_an_exception_of_an_operation_is_eio_and_the_session_goes_on() -> None:
    files = Files({b"blob": b"x" * 4096})
    with serving(files, threads=1) as served:

        def fail(request: fuse.Read) -> None:
            raise ValueError("a fault of ours")

        files.on_read = fail
        assert read_error(f"{served.root}/blob") == errno.EIO
        assert "a fault of ours" in served.log[0]
        files.on_read = files.answer
        assert read_error(f"{served.root}/blob") == 0


def test_an_os_error_of_an_operation_reaches_the_reader() -> None:
    files = Files({b"blob": b"x" * 4096})
    with serving(files) as served:

        def fail(request: fuse.Read) -> None:
            raise OSError(errno.ETIMEDOUT, "no answer")

        files.on_read = fail
        assert read_error(f"{served.root}/blob") == errno.ETIMEDOUT
        assert served.log == []


def test_an_errno_that_the_kernel_does_not_take_is_eio() -> None:
    files = Files({b"blob": b"x" * 4096})
    with serving(files) as served:
        files.on_read = lambda request: served.session.error(request.unique, 524)
        assert read_error(f"{served.root}/blob") == errno.EIO


@pytest.mark.parametrize("given", [0, 4095, 8192])
def test_data_that_is_too_short_or_too_long_is_eio_and_never_zeros(given: int) -> None:
    files = Files({b"blob": b"x" * 65536})
    with serving(files) as served:
        files.on_read = lambda request: served.session.data(request, b"x" * given)
        fd = os.open(f"{served.root}/blob", os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 4096) as buffer, pytest.raises(OSError) as caught:  # O_DIRECT: one READ of 4096 bytes
                os.preadv(fd, [buffer], 4096)
            assert caught.value.errno == errno.EIO
        finally:
            os.close(fd)
        assert len(served.log) == 1 and f"was given {given} bytes" in served.log[0]


def test_the_end_of_a_file_that_is_no_whole_page_is_read() -> None:
    with serving(Files({b"odd": b"abc" * 1000})) as served, open(f"{served.root}/odd", "rb") as file:
        assert file.read() == b"abc" * 1000


def test_a_reply_to_a_reader_that_was_killed_goes_nowhere() -> None:
    """The reader dies with its request unanswered; the late answer is ENOENT for the session, which says nothing."""
    files = Files({b"blob": b"x" * MIB})
    arrived = threading.Event()
    held: list[fuse.Read] = []

    def hold(request: fuse.Read) -> None:
        held.append(request)
        arrived.set()

    with serving(files) as served:
        files.on_read = hold
        reader = subprocess.Popen(
            [sys.executable, "-c", f"open('{served.root}/blob', 'rb').read()"], pass_fds=[served.mount]
        )
        assert arrived.wait(10)
        reader.kill()
        reader.wait()
        for request in held:
            files.answer(request)
        files.answer(held[0])  # and a second answer
        assert served.log == []
        files.on_read = files.answer
        assert read_error(f"{served.root}/blob") == 0


def test_closing_joins_idle_threads_at_once_and_readers_get_an_error() -> None:
    files = Files({b"blob": b"x" * MIB})
    arrived = threading.Event()
    device = fuse.open_device()
    session = files.session = fuse.Session(device, files)
    workers = [threading.Thread(target=session.serve) for _ in range(4)]
    mount = mounts.mount_fuse(device)
    for worker in workers:
        worker.start()
    with ThreadPoolExecutor(1) as reader:
        files.on_read = lambda request: arrived.set()  # never answered
        waiting = reader.submit(read_error, f"/proc/self/fd/{mount}/blob")
        assert arrived.wait(10)
        session.close()
        for worker in workers:
            worker.join(1)
            assert not worker.is_alive()
        assert not waiting.done()  # the descriptor is still open: another could go on serving
        os.close(device)
        assert waiting.result(10) in (errno.EIO, errno.ENOTCONN)
    with pytest.raises(OSError):
        os.stat(f"/proc/self/fd/{mount}/blob")
    session.reply(1, b"late")  # into the void, not into whatever has the descriptor's number now
    session.serve()  # returns
    os.close(mount)


def test_threads_end_when_the_last_reference_of_the_mount_goes() -> None:
    files = Files({b"blob": b"x" * MIB})
    device = fuse.open_device()
    session = files.session = fuse.Session(device, files)
    workers = [threading.Thread(target=session.serve) for _ in range(4)]
    mount = mounts.mount_fuse(device)
    for worker in workers:
        worker.start()
    assert read_error(f"/proc/self/fd/{mount}/blob") == 0
    os.close(mount)
    for worker in workers:
        worker.join(1)
        assert not worker.is_alive()
    session.close()
    os.close(device)


def test_a_closing_session_waits_for_an_operation_only_so_long() -> None:
    files = Files({b"blob": b"x" * 4096})
    entered, go_on = threading.Event(), threading.Event()

    def slow(request: fuse.Read) -> None:
        entered.set()
        assert go_on.wait(10)
        files.answer(request)

    with ThreadPoolExecutor(1) as reader, serving(files, threads=1) as served:
        files.on_read = slow
        reading = reader.submit(read_error, f"{served.root}/blob")
        assert entered.wait(10)
        with pytest.raises(TimeoutError, match="1 threads still at work"):
            served.session.close(0.01)
        go_on.set()
        assert reading.result(10) == 0


SERVER = """
import os, socket, stat, sys
from dsec_linux import fuse, mounts, sockets
sock = socket.socket(fileno=int(sys.argv[1]))
size = int(sys.argv[2])

class Operations:
    def lookup(self, parent, name): return fuse.Attr(2, stat.S_IFREG | 0o444, size) if name == b"blob" else None
    def getattr(self, node): return fuse.Attr(node, stat.S_IFDIR | 0o555) if node == 1 else self.lookup(1, b"blob")
    def open(self, node): return fuse.FOPEN_KEEP_CACHE
    def readdir(self, node): return []
    def read(self, request): sock.send(b"read")  # and no answer, ever

device = fuse.open_device()
session = fuse.Session(device, Operations())
mount = mounts.mount_fuse(device)
sockets.send_with_fds(sock, b"ready", [mount])
os.close(mount)
session.serve()
"""


def test_a_killed_server_gives_eio_and_never_zeros(pair: Pair) -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, ThreadPoolExecutor(1) as reader:
        arguments = [sys.executable, "-c", textwrap.dedent(SERVER), str(theirs.fileno()), str(len(blob_of(pair)))]
        server = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        try:
            _, [mount] = sockets.receive_with_fds(ours, 1)
            layer = mounts.mount_erofs(pair.meta, [f"/proc/self/fd/{mount}/blob"])
            waiting = reader.submit(read_error, f"/proc/self/fd/{layer}/big")
            assert ours.recv(10) == b"read"
            server.send_signal(signal.SIGKILL)
            assert waiting.result(10) == errno.EIO
            assert read_error(f"/proc/self/fd/{layer}/exact") == errno.EIO
            assert sorted(os.listdir(f"/proc/self/fd/{layer}")) == ["big", "exact", "small"]  # the metadata is local
            os.close(layer)
            os.close(mount)
        finally:
            server.kill()
            server.wait()


def test_an_abort_through_fusectl_frees_the_reader_at_once(pair: Pair) -> None:
    files = Files({b"blob": blob_of(pair)})
    arrived = threading.Event()
    control = mounts.mount_fusectl()
    with ThreadPoolExecutor(1) as reader, serving(files) as served:
        layer = mounts.mount_erofs(pair.meta, [f"{served.root}/blob"])
        files.on_read = lambda request: arrived.set()  # never answered
        reading = reader.submit(read_error, f"/proc/self/fd/{layer}/big")
        assert arrived.wait(10)
        connection = f"/proc/self/fd/{control}/{bdi.name_of(served.mount).partition(':')[2]}"
        with open(f"{connection}/waiting") as file:
            assert int(file.read()) >= 1
        with open(f"{connection}/abort", "w") as file:
            file.write("1")
        assert reading.result(10) == errno.EIO
        os.close(layer)
    os.close(control)


def test_an_unanswered_request_comes_again_after_notify_resend() -> None:
    """What another process needs to take a session over: no second INIT, and the request with the resend bit."""
    files = Files({b"blob": os.urandom(4096)})
    arrived = threading.Event()
    first: list[fuse.Read] = []

    def swallow(request: fuse.Read) -> None:
        first.append(request)
        arrived.set()

    with ThreadPoolExecutor(1) as reader, serving(files) as served:
        files.on_read = swallow

        def content() -> bytes:
            with open(f"{served.root}/blob", "rb") as file:
                return file.read()

        reading = reader.submit(content)
        assert arrived.wait(10)
        files.on_read = files.answer
        served.session.notify(fuse.NOTIFY_RESEND)
        assert reading.result(10) == files.content[0]
        assert len(files.reads) == 2 and files.reads[0] == files.reads[1]


def test_notifying_an_unknown_code_is_an_error() -> None:
    with serving(Files({})) as served:
        assert served.session.wait_ready(10)
        with pytest.raises(OSError) as caught:
            served.session.notify(4242)
        assert caught.value.errno == errno.EINVAL
