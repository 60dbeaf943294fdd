"""What a container needs in its root file system, and how it is taken out again.

The OCI runtime mounts on /proc, /dev, /sys and /etc/hosts. Where a base lacks one of these it would be made in the
upper, and so in what pack-diff packs. Here they are made before the start and, after the end, removed from the
upper, with the times of their directory put back: while the container ran they were mount points, which nobody
inside can change or remove.

/etc/hosts: with a network of its own a sandbox gets one with ``localhost`` when the image has none or an empty one
(as an exported docker image has); what an image says stays, and may be changed inside. With the host's network the
host's /etc/hosts and /etc/resolv.conf are used (copies: what the sandbox writes there is its own), as docker does.
What is written to a file that was put over the image's does not get into the upper. /etc/hostname is left alone.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat

from dsec_linux.files import open_in_root
from runtimes.errors import SettingsError
from runtimes.oci import MOUNT_POINTS

_LOCALHOST = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY


class Plan:
    """``missing`` are paths to make before the start and to remove from the upper after the end (directories end in
    ``/``), ``binds`` are (file of ours, absolute target), ``parents`` the attributes of the image's directories that
    get copied into the upper because of that."""

    __slots__ = ("binds", "missing", "parents")

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.parents: dict[str, list[int]] = {}
        self.binds: list[tuple[str, str]] = []


def plan(root: int, bundle: str, *, host_network: bool, hostname: str) -> Plan:
    """Look at what is there and write the files to bind into ``bundle``; changes nothing below ``root``."""
    result = Plan()
    for name in MOUNT_POINTS:
        if _kind(root, name) is None:
            result.missing.append(f"{name}/")
    if _kind(root, "etc") not in (None, stat.S_IFDIR):
        return result  # a symlink or a file: not ours to sort out
    wanted: list[tuple[str, bytes]] = []
    if host_network:
        wanted += [(name, _read(f"/etc/{name}")) for name in ("hosts", "resolv.conf")]
    elif _kind(root, "etc/hosts") is None or _empty_file(root, "etc/hosts"):
        wanted.append(("hosts", f"{_LOCALHOST}127.0.1.1\t{hostname}\n".encode()))
    for name, content in wanted:
        kind = _kind(root, f"etc/{name}")
        if not content or kind not in (None, stat.S_IFREG):
            continue
        if kind is None:
            if _kind(root, "etc") is None and "etc/" not in result.missing:
                result.missing.append("etc/")
            elif _kind(root, "etc") is not None:
                result.parents["etc"] = _attributes(root, "etc")
            result.missing.append(f"etc/{name}")
        source = f"{bundle}/{name}"
        with open(source, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
        result.binds.append((source, f"/etc/{name}"))
    return result


def _attributes(root: int, path: str) -> list[int]:
    info = os.stat(path, dir_fd=root, follow_symlinks=False)
    return [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns]


def make_missing(root: int, missing: list[str]) -> None:
    """Make the mount points of a plan, leaving the times of their directories as they were."""
    for path in missing:
        parent, name = _split(path)
        folder = open_in_root(root, parent or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            before = os.fstat(folder)
            if path.endswith("/"):
                os.mkdir(name, 0o755, dir_fd=folder)
                os.chmod(name, 0o755, dir_fd=folder)  # not the umask's choice
            else:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder))
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(folder)


def _remove_unchanged(root: int, path: str, before: list[int]) -> None:
    """Remove an empty directory of an upper that is as the image has it, so that it says nothing."""
    try:
        folder = open_in_root(root, path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        names = [name for name in os.listxattr(folder) if not name.startswith("trusted.overlay.")]
        if names or os.listxattr(folder).count("trusted.overlay.opaque") or _attributes(root, path) != before:
            return
        parent = os.stat(".", dir_fd=root)
        os.rmdir(path, dir_fd=root)
        os.utime(f"/proc/self/fd/{root}", ns=(parent.st_atime_ns, parent.st_mtime_ns))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
    finally:
        os.close(folder)


def remove_missing(upper: str, missing: list[str], parents: dict[str, list[int]]) -> None:
    """Take the mount points of a plan out of an upper that is not mounted any more, and the ``parents`` that were
    copied up for them alone. What is not there, or not as it was made, stays."""
    root = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in reversed(missing):
            parent, name = _split(path)
            try:
                folder = open_in_root(root, parent or ".", os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                before = os.fstat(folder)
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if path.endswith("/"):
                    os.rmdir(name, dir_fd=folder)
                elif stat.S_ISREG(info.st_mode) and info.st_size == 0:
                    os.unlink(name, dir_fd=folder)
                os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            finally:
                os.close(folder)
        for path, attributes in parents.items():
            _remove_unchanged(root, path, attributes)
    finally:
        os.close(root)


def make_workdir(root: int, path: str) -> str:
    """Make the working directory and its parents (0755, root) when they are missing, as docker does; it is a change
    of the sandbox like any other. Returns the path without ``.`` and ``..``. Raises SettingsError."""
    if not path.startswith("/"):
        raise SettingsError(f"the working directory {path!r} is not absolute")
    clean = "/" + posixpath.normpath(path).strip("/")
    try:
        os.close(open_in_root(root, clean, _DIRECTORY))
        return clean
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SettingsError(f"the working directory {clean} cannot be used: {error.strerror}") from None
    made = ""
    for part in clean.strip("/").split("/"):
        parent, made = made, f"{made}/{part}"
        try:
            os.close(open_in_root(root, made, _DIRECTORY))
        except FileNotFoundError:
            try:
                folder = open_in_root(root, parent or "/", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.mkdir(part, 0o755, dir_fd=folder)
                    os.chmod(part, 0o755, dir_fd=folder)
                finally:
                    os.close(folder)
            except OSError as error:
                raise SettingsError(f"the working directory {clean} cannot be made: {error.strerror}: {made}") from None
        except OSError as error:
            raise SettingsError(f"the working directory {clean} cannot be used: {error.strerror}: {made}") from None
    return clean


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent, name


def _kind(root: int, path: str) -> int | None:
    """The type bits of what is there itself (a symlink is one), None for nothing."""
    try:
        return stat.S_IFMT(os.stat(path, dir_fd=root, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _empty_file(root: int, path: str) -> bool:
    info = os.stat(path, dir_fd=root, follow_symlinks=False)
    return stat.S_ISREG(info.st_mode) and info.st_size == 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
