"""Descriptors over Unix sockets (SCM_RIGHTS, unix(7)), one message at a time: SOCK_SEQPACKET keeps the borders."""

from __future__ import annotations

import errno
import os
import struct

from dsec_linux.errors import failure, from_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

# From the kernel's headers, equal on x86_64 and aarch64: importing socket costs more than everything else here.
SOL_SOCKET, SO_PEERCRED, SCM_RIGHTS = 1, 17, 1
MSG_CTRUNC, MSG_TRUNC, MSG_NOSIGNAL, MSG_CMSG_CLOEXEC = 0x08, 0x20, 0x4000, 0x40000000
_CMSG_HEADER = 16  # struct cmsghdr: size_t length, int level, int type
MAX_FDS = 253  # SCM_MAX_FD


def send_with_fds(sock: socket.socket, payload: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors; the caller keeps (and closes) its own. The payload must not be empty.

    Raises LinuxError: EMSGSIZE for a message above the socket's buffer, EPIPE when the other side is gone.
    """
    if not payload:
        raise ValueError("a message without a byte cannot be told from the end of the connection")
    ancillary = [(SOL_SOCKET, SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))] if fds else []
    try:
        sent = sock.sendmsg([payload], ancillary, MSG_NOSIGNAL)
    except TimeoutError:
        raise
    except OSError as error:
        raise from_os_error(error, "sendmsg", f"socket {sock.fileno()}") from error
    if sent != len(payload):
        raise failure(errno.EMSGSIZE, "sendmsg", f"socket {sock.fileno()}", [f"{sent} of {len(payload)} bytes sent"])


def receive_with_fds(sock: socket.socket, maxfds: int, size: int = 65536) -> tuple[bytes, list[int]]:
    """Receive one message and its descriptors (close-on-exec, the caller's to close). ``b""`` is the end.

    Raises LinuxError with EMSGSIZE when the message has more than ``size`` bytes or ``maxfds`` descriptors; what came
    of them is closed then.
    """
    # CMSG_LEN, not CMSG_SPACE: the padding of the latter would let one descriptor more through.
    room = _CMSG_HEADER + 4 * maxfds if maxfds else 0
    try:
        payload, ancillary, flags, _ = sock.recvmsg(size, room, MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise
    except OSError as error:
        raise from_os_error(error, "recvmsg", f"socket {sock.fileno()}") from error
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            fds.extend(struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4]))
    problem = ""
    if flags & MSG_TRUNC:
        problem = f"the message has more than {size} bytes"
    elif flags & MSG_CTRUNC or len(fds) > maxfds:
        problem = f"the message carries more than {maxfds} descriptors"
    if problem:
        for fd in fds:
            os.close(fd)
        raise failure(errno.EMSGSIZE, "recvmsg", f"socket {sock.fileno()}", [problem])
    return payload, fds


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected, as the kernel knows them."""
    pid, uid, gid = struct.unpack("=iII", sock.getsockopt(SOL_SOCKET, SO_PEERCRED, 12))
    return pid, uid, gid
