"""What is asked for, and what becomes of it with the settings of the image (``run`` of the lowest base layer)."""

from __future__ import annotations

import os
import re

from runtimes.errors import SettingsError
from runtimes.oci import DEFAULT_PATH, check_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

DEFAULT_PIDS = 4096
LEAST_MEMORY = 6 << 20
"""Bytes, docker's bound: below it the container's set-up itself runs out of memory."""

MAX_TIMEOUT = 30 * 24 * 3600
"""Seconds: poll(2), which waits for it, counts milliseconds in an int."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([bkmgt]?)i?b?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class RunOptions:
    """One ``dsec run``. ``memory`` is in bytes (None: no limit), ``timeout`` in seconds (None: none), ``pids`` a
    count (0: no limit), ``env`` ``K=V`` (``K`` alone takes the caller's value), ``network`` ``none`` or ``host``."""

    __slots__ = (
        "argv",
        "base",
        "env",
        "interactive",
        "keep",
        "memory",
        "name",
        "network",
        "pids",
        "plain_http",
        "terminal",
        "timeout",
        "toolkits",
        "user",
        "workdir",
        "workspaces",
    )

    def __init__(
        self,
        base: str,
        argv: Sequence[str] = (),
        *,
        workspaces: Sequence[str] = (),
        toolkits: Sequence[str] = (),
        env: Sequence[str] = (),
        workdir: str | None = None,
        user: str | None = None,
        memory: int | None = None,
        pids: int = DEFAULT_PIDS,
        timeout: float | None = None,
        name: str | None = None,
        keep: bool = False,
        network: str = "none",
        interactive: bool = False,
        terminal: bool = False,
        plain_http: bool = False,
    ) -> None:
        self.base = base
        self.argv = list(argv)
        self.workspaces = list(workspaces)
        self.toolkits = list(toolkits)
        self.env = list(env)
        self.workdir = workdir
        self.user = user
        self.memory = memory
        self.pids = pids
        self.timeout = timeout
        self.name = name
        self.keep = keep
        self.network = network
        self.interactive = interactive
        self.terminal = terminal
        self.plain_http = plain_http


def parse_size(text: str) -> int:
    """``512m``, ``1.5g``, ``65536``: bytes; units are powers of 1024, as docker's. Raises SettingsError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"not a size: {text!r}; expected a number and b, k, m, g or t")
    amount = float(match[1]) * _UNITS[match[2].lower()]
    if amount >= 1 << 63:
        raise SettingsError(f"{text[:40]} of memory is more than a limit can be; less than 8388608t")
    size = int(amount)
    if size < LEAST_MEMORY:
        raise SettingsError(f"{text} of memory is too little to start a container; at least 6m")
    return size


def check_timeout(seconds: float) -> float:
    """More than nothing and at most ``MAX_TIMEOUT``; raises SettingsError (also for nan, which is neither)."""
    if not 0 < seconds <= MAX_TIMEOUT:
        raise SettingsError(f"{seconds:g} is not a time limit; expected seconds, more than 0, up to {MAX_TIMEOUT}")
    return seconds


def check_name(name: str) -> str:
    """A sandbox's name; raises SettingsError."""
    from runtimes.ids import is_sandbox_id

    if _NAME.fullmatch(name) is None or is_sandbox_id(name):
        raise SettingsError(f"not a name: {name!r}; expected 1 to 64 letters, digits, _ . -, and not the form of an id")
    return name


def command_line(run: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    """As docker: the image's entry point, then the given words or, without any, the image's command."""
    words = [*(run.get("Entrypoint") or ()), *(argv or run.get("Cmd") or ())]
    if not words:
        raise SettingsError("no command: none was given after --, and the base layer names none")
    if any("\0" in word for word in words):
        raise SettingsError("the command has a NUL byte in it")
    for word in words:
        check_text(word, "an argument")
    return words


def environment(run: Mapping[str, Any], given: Sequence[str], *, home: str, hostname: str, terminal: bool) -> list[str]:
    """PATH, HOSTNAME, TERM (with a terminal) and HOME as docker sets them; then the image's; then ``given``."""
    values = {"PATH": DEFAULT_PATH, "HOSTNAME": hostname}
    if terminal:
        values["TERM"] = "xterm"
    for entry in run.get("Env") or ():
        key, _, value = entry.partition("=")
        values[key] = value
    for entry in given:
        key, equals, value = entry.partition("=")
        if not key or "\0" in entry:
            raise SettingsError(f"not a variable: {entry!r}; expected NAME=VALUE or NAME")
        if equals:
            values[key] = value
        elif key in os.environ:
            values[key] = os.environ[key]
        else:
            values.pop(key, None)
    if "HOME" not in values:
        values["HOME"] = check_text(home, "the home directory in the sandbox's /etc/passwd")
    return [check_text(f"{key}={value}", "the variable") for key, value in values.items()]
