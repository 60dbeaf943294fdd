"""``dsec node stop``."""

from __future__ import annotations

import click


@click.command("stop")
@click.option(
    "--force", is_flag=True, help="Also while environments are mounted: readers of layers on demand get errors."
)
def command(force: bool) -> None:
    """End the node and wait until it is gone. When none runs there is nothing to do."""
    from dsec_store.home import Home
    from dsec_store.node.client import NodeClient

    client = NodeClient(Home.default())
    if client.running():
        client.stop(force)
    else:
        click.echo("no node runs", err=True)
