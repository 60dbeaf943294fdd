"""Talk to this machine's node, and start it when none runs (standard library only: ``dsec run`` and ``dsec mount``
import this).

Readiness is never slept for: a started node writes one line to a pipe when its sockets answer, or the reason why it
cannot.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
from typing import Any

from dsec_linux.sockets import receive_with_fds, send_with_fds
from dsec_store.errors import NodeError
from dsec_store.home import Home
from dsec_store.node.protocol import MAX_MESSAGE, VERSION, LayerArg, Mounted, MountRequest, encode

EXIT_SECONDS = 30.0
LOG_MAX = 16 << 20
"""Bytes of ``run/node.log`` above which the next node starts another."""

__all__ = ["LayerArg", "MountRequest", "Mounted", "NodeClient"]


class NodeClient:
    """One node of one home. Holds no connection: each call opens its own."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @classmethod
    def connect(cls, home: Home, start: bool = True) -> NodeClient:
        """A client of a node that answers. Without ``start`` a missing node is a NodeError."""
        client = cls(home)
        if not client.running():
            if not start:
                raise NodeError(f"no node runs for {home.path}; 'dsec node' starts one")
            client._start()
        return client

    def running(self) -> bool:
        """Whether a node answers on the descriptor socket."""
        try:
            self._open(self.home.node_fd_socket, socket.SOCK_SEQPACKET).close()
        except NodeError:
            return False
        return True

    def mount(self, request: MountRequest) -> tuple[Mounted, int]:
        """Mount an environment; returns it and the descriptor of the detached mount.

        The caller attaches the descriptor and closes it. Raises NodeError with the node's one line.
        """
        answer, fds = self._ask(request.to_bytes(), f"it mounted {request.id}")
        if len(fds) != 1:
            raise NodeError(f"the node sent {len(fds)} descriptors for {request.id}; expected 1")
        return Mounted(**answer), fds[0]

    def release(self, mount_id: str) -> bool:
        """Say that nobody uses the mount any more. False for an unknown id: the node may have been restarted."""
        answer, _ = self._ask(encode({"version": VERSION, "release": mount_id}), f"it released {mount_id}")
        return bool(answer["released"])

    def _ask(self, message: bytes, what: str) -> tuple[dict[str, Any], list[int]]:
        with self._open(self.home.node_fd_socket, socket.SOCK_SEQPACKET) as sock:
            try:
                send_with_fds(sock, message, [])
                data, fds = receive_with_fds(sock, 1, MAX_MESSAGE)
            except OSError as error:
                raise NodeError(f"the node ended while {what}: {error.strerror}; see {self.home.node_log}") from None
        if not data:
            raise NodeError(f"the node ended while {what}; see {self.home.node_log}")
        answer = json.loads(data)
        if "error" in answer:
            raise NodeError(answer["error"])
        return answer, fds

    def status(self) -> dict[str, Any]:
        return self._http("GET", "/v1/status")

    def stats(self) -> dict[str, Any]:
        return self._http("GET", "/v1/stats")

    def stop(self, force: bool = False) -> None:
        """End the node and wait until it has gone. Refused while environments are mounted, but for ``force``."""
        with open(self.home.node_lock) as lock:
            try:
                process = os.pidfd_open(int(lock.read()))
            except (OSError, ValueError):
                process = -1
            try:
                self._http("POST", f"/v1/stop?force={int(force)}")
                fcntl.flock(lock, fcntl.LOCK_EX)  # the node holds it until its very end
                if process >= 0:  # and what it had mounted is free when the process is gone
                    select.select([process], [], [], EXIT_SECONDS)
            finally:
                if process >= 0:
                    os.close(process)

    def _open(self, path: os.PathLike[str], kind: socket.SocketKind) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, kind)
        # a socket's address holds 107 bytes; the folder's descriptor keeps a long home usable
        folder = -1
        try:
            name = os.fspath(path)
            if len(os.fsencode(name)) > 100:
                parent, _, last = name.rpartition("/")
                folder = os.open(parent, os.O_PATH | os.O_CLOEXEC)
                name = f"/proc/self/fd/{folder}/{last}"
            sock.connect(name)
        except OSError as error:
            sock.close()
            raise NodeError(f"cannot reach the node at {os.fspath(path)}: {error.strerror}") from None
        finally:
            if folder >= 0:
                os.close(folder)
        return sock

    def _http(self, method: str, target: str) -> dict[str, Any]:
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("node")
        connection.sock = self._open(self.home.node_socket, socket.SOCK_STREAM)
        try:
            connection.request(method, target)
            response = connection.getresponse()
            body = json.loads(response.read() or b"{}")
        except (OSError, HTTPException, ValueError) as error:
            raise NodeError(f"the node's answer to {method} {target} broke off: {error}") from None
        finally:
            connection.close()
        if response.status >= 400:
            raise NodeError(str(body.get("error", f"{method} {target}: status {response.status}")))
        assert isinstance(body, dict)
        return body

    def _start(self) -> None:
        """Start ``dsec node`` in a session of its own. Of several callers at once one starts it, the others find it
        running.
        """
        self.home.ensure()
        with open(self.home.run / "node-start.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.running():
                return
            read_end, write_end = os.pipe()
            try:
                _rotate(self.home.node_log)
                log = os.open(self.home.node_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.set_inheritable(write_end, True)
                    child = os.posix_spawn(
                        sys.executable,
                        # -P: with -m alone the caller's directory would come first in the search for modules
                        [sys.executable, "-P", "-m", "dsec_cli", "node", "--ready-fd", str(write_end)],
                        _environment(self.home),
                        file_actions=[
                            (os.POSIX_SPAWN_DUP2, null, 0),
                            (os.POSIX_SPAWN_DUP2, log, 1),
                            (os.POSIX_SPAWN_DUP2, log, 2),
                        ],
                        setsid=True,
                    )
                finally:
                    os.close(log)
                    os.close(null)
                    os.close(write_end)
                answer = b""
                while block := os.read(read_end, 4096):
                    answer += block
                os.waitpid(child, 0)  # it forked the node off, so that the node is nobody's child here
            finally:
                os.close(read_end)
        text = answer.decode(errors="replace").strip()
        if text != "ready":
            raise NodeError(text or f"the node ended before it was ready; see {self.home.node_log}")


def _environment(home: Home) -> dict[str, str]:
    """The caller's, without what makes Python load other code or behave otherwise: the node outlives its caller."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "DSEC_HOME": os.fspath(home.path)}


def _rotate(log: Any) -> None:
    """Keep one older log: the new node starts another when this one has grown."""
    try:
        if log.stat().st_size > LOG_MAX:
            log.rename(log.with_suffix(".log.1"))
    except FileNotFoundError:
        pass
