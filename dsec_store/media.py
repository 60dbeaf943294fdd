"""Media types and annotation keys of layers and environments as OCI artifacts (standard library only)."""

from __future__ import annotations

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"

LAYER = "application/vnd.dsec.layer.v1"
LAYER_CONFIG = "application/vnd.dsec.layer.config.v1+json"
LAYER_METADATA = "application/vnd.dsec.layer.metadata.v1.erofs+zstd"
LAYER_CHUNKS = "application/vnd.dsec.layer.chunks.v1"
LAYER_DATA_ZSTD = "application/vnd.dsec.layer.data.v1+zstd"
LAYER_DATA_RAW = "application/vnd.dsec.layer.data.v1"
ENVIRONMENT = "application/vnd.dsec.environment.v1"

KIND = "dev.dsec.kind"
ID = "dev.dsec.id"
ZSTD = "dev.dsec.zstd"
SOURCE = "dev.dsec.source"
"""On a descriptor of an environment: ``HOST[:PORT]/NAME`` where the layer can be read when this store lacks it."""

KINDS = ("base", "workspace", "toolkit", "diff")
MAX_LAYERS = 500
"""Layers of one environment: what overlayfs stacks (fs/overlayfs/params.c, OVL_MAX_STACK)."""
