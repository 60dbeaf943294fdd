"""``dsec layer pull``: a layer or an environment from a registry, whole."""

from __future__ import annotations

from dataclasses import asdict

import click

from dsec_cli.layer_push import to_json
from dsec_cli.output import human_size, print_json
from dsec_cli.progress import transfer_bar


@click.command("pull")
@click.argument("source", metavar="SOURCE")
@click.option("--ref", "reference", metavar="NAME:TAG", help="The local reference [default: SOURCE's name and tag].")
@click.option("--raw", is_flag=True, help="Unpack the data too, so that mounts read it in place.")
@click.option("--plain-http", is_flag=True, help="No TLS (loopback never has it).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(source: str, reference: str | None, raw: bool, plain_http: bool, as_json: bool) -> None:
    """Copy SOURCE, HOST[:PORT]/NAME:TAG, to the local store. What is here is not fetched again.

    Not needed before a mount or a run: they fetch what they touch.
    """
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore
    from dsec_store.refs import parse_reference
    from dsec_store.registry.transfer import pull

    remote = parse_reference(source)
    local = parse_reference(reference) if reference is not None else None
    with transfer_bar(f"pulling {remote}") as progress:
        done = pull(
            LayerStore(Home.default()), remote, local, raw=raw, plain_http=plain_http or None, progress=progress
        )
    name = str(local or remote.local())
    if as_json:
        print_json({"reference": name, **to_json(asdict(done))})
        return
    click.echo(f"{name}  {done.kind}  {done.id}")
    click.echo(
        f"{done.layers} layer{'s' if done.layers > 1 else ''}, fetched {human_size(done.bytes_sent)} in "
        f"{done.blobs_sent} blobs; {human_size(done.bytes_present)} in {done.blobs_present} blobs were here"
    )
