"""``dsec run BASE [options] -- CMD…``: a command in a new sandbox, whose exit status is the command's.

Everything that is not the command's own end is 125 and one line on stderr, so that a caller can tell them apart.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import click

from dsec_store.errors import DsecError
from dsec_store.home import Home
from runtimes.errors import RuntimesError
from runtimes.settings import DEFAULT_PIDS, RunOptions, check_name, check_timeout, parse_size

FAILED = 125


def _say(message: str) -> None:
    from erofs_tools.errors import escape

    click.echo("dsec: " + escape(" ".join(message.split())), err=True)


class _RunCommand(click.Command):
    """Usage errors and failures of ours exit with 125: 1 and 2 may be the command's."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.ClickException as error:
            _say(f"{error.format_message()} (try dsec run --help; the command comes after --)")
            sys.exit(FAILED)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            _say(error.format_message())
        except (RuntimesError, DsecError, OSError) as error:
            _say(str(error))
        except Exception:
            import traceback

            traceback.print_exc()
        sys.exit(FAILED)


def _size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except RuntimesError as error:
        raise click.BadParameter(str(error)) from None


def _timeout(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    try:
        return None if value is None else check_timeout(value)
    except RuntimesError as error:
        raise click.BadParameter(str(error)) from None


def _name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else check_name(value)
    except RuntimesError as error:
        raise click.BadParameter(str(error)) from None


def _is_pipe(info: os.stat_result) -> bool:
    """Whether it is a pipe without a name, as /dev/stdout may be: opening that does not wait for a reader."""
    if not stat.S_ISFIFO(info.st_mode):
        return False
    read_end, write_end = os.pipe()
    try:
        return os.fstat(read_end).st_dev == info.st_dev
    finally:
        os.close(read_end)
        os.close(write_end)


def _result(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Found out before the command runs, not after: a fifo without a reader would even keep us waiting then."""
    if value is None:
        return None
    path = Path(value).absolute()
    if path.is_dir():
        raise click.BadParameter(f"{value} is a directory")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is no directory")
    try:
        info = path.stat()
    except FileNotFoundError:
        return str(path)
    except OSError as error:
        raise click.BadParameter(f"{value}: {error.strerror}") from None
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISCHR(info.st_mode) or _is_pipe(info)):
        raise click.BadParameter(f"{value} is neither a regular file nor a pipe or terminal like /dev/stdout")
    return str(path)


@click.command(cls=_RunCommand)
@click.argument("base")
@click.argument("command_line", metavar="-- CMD…", nargs=-1, type=click.UNPROCESSED)
@click.option("--workspace", "workspaces", metavar="REF", multiple=True, help="A workspace layer on top of the base.")
@click.option("--toolkit", "toolkits", metavar="REF", multiple=True, help="A toolkit layer on top; may be repeated.")
@click.option("--env", "-e", metavar="K=V", multiple=True, help="Set a variable; K alone passes the present value on.")
@click.option("--workdir", "-w", metavar="DIR", help="Working directory; made when it is missing.")
@click.option("--user", "-u", metavar="U[:G]", help="User, and group, by name or number.")
@click.option("--memory", "-m", metavar="SIZE", callback=_size, help="Memory limit, as 512m or 2g (default: none).")
@click.option(
    "--pids",
    metavar="N",
    type=click.IntRange(min=0),
    default=DEFAULT_PIDS,
    show_default=True,
    help="Most processes and threads at once; 0 for no limit.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    callback=_timeout,
    help="Kill everything after that time and exit with 124.",
)
@click.option("--name", callback=_name, help="A name of your own for dsec ps, rm and pack-diff.")
@click.option("--keep", is_flag=True, help="Keep what the command changed, for dsec pack-diff.")
@click.option(
    "--network", type=click.Choice(["none", "host"]), default="none", show_default=True, help="none: loopback only."
)
@click.option("--result", metavar="FILE", callback=_result, help="Write the command's record there (JSON).")
@click.option("--backend", type=click.Choice(["container"]), default="container", show_default=True)
@click.option("--plain-http", is_flag=True, help="Speak HTTP to registries (loopback always is).")
@click.option("--interactive", "-i", is_flag=True, help="Pass stdin on also when it is a terminal.")
@click.option("--tty", "-t", is_flag=True, help="Give the command a terminal.")
def command(
    base: str,
    command_line: tuple[str, ...],
    workspaces: tuple[str, ...],
    toolkits: tuple[str, ...],
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    memory: int | None,
    pids: int,
    timeout: float | None,
    name: str | None,
    keep: bool,
    network: str,
    result: str | None,
    backend: str,
    plain_http: bool,
    interactive: bool,
    tty: bool,
) -> None:
    """Run a command in a new sandbox: BASE (a base layer or an environment), then workspaces, then toolkits, then a
    writable layer of its own.

    \b
    Exit status: the command's own; 128+n when signal n ended it;
      124 timeout   125 dsec failed   126 cannot be executed   127 not found
      137 also when it ran out of memory (--result tells which)
    """
    if interactive and tty and not os.isatty(0):
        raise click.UsageError("-i -t need a terminal on stdin")
    from runtimes.supervisor import run

    options = RunOptions(
        base,
        command_line,
        workspaces=workspaces,
        toolkits=toolkits,
        env=env,
        workdir=workdir,
        user=user,
        memory=memory,
        pids=pids,
        timeout=timeout,
        name=name,
        keep=keep,
        network=network,
        interactive=interactive,
        terminal=tty,
        plain_http=plain_http,
    )
    done = run(Home.default().ensure(), options, result=result)
    if done.message:
        _say(done.message)
    sys.exit(done.exit_code)
