"""Fixtures of all tests: a home of one's own, the real command, and the check that a run leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsec_store.home import Home
from tests.leaks import LeakCheck, descendants

ROOT = Path(__file__).resolve().parent.parent
DSEC = ROOT / ".venv" / "bin" / "dsec"
DISK_FILE_SYSTEMS = ("ext2/ext3", "xfs", "btrfs")


def _on_disk(folder: str) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True).stdout.strip()
    return kind in DISK_FILE_SYSTEMS


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background of a script ignores SIGINT, and so would the commands that the tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() != 0:
        pytest.exit("the tests mount file systems and make namespaces: run them as root", returncode=4)
    # Who starts the run in the background may have these ignored, which every command under test would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # EROFS takes no metadata image from tmpfs or overlayfs, so tmp_path must be on a disk.
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        for folder in (tempfile.gettempdir(), "/var/tmp", str(ROOT / "build")):
            if Path(folder).is_dir() and _on_disk(folder):
                os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
                break
        else:
            pytest.exit("no temporary folder on ext4, xfs or btrfs: set TMPDIR to one", returncode=4)


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the run, with a list, when it leaves a mount, device, cgroup, namespace, superblock or process."""
    check = LeakCheck()
    yield
    left, surely_ours = check.finish()
    if left and surely_ours:
        pytest.fail("the run left behind:\n  " + "\n  ".join(left), pytrace=False)
    if left:
        print("new on this machine, perhaps of another run:\n  " + "\n  ".join(left))


def _stop_node(home: Home) -> None:
    """End the node of ``home`` if one runs: by its own command, else by the pid in its lock file."""
    if not home.node_lock.exists():
        return
    environment = {**os.environ, "DSEC_HOME": str(home.path)}
    subprocess.run([DSEC, "node", "stop", "--force"], env=environment, capture_output=True, timeout=60, check=False)
    try:
        pid = int(home.node_lock.read_text().split()[0])
        os.waitpid(pid, os.WNOHANG)  # its parent has ended, so it is a child of this subreaper
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError, IndexError):
        return
    try:
        # The number may have been given to another process since: only one that this run started is ended.
        if pid in set(descendants(os.getpid())):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 10)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _left_in(home: Home) -> list[str]:
    """Files that no command may leave in a home: half-written ones, and records of mounts that are gone."""
    left = [str(path) for path in home.mounts.glob("*")] if home.mounts.is_dir() else []
    blobs = home.store / "blobs" / "sha256"
    left += [str(path) for path in blobs.rglob("*") if path.is_file() and len(path.name) != 64]
    left += [str(path) for path in home.raw.glob("*") if len(path.name) != 64]
    return left


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """An empty home below ``tmp_path``, set as ``$DSEC_HOME``; its node is stopped and it is removed at the end."""
    here = Home(tmp_path / "home").ensure()
    monkeypatch.setenv("DSEC_HOME", str(here.path))
    yield here
    _stop_node(here)
    left = _left_in(here)
    shutil.rmtree(here.path)  # EBUSY names a mount that was left below
    assert not left, "left in the home:\n  " + "\n  ".join(left)


class Dsec:
    """The installed command as a real process. ``home`` is a path; another home may be given for each call."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def _environment(self, home: Path | None, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "DSEC_HOME": str(home or self.home), **(env or {})}

    def __call__(
        self,
        *args: str | os.PathLike[str],
        check: bool = True,
        input: str | bytes | None = None,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end. With ``check``, a failure is an assertion that shows what it printed."""
        data = input.encode() if isinstance(input, str) else input
        done = subprocess.run(
            [DSEC, *args],
            env=self._environment(home, env),
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            check=False,
            input=data if data is not None else b"",
        )
        out, err = done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="surrogateescape")
        if check:
            line = " ".join(str(a) for a in args)
            assert done.returncode == 0, f"dsec {line}: exit {done.returncode}\n--- stdout\n{out}--- stderr\n{err}"
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def json(self, *args: str | os.PathLike[str], **options: Any) -> Any:
        """The parsed output of a command called with ``--json``."""
        return json.loads(self(*args, "--json", **options).stdout)

    def start(self, *args: str | os.PathLike[str], home: Path | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start it and return; the caller ends it and closes its pipes (``with dsec.start(...) as process``)."""
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        env = self._environment(home, options.pop("env", None))
        return subprocess.Popen([DSEC, *args], env=env, **options)


@pytest.fixture
def dsec(home: Home) -> Dsec:
    """``dsec("layer", "ls")`` runs the real command with the test's home."""
    return Dsec(home.path)


@pytest.fixture(scope="session")
def erofs_utils() -> Path:
    """The folder with mkfs.erofs, fsck.erofs and dump.erofs ≥ 1.9.4, the judges of our images."""
    chosen = os.environ.get("DSEC_EROFS_UTILS")
    folders = [Path(chosen) / "bin"] if chosen else []
    folders.append(ROOT / "build" / "erofs-utils" / "bin")
    found = shutil.which("fsck.erofs")
    if found:
        folders.append(Path(found).parent)
    for folder in folders:
        if (folder / "fsck.erofs").exists():
            return folder
    pytest.fail(f"no fsck.erofs in {', '.join(map(str, folders))}: run tools/erofs-utils, or set DSEC_EROFS_UTILS")
