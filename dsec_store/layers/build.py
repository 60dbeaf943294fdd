"""From a directory, a tar or a tree to a published layer: the EROFS pair, chunk table, data object, config, manifest.

Everything is written to files without names and published at the end in one step, so an error or a kill on the way
leaves nothing.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from dsec_linux.files import unnamed_file
from dsec_store.backends.base import BlobWriter
from dsec_store.backends.local import EarlySync, raise_full, storing
from dsec_store.config import LayerConfig, empty_run
from dsec_store.dataobject import METADATA_MAX, ZSTD_NOTE, DataObjectWriter, encode_metadata
from dsec_store.errors import DsecError, WrongKind
from dsec_store.home import Home
from dsec_store.layers.store import LayerStore, local_tag
from dsec_store.manifest import EnvironmentLayer, LayerManifest
from dsec_store.media import KINDS
from dsec_store.refs import Reference
from erofs_tools.errors import show, show_path
from erofs_tools.tree import Tree
from erofs_tools.writer import ImageStats, write_image

Progress = Callable[[str, int], None]
"""Called with ``("total", bytes of all files)`` once, then with ``("data", bytes packed since the last call)``, and
``("publish", bytes to sync)``."""


@dataclass(frozen=True)
class BuiltLayer:
    """A published layer. Sizes in bytes; ``stored`` are all its blobs as they are stored and sent."""

    id: str
    manifest_digest: str
    manifest_size: int
    kind: str
    metadata_size: int
    data_size: int
    stored_size: int
    chunks: int
    counts: dict[str, int]

    def in_environment(self) -> EnvironmentLayer:
        return EnvironmentLayer(self.manifest_digest, self.manifest_size, self.kind, self.id)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "manifest": self.manifest_digest,
            "kind": self.kind,
            "sizes": {"metadata": self.metadata_size, "data": self.data_size, "stored": self.stored_size},
            "counts": {**self.counts, "chunks": self.chunks},
        }


@dataclass(frozen=True)
class PackedLayer:
    """A layer whose bytes are all written and whose names are not given yet: ``blobs`` in the order of publishing."""

    built: BuiltLayer
    manifest: LayerManifest
    blobs: tuple[BlobWriter, ...]
    raw_fd: int


def build_threads() -> int:
    """Threads that hash and compress: one a processor, at least two: one works while another writes its chunk."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


@contextmanager
def pack_tree(
    store: LayerStore, tree: Tree, kind: str, run: dict[str, Any] | None, progress: Progress | None = None
) -> Iterator[PackedLayer]:
    """Write the blobs of a layer; whoever does not publish them inside the context leaves nothing.

    Raises SourceError (a file that changed, or that no image can hold), StoreFull.
    """
    if progress is not None:
        progress(
            "total", sum(entry.size for entry in tree.entries() if S_ISREG(entry.mode) and entry.hardlink_to is None)
        )
    raw_folder = store.home.raw
    with ExitStack() as stack:
        with storing(raw_folder, "making the layer's raw file"):
            raw_fd = unnamed_file(str(raw_folder))
        stack.callback(os.close, raw_fd)
        metadata, chunks, data, config_blob, manifest_blob = (
            stack.enter_context(store.backend.writer()) for _ in range(5)
        )
        try:
            with (
                DataObjectWriter(data, raw_fd, build_threads()) as objects,
                _spool(raw_folder) as image,
                EarlySync((raw_fd, data.fileno())) as early,
            ):

                def take(blocks: bytes) -> None:
                    objects.write(blocks)
                    early.wrote(len(blocks))
                    if progress is not None:
                        progress("data", len(blocks))

                stats = write_image(tree, image, take, metadata_max=METADATA_MAX)
                table, data_stats = objects.finish()
                early.finish()
                image_digest, frame = _compress(image)
        except OSError as error:
            # Reading the source gives SourceErrors, so a full disk is this store's.
            raise_full(error, store.home.path, "building the layer")
            raise
        metadata.write(frame)
        chunks.write(table.serialize())
        config = LayerConfig(
            kind=kind,
            metadata_digest=image_digest,
            metadata_size=stats.metadata_size,
            data_size=data_stats.data_size,
            data_root=table.root(),
            inodes=stats.inodes,
            run=run or empty_run(),
        )
        config_blob.write(config.canonical)
        manifest = LayerManifest.build(
            config,
            metadata=(metadata.digest, metadata.size),
            chunks=(chunks.digest, chunks.size),
            data=(data.digest, data.size),
            zstd=ZSTD_NOTE,
        )
        manifest_blob.write(manifest.raw)
        built = BuiltLayer(
            id=config.id,
            manifest_digest=manifest.digest,
            manifest_size=len(manifest.raw),
            kind=kind,
            metadata_size=config.metadata_size,
            data_size=config.data_size,
            stored_size=metadata.size + chunks.size + data.size,
            chunks=data_stats.chunks,
            counts=_counts(stats),
        )
        yield PackedLayer(built, manifest, (config_blob, chunks, metadata, data, manifest_blob), raw_fd)


def build_layer(
    store: LayerStore,
    source: Path,
    reference: Reference,
    kind: str,
    *,
    strip_overlay: bool = False,
    literal_whiteouts: bool = False,
    run: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> BuiltLayer:
    """Build a layer of a directory or a tar (plain, gzip) and publish it under ``reference``, with ``raw/<id>``.

    run: the OCI execution part, for kind base only. Equal input gives an equal id. Raises ReferenceInvalid, WrongKind,
    SourceError with the path inside the source, StoreFull; then nothing is left in the store.
    """
    local_tag(reference)
    if kind not in KINDS:
        raise WrongKind(f"no kind of layer: {show(kind)}, expected one of {', '.join(KINDS)}")
    with (
        open_source(
            source, kind, home=store.home, strip_overlay=strip_overlay, literal_whiteouts=literal_whiteouts
        ) as tree,
        pack_tree(store, tree, kind, run, progress) as packed,
    ):
        if progress is not None:
            progress("publish", packed.built.data_size + packed.built.stored_size)
        store.publish(packed.blobs, reference, packed.built.manifest_digest, raw=(packed.built.id, packed.raw_fd))
        return packed.built


@contextmanager
def open_source(
    source: Path, kind: str, *, home: Home, strip_overlay: bool = False, literal_whiteouts: bool = False
) -> Iterator[Tree]:
    """The tree of a directory or a tar; a compressed tar is unpacked in the home, to a file without a name."""
    from erofs_tools.directory import from_directory
    from erofs_tools.tar import from_tar

    if source.is_dir():
        refuse_home(source, home)
        yield from_directory(source, strip_overlay=strip_overlay, literal_whiteouts=literal_whiteouts)
    elif source.exists():
        with from_tar(
            source, kind=kind, strip_overlay=strip_overlay, literal_whiteouts=literal_whiteouts, spool_dir=home.raw
        ) as tree:
            yield tree
    else:
        raise DsecError(f"no such directory or tar: {show_path(os.fsencode(source))}")


def refuse_home(source: Path, home: Home) -> None:
    """Raise DsecError for a directory that holds the home: the layer would hold what is being written of it."""
    here = home.path.resolve()
    for folder in (here, *here.parents):
        if folder.samefile(source):
            raise DsecError(
                f"{show_path(os.fsencode(source))} holds the home {home.path}, which a layer cannot be built into: "
                "set DSEC_HOME to a folder outside of it, or build of a part of it"
            )


@contextmanager
def _spool(folder: Path) -> Iterator[BinaryIO]:
    with storing(folder, "making the metadata image"):
        fd = unnamed_file(str(folder))
    with os.fdopen(fd, "w+b", buffering=1 << 20) as file:
        yield file


def _compress(image: BinaryIO) -> tuple[str, bytes]:
    """Digest of the image and its frame."""
    image.flush()
    size = image.seek(0, io.SEEK_END)
    with mmap.mmap(image.fileno(), size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        return "sha256:" + hashlib.sha256(view).hexdigest(), encode_metadata(view)


def _counts(stats: ImageStats) -> dict[str, int]:
    return {
        "inodes": stats.inodes,
        "files": stats.files,
        "directories": stats.directories,
        "symlinks": stats.symlinks,
        "others": stats.others,
    }
