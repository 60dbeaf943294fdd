"""What a backend is: a place for immutable blobs, named by digest, and for references, named by name and tag.

All methods are synchronous and safe to call from several threads and processes at once; services call them in threads.
Digests are ``sha256:<64 hex>``. Nothing is visible before it is whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple


class AnyDigest:
    """The type of ``ANY``: a reference may hold whatever it holds."""


ANY: Final = AnyDigest()
STREAM_BLOCK = 1 << 20


class StoredReference(NamedTuple):
    """A reference of a listing. ``digest`` is empty for a damaged one: what it holds is no digest, or its name none."""

    name: str
    tag: str
    digest: str


class BlobWriter(ABC):
    """A blob being written. Leaving the context without ``commit`` leaves nothing behind."""

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append; returns the number of bytes, always all of them. Raises StoreFull."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor of the bytes written so far. Whoever reads it must not move its offset (pread)."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes written so far."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Digest of the bytes written so far."""

    @abstractmethod
    def commit(self, expected_digest: str | None = None) -> tuple[str, int]:
        """Make the blob durable, then visible; returns digest and size.

        Raises IntegrityError, and keeps nothing, when the bytes are not those of ``expected_digest``; StoreFull.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop what was not committed."""

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Backend(ABC):
    """Blobs and references.

    Errors of all methods: BlobUnknown, ReferenceUnknown, ReferenceInvalid (not a digest, not a name), StoreFull.
    """

    @abstractmethod
    def stat(self, digest: str) -> int:
        """Size in bytes."""

    def has(self, digest: str) -> bool:
        from dsec_store.errors import BlobUnknown

        try:
            self.stat(digest)
        except BlobUnknown:
            return False
        return True

    def sound(self, digest: str, size: int | None = None) -> bool:
        """Whether the blob is there with the right bytes (and ``size`` of them): reads all of it."""
        import hashlib

        from dsec_store.errors import BlobUnknown

        summed = hashlib.sha256()
        try:
            if size is not None and self.stat(digest) != size:
                return False
            for piece in self.stream(digest):
                summed.update(piece)
        except (BlobUnknown, OSError):
            return False
        return "sha256:" + summed.hexdigest() == digest

    @abstractmethod
    def read(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from ``offset``: ``length`` of them, fewer where the blob ends, all the rest without ``length``."""

    @abstractmethod
    def stream(
        self, digest: str, offset: int = 0, length: int | None = None, block: int = STREAM_BLOCK
    ) -> Iterator[bytes]:
        """The same in pieces of at most ``block`` bytes. BlobUnknown is raised by the call, not by the first piece."""

    @abstractmethod
    def writer(self) -> BlobWriter:
        """A new blob; a context manager."""

    @abstractmethod
    def delete(self, digest: str) -> None:
        """Remove a blob. Whether something still needs it is the caller's question."""

    @abstractmethod
    def blobs(self) -> Iterator[str]:
        """Every blob's digest, in order."""

    @abstractmethod
    def refs(self, prefix: str = "") -> Iterator[StoredReference]:
        """Every reference whose name is ``prefix`` or lies below it, in order of name and tag; damaged ones too."""

    @abstractmethod
    def get_ref(self, name: str, tag: str) -> str:
        """The digest that a reference holds; IntegrityError when it holds none."""

    @abstractmethod
    def put_ref(self, name: str, tag: str, digest: str, *, expected: str | AnyDigest | None = ANY) -> None:
        """Compare-and-swap: set the reference if it holds ``expected`` (None: if there is none; ANY: whatever it
        holds).

        Raises ReferenceConflict with what it holds. The blob ``digest`` must exist (BlobUnknown).
        """

    @abstractmethod
    def delete_ref(self, name: str, tag: str) -> None:
        """Remove a reference, also a damaged one; its blobs stay until they are collected."""

    def publish(
        self,
        blobs: Sequence[BlobWriter],
        name: str | None = None,
        tag: str | None = None,
        digest: str | None = None,
        *,
        expected: str | AnyDigest | None = ANY,
    ) -> None:
        """Commit the blobs in order and then set the reference to ``digest``. A damaged blob that is there already is
        replaced.

        A backend that can do it as one does: then either everything is visible or nothing.
        """
        for blob in blobs:
            blob.commit()
        if name is not None and tag is not None and digest is not None:
            self.put_ref(name, tag, digest, expected=expected)
