"""``dsec mount``: an environment at a directory."""

from __future__ import annotations

import click


@click.command("mount")
@click.argument("references", nargs=-1, required=True, metavar="REF...")
@click.option("--at", "target", required=True, type=click.Path(exists=True, file_okay=False), help="Where.")
@click.option("--rw", "writable", is_flag=True, help="Writable; what changes is kept until dsec rm.")
@click.option("--name", help="With --rw: the name under which dsec ps, pack-diff and rm know it.")
@click.option("--plain-http", is_flag=True, help="Speak HTTP without TLS to registries that are not this machine.")
def command(references: tuple[str, ...], target: str, writable: bool, name: str | None, plain_http: bool) -> None:
    """Mount layers at a directory: a base layer or an environment first, then workspaces and toolkits, later on top.

    Nothing is pulled: what is read is fetched. References are NAME:TAG of the local store or HOST[:PORT]/NAME:TAG.
    """
    from dsec_store.home import Home
    from runtimes.mounts import mount_environment

    if name is not None and not writable:
        raise click.UsageError("--name goes with --rw")
    mount_environment(Home.default(), list(references), target, writable=writable, name=name, plain_http=plain_http)
