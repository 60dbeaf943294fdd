"""The process between ``dsec run`` and the container: the first process of a pid namespace around everything of a
sandbox.

It dies with the supervisor (PR_SET_PDEATHSIG), and when it dies the kernel kills all that it started,
double-forked, in another session or stopped, and its mount namespace goes with the sandbox's mount in it. So there
is nothing that a killed supervisor could leave behind but files and empty cgroups.

It is the parent of the container's first process, because an orphan goes to the first process of its namespace:
that gives the real wait status, in which exit code 137 and death by signal 9 differ.

It is forked, not started: everything is imported already, and it costs 2 ms.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH115

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket

from dsec_linux.cgroups import Cgroup
from dsec_linux.mounts import attach, make_slave, mount_proc, umount
from dsec_linux.namespaces import CLONE_NEWNS, CLONE_NEWPID, set_pdeathsig, setns, unshare
from dsec_linux.process import start_time, wait_ended
from dsec_linux.sockets import receive_with_fds, send_with_fds
from runtimes.container import OciRuntime, launch, never_executed
from runtimes.errors import CannotStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dsec_linux.cgroups import CgroupLayout

MONITOR = "monitor"
"""The file in the bundle with the monitor's process number and start time."""

_GO = b"go"
_CONTROL = 3  # descriptor in the monitor, after its stdin, stdout and stderr


class Job:
    """What the monitor does. ``group`` is the sandbox's group, made in ``layout`` (None: to be found out) with the
    limits ``memory`` (bytes or None) and ``pids`` (count or None); ``rootfs`` is where the root file system goes;
    ``bundle`` and ``state`` are folders; ``stdio`` are the container's three descriptors (of /dev/null with a
    terminal).
    """

    __slots__ = (
        "bundle",
        "container",
        "group",
        "layout",
        "memory",
        "pids",
        "rootfs",
        "runtime",
        "state",
        "stdio",
        "terminal",
    )

    def __init__(
        self,
        *,
        container: str,
        runtime: OciRuntime,
        group: str,
        layout: CgroupLayout | None,
        memory: int | None,
        pids: int | None,
        rootfs: str,
        bundle: str,
        state: str,
        stdio: tuple[int, int, int],
        terminal: bool,
    ) -> None:
        self.container = container
        self.runtime = runtime
        self.group = group
        self.layout = layout
        self.memory = memory
        self.pids = pids
        self.rootfs = rootfs
        self.bundle = bundle
        self.state = state
        self.stdio = stdio
        self.terminal = terminal


class Monitor:
    """The supervisor's side. ``pidfd`` is readable once the monitor has ended; ``control`` carries its messages:

    ``{"event": "ready", "layout": [kind, controllers, hierarchies, unified]}`` when the group and the namespaces
    are made; after ``launch``, ``{"event": "started"}`` with the pidfd of the container's first process; then
    ``{"event": "ended", "status": the wait status, "executed": bool}``. At any time ``{"event": "failed",
    "message": …, "code": …}``, with the exit code of ``dsec run``.
    """

    def __init__(self, job: Job) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self.pidfd = -1
        self.ended = False
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = _fork_into_new_pid_namespace()
            if self.pid == 0:
                _child(job, theirs, ours)
            self.pidfd = os.pidfd_open(self.pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        send_with_fds(ours, _GO)

    def launch(self, overlay: int) -> None:
        """Start the container on the detached mount ``overlay``; its bundle is written."""
        send_with_fds(self.control, _GO, [overlay])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors; None when the monitor has ended."""
        try:
            data, fds = receive_with_fds(self.control, 1)
        except ConnectionResetError:
            return None
        return (json.loads(data), fds) if data else None

    def kill(self) -> None:
        """Kill it, and so everything in its namespace. No error when it has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, seconds: float) -> bool:
        """Wait until it, and everything that it started, is gone; whether that was so within the time."""
        if not self.ended and wait_ended(self.pidfd, seconds):
            os.waitpid(self.pid, 0)
            self.ended = True
        return self.ended

    def close(self) -> None:
        self.control.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


def _fork_into_new_pid_namespace() -> int:
    """fork(2), the child being the first process of a new pid namespace; ours stays as it was."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    pid = -1
    try:
        unshare(CLONE_NEWPID)
        pid = os.fork()
    finally:
        if pid != 0:
            setns(own, CLONE_NEWPID)
            os.close(own)
    return pid


def _child(job: Job, control: socket.socket, parents: socket.socket) -> None:
    """Everything that the monitor does. Never returns, never raises."""
    try:
        gc.disable()  # it would only copy the parent's pages
        set_pdeathsig(signal.SIGKILL)
        parents.close()
        # Signals stay blocked: none is for us, and the last one cannot be.
        _tell_who(job)
        if control.recv(16) != _GO:
            os._exit(0)  # the supervisor died before PR_SET_PDEATHSIG
        _only_descriptors(job, control)
        control.detach()
        _run(job, socket.socket(fileno=_CONTROL))
    finally:
        os._exit(0)


def _run(job: Job, control: socket.socket) -> None:
    def say(message: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        send_with_fds(control, json.dumps(message).encode(), fds)

    try:
        os.setsid()  # the terminal's Ctrl-C is the supervisor's business
        group = Cgroup(job.group, job.layout)
        group.create(job.memory, job.pids)
        layout = group.layout
        _private_mounts(layout.unified if layout.kind == "hybrid" else None)
        os.chdir(job.bundle)
        say({"event": "ready", "layout": [layout.kind, layout.controllers, layout.hierarchies, layout.unified]})
        data, fds = receive_with_fds(control, 1)
        if not data:
            return  # the supervisor gave up
        attach(fds[0], job.rootfs)
        os.close(fds[0])
        pid = launch(job.runtime, job.state, job.container, terminal=job.terminal)
        _let_go_of_stdio()
        pidfd = os.pidfd_open(pid)
        say({"event": "started"}, (pidfd,))
        os.close(pidfd)
        executed, status = _wait_for(pid)
    except BaseException as error:
        code = error.code if isinstance(error, CannotStart) else 125
        say({"event": "failed", "message": f"{error}" or repr(error), "code": code})
        return
    say({"event": "ended", "status": status, "executed": executed})


def _tell_who(job: Job) -> None:
    """Write our number and start time, as the machine sees them, before there is anything to clean up: who reaps a
    sandbox waits until we are gone. /proc is still the machine's here."""
    pid = int(os.readlink("/proc/self"))
    file = os.open(f"{job.bundle}/{MONITOR}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(file, f"{pid} {start_time(pid)}".encode())
    os.close(file)


def _only_descriptors(job: Job, control: socket.socket) -> None:
    """The container's stdio and the control socket as 0 to 3; everything else is closed (the lock of the sandbox
    among it: it is the supervisor's alone)."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (*job.stdio, control.fileno())]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=number < _CONTROL)
    os.closerange(_CONTROL + 1, 2**31 - 1)


def _private_mounts(hide: str | None) -> None:
    """A mount namespace of our own, for the sandbox's mount, in which /proc is that of this pid namespace, and
    ``hide`` is not there: crun refuses a machine that has cgroup2 beside the older hierarchies."""
    unshare(CLONE_NEWNS)
    make_slave("/")
    if hide is not None:
        umount(hide, detach=True)
    proc = mount_proc()
    attach(proc, "/proc")
    os.close(proc)


def _let_go_of_stdio() -> None:
    """The container has its own copies: the pipes must end when it ends."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number, inheritable=False)
    os.close(null)


def _wait_for(pid: int) -> tuple[bool, int]:
    """Collect orphans until ``pid`` ends; whether it became the command, and its wait status."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        executed = ended.si_pid != pid or not never_executed(pid)
        _, status = os.waitpid(ended.si_pid, 0)
        if ended.si_pid == pid:
            return executed, status
