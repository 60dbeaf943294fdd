"""A registry that misbehaves on purpose: a real HTTP/1.1 server on raw sockets, with faults switched at run time.

    with HostileRegistry(home.store) as registry:          # or upstream="127.0.0.1:5000"
        registry.set(digest, hang_up(after=1000))          # for one blob or manifest, by digest
        registry.set(ANY, status(503), times=2)            # for the next two requests, whatever they ask for
        ... speak to registry.host ...
        assert [r.range for r in registry.requests_for(digest)] == ["bytes=0-99"]

It serves what a local backend's folder holds (``blobs/sha256/<2 hex>/<64 hex>``, ``refs/<name>/_tags/<tag>``), or what
another registry answers, and takes uploads only to count them. The standard library alone, so that a fault of the code
under test cannot hide here.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANY = "*"
"""The key of faults that hit every request without a fault of its own."""

_PATH = re.compile(r"/v2/(?P<name>.+)/(?P<what>manifests|blobs)/(?P<reference>[^/?]+)")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_BLOCK = 64 * 1024


@dataclass(frozen=True)
class Fault:
    """What goes wrong; made by the functions below. ``value`` is what the function's docstring says."""

    kind: str
    value: float = 0
    event: threading.Event | None = field(default=None, compare=False)


def wrong_byte(offset: int) -> Fault:
    """The byte at ``offset`` of the object is another one, in every answer that covers it."""
    return Fault("wrong-byte", offset)


def hang_up(after: int) -> Fault:
    """The headers promise the whole body; after ``after`` bytes of it the connection is closed."""
    return Fault("hang-up", after)


def reset(after: int) -> Fault:
    """As hang_up, with a TCP reset instead of an orderly end."""
    return Fault("reset", after)


def range_ignored() -> Fault:
    """A range is answered with 200 and the whole object."""
    return Fault("range-ignored")


def status(code: int) -> Fault:
    """The answer is that status with an OCI error body."""
    return Fault("status", code)


def delay(seconds: float) -> Fault:
    """The answer begins after ``seconds``."""
    return Fault("delay", seconds)


def hold(until: threading.Event) -> Fault:
    """The answer begins when the event is set (or the server is closed)."""
    return Fault("hold", 0, until)


def trickle(bytes_per_second: float) -> Fault:
    """The body comes at that rate."""
    return Fault("trickle", bytes_per_second)


def short_body(missing: int) -> Fault:
    """The body lacks its last ``missing`` bytes and Content-Length agrees with it, so that HTTP sees nothing wrong."""
    return Fault("short-body", missing)


def long_body(extra: int) -> Fault:
    """The body has ``extra`` bytes more than the object or the range, and Content-Length agrees with it."""
    return Fault("long-body", extra)


def wrong_content_range(shift: int = 1) -> Fault:
    """Content-Range names a place ``shift`` bytes further on than the bytes sent."""
    return Fault("wrong-content-range", shift)


def no_content_range() -> Fault:
    """206 without Content-Range."""
    return Fault("no-content-range")


@dataclass
class Request:
    """One request: ``digest`` of its object where known, the ``range`` header, the answer's ``status``.

    It is in the list before the first byte of the answer leaves, and a byte is counted before it leaves: a client that
    has its answer sees its request counted.
    """

    method: str
    path: str
    digest: str | None
    range: str | None
    status: int
    body_sent: int = 0
    received: int = 0


class HostileRegistry:
    """Context manager; ``host`` is ``127.0.0.1:PORT``, ``base`` the URL. Thread-safe."""

    def __init__(
        self, backend_dir: Path | str | None = None, *, upstream: str | None = None, fault: Fault | None = None
    ) -> None:
        if (backend_dir is None) == (upstream is None):
            raise ValueError("one of backend_dir and upstream")
        self._root = Path(backend_dir) if backend_dir is not None else None
        self._upstream = upstream
        self._lock = threading.Lock()
        self._faults: dict[str, tuple[Fault, int | None]] = {}
        self._extra: dict[str, bytes] = {}
        self._requests: list[Request] = []
        self._connections = 0
        self._sockets: set[socket.socket] = set()
        self.closing = threading.Event()
        if fault is not None:
            self.set(ANY, fault)
        registry = self

        class Handler(_Handler):
            pass

        Handler.registry = registry
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def base(self) -> str:
        return f"http://{self.host}"

    def __enter__(self) -> HostileRegistry:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        with self._lock:
            for one, _ in self._faults.values():
                if one.event is not None:
                    one.event.set()
        self._server.shutdown()
        self.drop_connections()
        self._server.server_close()  # joins the handlers' threads
        self._thread.join()

    # switches

    def set(self, key: str, fault: Fault, *, times: int | None = None) -> None:
        """Switch a fault on for a digest, a ``name:tag``, or ANY; for the next ``times`` requests, or for good."""
        with self._lock:
            self._faults[key] = (fault, times)

    def clear(self, key: str | None = None) -> None:
        """Switch off the fault of one key, or all."""
        with self._lock:
            if key is None:
                self._faults.clear()
            else:
                self._faults.pop(key, None)

    def add_blob(self, data: bytes) -> str:
        """Serve these bytes too; their digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.substitute(digest, data)
        return digest

    def substitute(self, key: str, data: bytes) -> None:
        """Serve these bytes under a digest that need not be theirs, or as the manifest of ``name:tag``."""
        with self._lock:
            self._extra[key] = data

    def drop_connections(self) -> None:
        """End every open connection at once."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # what was seen

    @property
    def requests(self) -> list[Request]:
        with self._lock:
            return list(self._requests)

    def requests_for(self, key: str) -> list[Request]:
        """The requests whose object has that digest, in the order of their answers."""
        return [r for r in self.requests if r.digest == key]

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        with self._lock:
            return self._connections

    @property
    def body_bytes(self) -> int:
        """The bytes of all bodies that were sent."""
        return sum(r.body_sent for r in self.requests)

    def forget_requests(self) -> None:
        with self._lock:
            self._requests.clear()
            self._connections = 0

    # used by the handler

    def take_fault(self, keys: list[str]) -> Fault | None:
        with self._lock:
            for key in [*keys, ANY]:
                if key in self._faults:
                    fault, times = self._faults[key]
                    if times is not None:
                        if times <= 1:
                            del self._faults[key]
                        else:
                            self._faults[key] = (fault, times - 1)
                    return fault
        return None

    def record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def opened(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections += 1
            self._sockets.add(sock)

    def closed(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def find(self, name: str, what: str, reference: str) -> tuple[str | None, Callable[[int, int], bytes], int] | None:
        """(digest, read(offset, length), size) of an object, or None."""
        with self._lock:
            data = self._extra.get(reference)
            if data is None:
                data = self._extra.get(f"{name}:{reference}")
        if data is None and self._upstream is not None:
            data = self._ask_upstream(name, what, reference)
            if data is None:
                return None
            if reference.startswith("sha256:"):  # immutable: asked for once
                with self._lock:
                    self._extra.setdefault(reference, data)
        if data is not None:
            known = data
            digest = reference if reference.startswith("sha256:") else "sha256:" + hashlib.sha256(data).hexdigest()
            return digest, lambda offset, length: known[offset : offset + length], len(known)
        assert self._root is not None
        digest = reference
        if not digest.startswith("sha256:"):
            tag = self._root / "refs" / name / "_tags" / reference
            if not tag.is_file():
                return None
            digest = tag.read_text().strip()
        path = self._root / "blobs" / "sha256" / digest[7:9] / digest[7:]
        if not path.is_file():
            return None

        def read(offset: int, length: int) -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(length)

        return digest, read, path.stat().st_size

    def _ask_upstream(self, name: str, what: str, reference: str) -> bytes | None:
        assert self._upstream is not None
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, */*"
            connection.request("GET", f"/v2/{name}/{what}/{reference}", headers={"Accept": accept})
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status == 200 else None
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are this server's daily bread."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    registry: HostileRegistry

    def setup(self) -> None:
        super().setup()
        self.registry.opened(self.connection)

    def finish(self) -> None:
        self.registry.closed(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path in ("/v2", "/v2/"):
            self._plain(200, b"{}")
            return
        match = _PATH.fullmatch(self.path.split("?", 1)[0])
        found = self.registry.find(match["name"], match["what"], match["reference"]) if match else None
        keys = [match["reference"], f"{match['name']}:{match['reference']}"] if match else []
        digest = found[0] if found else (match["reference"] if match else None)
        if digest is not None and digest not in keys:
            keys.append(digest)
        fault = self.registry.take_fault(keys) or Fault("none")
        if fault.kind == "delay":
            self.registry.closing.wait(fault.value)
        elif fault.kind == "hold" and fault.event is not None:
            fault.event.wait()
        if fault.kind == "status":
            self._plain(int(fault.value), _error_body(fault), digest)
            return
        if found is None or match is None:
            self._plain(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"not known"}]}', digest)
            return
        self._object(match["what"], *found, fault)

    def _object(
        self, what: str, digest: str | None, read: Callable[[int, int], bytes], size: int, fault: Fault
    ) -> None:
        header = self.headers.get("Range")
        start, end, code = 0, size, 200
        if header and what == "blobs" and fault.kind != "range-ignored":
            spec = _RANGE.fullmatch(header)
            if spec and spec[1]:
                start, end = int(spec[1]), min(size, int(spec[2]) + 1) if spec[2] else size
            elif spec:
                start = max(0, size - int(spec[2]))
            code = 206
            if start >= end:
                self._plain(416, b"", digest, {"Content-Range": f"bytes */{size}"})
                return
        length = end - start
        if fault.kind == "short-body":
            length = max(0, length - int(fault.value))
        extra = b"\xa5" * int(fault.value) if fault.kind == "long-body" else b""
        self.send_response(code)
        if what == "manifests":
            self.send_header("Content-Type", _media_type(read(0, size)))
        else:
            self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Docker-Content-Digest", digest or "")
        self.send_header("Content-Length", str(length + len(extra)))
        if code == 206 and fault.kind != "no-content-range":
            shift = int(fault.value) if fault.kind == "wrong-content-range" else 0
            self.send_header("Content-Range", f"bytes {start + shift}-{end - 1 + shift}/{size}")
        request = Request(self.command, self.path, digest, header, code)
        self.registry.record(request)
        self.end_headers()
        if self.command != "HEAD":
            self._body(request, read, start, length, fault)
            if extra:
                request.body_sent += len(extra)
                self.wfile.write(extra)

    def _body(self, request: Request, read: Callable[[int, int], bytes], start: int, length: int, fault: Fault) -> None:
        limit = int(fault.value) if fault.kind in ("hang-up", "reset") else None
        sent = 0
        while sent < length:
            if limit is not None and sent >= limit:
                break
            want = min(_BLOCK, length - sent, limit - sent if limit is not None else _BLOCK)
            if fault.kind == "trickle":
                want = max(1, min(want, int(fault.value / 10)))
                if self.registry.closing.wait(want / fault.value):
                    break
            block = read(start + sent, want)
            if fault.kind == "wrong-byte" and 0 <= (at := int(fault.value) - start - sent) < len(block):
                block = block[:at] + bytes([block[at] ^ 0xFF]) + block[at + 1 :]
            sent += len(block)
            request.body_sent = sent
            self.wfile.write(block)
        if limit is not None and sent < length:
            self.close_connection = True
            if fault.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.registry.closed(self.connection)
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    # uploads: counted, never kept

    def do_POST(self) -> None:
        self._upload(202, {"Location": self.path.split("?", 1)[0].rstrip("/") + "/1"})

    def do_PUT(self) -> None:
        self._upload(201, {"Location": self.path})

    def _upload(self, code: int, headers: dict[str, str]) -> None:
        digest = self.path.split("digest=", 1)[1].replace("%3A", ":") if "digest=" in self.path else None
        keys = [digest] if digest else []
        if match := _PATH.fullmatch(self.path.split("?", 1)[0]):
            keys += [match["reference"], f"{match['name']}:{match['reference']}"]
        fault = self.registry.take_fault(keys) or Fault("none")
        total = int(self.headers.get("Content-Length") or 0)
        limit = min(total, int(fault.value)) if fault.kind in ("hang-up", "reset") else total
        received = 0
        while received < limit:
            block = self.rfile.read(min(_BLOCK, limit - received))
            if not block:
                break
            received += len(block)
        if fault.kind in ("hang-up", "reset"):
            self.close_connection = True
            self.registry.record(Request(self.command, self.path, digest, None, 0, 0, received))
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault.kind == "status":
            code, headers = int(fault.value), {}
        body = _error_body(fault) if code >= 400 else b""
        self._plain(code, body, digest, headers, received)

    def _plain(
        self,
        code: int,
        body: bytes,
        digest: str | None = None,
        headers: dict[str, str] | None = None,
        received: int = 0,
    ) -> None:
        sent = 0 if self.command == "HEAD" else len(body)
        self.registry.record(Request(self.command, self.path, digest, self.headers.get("Range"), code, sent, received))
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if sent:
            self.wfile.write(body)


def _error_body(fault: Fault) -> bytes:
    return json.dumps({"errors": [{"code": "UNKNOWN", "message": f"a fault: {int(fault.value)}"}]}).encode()


def _media_type(document: bytes) -> str:
    try:
        value = json.loads(document)
        return str(value.get("mediaType") or "application/vnd.oci.image.manifest.v1+json")
    except (ValueError, AttributeError):
        return "application/octet-stream"
