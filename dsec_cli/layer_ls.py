"""``dsec layer ls``: what the local store holds."""

from __future__ import annotations

import click

from dsec_cli.output import human_size, print_json, print_table


@click.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
def command(as_json: bool) -> None:
    """List the layers and environments of the local store. What cannot be read is of kind "damaged"."""
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore

    listed = list(LayerStore(Home.default()).list())
    if as_json:
        print_json(
            [
                {
                    "reference": item.reference,
                    "kind": item.kind,
                    "id": item.id,
                    "manifest": item.manifest,
                    "data_size": item.data_size,
                    "stored_size": item.stored_size,
                }
                for item in listed
            ]
        )
        return
    print_table(
        ("REFERENCE", "KIND", "ID", "DATA", "STORED"),
        [
            (item.reference, item.kind, item.id[7:19], human_size(item.data_size), human_size(item.stored_size))
            for item in listed
        ],
    )
