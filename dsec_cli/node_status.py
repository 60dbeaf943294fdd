"""``dsec node status``."""

from __future__ import annotations

import click

from dsec_cli.output import print_json, print_table


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show the node's pid, the environments that it serves and the layers that it has mounted."""
    from dsec_store.home import Home
    from dsec_store.node.client import NodeClient

    status = NodeClient.connect(Home.default(), start=False).status()
    if as_json:
        print_json(status)
        return
    click.echo(f"node {status['pid']} for {status['home']}")
    rows = [
        (
            mount["id"],
            " ".join(f"{key}={value}" for key, value in mount["owner"].items()),
            ", ".join(x["reference"] for x in mount["layers"]),
        )
        for mount in status["mounts"]
    ]
    print_table(("MOUNT", "OWNER", "LAYERS"), rows)
    click.echo()
    print_table(
        ("LAYER", "REFERENCE", "EXPORT"), [(x["id"][7:19], x["reference"], x["export"]) for x in status["layers"]]
    )
