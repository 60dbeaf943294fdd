"""``dsec registry serve`` as a process: its one line of output, its end, and what a kill leaves."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from dsec_store.backends.local import LocalBackend
from dsec_store.errors import RegistryError
from dsec_store.home import Home
from dsec_store.registry.serve import parse_address
from tests.conftest import Dsec
from tests.servers import registry_process
from tests.waiting import until


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("localhost:0", ("localhost", 0)),
        (":80", ("", 80)),
        ("[::1]:5000", ("::1", 5000)),
        ("5000", None),
        ("host", None),
        ("host:http", None),
        ("host:65536", None),
        ("::1:5000", None),
    ],
)
def test_addresses(text: str, expected: tuple[str, int] | None) -> None:
    if expected is None:
        with pytest.raises(RegistryError, match="not an address"):
            parse_address(text)
    else:
        assert parse_address(text) == expected


def test_it_serves_the_store_of_its_home(home: Home) -> None:
    with LocalBackend(home.store).writer() as writer:
        writer.write(b"hello")
        digest, _ = writer.commit()
    with registry_process(home.path) as registry:
        assert registry.host.startswith("127.0.0.1:")
        assert not registry.host.endswith(":0")
        answer = httpx.get(f"http://{registry.host}/v2/a/blobs/{digest}", headers={"Range": "bytes=1-2"})
        assert (answer.status_code, answer.content) == (206, b"el")


def test_a_port_that_is_taken_is_one_clear_line(dsec: Dsec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = dsec("registry", "serve", "--listen", address, check=False)
    assert done.returncode == 1
    assert done.stderr == f"dsec: cannot listen on {address}: Address already in use\n"
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_within_two_seconds(home: Home, number: int) -> None:
    """Also while a client reads slowly, another sends slowly, and a third only has a connection."""
    with LocalBackend(home.store).writer() as writer:
        writer.write(bytes(30 << 20))
        digest, _ = writer.commit()
    with registry_process(home.path) as registry:
        address, port = registry.host.split(":")
        where = (address, int(port))
        with (
            httpx.stream("GET", f"http://{registry.host}/v2/a/blobs/{digest}") as download,
            socket.create_connection(where) as upload,
            socket.create_connection(where),
        ):
            next(download.iter_raw(100))
            upload.sendall(b"POST /v2/a/blobs/uploads/?digest=" + digest.encode() + b" HTTP/1.1\r\nHost: a\r\n")
            upload.sendall(b"Content-Length: 1000000\r\n\r\n" + bytes(300_000))
            began = time.monotonic()
            registry.process.send_signal(number)
            assert registry.process.wait(10) == 0
            assert time.monotonic() - began < 2
            assert registry.process.stderr is not None
            assert registry.process.stderr.read() == ""
    assert list(LocalBackend(home.store).blobs()) == [digest]


def has_open(pid: int, folder: Path) -> bool:
    links = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return any(os.readlink(link).startswith(str(folder)) for link in links)


def test_a_kill_during_an_upload_leaves_nothing_and_it_starts_again(home: Home) -> None:
    data = os.urandom(1_000_000)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    with registry_process(home.path) as registry:
        address, port = registry.host.split(":")
        with socket.create_connection((address, int(port))) as upload:
            upload.sendall(b"POST /v2/a/blobs/uploads/?digest=" + digest.encode() + b" HTTP/1.1\r\nHost: a\r\n")
            upload.sendall(b"Content-Length: 9000000\r\n\r\n" + bytes(4_000_000))
            until(lambda: has_open(registry.process.pid, home.store), "the upload to begin")
            registry.process.kill()
            registry.process.wait()
    assert [path for path in home.store.rglob("*") if path.is_file() and path.name != "lock"] == []
    with registry_process(home.path, f"{address}:{port}") as registry:
        answer = httpx.post(f"http://{registry.host}/v2/a/blobs/uploads/", params={"digest": digest}, content=data)
        assert answer.status_code == 201
