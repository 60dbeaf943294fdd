"""``dsec run``: one sandbox for one command, from its set-up to its record.

The supervisor makes the sandbox's folder and takes its lock, asks the node for the root file system, makes the
group with the limits, forks the monitor (monitor.py) and moves bytes until the command has ended. Then it takes
everything away again. It may be killed at any moment: the kernel ends the processes and the mount, the next
``dsec`` command the rest (sandboxes.py).

What ends a run is the end of the command's first process. Whatever it left in the background is killed then, also
when that holds the pipes open.
"""

# PTH101, PTH102, PTH106

# pathlib costs more to import than this module.
# ruff: noqa: PTH103

from __future__ import annotations

import os
import select
import time

from dsec_linux.cgroups import Cgroup, CgroupLayout
from dsec_linux.process import pidfd_send_signal
from dsec_linux.standard import fill_standard_descriptors
from dsec_store.errors import DsecError, NodeError
from dsec_store.node.client import NodeClient
from dsec_store.node.protocol import LayerArg, MountRequest
from dsec_store.node.records import remove_record
from runtimes import records
from runtimes.container import clean_message, find_runtime, never_executed
from runtimes.errors import CannotStart, ContainerFailed, RuntimesError
from runtimes.monitor import Job, Monitor
from runtimes.oci import Process, bundle_config
from runtimes.records import CommandRecord, now, write_json
from runtimes.rootfs import make_missing, make_workdir, plan
from runtimes.sandboxes import (
    DEATH_SECONDS,
    Sandbox,
    create,
    group_name,
    reap_stale,
    remove_group_and_state,
    runtime_state,
)
from runtimes.seccomp_bpf import ANNOTATION, filter_text
from runtimes.settings import RunOptions, command_line, environment
from runtimes.signals import Signals, Stopped
from runtimes.streams import Pump, Sink, stdin_source
from runtimes.users import resolve_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from dsec_store.home import Home
    from dsec_store.node.protocol import Mounted
    from runtimes.container import OciRuntime
    from runtimes.pty import Console, RawTerminal

    class Node(Protocol):
        """What is used of NodeClient."""

        def mount(self, request: MountRequest) -> tuple[Mounted, int]: ...

        def release(self, mount_id: str) -> object: ...


STOP_SECONDS = 1.0
"""How long a command may take to end after the first signal."""

_layout: CgroupLayout | None = None
"""Where the machine's control groups are, once a monitor has found out."""

_JUDGE_SECONDS = 0.002
"""How soon to look again whether the process has become the command: there is no event for that."""

_POLL_MAX = 86_400_000
"""Milliseconds: poll(2) takes an int of them."""

_LINGER_SECONDS = 1.0
"""How long the last output may take to be read after a timeout or a stop."""


class RunResult:
    """``exit_code`` for the shell, the command's ``record``, and a ``message`` for stderr or None."""

    __slots__ = ("exit_code", "message", "record")

    def __init__(self, exit_code: int, record: dict[str, Any], message: str | None) -> None:
        self.exit_code = exit_code
        self.record = record
        self.message = message


def run(
    home: Home, options: RunOptions, *, result: str | None = None, connect: Callable[[Home], Node] = NodeClient.connect
) -> RunResult:
    """Run a command in a new sandbox, with this process's stdin, stdout and stderr. Never raises for what can go
    wrong with it.

    ``result`` is a file for the record. ``connect`` gives the node.
    """
    this = _Run(home, options)
    try:
        try:
            reap_stale(home)
            this.set_up(connect)
            this.watch()
        except Stopped as stop:
            this.outcome, this.stopped_by = dict(records.STOPPED), stop.number
        except (RuntimesError, DsecError, OSError) as error:
            this.fail(error)
        this.clean_up()
    finally:
        this.close()
    if result is not None:
        try:
            write_json(result, this.record.to_dict())
        except OSError as error:
            this.fail(RuntimesError(f"the record cannot be written to {result}: {error.strerror}"))
    return this.result()


class _Run:
    """One run. ``outcome`` is None while the command may still run."""

    def __init__(self, home: Home, options: RunOptions) -> None:
        self.home = home
        self.options = options
        self.outcome: records.Outcome | None = None
        self.stopped_by = 0
        self.record = CommandRecord("")
        self._code: int | None = None
        self._message: str | None = None
        fill_standard_descriptors()
        self._signals = Signals()
        self._sandbox: Sandbox | None = None
        self._node: Node | None = None
        self._runtime: OciRuntime | None = None
        self._group: Cgroup | None = None
        self._monitor: Monitor | None = None
        self._console: Console | None = None
        self._raw: RawTerminal | None = None
        self._command = -1  # pidfd of the container's first process
        self._command_pid = 0
        self._master = -1
        self._outputs: list[Pump] = []
        self._input: Pump | None = None
        self._to_close: list[int] = []
        self._deadline: float | None = None
        self._kill_at: float | None = None

    # --- before ---

    def set_up(self, connect: Callable[[Home], Node]) -> None:
        """Everything up to the start of the container. The monitor makes groups and namespaces while the node
        mounts.
        """
        options = self.options
        runtime = self._runtime = find_runtime()
        refs = [options.base, *options.workspaces, *options.toolkits]
        config = {"name": options.name, "keep": options.keep, "refs": refs, "command": options.argv}
        with self._signals.deferred():
            sandbox = self._sandbox = create(self.home, config)
            self.record.sandbox = sandbox.id
            os.makedirs(runtime_state(self.home), mode=0o700, exist_ok=True)
            self._monitor = Monitor(
                Job(
                    container=sandbox.id,
                    runtime=runtime,
                    group=group_name(sandbox.id),
                    layout=_layout,
                    memory=options.memory,
                    pids=options.pids or None,
                    rootfs=sandbox.folder("rootfs"),
                    bundle=sandbox.folder("bundle"),
                    state=runtime_state(self.home),
                    stdio=self._connect_stdio(sandbox),
                    terminal=options.terminal,
                )
            )
            self._close_descriptors()  # the monitor has them
        layers = [LayerArg(options.base, "base")]
        layers += [LayerArg(reference, "workspace") for reference in options.workspaces]
        layers += [LayerArg(reference, "toolkit") for reference in options.toolkits]
        upper, work, owner = sandbox.folder("upper"), sandbox.folder("work"), {"sandbox": sandbox.id}
        request = MountRequest(sandbox.id, layers, upper, work, owner, options.plain_http)
        mounted, overlay = self._mount(request, connect)
        self._to_close.append(overlay)
        self._write_bundle(sandbox, mounted, overlay)
        self._await_monitor()
        self._signals.hold()
        self.record.started_at = now()
        if options.timeout is not None:
            self._deadline = time.monotonic() + options.timeout
        self._monitor.launch(overlay)
        self._close_descriptors()

    def _mount(self, request: MountRequest, connect: Callable[[Home], Node]) -> tuple[Mounted, int]:
        """Ask the node. Whether one runs is only looked at when it does not answer."""
        if connect == NodeClient.connect:
            client = self._node = NodeClient(self.home)
            try:
                return client.mount(request)
            except NodeError:
                if client.running():
                    raise
        self._node = connect(self.home)
        return self._node.mount(request)

    def _await_monitor(self) -> None:
        """Wait until the sandbox's group is made, and watch it run out of memory."""
        assert self._monitor is not None and self._sandbox is not None
        received = self._monitor.receive()
        if received is None:
            raise ContainerFailed("the sandbox's monitor was killed")
        message = received[0]
        if message["event"] == "failed":
            raise ContainerFailed(f"the sandbox could not be set up: {message['message']}")
        global _layout
        _layout = _layout or CgroupLayout(*message["layout"])
        group = self._group = Cgroup(group_name(self._sandbox.id), _layout)
        if "memory" in group.layout.controllers:
            group.oom_watch()

    def _write_bundle(self, sandbox: Sandbox, mounted: Mounted, root: int) -> None:
        """Settle who runs what and where by the image and the options; prepare the root file system; write the OCI
        config.
        """
        options, run = self.options, mounted.run
        argv = command_line(run, options.argv)
        user = resolve_user(root, options.user if options.user is not None else run.get("User") or "")
        host_network = options.network == "host"
        layout = plan(root, sandbox.folder("bundle"), host_network=host_network, hostname=sandbox.id)
        if options.keep:
            sandbox.config.update(layers=mounted.layers, environment=mounted.environment)
            sandbox.config.update(missing=layout.missing, parents=layout.parents)
            sandbox.write_config()  # before the first change: whoever cleans up must know of it
        make_missing(root, layout.missing)
        cwd = make_workdir(root, options.workdir or run.get("WorkingDir") or "/")
        env = environment(run, options.env, home=user.home, hostname=sandbox.id, terminal=options.terminal)
        self.record.argv, self.record.cwd, self.record.user = argv, cwd, user.name
        rows, columns = self._window() or (0, 0)
        process = Process(argv, env, cwd, user.uid, user.gid, user.groups, options.terminal, rows, columns)
        config = bundle_config(
            process,
            rootfs=sandbox.folder("rootfs"),
            hostname=sandbox.id,
            cgroup=f"/{group_name(sandbox.id)}/c",
            host_network=host_network,
            binds=layout.binds,
        )
        assert self._runtime is not None
        if self._runtime.is_crun and (program := filter_text(os.fspath(self.home.run))):
            config["annotations"] = {ANNOTATION: program}
            linux = config["linux"]
            assert isinstance(linux, dict)
            del linux["seccomp"]
        write_json(f"{sandbox.folder('bundle')}/config.json", config)

    def _connect_stdio(self, sandbox: Sandbox) -> tuple[int, int, int]:
        """Make the pipes, or the socket that a terminal comes over; the container's three descriptors."""
        null = self._theirs(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        if self.options.terminal:
            from runtimes.pty import Console

            self._console = Console(sandbox.folder("bundle"))
            return null, null, null
        theirs = [null]
        source = self._stdin()
        if source is not None:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            theirs = [self._theirs(read_end)]
            self._input = Pump(source, Sink(write_end, own=True))
        for fd, kept in ((1, self.record.stdout), (2, self.record.stderr)):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            theirs.append(self._theirs(write_end))
            os.set_blocking(read_end, False)
            self._outputs.append(Pump(read_end, Sink(fd), kept, suspicious=fd == 2))
        return theirs[0], theirs[1], theirs[2]

    def _stdin(self) -> int | None:
        """Our stdin, when it is to be passed on."""
        return stdin_source(0) if self.options.interactive or not os.isatty(0) else None

    def _theirs(self, fd: int) -> int:
        self._to_close.append(fd)
        return fd

    def _close_descriptors(self) -> None:
        while self._to_close:
            os.close(self._to_close.pop())

    # --- while it runs ---

    def watch(self) -> None:
        """Move bytes and wait until the command has ended, one way or another, and nothing of it is left."""
        assert self._monitor is not None
        while self.outcome is None:
            self._step()
        if not self._monitor.wait(DEATH_SECONDS):
            self._monitor.kill()
            if not self._monitor.wait(DEATH_SECONDS):
                raise ContainerFailed(
                    "the sandbox's processes were killed and are still there: they wait in the kernel"
                )
        self.record.ended_at = now()
        self._drain()

    def _step(self) -> None:
        """Wait for one thing to happen, and deal with all that has."""
        assert self._monitor is not None
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        poll.register(self._monitor.control, select.POLLIN)
        if self._console is not None:
            poll.register(self._console, select.POLLIN)
        pumps: dict[int, list[Pump]] = {}
        for pump in self._pumps():
            wants = pump.wants()
            if wants is not None:
                pumps.setdefault(wants[0], []).append(pump)
                poll.register(*wants)
        ready = dict(poll.poll(self._patience()))
        if self._signals.descriptor in ready:
            self._on_signals()
        if self._console is not None and self._console.fileno() in ready:
            self._on_terminal()
        for fd in ready:
            for pump in pumps.get(fd, ()):
                pump.ready()
        self._judge_held()
        if self._monitor.control.fileno() in ready:
            self._on_message()
        self._on_time()

    def _pumps(self) -> list[Pump]:
        return self._outputs if self._input is None else [self._input, *self._outputs]

    def _patience(self) -> float | None:
        """Milliseconds until the next deadline."""
        times = [when for when in (self._deadline, self._kill_at) if when is not None]
        if self._command_pid and any(pump.held for pump in self._outputs):
            times.append(time.monotonic() + _JUDGE_SECONDS)
        return min(max(0.0, min(times) - time.monotonic()) * 1000, _POLL_MAX) if times else None

    def _on_time(self) -> None:
        if self.outcome is not None:
            return
        moment = time.monotonic()
        if self._kill_at is not None and moment >= self._kill_at:
            self._kill(records.STOPPED)
        elif self._deadline is not None and moment >= self._deadline and not self.stopped_by:
            self._kill(records.TIMEOUT)

    def _kill(self, outcome: records.Outcome) -> None:
        assert self._monitor is not None
        self.outcome = dict(outcome)
        self._monitor.kill()

    def _on_signals(self) -> None:
        self._signals.drain()
        if self._signals.resized:
            self._signals.resized = False
            self._resize()
        received, self._signals.received = self._signals.received, []
        for number in received:
            if self.stopped_by:
                self._kill(records.STOPPED)
                return
            self.stopped_by = number
            self._kill_at = time.monotonic() + STOP_SECONDS
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Give the command a signal; when it has not been reported yet, that happens as soon as it is."""
        if self._command >= 0:
            try:
                pidfd_send_signal(self._command, number)
            except ProcessLookupError:
                pass

    def _on_message(self) -> None:
        assert self._monitor is not None
        received = self._monitor.receive()
        if received is None:
            if self.outcome is None:
                self.outcome = records.unknown("the sandbox's monitor was killed")
                self._message = "the sandbox's monitor was killed; how the command ended is not known"
            return
        message, fds = received
        match message["event"]:
            case "started":
                self._command = fds[0]
                self._command_pid = _pid_of(fds[0])
                if self.stopped_by:
                    self._pass_on(self.stopped_by)
            case "failed":
                text = str(message["message"])
                if message["code"] != 125:
                    raise self._cannot_start(text, int(message["code"]))
                raise ContainerFailed(f"the container did not start: {text}")
            case "ended":
                self._on_end(int(message["status"]), bool(message["executed"]))

    def _on_end(self, status: int, executed: bool) -> None:
        complaint = b"".join(pump.held for pump in self._outputs).decode(errors="replace")
        for pump in self._outputs:
            pump.release(drop=not executed)
        if not executed and not self.stopped_by:
            from runtimes.container import failure

            text = clean_message(complaint.strip())
            error = failure(text)
            raise self._cannot_start(text, error.code if isinstance(error, CannotStart) else 126)
        if self.stopped_by:
            self.outcome = dict(records.STOPPED)
        else:
            self.outcome = records.of_status(status, self._group.oom_count() if self._group else 0)

    def _cannot_start(self, text: str, code: int) -> CannotStart:
        return CannotStart(f"cannot start {self.record.argv[0]!r}: {text or 'the kernel refused it'}", code)

    def _judge_held(self) -> None:
        """Pass on what was held back once it is certain that the command, and not the OCI runtime, wrote it.

        Before it has started, and where its file cannot be executed, the runtime's message comes the way of its
        stderr. So the first block there waits, a few milliseconds at most, until the runtime has done its part and
        the process has become the command.
        """
        if not self._command_pid or not any(pump.held for pump in self._outputs):
            return
        try:
            executed = not never_executed(self._command_pid)
        except OSError:
            return  # it has ended: the monitor will say
        if executed:
            for pump in self._outputs:
                pump.release(drop=False)

    def _on_terminal(self) -> None:
        """The terminal has come: connect it."""
        from runtimes.pty import END_OF_FILE, RawTerminal

        assert self._console is not None
        master = self._master = self._console.accept()
        self._console.close()
        self._console = None
        os.set_blocking(master, False)
        self._resize()
        self._outputs.append(Pump(os.dup(master), Sink(1), self.record.stdout, suspicious=True))
        source = self._stdin()
        if source is not None:
            self._input = Pump(source, Sink(os.dup(master), own=True), at_end=END_OF_FILE)
            if os.isatty(0):
                self._raw = RawTerminal(0)

    def _window(self) -> tuple[int, int] | None:
        if not self.options.terminal:
            return None
        from runtimes.pty import size_of

        return size_of(0) or size_of(1)

    def _resize(self) -> None:
        size = self._window()
        if size is not None and self._master >= 0:
            from runtimes.pty import set_size

            set_size(self._master, *size)

    def _drain(self) -> None:
        """Pass on what is still in the pipes. Nobody can write any more, so an empty pipe is the end, whoever holds
        it.
        """
        own_end = self.outcome is not None and self.outcome["kind"] not in ("timeout", "stopped")
        until = self._deadline if own_end else time.monotonic() + _LINGER_SECONDS
        for pump in self._outputs:
            pump.release(drop=False)
            while not pump.done:
                if pump.ready():
                    continue
                if not pump.pending:
                    break
                if until is not None and time.monotonic() >= until:
                    break
                poll = select.poll()
                poll.register(pump.sink, select.POLLOUT)
                poll.register(self._signals.descriptor, select.POLLIN)
                poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000)
                self._signals.drain()
                if self._signals.received:  # who is asked to stop does not wait for a reader
                    until = time.monotonic()
            if pump.error is not None and self._message is None:
                self._message = f"the command's output could not be passed on: {pump.error.strerror}"
            pump.finish()

    # --- after ---

    def fail(self, error: Exception) -> None:
        """Note a failure of ours as what came of the run."""
        self._message = f"{error}" or repr(error)
        self._code = error.code if isinstance(error, CannotStart) else 125
        self.outcome = records.unknown(self._message)

    def clean_up(self) -> None:
        """End what is left, write the record, remove the sandbox or leave it finished. Signals wait."""
        self._signals.interrupting = False
        self._restore_terminal()
        try:
            self._end_processes()
            assert self.outcome is not None
            self.record.outcome = self.outcome
            if self._sandbox is None:
                return
            self._close_descriptors()
            remove_group_and_state(self.home, self._sandbox.id, self._group)
            if self._node is not None:
                self._release(self._node, self._sandbox.id)
            if not self._command_pid:
                self._sandbox.config["keep"] = False  # nothing ran in it
            if self._sandbox.keep:
                self._write_record(self._sandbox)
            self._sandbox.finish(self.outcome)
        except (RuntimesError, DsecError, OSError) as error:
            if self._message is None:
                self._message = f"the sandbox could not be cleaned up: {error}"

    def _release(self, node: Node, id: str) -> None:
        try:
            node.release(id)
        except NodeError:
            remove_record(self.home, id)  # a node that died holds nothing any more

    def _write_record(self, sandbox: Sandbox) -> None:
        """A full disk takes the record, not the sandbox."""
        try:
            write_json(f"{sandbox.folder('records')}/{self.record.id}.json", self.record.to_dict())
        except OSError as error:
            self._message = self._message or f"the command's record could not be kept: {error.strerror}"

    def _end_processes(self) -> None:
        if self._monitor is None:
            return
        self._monitor.kill()
        if not self._monitor.wait(DEATH_SECONDS):
            raise RuntimesError("its processes were killed and are still there: they wait in the kernel")

    def _restore_terminal(self) -> None:
        if self._raw is not None:
            self._raw.restore()
            self._raw = None

    def close(self) -> None:
        """Close every descriptor; also after an exception that is a bug."""
        self._restore_terminal()
        self._close_descriptors()
        for pump in self._pumps():
            pump.finish()
        if self._console is not None:
            self._console.close()
        if self._monitor is not None:
            self._monitor.close()
        for fd in (self._command, self._master):
            if fd >= 0:
                os.close(fd)
        if self._sandbox is not None:
            self._sandbox.close()
        self._signals.close()

    def result(self) -> RunResult:
        assert self.outcome is not None
        self.record.outcome = self.outcome
        code = self._code if self._code is not None else records.exit_code(self.outcome, stopped_by=self.stopped_by)
        return RunResult(code, self.record.to_dict(), self._message or self._remark())

    def _remark(self) -> str | None:
        """What a person at the terminal would otherwise wonder about."""
        match self.outcome:
            case {"kind": "timeout"}:
                return f"killed after {self.options.timeout:g} s (--timeout)"
            case {"kind": "oom"}:
                return "out of memory" + (f" (--memory {self.options.memory})" if self.options.memory else "")
        return None


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("Pid:")), 0)
