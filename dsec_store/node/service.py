"""The process ``dsec node``: one per home, sockets 0600, ready when they answer.

Start order: the lock, the node, the sockets, the line ``ready`` to whoever started it. What is found of an earlier
node's sockets is removed under the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import structlog
import uvicorn

from dsec_store.errors import DsecError, NodeError
from dsec_store.home import Home
from dsec_store.node.core import Node
from dsec_store.node.handover import Handover
from dsec_store.node.http import create_app


def run_node(home: Home, ready_fd: int | None = None) -> None:
    """Serve until a signal or ``dsec node stop``. With ``ready_fd`` the process detaches from its starter first and
    tells it there ``ready``, or in one line why not.
    """
    if ready_fd is not None and os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    _log_to_stderr()
    try:
        home.ensure()
        lock = _take_lock(home)
    except DsecError as error:
        if ready_fd is None:
            raise
        os.write(ready_fd, str(error).encode())
        os._exit(1)
    try:
        asyncio.run(_serve(home, ready_fd))
    finally:
        os.close(lock)


async def _serve(home: Home, ready_fd: int | None) -> None:
    node = Node(home)
    server: uvicorn.Server | None = None

    def stop() -> None:
        if server is not None:
            server.should_exit = True

    http_socket = _listen(home.node_socket, socket.SOCK_STREAM)
    config = uvicorn.Config(
        create_app(node, stop),
        log_config=None,
        lifespan="off",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    node.reap()
    handover = Handover(node, _listen(home.node_fd_socket, socket.SOCK_SEQPACKET))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    structlog.get_logger("dsec.node").info("ready", home=str(home.path), pid=os.getpid())
    if ready_fd is not None:
        os.write(ready_fd, b"ready")
        os.close(ready_fd)
    try:
        await server.serve(sockets=[http_socket])
    finally:
        for path in (home.node_fd_socket, home.node_socket):
            path.unlink(missing_ok=True)
        await asyncio.to_thread(handover.close)
        await asyncio.to_thread(node.close)
        structlog.get_logger("dsec.node").info("ended", pid=os.getpid())


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would raise the signal again at the end."""

    def install_signal_handlers(self) -> None:
        pass


def _take_lock(home: Home) -> int:
    fd = os.open(home.node_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise NodeError(f"a node runs already for {home.path} (pid {pid or 'unknown'})") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, kind)
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")  # an address holds 107 bytes only
        path.chmod(0o600)
        sock.listen(128)
    finally:
        os.close(folder)
    return sock


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
