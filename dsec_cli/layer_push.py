"""``dsec layer push``: a layer or an environment to a registry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dsec_cli.output import human_size, print_json
from dsec_cli.progress import transfer_bar


@click.command("push")
@click.argument("reference", metavar="REF")
@click.argument("target", metavar="TARGET")
@click.option("--plain-http", is_flag=True, help="No TLS (loopback never has it).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(reference: str, target: str, plain_http: bool, as_json: bool) -> None:
    """Copy REF of the local store to TARGET, HOST[:PORT]/NAME:TAG. What is there is not sent again.

    A layer of an environment that is not here is copied through from where it was mounted.
    """
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore
    from dsec_store.refs import parse_reference
    from dsec_store.registry.transfer import push

    local, remote = parse_reference(reference), parse_reference(target)
    with transfer_bar(f"pushing {local}") as progress:
        done = push(LayerStore(Home.default()), local, remote, plain_http=plain_http or None, progress=progress)
    if as_json:
        print_json({"reference": str(remote), **to_json(asdict(done))})
        return
    click.echo(f"{remote}  {done.kind}  {done.id}")
    click.echo(
        f"{done.layers} layer{'s' if done.layers > 1 else ''}, sent {human_size(done.bytes_sent)} in {done.blobs_sent} "
        f"blobs; {human_size(done.bytes_present)} in {done.blobs_present} blobs were there"
    )


def to_json(result: dict[str, Any]) -> dict[str, Any]:
    """The fields of a transfer under the names of the other commands."""
    return {"id": result.pop("id"), "manifest": result.pop("digest"), "kind": result.pop("kind"), **result}
