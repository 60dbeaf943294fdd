"""``raw/<layer id>``: a layer's data blob as it is, made from its data object; kernels read it in place."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dsec_linux.files import unnamed_file
from dsec_store.backends.local import storing, write_all
from dsec_store.chunks import CHUNK, ZSTD, ChunkRecord, ChunkTable
from dsec_store.dataobject import decode_chunk, decode_raw_chunk
from dsec_store.errors import DsecError, IntegrityError
from dsec_store.layers.store import Layer, LayerStore

THREADS = 2
"""Decompressing and hashing release the interpreter's lock."""


def make_raw(store: LayerStore, layer: Layer, progress: Callable[[int, int], None] | None = None) -> bool:
    """Make the raw file of a layer that is whole in the store, unless it is there with the right bytes; whether it had
    to be made.

    Each chunk is checked against the chunk table before it is written, zero chunks stay holes, and the file gets its
    name once it is synced. Raises IntegrityError with the chunk, StoreFull; then nothing is left.
    """
    path = store.home.raw_file(layer.id)
    table = store.chunk_table(layer)
    if _right(path, table):
        return False
    with storing(store.home.raw, f"making the raw file of layer {layer.id}"):
        fd = unnamed_file(str(store.home.raw))
        try:
            os.ftruncate(fd, table.data_size)
            _decode(store, layer, table, fd, progress)
            store.publish([], None, layer.digest, raw=(layer.id, fd))
        finally:
            os.close(fd)
    if not path.exists():
        raise DsecError(f"the raw file of layer {layer.id} could not be made: {path}")
    return True


def _right(path: Path, table: ChunkTable) -> bool:
    """Whether a raw file has the bytes that the chunk table says: reads all of it."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != table.data_size:
                return False
            return all(hashlib.sha256(file.read(CHUNK)).digest() == record.digest for record in table)
    except OSError:
        return False


def _decode(
    store: LayerStore, layer: Layer, table: ChunkTable, fd: int, progress: Callable[[int, int], None] | None
) -> None:
    source = os.open(store.backend.local_path(layer.manifest.data.digest), os.O_RDONLY | os.O_CLOEXEC)
    decode = decode_chunk if table.encoding == ZSTD else decode_raw_chunk

    def one(index: int, record: ChunkRecord) -> bytes:
        stored = os.pread(source, record.length, record.offset)
        try:
            return decode(stored, table.chunk_size(index), record.digest)
        except IntegrityError as error:
            raise IntegrityError(f"layer {layer.id}, chunk {index}: {error}") from None

    pending: deque[Future[bytes]] = deque()
    done = 0

    def take() -> None:
        nonlocal done
        data = pending.popleft().result()
        if any(data):
            os.lseek(fd, done, os.SEEK_SET)
            write_all(fd, data)
        done += len(data)
        if progress is not None:
            progress(done, table.data_size)

    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="raw") as pool:
            try:
                for index, record in enumerate(table):
                    pending.append(pool.submit(one, index, record))
                    if len(pending) > 4 * THREADS:
                        take()
                while pending:
                    take()
            finally:
                for future in pending:
                    future.cancel()
    finally:
        os.close(source)
