"""``dsec umount``."""

from __future__ import annotations

import click


@click.command("umount")
@click.argument("target", type=click.Path())
def command(target: str) -> None:
    """Undo ``dsec mount``. What was changed below a writable mount is kept, for dsec pack-diff, until dsec rm."""
    from dsec_store.home import Home
    from runtimes.mounts import umount_environment

    kept = umount_environment(Home.default(), target)
    if kept is not None:
        click.echo(f"the changes are kept as {kept}: dsec pack-diff {kept} --ref NAME:TAG, or dsec rm {kept}")
