"""``dsec pack-diff``: what a sandbox changed, as a layer on top of the sandbox's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dsec_cli.output import human_size, print_json

if TYPE_CHECKING:
    from dsec_store.layers.store import LayerStore
    from dsec_store.refs import Reference


@click.command("pack-diff")
@click.argument("name")
@click.option("--ref", "reference", required=True, metavar="REF", help="NAME:TAG, or HOST:PORT/NAME:TAG of a registry.")
@click.option("--plain-http", is_flag=True, help="No TLS with the registry (loopback never has it).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(name: str, reference: str, plain_http: bool, as_json: bool) -> None:
    """Pack what the finished sandbox NAME changed, and publish its layers with that one on top as the environment REF.

    The layers below are named, not read: only the changes cost time.
    """
    from dsec_cli.progress import build_bar
    from dsec_store.home import Home
    from dsec_store.layers.packdiff import layer_of_mount, pack_diff
    from dsec_store.layers.store import LayerStore, local_tag
    from dsec_store.refs import parse_reference
    from runtimes.sandboxes import open_finished

    target = parse_reference(reference)
    local_tag(target.local())
    home = Home.default()
    with open_finished(home, name) as sandbox, build_bar(f"packing {name}") as progress:
        store = LayerStore(home)
        layers = [layer_of_mount(store, layer) for layer in sandbox.layers]
        packed = pack_diff(store, sandbox.upper, layers, target if target.host is None else None, progress)
    if target.host is not None:
        _push(store, packed.environment.digest, target, plain_http)
    if as_json:
        print_json({"reference": str(target), **packed.to_json()})
        return
    diff = packed.layer
    click.echo(f"{target}  environment  {packed.environment.id}")
    click.echo(
        f"{len(packed.environment.layers)} layers; diff {diff.id[7:19]}: {diff.counts['inodes']} inodes, "
        f"data {human_size(diff.data_size)}, stored {human_size(diff.stored_size)}"
    )


def _push(store: LayerStore, digest: str, target: Reference, plain_http: bool) -> None:
    """Copy the packed environment to its registry; it stays in the local store, so that nothing is lost with a link."""
    from dsec_cli.progress import transfer_bar
    from dsec_store.errors import RegistryError
    from dsec_store.refs import Reference
    from dsec_store.registry.transfer import push

    packed = Reference(target.name, digest=digest)
    try:
        with transfer_bar(f"pushing {target}") as progress:
            push(store, packed, target, plain_http=plain_http or None, progress=progress)
    except RegistryError as error:
        raise type(error)(
            f"{error}; it is packed in the local store: dsec layer push {packed} {target}",
            status=error.status,
            code=error.code,
        ) from error
