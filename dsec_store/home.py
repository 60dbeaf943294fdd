"""Where everything durable lies: the folders of ``$DSEC_HOME`` (standard library only).

The home is on a disk file system (ext4, xfs, btrfs): EROFS refuses metadata images on tmpfs and overlayfs, and
overlayfs refuses an upper there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsec_store.errors import StoreUnusable

DEFAULT_HOME = "/var/lib/dsec"


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, mode 0700 whatever the umask is."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


@dataclass(frozen=True)
class Home:
    """The folders and files below one home. Digests may be given with or without ``sha256:``; file names carry the
    hex.
    """

    path: Path

    @classmethod
    def default(cls) -> Home:
        """``$DSEC_HOME``, or ``/var/lib/dsec``."""
        return cls(Path(os.environ.get("DSEC_HOME") or DEFAULT_HOME).absolute())

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def meta(self) -> Path:
        return self.path / "meta"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def raw(self) -> Path:
        return self.path / "raw"

    @property
    def sandboxes(self) -> Path:
        return self.path / "sandboxes"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def mounts(self) -> Path:
        return self.run / "mounts"

    @property
    def node_socket(self) -> Path:
        return self.run / "node.sock"

    @property
    def node_fd_socket(self) -> Path:
        return self.run / "node-fd.sock"

    @property
    def node_lock(self) -> Path:
        return self.run / "node.lock"

    @property
    def node_log(self) -> Path:
        return self.run / "node.log"

    def raw_file(self, layer_id: str) -> Path:
        return self.raw / _hex(layer_id)

    def meta_file(self, digest: str) -> Path:
        return self.meta / f"{_hex(digest)}.erofs"

    def cache_entry(self, root: str) -> Path:
        return self.cache / _hex(root)[:2] / _hex(root)

    def sandbox(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def ensure(self) -> Home:
        """Make the folders (mode 0700). Raises StoreUnusable where the file system cannot carry a store."""
        from dsec_linux.files import statfs_name

        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        kind = statfs_name(str(existing))
        if kind in ("tmpfs", "overlayfs", "ramfs", "fuse", "erofs"):
            raise StoreUnusable(
                f"the home {self.path} is on {kind}; EROFS and overlayfs need a disk file system (ext4, xfs, btrfs): "
                "set DSEC_HOME"
            )
        try:
            for folder in (
                self.path,
                self.store,
                self.meta,
                self.cache,
                self.raw,
                self.sandboxes,
                self.run,
                self.mounts,
            ):
                make_folders(folder)
        except OSError as error:
            raise StoreUnusable(f"cannot make the home {self.path}: {error.strerror}: {error.filename}") from error
        return self
