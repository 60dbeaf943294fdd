"""``dsec rm``: remove sandboxes and what they changed."""

from __future__ import annotations

import click

from dsec_store.home import Home
from runtimes.sandboxes import reap_stale, remove


@click.command()
@click.argument("sandboxes", metavar="SANDBOX…", nargs=-1, required=True)
@click.option("--force", "-f", is_flag=True, help="Kill those that run.")
def command(sandboxes: tuple[str, ...], force: bool) -> None:
    """Remove sandboxes, by id or name, with what they changed."""
    home = Home.default().ensure()
    reap_stale(home)
    for name in sandboxes:
        click.echo(remove(home, name, force=force))
