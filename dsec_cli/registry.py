"""``dsec registry``: its commands."""

from __future__ import annotations

import click

from dsec_cli.output import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("dsec_cli.registry_serve", "Serve this machine's store to others."),
}


@click.group(cls=LazyGroup, commands_table=COMMANDS)
def command() -> None:
    """Serve layers to other machines."""
