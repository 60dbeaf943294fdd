"""Control groups under the real kernel: limits and killing on version 1, the rest on version 2 too."""

from __future__ import annotations

import errno
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dsec_linux import cgroups
from dsec_linux.errors import LinuxError

from tests.waiting import until

LAYOUT = cgroups.detect()
V1 = pytest.mark.skipif(not LAYOUT.hierarchies, reason="no version 1 hierarchies here")
V2 = pytest.mark.skipif(LAYOUT.unified is None, reason="no cgroup2 mount here")
COUNTER = itertools.count()

MakeGroup = Callable[..., cgroups.Cgroup]


@pytest.fixture
def group() -> Iterator[MakeGroup]:
    """``group()`` is a new name; what was made under it is killed and removed at the end."""
    made: list[cgroups.Cgroup] = []

    def make(layout: cgroups.CgroupLayout | None = None) -> cgroups.Cgroup:
        made.append(cgroups.Cgroup(f"dsec/test-{os.getpid()}-{next(COUNTER)}", layout))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        one.remove()
        assert not one.exists()


def only_v2() -> cgroups.CgroupLayout:
    """The version 2 mount of a hybrid machine, as if it were alone."""
    return cgroups.CgroupLayout("v2", {}, [], LAYOUT.unified)


def below(parent: cgroups.Cgroup) -> cgroups.Cgroup:
    """The group that an OCI runtime would make."""
    child = cgroups.Cgroup(f"{parent.name}/container", parent.layout)
    child.create()
    return child


def start(group: cgroups.Cgroup, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=group.enter, stderr=subprocess.DEVNULL)


def running(group: cgroups.Cgroup, count: int) -> None:
    until(lambda: len(group.processes()) >= count, f"{count} processes in {group.name}")


@V1
def test_detection_finds_each_controller_where_the_kernel_says() -> None:
    with open("/proc/self/cgroup") as file:
        kernel = {name for line in file for name in line.split(":")[1].split(",")} - {"", "name=systemd"}
    assert kernel <= set(LAYOUT.controllers)
    for name in kernel:
        assert os.path.exists(f"{LAYOUT.controllers[name]}/cgroup.procs")
    assert LAYOUT.kind == ("hybrid" if LAYOUT.unified else "v1")


@V1
def test_a_process_that_needs_more_than_the_parents_memory_is_killed_and_counted(group: MakeGroup) -> None:
    parent = group()
    parent.create(memory=32 << 20)
    child = below(parent)
    watch = parent.oom_watch()
    assert parent.oom_count() == 0
    process = start(child, sys.executable, "-c", "x = bytearray(100 << 20)")
    assert process.wait() == -signal.SIGKILL
    assert select.select([watch], [], [], 0)[0]
    assert parent.oom_count() >= 1
    counted = parent.oom_count()
    child.remove()
    parent.remove()
    assert parent.oom_count() == counted  # the kernel's signal at the group's end is no out-of-memory


@V1
def test_a_process_within_the_memory_limit_is_not_counted(group: MakeGroup) -> None:
    parent = group()
    parent.create(memory=64 << 20)
    watch = parent.oom_watch()
    assert start(below(parent), sys.executable, "-c", "x = bytearray(8 << 20)").wait() == 0
    assert not select.select([watch], [], [], 0)[0]
    parent.remove()
    assert parent.oom_count() == 0


@V1
def test_no_more_processes_than_the_limit(group: MakeGroup) -> None:
    parent = group()
    parent.create(pids=5)
    script = """
import os, sys
made = 0
try:
    while made < 20:
        if os.fork() == 0:
            os.pause() if hasattr(os, "pause") else __import__("signal").pause()
        made += 1
except BlockingIOError:
    os._exit(made)
os._exit(100)
"""
    assert start(below(parent), sys.executable, "-c", script).wait() == 4


@V1
def test_killing_ends_a_tree_that_forks_all_the_time(group: MakeGroup) -> None:
    parent = group()
    parent.create(pids=200)
    # Each process starts another, in a session of its own, and ends; some stay.
    bomb = "import os\nwhile True:\n    if os.fork() == 0: os.setsid()\n    elif os.getpid() % 3: os._exit(0)"
    process = start(below(parent), sys.executable, "-c", bomb)
    running(parent, 20)
    parent.kill()
    assert parent.processes() == []
    process.wait()


@V1
def test_killing_ends_frozen_and_stopped_processes(group: MakeGroup) -> None:
    parent = group()
    parent.create()
    child = below(parent)
    process = start(child, "sleep", "1000")
    running(child, 1)
    process.send_signal(signal.SIGSTOP)
    child.freeze()
    parent.kill()
    assert process.wait() == -signal.SIGKILL


def test_killing_the_group_of_the_caller_is_refused(group: MakeGroup) -> None:
    one = group()
    one.create()
    script = f"""
from dsec_linux.cgroups import Cgroup
one = Cgroup({one.name!r})
one.enter()
try:
    one.kill()
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "EBUSY" in done.stdout and "the caller is in the group" in done.stdout


@V1
@pytest.mark.parametrize("layout", [None, pytest.param("v2", marks=V2)])
def test_frozen_processes_stand_still_until_thawed(group: MakeGroup, layout: str | None) -> None:
    one = group(only_v2() if layout else None)
    one.create()
    reader, writer = os.pipe()
    with subprocess.Popen(["yes"], preexec_fn=one.enter, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 10)
        one.freeze()
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):  # what the pipe held, and then no more
            while os.read(reader, 1 << 20):
                pass
        one.thaw()
        assert select.select([reader], [], [], 10)[0]
        process.kill()
    os.close(reader)


@V2
def test_version_2_kills_a_forking_tree_by_cgroup_kill(group: MakeGroup) -> None:
    parent = group(only_v2())
    parent.create()
    child = below(parent)
    bomb = "import os\nfor i in range(6): os.fork()\nimport signal; signal.pause()"
    process = start(child, sys.executable, "-c", bomb)
    running(parent, 60)
    parent.kill()
    assert process.wait() == -signal.SIGKILL
    assert parent.processes() == []
    parent.remove()
    assert not parent.exists()


@V2
def test_a_limit_without_its_controller_is_refused_and_nothing_is_made(group: MakeGroup) -> None:
    one = group(only_v2())
    with pytest.raises(LinuxError, match="no memory controller here"):
        one.create(memory=1 << 30)
    assert not one.exists()
    with pytest.raises(LinuxError, match="no memory controller here"):
        one.oom_watch()


@V1
def test_a_refused_limit_leaves_no_group(group: MakeGroup) -> None:
    one = group()
    with pytest.raises(LinuxError, match=r"pids\.max"):
        one.create(pids=-7)
    assert all(not os.path.exists(f"{top}/{one.name}") for top in LAYOUT.hierarchies)


@V1
def test_the_group_is_in_every_hierarchy_and_removed_from_all(group: MakeGroup) -> None:
    one = group()
    one.create(memory=1 << 30, pids=10)
    assert all(os.path.isdir(f"{top}/{one.name}") for top in LAYOUT.hierarchies)
    assert one.name in cgroups.names("dsec")
    with pytest.raises(FileExistsError):
        one.create()
    assert one.exists()
    below(one)
    process = start(one, "true")
    process.wait()
    one.remove()
    one.remove()  # again is no error
    assert all(not os.path.exists(f"{top}/{one.name}") for top in LAYOUT.hierarchies)
    assert one.name not in cgroups.names("dsec")


def test_removing_a_group_in_use_says_who_uses_it(group: MakeGroup) -> None:
    one = group()
    one.create()
    process = start(one, "sleep", "1000")
    running(one, 1)
    with pytest.raises(LinuxError) as caught:
        one.remove(deadline=0.01)
    assert caught.value.errno == errno.EBUSY
    assert f"{process.pid} (" in str(caught.value)
    one.kill()
    process.wait()


def test_groups_made_and_removed_at_once_do_not_disturb_each_other(group: MakeGroup) -> None:
    """Each removes the shared parent when it is empty, under the other's hands."""
    ones = [group() for _ in range(8)]

    def cycle(one: cgroups.Cgroup) -> None:
        for _ in range(10):
            one.create()
            one.remove()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cycle, ones))


@pytest.mark.parametrize("name", ["", "/", "/dsec", "dsec/../x", "dsec//x", "."])
def test_a_name_that_leaves_the_hierarchy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a control group"):
        cgroups.Cgroup(name)


def test_nothing_is_written_outside_a_control_group_file_system(tmp_path: os.PathLike[str]) -> None:
    forged = cgroups.CgroupLayout("v2", {}, [], os.fspath(tmp_path))
    with pytest.raises(LinuxError, match="not on a control group file system"):
        cgroups.Cgroup("dsec/x", forged).create()
    assert os.listdir(tmp_path) == []
