"""Packing what a sandbox changed: its upper as a diff layer, and the environment with that layer on top.

The work is in the size of the changes; the layers below are named, not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_store.errors import BlobUnknown, WrongKind
from dsec_store.layers.build import BuiltLayer, Progress, pack_tree
from dsec_store.layers.environment import build_environment
from dsec_store.layers.store import LayerStore
from dsec_store.manifest import EnvironmentIndex, EnvironmentLayer
from dsec_store.media import MAX_LAYERS
from dsec_store.refs import Reference


@dataclass(frozen=True)
class PackedDiff:
    """The diff layer and the environment that holds it, both published."""

    layer: BuiltLayer
    environment: EnvironmentIndex

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": {
                "id": self.environment.id,
                "manifest": self.environment.digest,
                "layers": [layer.manifest_digest for layer in self.environment.layers],
            },
            "diff": self.layer.to_json(),
        }


def pack_diff(
    store: LayerStore,
    upper: Path,
    layers: Sequence[EnvironmentLayer],
    reference: Reference | None,
    progress: Progress | None = None,
) -> PackedDiff:
    """Pack an overlay's upper, which nobody may be changing, and publish it with the environment under ``reference``.

    layers: the sandbox's, base first. Without a reference the blobs are published alone, for a push by digest. Diff
    layer, environment and reference become visible in one step. Raises SourceError with the path of an entry that lacks
    its content (redirect, metacopy), StoreFull, BlobUnknown (a layer that is neither here nor has a source).
    """
    from erofs_tools.upper import from_upper

    if len(layers) >= MAX_LAYERS:
        raise WrongKind(f"an environment of {len(layers) + 1} layers, expected at most {MAX_LAYERS}: nothing is packed")
    below = [_with_source(store, layer) for layer in layers]
    tree = from_upper(upper)
    with pack_tree(store, tree, "diff", None, progress) as packed, store.backend.writer() as index_blob:
        environment = build_environment([*below, packed.built.in_environment()])
        index_blob.write(environment.raw)
        store.publish([*packed.blobs, index_blob], reference, environment.digest, raw=(packed.built.id, packed.raw_fd))
        return PackedDiff(packed.built, environment)


def _with_source(store: LayerStore, layer: EnvironmentLayer) -> EnvironmentLayer:
    """A source is named only for what this store lacks: it says nothing about what the layer is."""
    if store.backend.has(layer.manifest_digest):
        return EnvironmentLayer(layer.manifest_digest, layer.manifest_size, layer.kind, layer.id)
    if layer.source is None:
        raise BlobUnknown(f"layer {layer.manifest_digest}: it is not in {store.backend.root}, and no registry is named")
    return layer


def layer_of_mount(store: LayerStore, layer: Mapping[str, Any]) -> EnvironmentLayer:
    """A layer as the node's answer to a mount names it (``id kind manifest manifest_size source``)."""
    size = layer.get("manifest_size")
    if size is None:
        size = store.backend.stat(layer["manifest"])
    return EnvironmentLayer(layer["manifest"], size, layer["kind"], layer["id"], layer["source"])
