"""Kept connections to registries: blocking HTTP/1.1 GETs of the standard library, for the node's request threads.

A start of a sandbox is a hundred small range requests one after the other, so what a request costs is what the
sandbox waits: httpx took 3.7 ms of CPU for each (and 150 ms to be imported), aiohttp 0.9 (and 300), http.client 0.4
(and 25).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from urllib.parse import urljoin, urlsplit

SILENCE = 20.0
"""Seconds that a connection may take, or say nothing, at most."""
REDIRECTS = 4
IDLE_MAX = 32
"""Idle connections that are kept for one host: a new one costs a round trip."""


class TransportError(Exception):
    """What broke under HTTP; ``str()`` names it: DNS, TLS, refused, no answer in time, hung up."""


class Answer:
    """A response whose body is read piece by piece, each within the deadline."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse, end: float) -> None:
        self._connection = connection
        self._response = response
        self._end = end
        self.status = response.status
        self.reason = response.reason
        self.received = 0

    def header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, ``b""`` at the end. Raises TransportError."""
        try:
            sock = self._connection.sock
            if sock is not None:
                sock.settimeout(_patience(self._end))
            data = self._response.read1(size)
        except (OSError, HTTPException) as error:
            raise TransportError(_reason(error, self.received)) from error
        self.received += len(data)
        return data


class HttpPool:
    """Connections by scheme and host, for any number of threads. ``close`` ends the requests under way as well."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._active: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    @contextmanager
    def get(self, url: str, headers: dict[str, str], end: float) -> Iterator[Answer]:
        """GET with redirects followed. ``end`` is the deadline, as of time.monotonic(). Raises TransportError."""
        for _ in range(REDIRECTS + 1):
            key, connection, response = self._send(url, headers, end)
            location = response.headers.get("Location")
            if response.status not in (301, 302, 303, 307, 308) or not location:
                break
            self._drop(connection)
            url = urljoin(url, location)
        else:
            raise TransportError(f"more than {REDIRECTS} redirects, the last to {url}")
        try:
            yield Answer(connection, response, end)
        except BaseException:
            self._drop(connection)
            raise
        if response.length == 0:
            response.read()  # read1 does not notice the end of a body whose length was told
        if response.isclosed() and not response.will_close:
            self._give_back(key, connection)
        else:
            self._drop(connection)

    def _send(
        self, url: str, headers: dict[str, str], end: float
    ) -> tuple[tuple[str, str], HTTPConnection, HTTPResponse]:
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        while True:
            connection, kept = self._take(key, end)
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(_patience(end))
                connection.request("GET", target, headers=headers)
                return key, connection, connection.getresponse()
            except (RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self._drop(connection)
                if not kept:  # a kept connection may have been closed while it was idle
                    raise TransportError(_reason(error, 0)) from error
            except (OSError, HTTPException) as error:
                self._drop(connection)
                raise TransportError(_reason(error, 0)) from error
            except BaseException:
                self._drop(connection)
                raise

    def _take(self, key: tuple[str, str], end: float) -> tuple[HTTPConnection, bool]:
        """A connection of the caller's own, and whether it was used before."""
        with self._lock:
            if self._closed:
                raise TransportError("the node is ending")
            idle = self._idle.get(key)
            connection = idle.pop() if idle else None
            kept = connection is not None
            if connection is None:
                scheme, host = key
                connection = self._connection(scheme, host, _patience(end))
            self._active.add(connection)
            return connection, kept

    def _connection(self, scheme: str, host: str, timeout: float) -> HTTPConnection:
        if scheme == "http":
            return HTTPConnection(host, timeout=timeout)
        if scheme != "https":
            raise TransportError(f"{scheme}:// is neither http nor https")
        if self._tls is None:  # loading the authorities' certificates takes 50 ms
            self._tls = ssl.create_default_context()
        return HTTPSConnection(host, timeout=timeout, context=self._tls)

    def _give_back(self, key: tuple[str, str], connection: HTTPConnection) -> None:
        with self._lock:
            self._active.discard(connection)
            idle = self._idle.setdefault(key, [])
            if not self._closed and len(idle) < IDLE_MAX:
                idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._active.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close what is idle, and break what is under way: its readers get a TransportError."""
        with self._lock:
            self._closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
            active = [connection.sock for connection in self._active]
        for connection in idle:
            connection.close()
        for sock in active:
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def _patience(end: float) -> float:
    """Seconds to wait now; raises TransportError when none are left."""
    left = end - time.monotonic()
    if left <= 0:
        raise TransportError("no answer in time")
    return min(left, SILENCE)


def _reason(error: Exception, received: int) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"the host's name has no address ({text})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({text})"
    if isinstance(error, HTTPException | ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return f"the registry hung up after {received} bytes ({text})"
    return f"cannot connect ({text})"
