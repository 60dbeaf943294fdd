"""What this machine's kernel can do, found by doing it: each probe tries the real thing, small, and undoes it.

A probe returns what it found, in a few words, or raises OSError (LinuxError where a call has a log).
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH102, PTH118, PTH208

from __future__ import annotations

import errno
import os
import re
import threading

from dsec_linux import fuse, mounts, namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24
"""Bits of CapEff (include/uapi/linux/capability.h)."""


def kernel_version() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if found is None:
        raise OSError(errno.EINVAL, f"uname says release {os.uname().release!r}")
    return int(found[1]), int(found[2])


def has_capability(bit: int) -> bool:
    """Whether the calling process has a capability in effect."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def read_one_file(mount: int, name: str, size: int) -> bytes:
    """The first ``size`` bytes of a file of a detached mount."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=mount)
    try:
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def probe_namespaces() -> str:
    """Make every namespace that a sandbox has, in a child process."""
    kinds = {
        "mount": namespaces.CLONE_NEWNS,
        "pid": namespaces.CLONE_NEWPID,
        "network": namespaces.CLONE_NEWNET,
        "ipc": namespaces.CLONE_NEWIPC,
        "uts": namespaces.CLONE_NEWUTS,
    }
    for name, flag in kinds.items():
        child = os.fork()
        if child == 0:
            number = 1
            try:
                namespaces.unshare(flag)
                number = 0
            except OSError as error:
                number = error.errno or 1
            finally:
                os._exit(number)
        number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if number:
            raise OSError(number, f"no {name} namespace: {os.strerror(number)}")
    return ", ".join(kinds)


def probe_erofs_file(image: str, data: str, name: str, expected: bytes) -> str:
    """Mount ``image`` with ``data`` as its device, both plain files, and read ``name``."""
    mount = mounts.mount_erofs(image, [data])
    try:
        if read_one_file(mount, name, len(expected)) != expected:
            raise OSError(errno.EIO, "a file-backed EROFS mount shows other bytes than the image has")
    finally:
        os.close(mount)
    return "mounted an image and read it"


class _OneFile:
    """FUSE operations of a file system that holds one file."""

    NODE = 2

    def __init__(self, name: bytes, content: bytes) -> None:
        self.name = name
        self.content = content
        self.session: fuse.Session

    def lookup(self, parent: int, name: bytes) -> fuse.Attr | None:
        return self.getattr(self.NODE) if name == self.name else None

    def getattr(self, node: int) -> fuse.Attr | None:
        if node == fuse.ROOT:
            return fuse.Attr(node, 0o40555, nlink=2)
        return fuse.Attr(node, 0o100444, len(self.content)) if node == self.NODE else None

    def open(self, node: int) -> int:
        return fuse.FOPEN_KEEP_CACHE

    def read(self, request: fuse.Read) -> None:
        self.session.data(request, self.content[request.offset : request.offset + request.size])

    def readdir(self, node: int) -> Sequence[tuple[bytes, int, int]]:
        return [(self.name, self.NODE, 0o100000)]


def probe_erofs_over_fuse(image: str, data: bytes, name: str, expected: bytes) -> str:
    """The same with the data in a file of a FUSE session of this process: how layers are read on demand."""
    device = fuse.open_device()
    files = _OneFile(b"data", data)
    files.session = session = fuse.Session(device, files, lambda text, error: None)
    thread = threading.Thread(target=session.serve, daemon=True)
    export = mount = -1
    try:
        export = mounts.mount_fuse(device)
        thread.start()
        mount = mounts.mount_erofs(image, [f"/proc/self/fd/{export}/data"])
        if read_one_file(mount, name, len(expected)) != expected:
            raise OSError(errno.EIO, "EROFS over FUSE shows other bytes than the image has")
        return f"served a read, protocol 7.{session.kernel_minor}"
    finally:
        for fd in (mount, export):
            if fd >= 0:
                os.close(fd)
        session.close()
        os.close(device)
        if thread.ident is not None:
            thread.join()


def probe_overlay(image: str, data: str, name: str, folder: str) -> str:
    """Stack two layers by descriptor under an upper in ``folder``, write, delete and look."""
    upper, work = os.path.join(folder, "upper"), os.path.join(folder, "work")
    os.mkdir(upper)
    os.mkdir(work)
    layers: list[int] = []
    try:
        for _ in range(2):
            layers.append(mounts.mount_erofs(image, [data]))
        overlay = mounts.mount_overlay(layers, upper, work)
    finally:
        for layer in layers:
            os.close(layer)
    try:
        os.unlink(name, dir_fd=overlay)
        os.mkdir("made", dir_fd=overlay)
        shown = os.listdir(f"/proc/self/fd/{overlay}")
        if shown != ["made"] or sorted(os.listdir(upper)) != sorted(["made", name]):
            raise OSError(errno.EIO, "an overlay of two EROFS layers does not show what was written to it")
    finally:
        os.close(overlay)
    return "stacked two layers under an upper"


def probe_clone(image: str, data: str) -> str:
    """Clone a detached mount (Linux 6.15): how a single layer is mounted read-only."""
    layer = mounts.mount_erofs(image, [data])
    try:
        os.close(mounts.clone_mount(layer))
    finally:
        os.close(layer)
    return "cloned a detached mount"


def probe_xattrs(folder: str) -> str:
    """Set trusted and user xattrs on a file in ``folder``: what overlayfs and images with xattrs need of the disk."""
    path = os.path.join(folder, "xattrs")
    with open(path, "w"):
        pass
    for name in ("trusted.dsec", "user.dsec"):
        try:
            os.setxattr(path, name, b"1")
        except OSError as error:
            raise OSError(error.errno, f"no {name.split('.')[0]} xattrs on {folder}: {error.strerror}") from error
    return "trusted, user"
