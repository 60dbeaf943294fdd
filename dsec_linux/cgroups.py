"""Control groups, version 1 and 2 (Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst).

On a hybrid machine the controllers with limits are on version 1, and so is all that is done here; version 2 is used
where it is alone. A ``Cgroup`` is one group by name in every hierarchy. It carries the limits and no processes of its
own: an OCI runtime makes its own group below it. Nothing is written where statfs(2) does not say cgroup.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH102, PTH106, PTH110, PTH112

from __future__ import annotations

import errno
import os
import select
import time

from dsec_linux.errors import LinuxError, failure, from_os_error
from dsec_linux.files import statfs_name
from dsec_linux.mounts import mountinfo
from dsec_linux.namespaces import pidfd_open
from dsec_linux.process import SIGKILL, pidfd_send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE = 10.0  # seconds for a tree to die, freeze or become removable


class CgroupLayout:
    """Where the controllers are.

    ``kind`` is ``v1``, ``v2`` or ``hybrid`` (version 1 controllers beside a version 2 mount). ``controllers`` maps a
    name to the folder of its hierarchy; ``hierarchies`` are all version 1 folders, named ones without a controller too;
    ``unified`` is the folder of version 2, or None.
    """

    __slots__ = ("controllers", "hierarchies", "kind", "unified")

    def __init__(self, kind: str, controllers: dict[str, str], hierarchies: list[str], unified: str | None) -> None:
        self.kind = kind
        self.controllers = controllers
        self.hierarchies = hierarchies
        self.unified = unified

    def __repr__(self) -> str:
        return f"CgroupLayout({self.kind}, {', '.join(sorted(self.controllers))})"


def detect() -> CgroupLayout:
    """The layout of this mount namespace. Raises LinuxError when no control group file system is mounted."""
    with open("/proc/cgroups") as file:
        known = {line.split()[0] for line in file if not line.startswith("#")}
    controllers: dict[str, str] = {}
    hierarchies: list[str] = []
    unified = None
    seen: set[str] = set()
    for mount in mountinfo():
        if mount.fstype == "cgroup" and statfs_name(mount.target) == "cgroup":
            if mount.major_minor in seen:  # the same hierarchy mounted again
                continue
            seen.add(mount.major_minor)
            mine = {option for option in mount.super_options if option in known and option not in controllers}
            named = any(option.startswith("name=") for option in mount.super_options)
            if mine or named:
                hierarchies.append(mount.target)
                controllers.update(dict.fromkeys(mine, mount.target))
        elif mount.fstype == "cgroup2" and unified is None and statfs_name(mount.target) == "cgroup2":
            unified = mount.target
    if unified is not None:
        for name in _read(f"{unified}/cgroup.controllers").split():
            controllers.setdefault(name, unified)
    if hierarchies:
        return CgroupLayout("v1" if unified is None else "hybrid", controllers, hierarchies, unified)
    if unified is None:
        raise failure(errno.ENOENT, "detect", "control groups", ["neither cgroup nor cgroup2 is mounted"])
    return CgroupLayout("v2", controllers, hierarchies, unified)


def names(parent: str, layout: CgroupLayout | None = None) -> list[str]:
    """The groups directly below ``parent`` in any hierarchy, by full name: what a killed process may have left."""
    layout = layout or detect()
    found: set[str] = set()
    for top in _folders(layout):
        try:
            with os.scandir(f"{top}/{parent}") as entries:
                found.update(f"{parent}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            continue
    return sorted(found)


class OomWatch:
    """Told by the kernel when processes of a group run out of its memory.

    ``descriptor`` is ready for ``poll_mask`` when it happened. ``count()`` is how often so far: on version 2 the
    processes killed, on version 1 the times that the limit had to be enforced by killing.
    """

    def __init__(self, descriptor: int, poll_mask: int, read: Callable[[], int]) -> None:
        self.descriptor = descriptor
        self.poll_mask = poll_mask
        self._read = read
        self._count = 0

    def count(self) -> int:
        if self.descriptor >= 0:
            self._count = self._read()
        return self._count

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        """Stop watching; ``count`` stays what it was."""
        if self.descriptor >= 0:
            self.count()
            os.close(self.descriptor)
            self.descriptor = -1


class Cgroup:
    """The group ``name`` (a path below the root of every hierarchy, ``dsec/<sandbox id>``); ``create`` makes it."""

    def __init__(self, name: str, layout: CgroupLayout | None = None) -> None:
        parts = name.split("/")
        if not all(parts) or "." in parts or ".." in parts:
            raise ValueError(f"{name!r} is no name of a control group")
        self.name = name
        self.layout = layout or detect()
        self.version = 2 if self.layout.kind == "v2" else 1
        self._watch: OomWatch | None = None

    # --- making it ---

    def create(self, memory: int | None = None, pids: int | None = None) -> None:
        """Make the group in every hierarchy, with at most ``memory`` bytes (swap included) and ``pids`` processes.

        Raises LinuxError: EEXIST when there is one, ENOENT when a limit's controller is not available; nothing is left
        then.
        """
        for controller, limit in (("memory", memory), ("pids", pids)):
            if limit is not None and controller not in self.layout.controllers:
                raise failure(errno.ENOENT, f"limit {controller}", self.name, [f"no {controller} controller here"])
        made: list[str] = []
        try:
            for top in self._tops():
                self._make(top, made)
            if memory is not None:
                self._limit_memory(memory)
            if pids is not None:
                self._write("pids", "pids.max", str(pids))
        except BaseException:
            for path in reversed(made):
                _rmdir(path)
            for top in self._tops():
                self._remove_shared(top)
            raise

    def _tops(self) -> list[str]:
        """The roots of the hierarchies that the group is made in."""
        if self.version == 2:
            return [self.layout.unified or ""]
        # All of them, so that an OCI runtime makes no parent of its own, which another's ``remove`` could take away
        # under it.
        return self.layout.hierarchies

    def _make(self, top: str, made: list[str]) -> None:
        parts = self.name.split("/")
        for attempt in range(100):
            path = top
            try:
                for depth, part in enumerate(parts):
                    parent, path = path, f"{path}/{part}"
                    self._make_one(parent, path, last=depth == len(parts) - 1)
                    if depth == len(parts) - 1:
                        made.append(path)
                    self._inherit_cpuset(top, parent, path)
                return
            except OSError as error:
                # Between two calls, who removed the last group of the parent removed the parent too; its open files
                # say ENODEV then.
                if error.errno not in (errno.ENOENT, errno.ENODEV) or attempt == 99:
                    raise

    def _make_one(self, parent: str, path: str, *, last: bool) -> None:
        _must_be_cgroup(parent)
        if self.version == 2:
            wanted = [c for c in ("memory", "pids", "cpu") if self.layout.controllers.get(c) == self.layout.unified]
            enabled = _read(f"{parent}/cgroup.subtree_control").split()
            for controller in wanted:
                if controller not in enabled:
                    _write(f"{parent}/cgroup.subtree_control", f"+{controller}")
        try:
            os.mkdir(path, 0o755)
        except FileExistsError as error:
            if last:
                raise from_os_error(error, "mkdir", path) from error
        except OSError as error:
            raise from_os_error(error, "mkdir", path) from error

    def _inherit_cpuset(self, top: str, parent: str, path: str) -> None:
        """A new version 1 cpuset is empty, and takes no process before it has processors and memory nodes."""
        if self.version == 1 and top == self.layout.controllers.get("cpuset"):
            for file in ("cpuset.cpus", "cpuset.mems"):
                if not _read(f"{path}/{file}").strip():
                    _write(f"{path}/{file}", _read(f"{parent}/{file}").strip())

    def _limit_memory(self, memory: int) -> None:
        if self.version == 2:
            self._write("memory", "memory.max", str(memory))
            if os.path.exists(f"{self.path('memory')}/memory.swap.max"):
                self._write("memory", "memory.swap.max", "0")
            return
        self._write("memory", "memory.limit_in_bytes", str(memory))
        if os.path.exists(f"{self.path('memory')}/memory.memsw.limit_in_bytes"):
            self._write("memory", "memory.memsw.limit_in_bytes", str(memory))

    def path(self, controller: str | None = None) -> str:
        """The group's folder in the hierarchy of a controller, or in the one that its processes are looked for in."""
        if self.version == 2:
            return f"{self.layout.unified}/{self.name}"
        if controller is None:
            controller = next((c for c in ("freezer", "pids", "memory") if c in self.layout.controllers), None)
        top = self.layout.controllers[controller] if controller else self.layout.hierarchies[0]
        return f"{top}/{self.name}"

    def exists(self) -> bool:
        return os.path.isdir(self.path())

    def _write(self, controller: str, file: str, text: str) -> None:
        _write(f"{self.path(controller)}/{file}", text)

    # --- its processes ---

    def enter(self, pid: int = 0) -> None:
        """Move a process (0: the caller) into the group, in every hierarchy. Its later children are born there."""
        for top in self._tops():
            _write(f"{top}/{self.name}/cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        """The processes in the group and in all below it; none when there is no group."""
        found: set[int] = set()
        for folder in _walk(self.path()):
            try:
                found.update(map(int, _read(f"{folder}/cgroup.procs").split()))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # removed meanwhile
                    raise
        return sorted(found)

    def kill(self, deadline: float = DEADLINE) -> None:
        """Kill every process in the group and below, forking ones too, and wait until all have ended.

        Raises LinuxError with ETIMEDOUT when some have not within ``deadline`` seconds, and EBUSY when the caller is
        one of them.
        """
        end = time.monotonic() + deadline
        if os.getpid() in self.processes():
            raise failure(errno.EBUSY, "kill", self.name, ["the caller is in the group"])
        if self.version == 2:
            if self.exists():
                _write(f"{self.path()}/cgroup.kill", "1")
                self._wait_event("populated", "0", end)
            return
        while remaining := self.processes():
            if time.monotonic() > end:
                raise failure(
                    errno.ETIMEDOUT, "kill", self.name, [f"still there after {deadline} s: {_describe(remaining)}"]
                )
            self._kill_round(end)

    def _kill_round(self, end: float) -> None:
        """Freeze, so that what forks cannot run away, signal all, thaw, wait for what was signalled."""
        pidfds: dict[int, int] = {}
        try:
            self._freezer("FROZEN")
            try:
                while new := [pid for pid in self.processes() if pid not in pidfds]:
                    for pid in new:
                        try:
                            pidfds[pid] = pidfd_open(pid)
                            pidfd_send_signal(pidfds[pid], SIGKILL)
                        except ProcessLookupError:
                            continue
                    if time.monotonic() > end:
                        break
            finally:
                self._freezer("THAWED")  # a frozen process does not die
            poll = select.poll()
            for fd in pidfds.values():
                poll.register(fd, select.POLLIN)
            waiting = set(pidfds.values())
            while waiting and (left := end - time.monotonic()) > 0:
                for fd, _ in poll.poll(left * 1000):
                    poll.unregister(fd)
                    waiting.discard(fd)
        finally:
            for fd in pidfds.values():
                os.close(fd)

    def _freezer(self, state: str) -> None:
        """Set the state of a version 1 group; THAWED also of those below, which an OCI runtime may have frozen."""
        if "freezer" not in self.layout.controllers:
            return
        for folder in [self.path("freezer")] if state == "FROZEN" else _walk(self.path("freezer")):
            try:
                _write(f"{folder}/freezer.state", state)
            except FileNotFoundError:
                continue

    def freeze(self, deadline: float = DEADLINE) -> None:
        """Stop every process of the group, and wait until all stand still. Raises LinuxError with ETIMEDOUT."""
        end = time.monotonic() + deadline
        if self.version == 2:
            _write(f"{self.path()}/cgroup.freeze", "1")
            self._wait_event("frozen", "1", end)
            return
        path = f"{self.path('freezer')}/freezer.state"
        _write(path, "FROZEN")
        while _read(path).strip() != "FROZEN":
            if time.monotonic() > end:
                _write(path, "THAWED")
                raise failure(errno.ETIMEDOUT, "freeze", self.name, [f"not all processes stopped within {deadline} s"])
            time.sleep(0.001)  # version 1 has no event for it; a process in an uninterruptible wait holds it up

    def thaw(self) -> None:
        """Let the processes go on."""
        if self.version == 2:
            _write(f"{self.path()}/cgroup.freeze", "0")
        else:
            _write(f"{self.path('freezer')}/freezer.state", "THAWED")

    def _wait_event(self, key: str, value: str, end: float) -> None:
        """Wait for a line of cgroup.events (version 2), which can be polled."""
        path = f"{self.path()}/cgroup.events"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLPRI)
            while f"{key} {value}" not in os.pread(fd, 4096, 0).decode().splitlines():
                left = end - time.monotonic()
                if left <= 0:
                    raise failure(errno.ETIMEDOUT, f"wait for {key} {value}", self.name, [_describe(self.processes())])
                poll.poll(left * 1000)
        finally:
            os.close(fd)

    # --- memory ---

    def oom_watch(self) -> OomWatch:
        """Watch for the group's memory limit being enforced by killing, in it or in any group below.

        ``remove`` ends the watch; its count stays. Raises LinuxError without a memory controller.
        """
        if "memory" not in self.layout.controllers:
            raise failure(errno.ENOENT, "oom_watch", self.name, ["no memory controller here"])
        if self._watch is None:
            self._watch = self._watch_v2() if self.version == 2 else self._watch_v1()
        return self._watch

    def oom_count(self) -> int:
        """How often it happened since ``oom_watch``; 0 without a watch."""
        return self._watch.count() if self._watch else 0

    def _watch_v1(self) -> OomWatch:
        # An out-of-memory of a group is told to it and to those below it, and it is the group with the limit that runs
        # out, which is this one. (oom_kill in memory.oom_control counts in the victim's own group only.)
        folder = self.path("memory")
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(f"{folder}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _write(f"{folder}/cgroup.event_control", f"{event} {control}")
            finally:
                os.close(control)
        except BaseException:
            os.close(event)
            raise
        total = 0

        def read() -> int:
            nonlocal total
            try:
                total += os.eventfd_read(event)
            except BlockingIOError:
                pass
            return total

        return OomWatch(event, select.POLLIN, read)

    def _watch_v2(self) -> OomWatch:
        fd = os.open(f"{self.path()}/memory.events", os.O_RDONLY | os.O_CLOEXEC)

        def read() -> int:
            lines = os.pread(fd, 4096, 0).decode().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

        return OomWatch(fd, select.POLLPRI, read)

    # --- the end ---

    def remove(self, deadline: float = DEADLINE) -> None:
        """Remove the group and all below it from every hierarchy, and its name's first part when empty then.

        Nothing to do is no error. Raises LinuxError: EBUSY when a process is still in it after ``deadline`` seconds.
        """
        if self._watch is not None:
            self._watch.close()  # before: the kernel signals the eventfd when the group goes
        end = time.monotonic() + deadline
        for top in _folders(self.layout):
            # Children first.
            for folder in reversed(list(_walk(f"{top}/{self.name}"))):
                while not _rmdir(folder):
                    if time.monotonic() > end:
                        raise failure(errno.EBUSY, "rmdir", folder, [_describe(self.processes())])
                    time.sleep(0.001)  # the last process has ended but is not quite gone
            self._remove_shared(top)

    def _remove_shared(self, top: str) -> None:
        shared, _, below = self.name.partition("/")
        if below:
            _rmdir(f"{top}/{shared}")


def _folders(layout: CgroupLayout) -> list[str]:
    return [*layout.hierarchies, *([layout.unified] if layout.unified else [])]


def _walk(folder: str) -> Iterator[str]:
    """A group and all below it, parents first; nothing when it is not there."""
    if not os.path.isdir(folder):
        return
    yield folder
    try:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for path in below:
        yield from _walk(path)


def _rmdir(path: str) -> bool:
    """Whether the group is gone; False while it is busy or has groups below."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise from_os_error(error, "rmdir", path) from error
    return True


def _must_be_cgroup(path: str | int) -> None:
    kind = statfs_name(path)
    if kind not in ("cgroup", "cgroup2"):
        raise failure(errno.EINVAL, "write", str(path), [f"it lies on {kind}, not on a control group file system"])


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        raise from_os_error(error, "read", path) from error


def _write(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, "open", path) from error
    try:
        _must_be_cgroup(fd)
        os.write(fd, text.encode())
    except LinuxError:
        raise
    except OSError as error:
        raise from_os_error(error, f"write({text})", path) from error
    finally:
        os.close(fd)


def _describe(pids: list[int]) -> str:
    """``12 (python3), 15 (sh)`` for an error's line."""
    words = []
    for pid in pids[:8]:
        try:
            words.append(f"{pid} ({_read(f'/proc/{pid}/comm').strip()})")
        except OSError:
            words.append(str(pid))
    return f"{len(pids)} processes: {', '.join(words)}" if pids else "no process is left in it"
