"""``dsec stats``: what the node fetched."""

from __future__ import annotations

import click

from dsec_cli.output import human_size, print_json, print_table


@click.command("stats")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Per layer and in total since the node started: size, bytes fetched, requests, chunks touched.

    A layer that lies whole on this disk is read by the kernel without the node (direct): its chunks are not counted.
    """
    from dsec_store.home import Home
    from dsec_store.node.client import NodeClient

    stats = NodeClient.connect(Home.default(), start=False).stats()
    if as_json:
        print_json(stats)
        return
    rows = [_row(layer["reference"], layer["export"], layer) for layer in stats["layers"]]
    rows.append(_row("total", "", stats["total"]))
    print_table(("LAYER", "EXPORT", "SIZE", "FETCHED", "REQUESTS", "CHUNKS", "TOUCHED", "SHARE"), rows)


def _row(name: str, export: str, counts: dict[str, int | None]) -> tuple[object, ...]:
    size, fetched, chunks, touched = (counts[key] for key in ("size", "bytes_fetched", "chunks", "chunks_touched"))
    share = f"{100 * touched / chunks:.1f}%" if touched is not None and chunks else "-"
    shown = "-" if touched is None else touched
    return name, export, human_size(size or 0), human_size(fetched or 0), counts["requests"], chunks, shown, share
