"""The record of a command (docs/formats.md §10): what ran, how it ended, and the two ends of what it printed.

``stdout`` and ``stderr`` are ``{"total", "head", "tail", "dropped"}``: ``total`` and ``dropped`` count bytes;
``head`` is base64 of the bytes from offset 0, ``tail`` of the bytes up to ``total``, so every kept byte has its
absolute offset. With a terminal everything is in ``stdout``. Times are UTC, RFC 3339 with microseconds.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH105, PTH108, PTH116

from __future__ import annotations

import binascii
import json
import os
import stat
import time

from runtimes.ids import ulid

KEPT = 64 * 1024
"""Bytes kept of each end of a stream."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Outcome = dict[str, str | int]


class HeadTail:
    """The first and last ``KEPT`` bytes of a stream of any length, and its exact length. Memory is bounded by 3 ×
    KEPT.
    """

    __slots__ = ("_tail", "head", "total")

    def __init__(self) -> None:
        self.head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = KEPT - len(self.head)
        if room:
            self.head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * KEPT:  # cut seldom, so that each byte moves at most once
                del self._tail[:-KEPT]

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-KEPT:])

    def to_dict(self) -> dict[str, int | str]:
        tail = self.tail
        return {
            "total": self.total,
            "head": _base64(self.head),
            "tail": _base64(tail),
            "dropped": self.total - len(self.head) - len(tail),
        }


def _base64(data: bytes | bytearray) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def now() -> str:
    """The time as records have it."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds // 1000:06d}Z"


def exited(code: int) -> Outcome:
    return {"kind": "exited", "code": code}


def signalled(number: int) -> Outcome:
    return {"kind": "signalled", "signal": number}


def unknown(reason: str) -> Outcome:
    return {"kind": "unknown", "reason": " ".join(reason.split())}


OOM: Outcome = {"kind": "oom"}
TIMEOUT: Outcome = {"kind": "timeout"}
STOPPED: Outcome = {"kind": "stopped"}


def of_status(status: int, oom_kills: int) -> Outcome:
    """The outcome of a command that ended by itself, from its wait status and the sandbox's out-of-memory kills.

    A kill counts unless the command ended with 0: what fails after one of its processes was taken away failed for
    want of memory, whichever code it passes on (make gives 2, a shell 137). A command that copes has exited.
    """
    code = os.waitstatus_to_exitcode(status)
    if oom_kills and code:
        return dict(OOM)
    return exited(code) if code >= 0 else signalled(-code)


def exit_code(outcome: Mapping[str, Any], *, stopped_by: int = 0) -> int:
    """What ``dsec run`` exits with. ``stopped_by`` is the signal that stopped it."""
    match outcome["kind"]:
        case "exited":
            return int(outcome["code"])
        case "signalled":
            return 128 + int(outcome["signal"])
        case "oom":
            return 137
        case "timeout":
            return 124
        case "stopped":
            return 128 + stopped_by
    return 125


class CommandRecord:
    """One command of a sandbox, filled in while it runs."""

    __slots__ = ("argv", "cwd", "ended_at", "id", "outcome", "sandbox", "started_at", "stderr", "stdout", "user")

    def __init__(self, sandbox: str) -> None:
        self.id = ulid()
        self.sandbox = sandbox
        self.argv: list[str] = []
        self.cwd = ""
        self.user = ""
        self.started_at: str | None = None
        self.ended_at: str | None = None
        self.outcome: Outcome = unknown("it was not started")
        self.stdout = HeadTail()
        self.stderr = HeadTail()

    def to_dict(self) -> dict[str, Any]:
        """``session`` is null: a command of ``dsec run`` belongs to none."""
        return {
            "id": self.id,
            "sandbox": self.sandbox,
            "session": None,
            "argv": self.argv,
            "cwd": self.cwd,
            "user": self.user,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "outcome": self.outcome,
            "stdout": self.stdout.to_dict(),
            "stderr": self.stderr.to_dict(),
        }


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Replace a file by the JSON of ``value``: a reader finds the old one or the new one, whole.

    A path that is no regular file (/dev/stdout, a pipe) is written to instead. Not synced: a power cut may lose it.
    """
    data = json.dumps(value, ensure_ascii=True).encode() + b"\n"
    try:
        special = not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        special = False
    if special:
        with open(path, "wb") as file:
            file.write(data)
        return
    path = os.path.realpath(path)
    temporary = f"{path}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
