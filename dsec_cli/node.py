"""``dsec node``: run the node here, look at it, stop it."""

from __future__ import annotations

import click

from dsec_cli.output import LazyGroup

TABLE = {
    "status": ("dsec_cli.node_status", "Show the node's pid, environments and layer mounts."),
    "stop": ("dsec_cli.node_stop", "End the node."),
}


@click.group("node", cls=LazyGroup, commands_table=TABLE, invoke_without_command=True)
@click.option("--ready-fd", type=int, hidden=True, help="Detach, and say there when ready.")
@click.pass_context
def command(ctx: click.Context, ready_fd: int | None) -> None:
    """Run the block server of this machine in the foreground.

    Other commands start it in the background when they need it.
    """
    if ctx.invoked_subcommand is None:
        from dsec_store.home import Home
        from dsec_store.node.service import run_node

        run_node(Home.default(), ready_fd)
