"""What a test run must not leave behind, and the comparison that finds it.

Looked at before the first test and after the last: mounts of our kinds, loop and ublk devices, EROFS superblocks (a
detached mount is in no mount table, but its backing device is in /sys/class/bdi), cgroups, network namespaces, and
every process that descends from the run (a subreaper, so a daemon that detaches itself stays its descendant).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
MACHINE_LOCK = Path("/var/lock/dsec-tests")
RELEASE_SECONDS = 10.0
"""How long the kernel may take to let go of what nothing refers to any more."""

OURS = re.compile(r"^(dsec\b.*|[a-z0-9]{1,16}-[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26})$")
"""Names of cgroups of ours: the parent group, and sandbox ids."""


@dataclass
class Snapshot:
    """Each set holds one printable line for each thing. ``machine`` ones may belong to another test run."""

    processes: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    superblocks: set[str] = field(default_factory=set)
    cgroups: set[str] = field(default_factory=set)
    network_namespaces: set[str] = field(default_factory=set)

    def minus(self, before: Snapshot) -> dict[str, set[str]]:
        found = {name: getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__}
        return {name: things for name, things in found.items() if things}


def become_subreaper() -> None:
    """From now on, orphans below this process become its children, where they can be seen."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int) -> Iterator[int]:
    """Every process below ``pid``, zombies too."""
    try:
        children = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def process_line(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return f"{pid}"
    return f"{pid} {command or f'({name})'}"


def reap() -> None:
    """Collect orphans that became our children and have ended: they are no leak.

    Only those: a child that a test still holds as a Popen object would lose its exit status, so this runs at the end.
    """
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def snapshot() -> Snapshot:
    seen = Snapshot()
    seen.processes = {process_line(pid) for pid in descendants(os.getpid())}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, right = line.split(" - ", 1)
        kind, source = right.split(" ")[:2]
        if kind in ("erofs", "overlay") or kind.split(".")[0] in ("fuse", "fuseblk"):
            seen.mounts.add(f"{kind} {source} on {left.split(' ')[4]}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        seen.devices.add(f"{backing.parts[3]} of {backing.read_text().strip()}")
    seen.devices.update(str(path) for path in Path("/dev").glob("ublkb*"))
    bdi = Path("/sys/class/bdi")
    seen.superblocks = (
        {entry.name for entry in bdi.iterdir() if entry.name.startswith("erofs")} if bdi.is_dir() else set()
    )
    for folder, folders, _ in os.walk("/sys/fs/cgroup"):
        seen.cgroups.update(f"{folder}/{name}" for name in folders if OURS.match(name))
    named = Path("/run/netns")
    seen.network_namespaces = {str(path) for path in named.iterdir()} if named.is_dir() else set()
    return seen


class LeakCheck:
    """``start`` before the first test, ``finish`` after the last."""

    def __init__(self) -> None:
        become_subreaper()
        # Two runs on one machine (two checkouts) see each other's mounts. Each holds this lock shared; whoever gets
        # it exclusively at the end was alone, and everything new on the machine is its own.
        self._lock = os.open(MACHINE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._alone = True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._alone = False
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._before = snapshot()

    def alone(self) -> bool:
        """Was no other run on this machine, and did nobody say so (``DSEC_TESTS_SHARED=1``)?"""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return self._alone and os.environ.get("DSEC_TESTS_SHARED") != "1"

    def finish(self) -> tuple[list[str], bool]:
        """What was left, one line each, and whether all of it is surely this run's. Ends processes that were left."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while True:
            reap()
            left = snapshot().minus(self._before)
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        ours = self.alone() or "processes" in left
        os.close(self._lock)
        for line in left.get("processes", ()):
            try:
                os.kill(int(line.split(" ")[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass
        reap()
        return [f"{name.replace('_', ' ')}: {thing}" for name, things in left.items() for thing in sorted(things)], ours
