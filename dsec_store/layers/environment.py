"""Environments: an ordered list of layers under one reference."""

from __future__ import annotations

from collections.abc import Sequence

from dsec_store.errors import WrongKind
from dsec_store.layers.store import LayerStore
from dsec_store.manifest import EnvironmentIndex, EnvironmentLayer
from dsec_store.media import MAX_LAYERS
from dsec_store.refs import Reference


def build_environment(layers: Sequence[EnvironmentLayer]) -> EnvironmentIndex:
    """The index of these layers, base first; raises WrongKind unless the first is a base and only it."""
    if not layers:
        raise WrongKind("an environment without layers, expected a base layer first")
    if len(layers) > MAX_LAYERS:
        raise WrongKind(f"an environment of {len(layers)} layers, expected at most {MAX_LAYERS}")
    kinds = [layer.kind for layer in layers]
    if kinds[0] not in (None, "base"):
        raise WrongKind(f"an environment that begins with a layer of kind {kinds[0]}, expected a base layer first")
    if "base" in kinds[1:]:
        place = kinds.index("base", 1) + 1
        raise WrongKind(f"an environment with a base layer at place {place}, expected it first only")
    return EnvironmentIndex.build(layers)


def publish_environment(
    store: LayerStore, layers: Sequence[EnvironmentLayer], reference: Reference
) -> EnvironmentIndex:
    """Publish an environment under a reference. Layers without ``source`` must be in the store (BlobUnknown)."""
    for layer in layers:
        if layer.source is None:
            store.backend.stat(layer.manifest_digest)
    index = build_environment(layers)
    with store.backend.writer() as blob:
        blob.write(index.raw)
        store.publish([blob], reference, index.digest)
    return index
