"""``dsec layer show``: all about one layer or environment."""

from __future__ import annotations

from typing import Any

import click

from dsec_cli.output import human_size, print_json, print_line, print_table


@click.command("show")
@click.argument("reference")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with config and manifest; sizes in bytes.")
def command(reference: str, as_json: bool) -> None:
    """Show a layer or an environment of the local store: its ids, sizes, counts and settings."""
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore
    from dsec_store.refs import parse_reference

    shown = LayerStore(Home.default()).show(parse_reference(reference))
    if as_json:
        print_json(shown)
        return
    for key in ("reference", "kind", "id", "manifest"):
        print_line(f"{key:<10} {shown[key]}")
    if shown["kind"] == "environment":
        _print_layers(shown["layers"])
    else:
        _print_layer(shown)


def _print_layer(shown: dict[str, Any]) -> None:
    sizes, counts = shown["sizes"], shown["counts"]
    print_line(
        f"{'metadata':<10} {human_size(sizes['metadata'])}, stored {human_size(sizes['stored_metadata'])}; "
        f"{counts['inodes']} inodes: {counts['files']} files, {counts['directories']} directories, "
        f"{counts['symlinks']} symlinks, {counts['others']} others"
    )
    print_line(
        f"{'data':<10} {human_size(sizes['data'])}, stored {human_size(sizes['stored_data'])} "
        f"({shown['zstd'] or 'raw'}); {counts['chunks']} chunks"
    )
    if shown["raw"]:
        print_line(f"{'raw':<10} {shown['raw']}")
    for key, value in shown["config"]["run"].items():
        if value:
            print_line(f"{key:<10} {value}")


def _print_layers(layers: list[dict[str, Any]]) -> None:
    click.echo()
    print_table(
        ("LAYER", "KIND", "MANIFEST", "DATA", "STORED", "SOURCE"),
        [
            (
                (layer["id"] or "")[7:19],
                layer["kind"] or "",
                layer["manifest"][7:19],
                "-" if layer["data"] is None else human_size(layer["data"]),
                "-" if layer["stored"] is None else human_size(layer["stored"]),
                layer["source"] or ("local" if layer["local"] else "missing"),
            )
            for layer in layers
        ],
    )
