"""``dsec layer build``: a layer of a directory or a tar."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dsec_cli.output import human_size, print_json
from dsec_cli.progress import build_bar
from dsec_store.media import KINDS


@click.command("build")
@click.argument("source")
@click.option("--ref", "reference", required=True, metavar="NAME:TAG", help="The reference to publish it under.")
@click.option("--kind", required=True, type=click.Choice(KINDS), help="What the layer is for.")
@click.option("--strip-overlay-xattrs", is_flag=True, help="Drop overlay xattrs and 0/0 devices instead of refusing.")
@click.option("--literal-whiteouts", is_flag=True, help="Keep .wh. names as the files that they are.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", help="A variable for commands (base only; repeatable).")
@click.option("--workdir", default="", metavar="DIR", help="The working directory (base only).")
@click.option("--user", default="", metavar="USER[:GROUP]", help="The user (base only).")
@click.option("--entrypoint", default="", metavar="WORDS", help="What stands before a command, as a shell line (base).")
@click.option("--cmd", default="", metavar="WORDS", help="The command, as a shell line (base only).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: str,
    reference: str,
    kind: str,
    strip_overlay_xattrs: bool,
    literal_whiteouts: bool,
    env: tuple[str, ...],
    workdir: str,
    user: str,
    entrypoint: str,
    cmd: str,
    as_json: bool,
) -> None:
    """Build a layer of SOURCE, a directory or a tar (plain or gzip), and publish it in the local store.

    Equal contents give an equal layer id, whenever and wherever it is built.
    """
    from dsec_store.home import Home
    from dsec_store.layers.build import build_layer
    from dsec_store.layers.store import LayerStore, local_tag
    from dsec_store.refs import parse_reference

    if not source:  # which would be the current directory
        raise click.UsageError("SOURCE is empty; expected a directory or a tar")
    for option, value in (("--user", user), ("--workdir", workdir)):
        if not value.isprintable():
            raise click.UsageError(f"{option} {value!r}: expected text without control characters")
    if workdir and not workdir.startswith("/"):
        raise click.UsageError(f"--workdir {workdir}: expected an absolute path")
    run = {
        "Env": list(env),
        "Entrypoint": _words("--entrypoint", entrypoint),
        "Cmd": _words("--cmd", cmd),
        "User": user,
        "WorkingDir": workdir,
    }
    for pair in env:
        if not pair.partition("=")[0] or "=" not in pair:
            raise click.UsageError(f"--env {pair}: expected KEY=VALUE")
    if kind != "base" and any(run.values()):
        raise click.UsageError(f"--env, --workdir, --user, --entrypoint and --cmd are for --kind base, not {kind}")
    parsed = parse_reference(reference)
    local_tag(parsed)
    with build_bar(f"building {parsed}") as progress:
        built = build_layer(
            LayerStore(Home.default()),
            Path(source),
            parsed,
            kind,
            strip_overlay=strip_overlay_xattrs,
            literal_whiteouts=literal_whiteouts,
            run=run if kind == "base" else None,
            progress=progress,
        )
    if as_json:
        print_json({"reference": str(parsed), **built.to_json()})
        return
    ratio = f" ({built.stored_size / built.data_size:.0%})" if built.data_size else ""
    click.echo(f"{parsed}  {built.kind}  {built.id}")
    click.echo(
        f"{built.counts['inodes']} inodes, data {human_size(built.data_size)}, "
        f"metadata {human_size(built.metadata_size)}, stored {human_size(built.stored_size)}{ratio}"
    )


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"{option} {text}: {error}") from error
