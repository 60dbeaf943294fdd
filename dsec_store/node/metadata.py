"""Metadata images on local disk: ``meta/<digest>.erofs``, whole, and verified before a kernel sees them.

A file appears there under its digest only after its bytes matched the digest and passed ``erofs_tools.verify``. Its
digest is checked once more when a node first uses it, because the kernel trusts what it reads from there.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dsec_linux.files import link_fd, unnamed_file, write_all
from dsec_store.config import LayerConfig
from dsec_store.dataobject import decode_metadata
from dsec_store.digests import digest_bytes
from dsec_store.errors import IntegrityError, StoreFull
from dsec_store.home import Home
from erofs_tools.errors import ErofsError
from erofs_tools.verify import verify

_INODE_COUNT = 1024 + 16
"""Where the superblock has its number of inodes, which ``verify`` has found to be true."""


def usable(path: Path, config: LayerConfig, what: str) -> bool:
    """Whether the image is there with the right bytes; a damaged one is removed.

    Raises IntegrityError when the config says another number of inodes than there are.
    """
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            count = int.from_bytes(os.pread(file.fileno(), 8, _INODE_COUNT), "little")
    except FileNotFoundError:
        return False
    if f"sha256:{found}" == config.metadata_digest:
        _check_count(count, config, what)
        return True
    path.unlink(missing_ok=True)
    return False


def _check_count(found: int, config: LayerConfig, what: str) -> None:
    if found != config.inodes:
        raise IntegrityError(f"{what}: the metadata image has {found} inodes; its config says {config.inodes}")


def unpack(home: Home, config: LayerConfig, stored: bytes, what: str) -> Path:
    """Make ``meta/<digest>.erofs`` from the stored zstd frame. Returns its path.

    Raises IntegrityError when it is not the image that the config names or not one that may be given to a kernel,
    StoreFull.
    """
    try:
        image = decode_metadata(stored, config.metadata_size, digest_bytes(config.metadata_digest))
    except IntegrityError as error:
        raise IntegrityError(f"{what}: {error}") from error
    path = home.meta_file(config.metadata_digest)
    try:
        fd = unnamed_file(str(home.meta))
        try:
            write_all(fd, image)
            verified = verify(image, data_size=config.data_size, name=what)
            _check_count(verified.inodes, config, what)
            try:
                link_fd(fd, str(path))
            except FileExistsError:
                pass  # another process was as fast, with the same bytes
        finally:
            os.close(fd)
    except ErofsError as error:
        raise IntegrityError(f"the metadata image may not be mounted: {error}") from error
    except OSError as error:
        raise StoreFull(f"{what}: cannot write its metadata image below {home.meta}: {error.strerror}") from error
    return path
