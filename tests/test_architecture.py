"""The shape of the project: imports go down only, hot commands stay light, the wheel is whole."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "packages"
]


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _imported_by(modules: str) -> set[str]:
    """Top-level packages from outside the standard library that importing ``modules`` brings in."""
    seen = _python(f"import {modules}, sys; print(*{{name.split('.')[0] for name in sys.modules}})").split()
    beginning = set(_python("import sys; print(*{name.split('.')[0] for name in sys.modules})").split())
    return set(seen) - beginning - set(sys.stdlib_module_names) - set(PACKAGES)


def test_imports_only_go_down() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", ["dsec_cli.__main__", "dsec_cli.run", "dsec_cli.mount", "dsec_cli.umount"])
def test_commands_that_start_sandboxes_import_click_and_the_standard_library_only(module: str) -> None:
    assert _imported_by(module) <= {"click"}


@pytest.mark.parametrize("module", ["runtimes.supervisor", "dsec_store.node.client", "dsec_linux.mounts"])
def test_what_a_sandbox_start_runs_imports_the_standard_library_only(module: str) -> None:
    assert _imported_by(module) == set()


def test_every_command_of_the_table_exists_and_explains_itself() -> None:
    code = """
import click
from dsec_cli.__main__ import cli
def walk(command, path):
    assert command.help or command.short_help, path
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                walk(command.get_command(context, name), [*path, name])
walk(cli, ["dsec"])
"""
    _python(code)


def test_the_wheel_holds_every_module_and_nothing_of_the_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licence = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
        entry_points = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert licence
    assert "dsec = dsec_cli.__main__:main" in entry_points
