"""``run/node-fd.sock``: mount requests in, descriptors out; and releases, which every sandbox needs at its end.

One request a connection. Threads, not asyncio: a request makes blocking system calls, and a slow registry must not
hold up the next caller.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from dsec_linux.errors import LinuxError
from dsec_linux.sockets import peer_credentials, receive_with_fds, send_with_fds
from dsec_store.errors import DsecError
from dsec_store.node.core import Node
from dsec_store.node.log import Log
from dsec_store.node.protocol import MAX_MESSAGE, MountRequest, encode, release_request

THREADS = 16
REQUEST_SECONDS = 10.0
"""How long a connected caller may take to say what it wants."""

log = Log("dsec.node")


class Handover:
    """Serves a listening SOCK_SEQPACKET socket until ``close``."""

    def __init__(self, node: Node, listener: socket.socket) -> None:
        self._node = node
        self._listener = listener
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="mount")
        self._thread = threading.Thread(target=self._accept, name="handover", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._pool.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(REQUEST_SECONDS)
                data, fds = receive_with_fds(connection, 0, MAX_MESSAGE)
                for fd in fds:
                    os.close(fd)
                if data:
                    connection.settimeout(None)
                    self._answer(connection, data)
            except OSError as error:
                log.warning("a caller went away", reason=str(error))
            except Exception:
                log.exception("a mount request failed by a fault of ours")

    def _answer(self, connection: socket.socket, data: bytes) -> None:
        pid, uid, _ = peer_credentials(connection)
        try:
            if uid != os.geteuid():
                raise DsecError(f"user {uid} may not mount; the node belongs to user {os.geteuid()}")
            released = release_request(data)
            if released is not None:
                send_with_fds(connection, encode({"released": self._node.release(released)}), [])
                return
            request = MountRequest.from_bytes(data)
            mounted, fd = self._node.mount(request, pid)
        except (DsecError, LinuxError, OSError) as error:
            log.warning("refused", pid=pid, reason=error)
            send_with_fds(connection, encode({"error": str(error)}), [])
            return
        except Exception as error:
            log.exception("a request failed by a fault of ours", pid=pid)
            text = f"a fault in the node: {type(error).__name__}: {error}; see {self._node.home.node_log}"
            send_with_fds(connection, encode({"error": text}), [])
            return
        try:
            send_with_fds(connection, encode(mounted.to_dict()), [fd])
        except BaseException:
            self._node.release(mounted.id)  # the caller never got it
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Take no more requests; those under way are answered first."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self._thread.join()
        self._pool.shutdown()
