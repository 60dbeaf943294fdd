"""``dsec layer rm``: remove references."""

from __future__ import annotations

import click


@click.command("rm")
@click.argument("references", nargs=-1, required=True, metavar="REF...")
def command(references: tuple[str, ...]) -> None:
    """Remove references from the local store. What they name stays on disk until it is collected."""
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore, local_tag
    from dsec_store.refs import parse_reference

    store = LayerStore(Home.default())
    parsed = [parse_reference(text) for text in references]
    for reference in parsed:  # all or nothing: a misspelt one is found before anything is removed
        store.backend.get_ref(*local_tag(reference))
    for reference in parsed:
        store.remove(reference)
