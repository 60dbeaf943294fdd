"""Sandboxes on disk: ``sandboxes/<id>/``, who has one, and what becomes of those whose supervisor died.

    lock            flock(2) held by the supervisor while it lives: whose lock is free, does not run
    config.json     what was asked for; written before anything is mounted
    bundle/         for the OCI runtime; ``monitor`` in it names the process that everything hangs on
    upper/ work/    of the overlay
    rootfs/         where the overlay is mounted, in the monitor's mount namespace only
    records/        the command's record
    ended.json      when it ended and how; only there when the sandbox was kept (``--keep``)

``sandboxes/.lock`` is held while a sandbox is made or a dead one is claimed, so that a folder whose lock is not
taken yet cannot be mistaken for one whose owner died.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH101, PTH102, PTH104, PTH110, PTH112, PTH208

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager

from dsec_linux.mounts import mountinfo, umount
from dsec_linux.process import SIGKILL, SIGTERM, pidfd_send_signal, start_time, wait_ended
from dsec_store.errors import DsecError
from dsec_store.node.records import is_locked, is_mount, remove_record
from runtimes.errors import NameInUse, RuntimesError, SandboxBusy, SandboxUnknown
from runtimes.ids import is_sandbox_id, sandbox_id
from runtimes.records import now, unknown, write_json
from runtimes.rootfs import remove_missing
from runtimes.trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from dsec_linux.cgroups import Cgroup
    from dsec_store.home import Home

VERSION = 1
CONFIG, ENDED, LOCK = "config.json", "ended.json", "lock"
MONITOR = "bundle/monitor"
_FOLDERS = ("bundle", "upper", "work", "rootfs", "records")
_GONE = ".gone-"
_REACT_SECONDS = 3.0
"""How long a supervisor may take to end its sandbox when asked to."""

DEATH_SECONDS = 10.0
"""How long a killed process may take to go away before that is an error."""


class Sandbox:
    """A sandbox that this process has the lock of. ``config`` is what config.json says."""

    __slots__ = ("_lock", "config", "home", "id", "path")

    def __init__(self, home: Home, id: str, lock: int, config: dict[str, Any]) -> None:
        self.home = home
        self.id = id
        self.path = os.fspath(home.sandbox(id))
        self.config = config
        self._lock = lock

    @property
    def keep(self) -> bool:
        return bool(self.config.get("keep"))

    def folder(self, name: str) -> str:
        return f"{self.path}/{name}"

    def write_config(self) -> None:
        write_json(self.folder(CONFIG), self.config)

    def finish(self, outcome: dict[str, Any], *, dead: bool = False) -> None:
        """Leave what a kept sandbox is: upper, records, config, and how it ended. Anything else is removed, or
        everything.
        """
        if not self.keep:
            _remove_folder(self.home, self.id)
            return
        remove_missing(self.folder("upper"), self.config.get("missing", []), self.config.get("parents", {}))
        for name in ("bundle", "work", "rootfs"):
            remove_tree(self.folder(name))
        write_json(self.folder(ENDED), {"ended_at": now(), "outcome": outcome, "dead": dead})

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class FinishedSandbox:
    """What pack-diff needs: ``layers`` is base first, as dsec_store.node.protocol.Mounted has it."""

    __slots__ = ("id", "layers", "upper")

    def __init__(self, id: str, upper: Path, layers: list[dict[str, Any]]) -> None:
        self.id = id
        self.upper = upper
        self.layers = layers


def create(home: Home, config: dict[str, Any]) -> Sandbox:
    """Make a sandbox and take its lock. ``config`` becomes config.json, with ``id``, ``pid`` and ``created_at``
    added.

    Raises NameInUse.
    """
    id = sandbox_id()
    pid = os.getpid()
    owner = {"pid": pid, "pid_started": start_time(pid)}
    whole = {"version": VERSION, "id": id, **owner, "created_at": now(), **config}
    with _guard(home):
        name = config.get("name")
        if name is not None:
            for other in _ids(home):
                if _read(home, other, CONFIG).get("name") == name:
                    raise NameInUse(f"the name {name!r} is in use by sandbox {other}: dsec rm {name}")
        path = os.fspath(home.sandbox(id))
        lock: int | None = None
        try:
            os.mkdir(path, 0o700)
            lock = _take(f"{path}/{LOCK}")
            assert lock is not None  # nobody claims one while we have the guard
            sandbox = Sandbox(home, id, lock, whole)
            sandbox.write_config()
            for folder in _FOLDERS:
                os.mkdir(sandbox.folder(folder), 0o700)
            os.chmod(sandbox.folder("upper"), 0o755)  # the root directory that the sandbox sees: not the umask's choice
        except OSError as error:
            remove_tree(path)
            if lock is not None:
                os.close(lock)
            raise RuntimesError(f"cannot make the sandbox {path}: {error.strerror}") from error
    return sandbox


def find(home: Home, name: str) -> str:
    """The id of a sandbox by its id or name. Raises SandboxUnknown."""
    if is_sandbox_id(name):
        if home.sandbox(name).is_dir():
            return name
    else:
        for id in _ids(home):
            if _read(home, id, CONFIG).get("name") == name:
                return id
    raise SandboxUnknown(f"no sandbox {name!r}; dsec ps lists them")


@contextmanager
def open_finished(home: Home, name: str) -> Iterator[FinishedSandbox]:
    """A sandbox that has ended, by id or name, with its lock held. Raises SandboxUnknown, SandboxBusy."""
    from pathlib import Path

    id = find(home, name)
    lock = claim(home, id)
    if lock is None:
        raise SandboxBusy(f"sandbox {name} runs, or another command works on it; it must have ended")
    try:
        config = read_config(home, id)
        target = _mounted_at(config)
        if target is not None:
            raise SandboxBusy(f"sandbox {name} is mounted at {target}; dsec umount {target} ends it")
        if not os.path.exists(home.sandbox(id) / ENDED):
            raise SandboxUnknown(f"sandbox {name} was not kept: it died and was not cleaned up yet")
        yield FinishedSandbox(id, Path(home.sandbox(id) / "upper"), list(_read(home, id, CONFIG).get("layers", [])))
    finally:
        os.close(lock)


def listing(home: Home) -> list[dict[str, Any]]:
    """All sandboxes, oldest first, as ``dsec ps --json`` shows them.

    ``state`` is ``running``, ``finished`` or ``dead`` (its supervisor was killed); ``pid`` is the supervisor's
    while it runs.
    """
    found = []
    for id in sorted(_ids(home), key=lambda each: each.rpartition("-")[2]):
        config, ended = _read(home, id, CONFIG), _read(home, id, ENDED)
        running = not ended and (_is_locked(home, id) or _mounted_at(config) is not None)
        if not config or not (running or ended):
            continue  # being made or removed just now
        found.append(
            {
                "id": id,
                "name": config.get("name"),
                "state": "running" if running else "dead" if ended.get("dead") else "finished",
                "pid": config.get("pid") if running else None,
                "refs": config.get("refs", []),
                "command": config.get("command", []),
                "started_at": config.get("created_at"),
                "ended_at": ended.get("ended_at"),
                "outcome": ended.get("outcome"),
            }
        )
    return found


def remove(home: Home, name: str, *, force: bool = False) -> str:
    """Remove a sandbox by id or name and return its id. One that runs is refused (SandboxBusy), or killed with
    ``force``.
    """
    id = find(home, name)
    lock = claim(home, id)
    if lock is None and force:
        _end_supervisor(home, id)
        lock = claim(home, id)
        if not os.path.exists(home.sandbox(id)):
            return id  # its supervisor removed it
    if lock is None:
        hint = "it did not end" if force else "dsec rm --force kills it"
        raise SandboxBusy(f"sandbox {name} runs, or another command works on it; {hint}")
    try:
        config = read_config(home, id)
        target = _mounted_at(config)
        if target is not None:
            if not force:
                raise SandboxBusy(f"sandbox {name} is mounted at {target}; dsec umount it, or dsec rm --force")
            umount(target)
        _release_what_it_held(home, id)
        _remove_folder(home, id)
    finally:
        os.close(lock)
    return id


def reap_stale(home: Home) -> list[str]:
    """Clean up after every sandbox whose supervisor died; returns their ids.

    Its processes are killed, its groups, the OCI runtime's state and the node's mount go, and the folder too unless
    it was to be kept. Several at once, in any processes, share the work. Takes about 15 µs for each sandbox when
    there is nothing to do.
    """
    reaped = []
    for id in _ids(home):
        path = os.fspath(home.sandbox(id))
        if os.path.exists(f"{path}/{ENDED}") or _is_locked(home, id) or _mounted_at(read_config(home, id)):
            continue
        lock = claim(home, id)
        if lock is None:
            continue
        try:
            if os.path.exists(f"{path}/{ENDED}") or not os.path.isdir(path) or _mounted_at(read_config(home, id)):
                continue
            try:
                _release_what_it_held(home, id)
            except (RuntimesError, DsecError, OSError):
                continue  # what cannot be done now is tried again by the next command
            config = _read(home, id, CONFIG)
            if config.get("keep") and os.path.isdir(f"{path}/records"):
                Sandbox(home, id, -1, config).finish(unknown("its supervisor died"), dead=True)
            else:
                _remove_folder(home, id)
            reaped.append(id)
        finally:
            os.close(lock)
    for name in _names(home):
        if name.startswith(_GONE) and not _is_locked(home, name):
            remove_tree(os.fspath(home.sandbox(name)), LOCK)
    return reaped


def _remove_folder(home: Home, id: str) -> None:
    """Remove the folder of a sandbox whose lock we hold. Under its other name it is no sandbox any more; should we die
    in the middle, the next command goes on."""
    gone = os.fspath(home.sandbox(f"{_GONE}{id}"))
    os.rename(home.sandbox(id), gone)
    remove_tree(gone, LOCK)


def release_mount(home: Home, id: str) -> None:
    """Tell the node that the sandbox's mount is not used any more; where none runs, the record is all that is left of
    it. Raises NodeError."""
    from dsec_store.node.client import NodeClient

    node = NodeClient(home)
    if node.running():
        node.release(id)
    else:
        remove_record(home, id)


def remove_group_and_state(home: Home, id: str, group: Cgroup | None = None) -> None:
    """Kill what is left in the sandbox's groups, remove them and the OCI runtime's state folder."""
    from dsec_linux.cgroups import Cgroup

    group = group or Cgroup(group_name(id))
    group.kill()
    group.remove()
    remove_tree(f"{runtime_state(home)}/{id}")


def group_name(id: str) -> str:
    """The sandbox's group, in every hierarchy: it has the limits, and the container's own group is ``c`` below it."""
    return f"dsec/{id}"


def runtime_state(home: Home) -> str:
    """The OCI runtime's state folder (``--root``), our own."""
    return os.fspath(home.run / "oci")


def _release_what_it_held(home: Home, id: str) -> None:
    _kill_monitor(home, id)
    remove_group_and_state(home, id)
    if os.path.exists(home.mounts / f"{id}.json"):
        release_mount(home, id)


def _kill_monitor(home: Home, id: str) -> None:
    """End the monitor, which by itself ends with the supervisor, and wait until everything below it is gone."""
    try:
        with open(home.sandbox(id) / MONITOR) as file:
            pid, started = map(int, file.read().split())
    except (OSError, ValueError):
        return
    _kill_and_wait(pid, started)


def _end_supervisor(home: Home, id: str) -> None:
    """Let the supervisor end its sandbox: a first SIGTERM asks the command, a second kills it."""
    config = _read(home, id, CONFIG)
    try:
        pid = int(config.get("pid", 0))
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    try:
        if not _is_locked(home, id) or start_time(pid) != config.get("pid_started"):
            return  # it has ended: the number may be another process's, and the lock another command's
        pidfd_send_signal(pidfd, SIGTERM)
        if wait_ended(pidfd, 0.05):
            return
        pidfd_send_signal(pidfd, SIGTERM)
        if not wait_ended(pidfd, _REACT_SECONDS):
            pidfd_send_signal(pidfd, SIGKILL)
            wait_ended(pidfd, DEATH_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _kill_and_wait(pid: int, started: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) != started:
            return  # another process by now
        pidfd_send_signal(pidfd, SIGKILL)
        if not wait_ended(pidfd, DEATH_SECONDS):
            raise RuntimesError(
                f"process {pid} was killed {DEATH_SECONDS:g} s ago and is still there: it waits in the kernel"
            )
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


@contextmanager
def _guard(home: Home) -> Iterator[None]:
    fd = os.open(home.sandboxes / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _take(path: str) -> int | None:
    """Open and lock; None when somebody else has it.

    Who only asks whether it is locked holds it shared for an instant: that is waited for.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            pass
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None


def claim(home: Home, id: str) -> int | None:
    """The lock of a sandbox whose owner is gone, None when there is an owner or no sandbox any more."""
    with _guard(home):
        try:
            return _take(os.fspath(home.sandbox(id) / LOCK))
        except FileNotFoundError:
            return None


def _is_locked(home: Home, id: str) -> bool:
    return is_locked(home.sandbox(id) / LOCK)


def _mounted_at(config: dict[str, Any]) -> str | None:
    """Where a writable mount (``dsec mount --rw``) is in the mount table; None when it is not, or is none."""
    mount = config.get("mount")
    return next((each.target for each in mountinfo() if is_mount(each, mount)), None) if mount else None


def read_config(home: Home, id: str) -> dict[str, Any]:
    """A sandbox's config.json; empty when there is none (yet, or any more)."""
    return _read(home, id, CONFIG)


def _ids(home: Home) -> list[str]:
    return [name for name in _names(home) if not name.startswith(".")]


def _names(home: Home) -> list[str]:
    try:
        return os.listdir(home.sandboxes)
    except FileNotFoundError:
        return []


def _read(home: Home, id: str, name: str) -> dict[str, Any]:
    """A JSON file of a sandbox; empty when it is not there (yet, or any more)."""
    try:
        with open(home.sandbox(id) / name, "rb") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
