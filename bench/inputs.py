"""Real input for the demo and the benchmarks: a Debian root, a project with its tests, and pytest.

Everything comes from Debian and PyPI under its own name, is built once into a work folder, and is kept there for the
next run. A folder appears under its final name only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.harness import ROOT

SUITE = "bookworm"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
BASE_PACKAGES = (
    "ca-certificates,python3,python3-dev,python3-venv,python3-pip,git,build-essential,cmake,ripgrep,curl,less,procps,"
    "vim-tiny,clang,golang-go,nodejs,python3-scipy,python3-pandas"
)
"""What images for coding tasks usually hold: the tool chains of several languages, of which one task uses one."""
BASE_STEPS = 1142
"""Lines that debootstrap prints for these packages, about."""

PROJECT = "jinja2==3.1.6"
PROJECT_FOLDER = "/workspace/jinja2"
PROJECT_NEEDS = ("markupsafe==3.0.2", "trio==0.30.0")
"""What the project imports, and what its tests import besides pytest."""
TOOLKIT = ("pytest==8.3.5",)

PYTHON = "3.11"
"""Debian 12's, whatever runs this."""
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
"""Where Debian's python3 looks by itself: a workspace and a toolkit meet there when they are stacked."""

TEST_COMMAND = ("sh", "-c", "echo started; exec python3 -m pytest -v -p no:cacheprovider")
TEST_ENV = ("PYTHONUNBUFFERED=1",)
TESTS = 909


@dataclass(frozen=True)
class Inputs:
    """Three trees, and the three as one tar."""

    base: Path
    workspace: Path
    toolkit: Path
    archive: Path


def prepare(work: Path, console: Console) -> Inputs:
    """Build what is missing below ``work``. Raises RuntimeError with the output of a step that failed."""
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    base = _once(work / "base", [SUITE, BASE_PACKAGES], lambda target: _debian(target, console), console)
    toolkit = _once(work / "toolkit", list(TOOLKIT), lambda target: _toolkit(target, base, console), console)
    recipe = [PROJECT, *PROJECT_NEEDS, *TOOLKIT]
    workspace = _once(work / "workspace", recipe, lambda target: _workspace(target, base, toolkit, console), console)
    archive = work / "environment.tar.zst"
    made_of = [path.stat().st_mtime_ns for path in (base, workspace, toolkit)]
    _once(
        archive, [str(number) for number in made_of], lambda t: _archive(t, base, workspace, toolkit, console), console
    )
    return Inputs(base, workspace, toolkit, archive)


def _once(target: Path, recipe: list[str], make: Callable[[Path], None], console: Console) -> Path:
    """``target``, made by ``make`` unless it is there and was made by the same recipe."""
    stamp = target.with_name(target.name + ".recipe")
    if target.exists() and stamp.exists() and stamp.read_text() == json.dumps(recipe):
        console.print(f"{target.name}: kept from an earlier run", style="dim")
        return target
    stamp.unlink(missing_ok=True)
    unfinished = target.with_name(target.name + ".unfinished")
    for old in (target, unfinished):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    make(unfinished)
    unfinished.rename(target)
    stamp.write_text(json.dumps(recipe))
    return target


@contextmanager
def _bar(console: Console, text: str, total: float | None) -> Iterator[Callable[[float], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, total=1, completed=1)


def _run(command: list[str], each_line: Callable[[str], None] = lambda line: None) -> None:
    """Run a program, quietly; its last lines are in the error when it fails."""
    tail: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail = [*tail[-19:], line]
                each_line(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … failed ({process.returncode}):\n{''.join(tail)}")


def _debian(target: Path, console: Console) -> None:
    """debootstrap, in a mount namespace of its own: what it mounts for itself cannot be left behind."""
    with _bar(console, f"debootstrap {SUITE} with python3, git, build-essential", BASE_STEPS) as show:
        lines = 0

        def count(_: str) -> None:
            nonlocal lines
            lines = min(lines + 1, BASE_STEPS - 1)
            show(lines)

        isolated = ["unshare", "--mount", "--propagation", "private"]
        options = ["--variant=minbase", f"--include={BASE_PACKAGES}"]
        _run([*isolated, "debootstrap", *options, SUITE, str(target), MIRROR], count)
    # Downloads, lists and logs are no part of an image, and the building machine's names even less.
    for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/cache/apt/*.bin", "var/log/*.log"):
        for path in target.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("etc/resolv.conf", "etc/hostname"):
        (target / name).unlink(missing_ok=True)


def _pip(*arguments: str) -> None:
    python = str(ROOT / ".venv" / "bin" / "python")
    _run([python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments])


def _install(target: Path, *requirements: str) -> None:
    """Wheels for Debian 12's Python into the tree's dist-packages."""
    arch = os.uname().machine
    chosen = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:", "--no-compile"]
    chosen += [f"--platform=manylinux_2_{minor}_{arch}" for minor in (36, 28, 17)] + [
        f"--platform=manylinux2014_{arch}"
    ]
    _pip("install", "-q", "--target", str(target / SITE), *chosen, *requirements)
    shutil.rmtree(target / SITE / "bin", ignore_errors=True)


def _compile(tree: Path, base: Path) -> None:
    """Byte-compile the tree with the base's own Python, as an installation there would have."""
    inside = 'mount --bind "$1" "$2/mnt" && exec chroot "$2" python3 -m compileall -q -s /mnt -p / /mnt'
    isolated = ["unshare", "--mount", "--propagation", "private", "env", "PYTHONDONTWRITEBYTECODE=1"]
    _run([*isolated, "sh", "-c", inside, "sh", str(tree), str(base)])


def _folders(tree: Path) -> None:
    for path in [tree, *(path for path in tree.rglob("*") if path.is_dir() and not path.is_symlink())]:
        path.chmod(0o755)


def _collect(tree: Path, base: Path, toolkit: Path) -> None:
    """Let pytest look for the tests once, as whoever made the environment would have, and keep their bytecode."""
    scratch = tree.with_name("scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    for name in ("upper", "work", "root"):
        (scratch / name).mkdir(parents=True)
    stack = f"lowerdir={tree}:{toolkit}:{base},upperdir={scratch}/upper,workdir={scratch}/work"
    inside = 'mount -t overlay -o "$1" tests "$2" && cd "$2" && exec chroot . sh -c "$3"'
    pytest = f"cd {PROJECT_FOLDER} && exec python3 -m pytest --collect-only -q -p no:cacheprovider"
    isolated = ["unshare", "--mount", "--propagation", "private", "env", "-u", "PYTHONDONTWRITEBYTECODE", "sh", "-c"]
    _run([*isolated, inside, "sh", stack, str(scratch / "root"), pytest])
    for compiled in (scratch / "upper" / PROJECT_FOLDER.lstrip("/")).rglob("*-pytest-*.pyc"):
        target = tree / compiled.relative_to(scratch / "upper")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(compiled, target)
    shutil.rmtree(scratch)
    if not list(tree.rglob("*-pytest-*.pyc")):
        raise RuntimeError(f"pytest found no tests in {tree}, or kept no bytecode of them")


def _workspace(target: Path, base: Path, toolkit: Path, console: Console) -> None:
    """The project's source distribution, unpacked, and the packages that it and its tests import."""
    with _bar(console, f"{PROJECT} with its tests and dependencies", None):
        downloads, unpacked = target.with_name("downloads"), target.with_name("unpacked")
        for left in (downloads, unpacked):
            shutil.rmtree(left, ignore_errors=True)
        _install(target, *PROJECT_NEEDS)
        _pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(downloads), PROJECT)
        project = target / PROJECT_FOLDER.lstrip("/")
        with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
            archive.extractall(unpacked, filter="data")
        project.parent.mkdir(parents=True)
        next(unpacked.iterdir()).rename(project)
        unpacked.rmdir()
        shutil.rmtree(downloads)
        (target / SITE / "project.pth").write_text(f"{PROJECT_FOLDER}/src\n")
        for root, folders, files in os.walk(target):
            for name in (*folders, *files):
                os.chown(Path(root) / name, 0, 0, follow_symlinks=False)
        _folders(target)
        _compile(target, base)
        _collect(target, base, toolkit)


def _toolkit(target: Path, base: Path, console: Console) -> None:
    with _bar(console, f"toolkit {' '.join(TOOLKIT)}", None):
        _install(target, *TOOLKIT)
        _folders(target)
        _compile(target, base)


def _archive(target: Path, base: Path, workspace: Path, toolkit: Path, console: Console) -> None:
    """The three trees one after the other in one tar, compressed as a base image's layers are."""
    with _bar(console, "environment.tar.zst, for the control", None):
        tar = ["tar", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-c"]
        trees = [word for tree in (base, workspace, toolkit) for word in ("-C", str(tree), ".")]
        with target.open("wb") as out, subprocess.Popen([*tar, *trees], stdout=subprocess.PIPE) as packing:
            subprocess.run(["zstd", "-q", "-3", "-T0", "-c"], stdin=packing.stdout, stdout=out, check=True)
        if packing.returncode:
            raise RuntimeError(f"tar failed ({packing.returncode})")
