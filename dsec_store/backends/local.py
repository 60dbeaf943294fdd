"""Blobs and references in a directory of a local disk file system.

    blobs/sha256/<first two hex>/<64 hex>
    refs/<name>/_tags/<tag>            the digest of a manifest and a newline
    lock                               flock of whoever changes names here; holds the list of a publication under way

Blobs are written to files without a name (O_TMPFILE) and get theirs by linkat once they are synced, so that a killed
process leaves nothing. A publication gives several names (blobs, manifest, reference), which no file system does at
once: under the lock, its new names are first listed in ``lock``, and whoever takes the lock next removes what a killed
process left half published.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from dsec_linux.files import fsync_dir, link_fd, unnamed_file
from dsec_store.backends.base import ANY, STREAM_BLOCK, AnyDigest, Backend, BlobWriter, StoredReference
from dsec_store.digests import check_digest, is_digest
from dsec_store.errors import (
    BlobUnknown,
    DsecError,
    IntegrityError,
    ReferenceConflict,
    ReferenceInvalid,
    ReferenceUnknown,
    StoreFull,
    StoreUnusable,
)
from dsec_store.home import make_folders
from dsec_store.refs import valid_name, valid_tag
from erofs_tools.errors import shorten, show


@contextmanager
def storing(path: Path | str, what: str) -> Iterator[None]:
    """Turn the system's refusals while writing below ``path`` into one clear line: StoreFull, StoreUnusable."""
    try:
        yield
    except OSError as error:
        raise_full(error, path, what)
        raise StoreUnusable(f"{what} in {path}: {error.strerror or error}") from error


def raise_full(error: OSError, path: Path | str, what: str) -> None:
    """Raise StoreFull when that is what the error says."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StoreFull(f"{what}: no space left on the file system of {path} ({os.strerror(error.errno)})") from error


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it: a disk that becomes full cuts a write short before it refuses one."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class LocalBlobWriter(BlobWriter):
    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._hash = hashlib.sha256()
        self._size = 0
        with storing(backend.root, "writing a blob"):
            self._fd = unnamed_file(str(backend.blob_root))

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        self._hash.update(data)
        with storing(self._backend.root, "writing a blob"):
            write_all(self._fd, data)
        self._size += len(data)
        return len(data)

    def fileno(self) -> int:
        return self._fd

    @property
    def size(self) -> int:
        return self._size

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def commit(self, expected_digest: str | None = None) -> tuple[str, int]:
        if expected_digest is not None and expected_digest != self.digest:
            found, size = self.digest, self._size
            self.close()
            raise IntegrityError(f"blob of {size} bytes: found {found}, expected {expected_digest}")
        self._backend.publish([self])
        return self.digest, self._size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalBackend(Backend):
    """A store in ``root``, which is made when it is missing. Names are changed under one lock; readers take none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blob_root = root / "blobs" / "sha256"
        self.ref_root = root / "refs"
        self._lock_path = root / "lock"
        self._fresh_reference = root / "reference"
        self._fresh_blob = root / "blob"
        with storing(root, "making the store"):
            make_folders(self.blob_root)
            make_folders(self.ref_root)
            self._recover()

    # Blobs

    def local_path(self, digest: str) -> Path:
        """Where the blob lies or would lie; raises ReferenceInvalid when it is no digest."""
        text = check_digest(digest)[7:]
        return self.blob_root / text[:2] / text

    def _open(self, digest: str) -> int:
        try:
            return os.open(self.local_path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BlobUnknown(f"no blob {digest} in {self.root}") from None

    def stat(self, digest: str) -> int:
        try:
            return self.local_path(digest).stat().st_size
        except FileNotFoundError:
            raise BlobUnknown(f"no blob {digest} in {self.root}") from None

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.stream(digest, offset, length))

    def stream(
        self, digest: str, offset: int = 0, length: int | None = None, block: int = STREAM_BLOCK
    ) -> Iterator[bytes]:
        return _BlobStream(self._open(digest), offset, length, block)

    def writer(self) -> BlobWriter:
        return LocalBlobWriter(self)

    def delete(self, digest: str) -> None:
        path = self.local_path(digest)
        with self.lock():
            try:
                path.unlink()
            except FileNotFoundError:
                raise BlobUnknown(f"no blob {digest} in {self.root}") from None
            fsync_dir(str(path.parent))

    def blobs(self) -> Iterator[str]:
        for folder in sorted(path for path in self.blob_root.iterdir() if path.is_dir()):
            for path in sorted(folder.iterdir()):
                digest = "sha256:" + path.name
                if is_digest(digest):
                    yield digest

    # References

    def _reference_path(self, name: str, tag: str) -> Path:
        if not valid_name(name):
            raise ReferenceInvalid(f"not a name: {show(name)}")
        if not valid_tag(tag):
            raise ReferenceInvalid(f"not a tag: {show(tag)}")
        return self.ref_root / name / "_tags" / tag

    def refs(self, prefix: str = "") -> Iterator[StoredReference]:
        if prefix and not valid_name(prefix):
            raise ReferenceInvalid(f"not a name: {show(prefix)}")
        for name, tag, _ in sorted(self._listed(self.ref_root / prefix)):
            with suppress(ReferenceUnknown):  # removed since
                try:
                    digest = self.get_ref(name, tag)
                except (IntegrityError, ReferenceInvalid, OSError):
                    digest = ""
                yield StoredReference(name, tag, digest)

    def _listed(self, top: Path) -> Iterator[tuple[str, str, Path]]:
        """Name, tag and file of everything below ``top`` that has the place of a reference, legal or not."""
        for folder, folders, files in os.walk(top):
            path = Path(folder)
            if path.name == "_tags":
                name = str(path.parent.relative_to(self.ref_root))
                links = [entry for entry in folders if (path / entry).is_symlink()]
                yield from ((name, tag, path / tag) for tag in files + links)

    def get_ref(self, name: str, tag: str) -> str:
        path = self._reference_path(name, tag)
        found = _content(path)
        if found is None:
            raise ReferenceUnknown(f"no reference {name}:{tag} in {self.root}")
        if not found.endswith("\n") or not is_digest(found[:-1]):
            raise IntegrityError(f"reference {name}:{tag}: {path} holds {found[:80]!r}, expected a digest")
        return found[:-1]

    def put_ref(self, name: str, tag: str, digest: str, *, expected: str | AnyDigest | None = ANY) -> None:
        self.publish([], name, tag, digest, expected=expected)

    def delete_ref(self, name: str, tag: str) -> None:
        try:
            path = self._reference_path(name, tag)
        except ReferenceInvalid:  # a name that nobody can have given here can still lie here
            found = [one for *named, one in self._listed(self.ref_root) if named == [name, tag]]
            if not found:
                raise
            path = found[0]
        with self.lock():
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                raise ReferenceUnknown(f"no reference {name}:{tag} in {self.root}") from None
            fsync_dir(str(path.parent))
            self._prune(path.parent, self.ref_root)

    # Publishing

    def publish(
        self,
        blobs: Sequence[BlobWriter],
        name: str | None = None,
        tag: str | None = None,
        digest: str | None = None,
        *,
        expected: str | AnyDigest | None = ANY,
        sync_also: Sequence[int] = (),
    ) -> None:
        """All or nothing: sync the blobs, name them, set the reference. sync_also: descriptors to sync in the same
        go.

        A blob that is there already is read: when its bytes are wrong, the new one takes its place, and keeps it.
        """
        reference = None
        if name is not None and tag is not None and digest is not None:
            reference = self._reference_path(name, tag)
            check_digest(digest)
        with storing(self.root, "publishing"):
            sync_files([*(blob.fileno() for blob in blobs), *sync_also])
            sound = self._sound_identities(blobs)  # reading may take long, so it is done before anybody has to wait
            with self.lock() as journal:
                if reference is not None and digest is not None:
                    self._check_swap(reference, f"{name}:{tag}", digest, [b.digest for b in blobs], expected)
                self._name(journal, blobs, sound, reference, digest)

    def _check_swap(
        self, path: Path, text: str, digest: str, new: Sequence[str], expected: str | AnyDigest | None
    ) -> None:
        if digest not in new and not self.has(digest):
            raise BlobUnknown(f"reference {text}: no blob {digest} in {self.root}")
        if isinstance(expected, AnyDigest):
            return
        found = _content(path)
        found = None if found is None else found.strip()
        if found != expected:
            raise ReferenceConflict(
                f"reference {text}: holds {shorten(found or 'nothing')}, expected {expected or 'nothing'}"
            )

    def _sound_identities(self, blobs: Sequence[BlobWriter]) -> dict[str, _Identity]:
        """Of the blobs that have a name here already, those with the right bytes, and which file that was."""
        found = {}
        for blob in blobs:
            identity = _identity(self.local_path(blob.digest))
            if identity is not None and self.sound(blob.digest, blob.size):
                found[blob.digest] = identity
        return found

    def _name(
        self,
        journal: _Journal,
        blobs: Sequence[BlobWriter],
        sound: Mapping[str, _Identity],
        reference: Path | None,
        digest: str | None,
    ) -> None:
        fresh, damaged = {}, {}
        for blob in blobs:
            path = self.local_path(blob.digest)
            identity = _identity(path)
            if identity is None:
                fresh[path] = blob
            elif sound.get(blob.digest) != identity and not self.sound(blob.digest, blob.size):
                damaged[path] = blob
        # What takes the place of a damaged blob is not taken back: it is what the name promised all the time.
        entry = _Entry([blob.digest for blob in fresh.values()], reference, digest)
        # One name alone is given or not: no list, which after a power cut might take back what was acknowledged.
        listed = reference is not None or len(fresh) > 1 or bool(damaged)
        if listed:
            journal.begin(entry)
        try:
            folders = set()
            for path, blob in fresh.items():
                if not path.parent.is_dir():
                    path.parent.mkdir(mode=0o700)
                    folders.add(self.blob_root)
                folders.add(path.parent)
                link_fd(blob.fileno(), str(path))
            for path, blob in damaged.items():
                replace_by_fd(blob.fileno(), path, self._fresh_blob)
            # Also of blobs that were there: another process may have named them a moment ago.
            folders |= {self.local_path(blob.digest).parent for blob in blobs}
            sync_folders(folders)
            if reference is not None and digest is not None:
                self._write_reference(reference, digest)
        except BaseException:
            self._withdraw(entry)
            journal.end()
            raise
        if listed:
            journal.end(durably=reference is None)

    def _withdraw(self, entry: _Entry) -> None:
        """Take back the names that a publication gave, unless its reference was set, which comes last."""
        if entry.reference is not None:
            if (_content(entry.reference) or "").strip() == entry.digest:
                return
            self._prune(entry.reference.parent, self.ref_root)
        for digest in entry.blobs:
            path = self.local_path(digest)
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
        self._fresh_reference.unlink(missing_ok=True)
        self._fresh_blob.unlink(missing_ok=True)

    def _write_reference(self, path: Path, digest: str) -> None:
        made = path.parent
        folders = {path.parent}
        while not made.is_dir():
            made = made.parent
            folders.add(made)
        make_folders(path.parent)
        fd = unnamed_file(str(self.root))
        try:
            os.write(fd, digest.encode() + b"\n")
            os.fsync(fd)
            try:
                link_fd(fd, str(path))
            except FileExistsError:
                replace_by_fd(fd, path, self._fresh_reference)
        finally:
            os.close(fd)
        sync_folders(folders)

    def _prune(self, folder: Path, top: Path) -> None:
        """Remove the folders that have become empty, up to ``top``."""
        while folder != top:
            try:
                folder.rmdir()
            except FileNotFoundError:  # making the folders failed on the way
                pass
            except OSError:
                return
            folder = folder.parent

    @contextmanager
    def lock(self) -> Iterator[_Journal]:
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            journal = _Journal(self, fd)
            journal.undo()
            yield journal
        finally:
            os.close(fd)

    def _recover(self) -> None:
        """Remove what a killed publication left. One that is still under way holds the lock and is left alone."""
        try:
            if not self._lock_path.stat().st_size:
                return
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _Journal(self, fd).undo()
        except BlockingIOError:
            return
        finally:
            os.close(fd)


_Identity = tuple[int, int, int, int]


def _identity(path: Path) -> _Identity | None:
    """What another file or other bytes under the name would change."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _content(path: Path) -> str | None:
    """The beginning of a reference's file; None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(1024).decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return "a dangling symbolic link" if path.is_symlink() else None
    except IsADirectoryError:
        return "a directory"


def replace_by_fd(fd: int, path: Path, fresh: Path) -> None:
    """Give an unnamed file the name ``path`` in place of what has it: by ``fresh``, a name that no other uses now.

    linkat does not replace, rename does. The name is durable after ``fsync_dir``.
    """
    fresh.unlink(missing_ok=True)
    link_fd(fd, str(fresh))
    fresh.rename(path)


class _Entry(NamedTuple):
    """What a publication is about to name: blobs, and a reference file with its digest."""

    blobs: Sequence[str]
    reference: Path | None
    digest: str | None


class _Journal:
    """The entry of a publication under way, in the lock file; empty when there is none.

    It is not synced: it protects from a killed process, whose writes the kernel keeps. After a power cut some blobs
    without a reference may be left, and are collected as such.
    """

    def __init__(self, backend: LocalBackend, fd: int) -> None:
        self._backend = backend
        self._fd = fd

    def begin(self, entry: _Entry) -> None:
        path = None if entry.reference is None else str(entry.reference.relative_to(self._backend.ref_root))
        text = json.dumps({"blobs": entry.blobs, "reference": path, "digest": entry.digest})
        try:
            written = os.pwrite(self._fd, text.encode(), 0)
            if written < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.end()
            raise

    def end(self, *, durably: bool = False) -> None:
        """Forget the entry. durably: nothing else says that the publication succeeded."""
        os.ftruncate(self._fd, 0)
        if durably:
            os.fsync(self._fd)

    def undo(self) -> None:
        """Take back what a killed process was publishing."""
        size = os.fstat(self._fd).st_size
        if not size:
            return
        with suppress(ValueError, KeyError, TypeError, DsecError):  # cut short: nothing had a name yet
            entry = json.loads(os.pread(self._fd, size, 0))
            path = entry["reference"]
            reference = None if path is None else self._backend.ref_root / path
            self._backend._withdraw(_Entry(entry["blobs"], reference, entry["digest"]))
        self.end()


class _BlobStream(Iterator[bytes]):
    """Pieces of an open blob. It owns the descriptor, and closes it at the end or when it is dropped before that."""

    def __init__(self, fd: int, offset: int, length: int | None, block: int) -> None:
        self._fd = fd
        self._position = offset
        self._end = os.fstat(fd).st_size if length is None else offset + length
        self._block = block

    def __next__(self) -> bytes:
        data = b""
        if self._fd >= 0 and self._position < self._end:
            data = os.pread(self._fd, min(self._block, self._end - self._position), self._position)
        if not data:
            self.close()
            raise StopIteration
        self._position += len(data)
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def sync_files(fds: Sequence[int]) -> None:
    """fsync all of them at once: the file system's journal then commits them together, in about the time of one."""
    if len(fds) == 1:
        os.fsync(fds[0])
    elif fds:
        with ThreadPoolExecutor(max_workers=min(8, len(fds))) as pool:
            list(pool.map(os.fsync, fds))


def sync_folders(folders: set[Path]) -> None:
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for folder in sorted(folders)]
    try:
        sync_files(fds)
    finally:
        for fd in fds:
            os.close(fd)


class EarlySync:
    """Brings large files to the disk while they are written, so that the sync before publishing finds little to do.

    A context manager. ``finish`` raises the first error of the disk: the kernel reports it once for a descriptor.
    """

    STEP = 32 << 20

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = fds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._running: Future[None] | None = None
        self._written = 0

    def wrote(self, size: int) -> None:
        self._written += size
        if self._written >= self.STEP and (self._running is None or self._running.done()):
            self.finish()
            self._written = 0
            self._running = self._pool.submit(self._sync)

    def _sync(self) -> None:
        for fd in self._fds:
            os.fdatasync(fd)

    def finish(self) -> None:
        if self._running is not None:
            self._running.result()

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
