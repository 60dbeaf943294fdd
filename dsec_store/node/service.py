"""The process ``dsec node``: one per home, sockets 0600, ready when they answer.

Start order: the lock, the node, the sockets, the line ``ready`` to whoever started it. What is found of an earlier
node's sockets is removed under the lock. The HTTP server is loaded when the first request for it comes: a sandbox
that waits for the node to start needs the descriptor socket alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import sys
from pathlib import Path

from dsec_store.errors import DsecError, NodeError
from dsec_store.home import Home
from dsec_store.node.core import Node
from dsec_store.node.handover import Handover
from dsec_store.node.log import Log, to_stderr

SWITCH_SECONDS = 0.0005
"""A reader's answer passes through three threads; with Python's 5 ms each could wait that long for the interpreter."""

log = Log("dsec.node")


def run_node(home: Home, ready_fd: int | None = None) -> None:
    """Serve until a signal or ``dsec node stop``.

    With ``ready_fd`` the process detaches from its starter first and tells it there ``ready``, or in one line why not.
    """
    if ready_fd is not None and os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_SECONDS)
    to_stderr()
    try:
        home.ensure()
        _take_lock(home)
    except DsecError as error:
        if ready_fd is None:
            raise
        os.write(ready_fd, str(error).encode())
        os._exit(1)
    _serve(home, ready_fd)
    # the lock is not let go: whoever waits for the node to be gone waits for the end of the process


def _serve(home: Home, ready_fd: int | None) -> None:
    with Stop() as stop:
        node = Node(home)
        http_socket = _listen(home.node_socket, socket.SOCK_STREAM)
        node.reap()
        handover = Handover(node, _listen(home.node_fd_socket, socket.SOCK_SEQPACKET))
        try:
            log.info("ready", home=home.path, pid=os.getpid())
            if ready_fd is not None:
                os.write(ready_fd, b"ready")
                os.close(ready_fd)
            if stop.wait_for(http_socket):
                asyncio.run(_serve_http(node, http_socket, stop))
        finally:
            for path in (home.node_fd_socket, home.node_socket):
                path.unlink(missing_ok=True)
            http_socket.close()
            handover.close()
            node.close()
            log.info("ended", pid=os.getpid())


async def _serve_http(node: Node, http_socket: socket.socket, stop: Stop) -> None:
    import uvicorn

    from dsec_store.node.http import create_app

    app = create_app(node, stop.set)
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", access_log=False, ws="none", timeout_graceful_shutdown=5
    )

    class Server(uvicorn.Server):
        """Without uvicorn's own signal handling, which would raise the signal again at the end."""

        def install_signal_handlers(self) -> None:
            pass

    server = Server(config)

    def end() -> None:
        server.should_exit = True

    asyncio.get_running_loop().add_reader(stop.fd, end)
    await server.serve(sockets=[http_socket])


class Stop:
    """That the node shall end: set by a signal or a request, seen by a descriptor that becomes readable."""

    def __enter__(self) -> Stop:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.set())
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def wait_for(self, sock: socket.socket) -> bool:
        """Wait for a connection; False when the node shall end first."""
        readable, _, _ = select.select([sock.fileno(), self.fd], [], [])
        return self.fd not in readable


def _take_lock(home: Home) -> None:
    fd = os.open(home.node_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise NodeError(f"a node runs already for {home.path} (pid {pid or 'unknown'})") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


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
