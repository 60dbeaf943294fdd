"""The registry as a process: uvicorn around the application."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from dsec_store.backends.base import Backend
from dsec_store.errors import RegistryError
from dsec_store.registry.app import create_app
from erofs_tools.errors import shorten, show

GRACE = 1
"""Seconds that requests under way get when the process is asked to end."""


def parse_address(text: str) -> tuple[str, int]:
    """``ADDR:PORT``, ``[V6]:PORT`` or ``:PORT`` (all addresses); raises RegistryError."""
    host, colon, port = text.rpartition(":")
    if (
        not colon
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or int(port) > 65535
        or (":" in host and not host.startswith("["))
    ):
        raise RegistryError(f"not an address: {show(text)}; expected ADDR:PORT, for example 127.0.0.1:5000")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A bound and listening socket; raises RegistryError with the reason when the port cannot be had."""
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        family, where = found[0], found[4]
        # asyncio sets TCP_NODELAY only on sockets that name their protocol, and Nagle's algorithm holds the body of a
        # small answer back for 40 ms.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections
            sock.bind(where)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise RegistryError(f"cannot listen on {shorten(address)}: {error.strerror or error}") from error
    except UnicodeError as error:  # of the codec that names go through on their way to the resolver
        raise RegistryError(f"cannot listen on {shorten(address)}: {shorten(host)} is not a host") from error


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn without its signal handlers (it would end by raising the signal again), with a call once it answers."""

    def __init__(self, backend: Backend, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            create_app(backend),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="off",
            # Nodes keep connections open between misses; uvicorn's 5 s would cost them a handshake each time.
            timeout_keep_alive=120,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def stop(self) -> None:
        self.should_exit = True


def _worth_a_line(record: logging.LogRecord) -> bool:
    # Cutting off requests at the end is wanted; docker and skopeo try TLS before plain HTTP, each time.
    cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut_off and not record.getMessage().startswith(("Cancel ", "Invalid HTTP request"))


def serve(backend: Backend, sock: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; returns when everything is closed."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_worth_a_line)
    server = Server(backend, ready)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        await server.serve(sockets=[sock])

    asyncio.run(run())
