"""``dsec node stop``."""

from __future__ import annotations

import os
import select

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsec_store.home import Home
    from dsec_store.node.client import NodeClient


@click.command("stop")
@click.option(
    "--force", is_flag=True, help="Also while environments are mounted: readers of layers on demand get errors."
)
def command(force: bool) -> None:
    """End the node and wait until it is gone. When none runs there is nothing to do."""
    from dsec_store.home import Home
    from dsec_store.node.client import NodeClient

    home = Home.default()
    client = NodeClient(home)
    process = _node_process(home)
    try:
        if client.running():
            _stop(client, force, process)
        else:
            click.echo("no node runs", err=True)
    finally:
        if process >= 0:
            os.close(process)


def _node_process(home: Home) -> int:
    """A pidfd of the process that holds or held the node's lock, -1 without one."""
    try:
        return os.pidfd_open(int(home.node_lock.read_text()))
    except (OSError, ValueError):
        return -1


def _stop(client: NodeClient, force: bool, process: int) -> None:
    from dsec_store.errors import NodeError
    from dsec_store.node.client import EXIT_SECONDS

    try:
        client.stop(force)
    except NodeError:
        wait = 0.0
        try:
            client.status()
        except NodeError:  # it does not answer any more: somebody else has stopped it
            wait = EXIT_SECONDS
        if process >= 0 and select.select([process], [], [], wait)[0]:
            return
        raise
