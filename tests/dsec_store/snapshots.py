"""File trees as values that can be compared, and layers and environments of a store as mounted trees."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dsec_linux.mounts import clone_mount, mount_erofs, mount_overlay
from dsec_store.layers.store import Environment, Layer, LayerStore

Snapshot = dict[bytes, dict[str, Any]]


def snapshot(root: str | Path, upper: Path | None = None) -> Snapshot:
    """Everything below ``root`` (and itself, as ``b""``) that a layer keeps: type, mode, ids, rdev, size, content,
    mtime in ns, xattrs but overlayfs's, and with which other paths a path shares its inode.

    upper: that of an overlay mounted at ``root``. What is in it shares inodes as it does there: the overlay shows a
    name that was copied up with the number of the file below, and a new hard link to it with its own.
    """
    found: Snapshot = {}
    inodes: dict[tuple[int, int, bool], list[bytes]] = {}

    def identity(info: os.stat_result, name: bytes) -> tuple[int, int, bool]:
        if upper is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                info = os.lstat(os.path.join(os.fsencode(upper), name))
                return info.st_dev, info.st_ino, True
        return info.st_dev, info.st_ino, False

    def look(path: bytes, name: bytes) -> None:
        info = os.lstat(path)
        value: dict[str, Any] = {
            "mode": oct(info.st_mode),
            "ids": (info.st_uid, info.st_gid),
            "mtime": info.st_mtime_ns,
            "xattrs": _xattrs(path),
        }
        if stat.S_ISREG(info.st_mode):
            value["size"] = info.st_size
            value["content"] = _content(path)
        elif stat.S_ISLNK(info.st_mode):
            value["target"] = os.readlink(path)
        elif stat.S_ISBLK(info.st_mode) or stat.S_ISCHR(info.st_mode):
            value["rdev"] = info.st_rdev
        if not stat.S_ISDIR(info.st_mode):
            inodes.setdefault(identity(info, name), []).append(name)
        found[name] = value
        if stat.S_ISDIR(info.st_mode):
            for child in sorted(os.listdir(path)):
                look(path + b"/" + child, name + b"/" + child if name else child)

    look(os.fsencode(root) + b"/.", b"")
    for names in inodes.values():
        for name in names:
            found[name]["links"] = tuple(names)
    return found


def _xattrs(path: bytes) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
        return {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in names
            if not name.startswith(("trusted.overlay.", "security.selinux"))
        }
    except OSError:
        return {}


def _content(path: bytes) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def difference(left: Snapshot, right: Snapshot) -> list[str]:
    """What differs, a line each; for messages."""
    lines = [f"only left: {name!r}" for name in left.keys() - right.keys()]
    lines += [f"only right: {name!r}" for name in right.keys() - left.keys()]
    for name in left.keys() & right.keys():
        for key in left[name].keys() | right[name].keys():
            one, other = left[name].get(key), right[name].get(key)
            if one != other:
                lines.append(f"{name!r}: {key}: {one} / {other}")
    return sorted(lines)


def mount_layer(store: LayerStore, layer: Layer) -> int:
    """A detached mount of a layer of the store, from its metadata image and raw file."""
    meta = store.home.meta_file(layer.config.metadata_digest)
    if not meta.exists():
        meta.write_bytes(store.metadata_image(layer))
    return mount_erofs(str(meta), [str(store.home.raw_file(layer.id))])


@contextmanager
def mounted(store: LayerStore, what: Layer | Environment, writable: Path | None = None) -> Iterator[str]:
    """The path of a mounted layer or environment; ``writable``: an overlay with ``upper`` and ``work`` below it."""
    layers: Sequence[Layer | None] = [what] if isinstance(what, Layer) else what.layers
    with ExitStack() as stack:
        lowers = []
        for layer in reversed(layers):
            assert layer is not None
            fd = mount_layer(store, layer)
            stack.callback(os.close, fd)
            lowers.append(fd)
        if writable is not None:
            for name in ("upper", "work"):
                (writable / name).mkdir(parents=True, exist_ok=True)
            if not os.listdir(writable / "upper"):
                _take_root(f"/proc/self/fd/{lowers[0]}/.", writable / "upper")
            top = mount_overlay(lowers, str(writable / "upper"), str(writable / "work"))
        else:
            top = mount_overlay(lowers) if len(lowers) > 1 else clone_mount(lowers[0])
        stack.callback(os.close, top)
        yield f"/proc/self/fd/{top}"


def _take_root(source: str, upper: Path) -> None:
    """The root of an overlay looks as its upper does, so a new upper gets the attributes of the root below."""
    info = os.stat(source)
    os.chown(upper, info.st_uid, info.st_gid)
    upper.chmod(stat.S_IMODE(info.st_mode))
    for name, value in _xattrs(os.fsencode(source)).items():
        os.setxattr(upper, name, value)
    os.utime(upper, ns=(info.st_mtime_ns, info.st_mtime_ns))
