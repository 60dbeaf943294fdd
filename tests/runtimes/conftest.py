"""A home with a busybox base and a running node for all tests of sandboxes; each test leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_linux.cgroups import Cgroup, names
from dsec_store.home import Home
from runtimes.sandboxes import runtime_state
from tests.conftest import DSEC, Dsec, _stop_node
from tests.waiting import until

BASE = "test/busybox:1"


def make_busybox(root: Path) -> None:
    """A root file system with every applet, two users, a file that is no program, and the mount points."""
    for folder in ("bin", "etc", "tmp", "root", "proc", "sys", "dev", "home/ann"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin" / "busybox")
    applets = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001:Ann:/home/ann:/bin/sh\nbob:x:1002:1002::/nonexistent:/bin/sh\n"
    )
    (root / "etc" / "group").write_text("root:x:0:\nann:x:1001:\nwheel:x:10:root,ann\nstaff:x:50:ann,bob\n")
    (root / "tmp").chmod(0o1777)
    (root / "bin" / "garbage").write_bytes(b"\x01\x02 no program")
    (root / "bin" / "garbage").chmod(0o755)
    (root / "bin" / "lost").write_text("#!/no/such/interpreter\n")
    (root / "bin" / "lost").chmod(0o755)
    (root / "bin" / "plain").write_text("#!/bin/sh\n")


class Box:
    """The command with its home; ``run`` returns the finished process and the record that it wrote."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self.dsec = Dsec(home.path)
        self._folder = folder
        self._others = set(names("dsec"))  # what another program left before is not ours

    def run(
        self, *arguments: str, base: str = BASE, input: bytes = b"", env: dict[str, str] | None = None
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        """``arguments`` are options, ``--`` and the command."""
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        done = self.dsec("run", base, "--result", str(result), *arguments, check=False, input=input, env=env)
        return done, json.loads(result.read_bytes())

    def start(self, *arguments: str, base: str = BASE, **options: Any) -> subprocess.Popen[bytes]:
        return self.dsec.start("run", base, *arguments, **options)

    def build(self, source: Path, reference: str, kind: str = "base") -> str:
        self.dsec("layer", "build", str(source), "--ref", reference, "--kind", kind)
        return reference

    def ps(self) -> list[dict[str, Any]]:
        found = self.dsec.json("ps")
        assert isinstance(found, list)
        return found

    def left_behind(self) -> list[str]:
        """What no sandbox may leave once its command has ended: folders, groups, state of the OCI runtime, mounts."""
        left = [str(path) for path in self.home.sandboxes.iterdir() if path.name != ".lock"]
        # Groups with processes are of sandboxes that run in other homes.
        left += [name for name in names("dsec") if name not in self._others and not Cgroup(name).processes()]
        state = Path(runtime_state(self.home))
        left += [str(path) for path in state.iterdir() if not path.name.startswith(".")] if state.is_dir() else []
        left += [str(path) for path in self.home.mounts.iterdir()]
        mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
        left += [line for line in mounts.splitlines() if str(self.home.path) in line]
        return left

    def nothing_left(self) -> None:
        """Sandboxes of other homes may be on their way at the moment: what goes away by itself was not left."""
        last: list[str] = []

        def clean() -> bool:
            last[:] = self.left_behind()
            return not last

        try:
            until(clean, "nothing is left behind", seconds=5)
        except AssertionError:
            pytest.fail("left behind:\n  " + "\n  ".join(last))


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("runtimes")
    home = Home(folder / "home").ensure()
    box = Box(home, folder)
    make_busybox(folder / "busybox")
    box.build(folder / "busybox", BASE)
    subprocess.run(
        [DSEC, "run", BASE, "--", "true"], env={**os.environ, "DSEC_HOME": str(home.path)}, check=True, timeout=60
    )
    yield box
    _stop_node(home)
    shutil.rmtree(home.path)


@pytest.fixture
def box(_shared: Box, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setenv("DSEC_HOME", str(_shared.home.path))
    yield _shared
    for entry in _shared.ps():
        _shared.dsec("rm", "--force", entry["id"])
    _shared.nothing_left()


def processes_with(marker: str) -> list[int]:
    """Processes of the machine whose command line has ``marker`` in it (ours is not asked)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def gone(marker: str) -> None:
    """Fail unless no process with ``marker`` is there; the kernel may take a moment to bury one."""
    until(lambda: not processes_with(marker), f"processes with {marker} ended")
