"""Containers by an OCI runtime: crun, or runc where crun is not there.

``launch`` runs in the monitor (monitor.py), with the bundle as its working directory and the container's own stdin,
stdout and stderr as its. The runtime's messages go to a file: a pipe as its stderr would be inherited by the
container.

The runtime's own ``delete`` is not used: what it would do (end the processes, remove the groups and the state
folder) is done by who made them, also when the supervisor was killed, and one program less is run.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH119

from __future__ import annotations

import os

from runtimes.errors import CannotStart, ContainerFailed

LOG = "runtime.log"
PID_FILE = "pid"
CONSOLE = "console.sock"
"""Names in the bundle, used relative to it: a Unix socket's address holds 107 bytes, however deep the home is."""

_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FORKED_NOT_EXECUTED = 0x40  # PF_FORKNOEXEC of linux/sched.h, field 9 of /proc/PID/stat

_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))
"""All but SIGKILL, SIGSTOP and the C library's own: what we ignore (SIGPIPE, as Python does) would be ignored by
the command.
"""

# What the runtimes say when it is the command that cannot be started; the rest is a failure of the sandbox.
_ABOUT_THE_COMMAND = ("executable file", "open executable", "exec container process", "exec: ", "exec /")
_MISSING = ("no such file or directory", "not found in $path")


class OciRuntime:
    """``path`` of the program; ``is_crun`` tells the two apart."""

    __slots__ = ("is_crun", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_crun = os.path.basename(path) == "crun"


def find_runtime() -> OciRuntime:
    """crun, else runc, by ``PATH`` and the usual folders; ``$DSEC_OCI_RUNTIME`` names another program (by its path,
    and its name says which of the two it is like). Raises ContainerFailed when there is none."""
    chosen = os.environ.get("DSEC_OCI_RUNTIME")
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise ContainerFailed(f"DSEC_OCI_RUNTIME names {chosen}, which is no program")
        return OciRuntime(chosen)
    folders = [*os.environ.get("PATH", "").split(":"), *_FOLDERS.split(":")]
    for name in ("crun", "runc"):
        for folder in folders:
            path = f"{folder}/{name}"
            if folder and os.access(path, os.X_OK):
                return OciRuntime(path)
    raise ContainerFailed("no OCI runtime: neither crun nor runc is installed")


def launch(runtime: OciRuntime, state: str, container: str, *, terminal: bool) -> int:
    """Create and start the container of the bundle in the working directory; returns its first process, our child.

    ``state`` is the runtime's state folder. The caller must be a subreaper or the first process of its pid namespace.
    Raises CannotStart when the command is the reason, else ContainerFailed.
    """
    arguments = [
        runtime.path,
        "--root",
        state,
        "--log",
        LOG,
        "run",
        "--detach",
        "--bundle",
        ".",
        "--pid-file",
        PID_FILE,
    ]
    if terminal:
        arguments += ["--console-socket", CONSOLE]
    # not the caller's environment: LISTEN_FDS, NOTIFY_SOCKET and others would be passed on into the container
    child = os.posix_spawn(runtime.path, [*arguments, container], {"PATH": _FOLDERS}, setsigdef=_SIGNALS, setsigmask=())
    _, status = os.waitpid(child, 0)
    if status:
        raise failure(_log())
    with open(PID_FILE) as file:
        return int(file.read())


def never_executed(pid: int) -> bool:
    """Whether a child that has ended, and was not yet waited for, ended before it became the command.

    crun's forked process is told by the kernel's flag; runc's has executed runc itself before, and is told by its
    name.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    name, _, rest = text.partition(b"(")[2].rpartition(b")")
    return bool(int(rest.split()[6]) & _FORKED_NOT_EXECUTED) or name.startswith(b"runc:[")


def failure(message: str) -> ContainerFailed:
    """The error of what a runtime said."""
    text = " ".join(message.split()) or "the OCI runtime ended without a message"
    lower = text.lower()
    if any(part in lower for part in _ABOUT_THE_COMMAND):
        return CannotStart(text, 127 if any(part in lower for part in _MISSING) else 126)
    return ContainerFailed(text)


def _log() -> str:
    """The last message of the runtime's log, without the time in front of it."""
    try:
        with open(LOG, "rb") as file:
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        lines = []
    return clean_message(lines[-1]) if lines else ""


def clean_message(line: str) -> str:
    """A line of a runtime's log as a message: crun puts a time in front, runc writes ``time=… level=… msg="…"``."""
    if ' msg="' in line:
        line = line.split(' msg="', 1)[1].rstrip().removesuffix('"').replace('\\"', '"')
    first, _, rest = line.partition(": ")
    return rest if rest and first[:4].isdigit() and "T" in first else line
