"""``dsec layer rm``: remove references."""

from __future__ import annotations

import click


@click.command("rm")
@click.argument("references", nargs=-1, required=True, metavar="REF...")
def command(references: tuple[str, ...]) -> None:
    """Remove references from the local store. What they name stays on disk until it is collected."""
    from dsec_store.home import Home
    from dsec_store.layers.store import LayerStore

    store = LayerStore(Home.default())
    # All or nothing: a misspelt one is found before anything is removed.
    for name, tag in dict.fromkeys([store.find(text) for text in references]):
        store.remove(name, tag)
