"""What all commands share: lazy loading, one line for an error, JSON and tables."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from dsec_linux.standard import fill_standard_descriptors


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; the table gives the help line without an import."""

    def __init__(self, *args: Any, commands_table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = commands_table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._table.get(cmd_name)
        if entry is None:
            return None
        command = importlib.import_module(entry[0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in self._table.items()])


def fail(message: str, code: int = 1) -> None:
    """Print one line to stderr and leave. Line breaks in the message become spaces: an error is one line, and what a
    registry or a source wrote into it does not reach a terminal as an order."""
    from erofs_tools.errors import escape

    click.echo("dsec: " + escape(" ".join(message.split())), err=True)
    sys.exit(code)


def open_streams() -> None:
    """Put /dev/null in the place of standard streams that the caller closed, also as Python's streams."""
    fill_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115


def _os_error(error: OSError) -> str:
    """LinuxError says itself what was called on what; Python's own puts ``[Errno n]`` before it."""
    if hasattr(error, "call") or not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def run_command(command: click.Command) -> None:
    """Run the whole command line. 0 fine, 1 a user's mistake or a failure, 2 usage, 130 interrupted.

    Anything that is not one of our errors or an OSError is a bug and keeps its traceback.
    """
    from dsec_store.errors import DsecError

    open_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # __main__ set it for the time of the imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(command.main(standalone_mode=False))
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "dsec"
        fail(f"{error.format_message()} (try {path} --help)", 2)
    except click.ClickException as error:
        fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except DsecError as error:
        fail(str(error))
    except OSError as error:
        fail(_os_error(error))
    except Exception as error:
        if any(base.__name__ in ("ErofsError", "RuntimesError") for base in type(error).__mro__):
            fail(str(error))
        raise


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii", "strict")
    except UnicodeError:  # bytes of a name that are no text, or an output that is not UTF-8
        text = json.dumps(value, indent=2)
    click.echo(text)


def print_line(text: str) -> None:
    """One line: control characters in it are shown escaped, as everywhere in what is printed for a person."""
    from erofs_tools.errors import escape

    click.echo(escape(text))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns padded to their widest cell, numbers to the right; plain text, so that it can be cut and grepped.

    A cell is one line without control characters, whatever was in it.
    """
    from erofs_tools.errors import escape

    cells = [[escape(str(cell)) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]
    numeric = [
        bool(cells) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in cells) for i in range(len(headers))
    ]
    for row in [list(headers), *cells]:
        line = "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        click.echo(line.rstrip())


def human_size(size: int) -> str:
    """``1.5 MB``: decimal units, as in the documents."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
