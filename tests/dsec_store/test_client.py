"""The registry client against servers that misbehave: what it returns is right, what goes wrong is one clear line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_store import media
from dsec_store.backends.local import LocalBackend
from dsec_store.errors import (
    BlobUnknown,
    DsecError,
    IntegrityError,
    ReferenceUnknown,
    RegistryError,
    RegistryUnreachable,
)
from dsec_store.registry import client as client_module
from dsec_store.registry.client import RegistryClient
from tests import hostile
from tests.hostile import HostileRegistry
from tests.servers import registry_thread

DATA = os.urandom(3_000_000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": media.OCI_MANIFEST, "config": {}, "layers": []}).encode()
MANIFEST_DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[HostileRegistry]:
    with HostileRegistry(tmp_path) as registry:
        registry.add_blob(DATA)
        registry.substitute("n:v1", MANIFEST)
        registry.substitute(MANIFEST_DIGEST, MANIFEST)
        yield registry


@pytest.fixture
def client(registry: HostileRegistry) -> Iterator[RegistryClient]:
    with RegistryClient(registry.host) as client:
        yield client


def taken(client: RegistryClient, size: int = len(DATA)) -> bytes:
    return b"".join(client.stream_blob("n", DIGEST, size))


def one_line(error: DsecError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400
    return text


# What is right


def test_manifests_come_with_type_and_digest(client: RegistryClient) -> None:
    for reference in ("v1", MANIFEST_DIGEST):
        assert client.get_manifest("n", reference) == (MANIFEST, media.OCI_MANIFEST, MANIFEST_DIGEST)


def test_blobs_stream_whole(client: RegistryClient) -> None:
    assert client.blob_size("n", DIGEST) == len(DATA)
    assert taken(client) == DATA


def test_ranges_are_exact(client: RegistryClient) -> None:
    for offset, length in ((0, 1), (1000, 2_000_000), (len(DATA) - 1, 1)):
        assert client.read_range("n", DIGEST, offset, length) == DATA[offset : offset + length]


def test_what_is_unknown_is_said_so(client: RegistryClient) -> None:
    other = "sha256:" + "0" * 64
    assert client.blob_size("n", other) is None
    assert not client.has_manifest("n", other)
    with pytest.raises(ReferenceUnknown, match=r"has no n:v2 \(MANIFEST_UNKNOWN: not known\)"):
        client.get_manifest("n", "v2")
    with pytest.raises(BlobUnknown, match=other):
        list(client.stream_blob("n", other, 1))
    with pytest.raises(BlobUnknown, match=other):
        client.read_range("n", other, 0, 1)


def test_a_blob_is_sent_once(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    calls = []

    def content() -> Iterator[bytes]:
        calls.append(1)
        for at in range(0, len(DATA), 700_000):
            yield DATA[at : at + 700_000]

    with registry_thread(backend) as host, RegistryClient(host) as client:
        assert client.put_blob("n", DIGEST, len(DATA), content)
        assert not client.put_blob("n", DIGEST, len(DATA), content)
        assert client.mount_blob("other", DIGEST, "n")
    assert calls == [1]
    assert backend.read(DIGEST) == DATA


# What is wrong


def test_wrong_bytes_never_reach_the_last_piece(registry: HostileRegistry, client: RegistryClient) -> None:
    registry.set(DIGEST, hostile.wrong_byte(len(DATA) // 2))
    pieces = []
    with pytest.raises(IntegrityError, match="expected " + DIGEST) as caught:
        for piece in client.stream_blob("n", DIGEST, len(DATA)):
            pieces.append(piece)
    assert one_line(caught.value)
    assert sum(map(len, pieces)) < len(DATA)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (hostile.hang_up(0), RegistryError, "hung up after 0 of 3000000 bytes"),
        (hostile.hang_up(1_000_000), RegistryError, r"hung up after \d+ of 3000000 bytes"),
        (hostile.reset(1_000_000), RegistryError, "hung up"),
        (hostile.short_body(1), IntegrityError, "found 2999999 bytes, expected 3000000"),
        (hostile.long_body(1), IntegrityError, "more than 3000000 bytes"),
        (hostile.wrong_byte(0), IntegrityError, "found sha256:"),
        (hostile.status(401), RegistryError, r"wants credentials for the blob .* \(401\)"),
        (hostile.status(403), RegistryError, r"forbids access to the blob .* \(403\)"),
        (hostile.status(404), BlobUnknown, "has no blob"),
        (hostile.status(429), RegistryError, r"too many requests \(429\)"),
        (hostile.status(500), RegistryError, "with 500: UNKNOWN: a fault: 500, expected 200"),
        (hostile.status(503), RegistryError, "with 503"),
    ],
)
def test_each_fault_of_a_blob_is_one_clear_line(
    registry: HostileRegistry, client: RegistryClient, fault: hostile.Fault, error: type[DsecError], words: str
) -> None:
    registry.set(DIGEST, fault, times=1)
    with pytest.raises(error) as caught:
        taken(client)
    assert re.search(words, one_line(caught.value)), caught.value
    assert registry.host in str(caught.value)
    assert DIGEST in str(caught.value)
    assert taken(client) == DATA  # and the client goes on


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (hostile.range_ignored(), "answered a range with 200"),
        (hostile.wrong_content_range(1), "sent 'bytes 101-300/3000000'"),
        (hostile.no_content_range(), "sent 'no Content-Range'"),
        (hostile.short_body(1), "sent 199 bytes or more"),
        (hostile.long_body(1), "sent 201 bytes or more"),
        (hostile.hang_up(50), "hung up after 50 of 200 bytes"),
        (hostile.status(416), "with 416"),
    ],
)
def test_each_fault_of_a_range_is_one_clear_line(
    registry: HostileRegistry, client: RegistryClient, fault: hostile.Fault, words: str
) -> None:
    registry.set(DIGEST, fault, times=1)
    with pytest.raises(RegistryError) as caught:
        client.read_range("n", DIGEST, 100, 200)
    assert re.search(words, one_line(caught.value)), caught.value
    assert client.read_range("n", DIGEST, 100, 200) == DATA[100:300]


def test_a_range_answered_with_the_whole_blob_is_not_read(registry: HostileRegistry, client: RegistryClient) -> None:
    big = registry.add_blob(bytes(64 << 20))
    registry.set(big, hostile.range_ignored())
    with pytest.raises(RegistryError):
        client.read_range("n", big, 0, 10)
    assert registry.requests_for(big)[0].body_sent < 32 << 20


@pytest.mark.parametrize("reference", ["v1", MANIFEST_DIGEST])
def test_a_manifest_with_a_wrong_byte_is_refused(
    registry: HostileRegistry, client: RegistryClient, reference: str
) -> None:
    registry.set(MANIFEST_DIGEST, hostile.wrong_byte(5))
    with pytest.raises(IntegrityError, match=MANIFEST_DIGEST) as caught:
        client.get_manifest("n", reference)
    assert one_line(caught.value)


def test_a_manifest_without_end_is_not_read(registry: HostileRegistry, client: RegistryClient) -> None:
    registry.substitute("n:huge", bytes(64 << 20))
    with pytest.raises(IntegrityError, match="more than 4194304 bytes"):
        client.get_manifest("n", "huge")


def test_an_upload_that_is_cut_off_is_one_clear_line(registry: HostileRegistry, client: RegistryClient) -> None:
    new = os.urandom(8_000_000)
    digest = "sha256:" + hashlib.sha256(new).hexdigest()
    registry.set(digest, hostile.hang_up(100_000))
    registry.set(f"n:{digest}", hostile.hang_up(100_000))
    with pytest.raises(RegistryError, match="hung up during the blob") as caught:
        client.put_blob("n", digest, len(new), lambda: [new], ask=False)
    assert one_line(caught.value)


def test_an_upload_that_is_refused_is_one_clear_line(registry: HostileRegistry, client: RegistryClient) -> None:
    digest = "sha256:" + hashlib.sha256(b"new").hexdigest()
    registry.set(digest, hostile.status(507))
    with pytest.raises(RegistryError, match="with 507") as caught:
        client.put_blob("n", digest, 3, lambda: [b"new"], ask=False)
    assert caught.value.status == 507
    assert caught.value.code == "UNKNOWN"


def test_an_error_of_what_is_sent_stays_what_it_is(tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        yield b"first"
        raise IntegrityError("the source is damaged")

    backend = LocalBackend(tmp_path / "store")
    with (
        registry_thread(backend) as host,
        RegistryClient(host) as client,
        pytest.raises(IntegrityError, match="the source is damaged"),
    ):
        client.put_blob("n", DIGEST, len(DATA), content)
    assert list(backend.blobs()) == []


# Nobody there


def test_a_refused_connection_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    with RegistryClient(host) as client, pytest.raises(RegistryUnreachable) as caught:
        client.get_manifest("n", "v1")
    assert str(caught.value) == f"cannot reach registry {host}: connection refused"


def test_an_unknown_host_is_one_clear_line() -> None:
    with RegistryClient("registry.invalid") as client, pytest.raises(RegistryUnreachable) as caught:
        client.get_manifest("n", "v1")
    assert one_line(caught.value).startswith("cannot reach registry registry.invalid: no such host")


def test_plain_http_where_tls_is_expected_is_one_clear_line(registry: HostileRegistry) -> None:
    with RegistryClient(registry.host, plain_http=False) as client, pytest.raises(RegistryUnreachable) as caught:
        client.get_manifest("n", "v1")
    assert "no TLS there" in one_line(caught.value)
    assert "--plain-http" in str(caught.value)


def test_silence_is_bounded(registry: HostileRegistry, monkeypatch: pytest.MonkeyPatch, client: RegistryClient) -> None:
    monkeypatch.setattr(client_module, "SILENCE_TIMEOUT", 0.3)
    registry.set(DIGEST, hostile.hold(threading.Event()))
    with RegistryClient(registry.host) as quick, pytest.raises(RegistryUnreachable, match="fell silent") as caught:
        taken(quick)
    assert one_line(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /v2/n/manifests/v1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://x/\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_garbage_is_one_clear_line(answer: bytes) -> None:
    def talk(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                while sock.recv(65536):
                    sock.sendall(answer)
                    if b"302" not in answer:
                        break

    with serving(talk) as host, RegistryClient(host) as client, pytest.raises(RegistryError) as caught:
        client.get_manifest("n", "v1")
    assert host in one_line(caught.value)


class serving:
    """A listening socket, and a thread that talks on it."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=talk, args=(self._listener,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *exc: Any) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize("host", ["xn--a.b", "xn--zzzzzzzzzz99999999.b:1", "999.1.1.1"])
def test_a_host_that_no_name_can_be_is_one_line(host: str) -> None:
    with pytest.raises(RegistryError, match=host) as caught, RegistryClient(host) as client:
        client.get_manifest("a", "1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "location", ["http://[", "http://xn--a.b/x", "http://999.1.1.1/", "http://h:99999/", "//[::1/"]
)
def test_a_location_that_leads_nowhere_is_one_line(location: str) -> None:
    answer = f"HTTP/1.1 202 Accepted\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        with RegistryClient(f"127.0.0.1:{listener.getsockname()[1]}") as client, pytest.raises(RegistryError) as caught:
            client.put_blob("a", "sha256:" + "0" * 64, 1, lambda: [b"x"], ask=False)
        thread.join(10)
    assert "\n" not in str(caught.value)
