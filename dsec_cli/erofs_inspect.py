"""``dsec erofs inspect FILE``: superblock, devices, counts and the largest of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsec_cli.output import human_size, print_json, print_line, print_table
from erofs_tools.errors import FormatError
from erofs_tools.inspect import describe


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(file: Path, as_json: bool) -> None:
    """Show what is in FILE, the metadata image of a layer."""
    try:
        found = describe(file)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    superblock, contents = found["superblock"], found["contents"]
    features = ", ".join(superblock["features_compatible"] + superblock["features_incompatible"])
    rows = [
        ("metadata", f"{human_size(found['metadata_size'])}, {superblock['blocks']} blocks"),
        ("features", features),
        ("checksum", superblock["checksum"]),
        *((f"device {i}", f"{human_size(d['size'])}, {d['blocks']} blocks") for i, d in enumerate(found["devices"], 1)),
        ("inodes", f"{found['inodes']}, {found['hard_links']} more hard links"),
    ]
    kinds = (
        *("files", "directories", "symlinks", "character_devices", "block_devices", "fifos", "sockets"),
        *("whiteouts", "opaque_directories", "xattrs"),
    )
    rows += [(kind.replace("_", " "), str(found[kind])) for kind in kinds if found[kind]]
    rows.append(("contents", f"{human_size(contents['size'])}, of it {human_size(contents['holes'])} holes"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print_line(f"{name.ljust(width)}  {text}")
    for title, unit, kind in (
        ("largest files", "size", "largest_files"),
        ("largest directories", "names", "largest_directories"),
    ):
        if found[kind]:
            click.echo()
            print_table((unit.upper(), title.upper()), [(one[unit], one["path"]) for one in found[kind]])
