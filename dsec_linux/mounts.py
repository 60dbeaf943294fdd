"""Mounts as this project makes them: detached first, by descriptor, with the new mount API.

A detached mount is one that only its descriptors hold: when the last is closed, or the process dies, it is gone and the
mount table never knew it. ``attach`` puts one into the tree of directories.

The kernel refuses several mistakes with an errno and an empty log (its text goes to dmesg). Those are looked for before
the call, so that the error can say what is wrong.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH115

from __future__ import annotations

import errno
import os
import stat
import struct

from dsec_linux import mountapi
from dsec_linux.errors import LinuxError, failure, from_os_error
from dsec_linux.files import statfs_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_LOWERS = 500  # OVL_MAX_STACK

# A forged trusted.overlay.redirect or metacopy in a layer would show one file under another's name. xino=on would set
# bit 63 of st_ino.
OVERLAY_OPTIONS = (
    ("redirect_dir", "nofollow"),
    ("metacopy", "off"),
    ("index", "off"),
    ("nfs_export", "off"),
    ("xino", "off"),
)

_EROFS_MAGIC = 0xE0F5E1E2
_NO_METADATA_ON = ("tmpfs", "ramfs", "overlayfs")  # the kernel says ENOTBLK there (memfds are tmpfs)


def _refuse(call: str, subject: str, text: str, number: int = errno.EINVAL) -> LinuxError:
    return failure(number, call, subject, [text])


def _open_path(path: str, call: str) -> int:
    """An O_PATH descriptor: what was checked is what gets mounted, and long paths fit."""
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, call, path) from error


def _as_string(path: str, fd: int) -> str:
    """The path as an fsconfig string: itself, so that mountinfo shows it, or by descriptor where it is too long."""
    return path if len(os.fsencode(path)) <= mountapi.FSCONFIG_STRING_MAX else f"/proc/self/fd/{fd}"


class _Superblock:
    """What a mount needs to know of an EROFS superblock (at byte 1024): block size, and blocks of each device."""

    __slots__ = ("block_size", "device_blocks")

    def __init__(self, source: str, call: str) -> None:
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, call, source) from error
        try:
            raw = os.pread(fd, 128, 1024)
            if len(raw) < 128 or struct.unpack_from("<I", raw)[0] != _EROFS_MAGIC:
                raise _refuse(call, source, "no EROFS superblock at byte 1024")
            bits = raw[12]
            if not 9 <= bits <= 16:
                raise _refuse(call, source, f"EROFS superblock with blocks of 2^{bits} bytes, expected 2^9 to 2^16")
            self.block_size = 1 << bits
            count, slot = struct.unpack_from("<HH", raw, 86)
            slots = os.pread(fd, 128 * count, 128 * slot)
        finally:
            os.close(fd)
        if len(slots) < 128 * count:
            raise _refuse(call, source, f"the file ends inside its table of {count} devices")
        self.device_blocks = [struct.unpack_from("<I", slots, 128 * i + 64)[0] for i in range(count)]


def mount_erofs(source: str, devices: Sequence[str] = ()) -> int:
    """A detached, read-only, nodev mount of a file-backed EROFS image.

    ``source`` is the metadata image: a file on ext4, xfs, btrfs and the like, not on tmpfs or overlayfs. ``devices``
    are the data blobs in the order of its device table; files anywhere, also of a FUSE mount (``/proc/self/fd/N/name``
    for a detached one, served by another thread or process). Returns the descriptor of fsmount().

    Raises LinuxError; for a wrong number of devices, a device that is shorter than its table entry or not whole blocks,
    and a source on a file system that the kernel does not take, before the call.
    """
    call = "mount_erofs"
    held: list[int] = []
    try:
        held.append(_open_path(source, call))
        if not stat.S_ISREG(os.fstat(held[0]).st_mode):
            raise _refuse(call, source, "not a regular file")
        kind = statfs_name(held[0])
        if kind in _NO_METADATA_ON:
            raise _refuse(
                call,
                source,
                f"it lies on {kind}, where EROFS takes no image: put it on ext4, xfs or btrfs",
                errno.ENOTBLK,
            )
        superblock = _Superblock(source, call)
        if len(devices) != len(superblock.device_blocks):
            raise _refuse(
                call, source, f"the image names {len(superblock.device_blocks)} devices, {len(devices)} were given"
            )
        for device, blocks in zip(devices, superblock.device_blocks, strict=True):
            held.append(_open_path(device, call))
            _check_device(device, held[-1], blocks, superblock.block_size)
        fs = mountapi.fsopen("erofs")
        try:
            mountapi.fsconfig_flag(fs, "ro", source)
            mountapi.fsconfig_string(fs, "source", _as_string(source, held[0]), source)
            for device, fd in zip(devices, held[1:], strict=True):
                mountapi.fsconfig_string(fs, "device", _as_string(device, fd), source)
            try:
                mountapi.fsconfig_create(fs, source)
            except LinuxError as error:
                if error.errno == errno.ENOTBLK:
                    raise mountapi.with_log(error, f"{kind} cannot carry an EROFS image here") from error
                raise
            return mountapi.fsmount(fs, mountapi.MOUNT_ATTR_RDONLY | mountapi.MOUNT_ATTR_NODEV, source)
        finally:
            os.close(fs)
    finally:
        for fd in held:
            os.close(fd)


def _check_device(device: str, fd: int, blocks: int, block_size: int) -> None:
    call = "mount_erofs(device)"
    try:
        info = os.fstat(fd)
    except OSError as error:
        raise from_os_error(error, call, device) from error
    if stat.S_ISBLK(info.st_mode):
        return
    if not stat.S_ISREG(info.st_mode):
        raise _refuse(call, device, "neither a regular file nor a block device")
    if info.st_size % block_size:
        raise _refuse(
            call, device, f"{info.st_size} bytes are not whole blocks of {block_size}: the last one could not be read"
        )
    if info.st_size < blocks * block_size:
        raise _refuse(call, device, f"it has {info.st_size} bytes, the image's device table says {blocks * block_size}")


def mount_overlay(lowers: Sequence[int], upper: str | None = None, work: str | None = None) -> int:
    """A detached, nodev overlay of mounted layers, with a writable ``upper`` (and its ``work`` folder) or without.

    ``lowers`` are descriptors of directories, normally of detached mounts, TOP FIRST. They may be closed afterwards.
    Returns the descriptor of fsmount(). Raises LinuxError; before the call for one lower without an upper (use
    ``clone_mount``), more than 500 lowers, the same lower twice, and an upper and work that overlayfs does not take.
    """
    call = "mount_overlay"
    if (upper is None) != (work is None):
        raise _refuse(call, "overlay", "upper and work are given together or not at all")
    if not lowers:
        raise _refuse(call, "overlay", "no lower layer")
    if len(lowers) == 1 and upper is None:
        raise _refuse(call, "overlay", "overlayfs takes no single layer without an upper: clone the layer's mount")
    if len(lowers) > MAX_LOWERS:
        raise _refuse(call, "overlay", f"{len(lowers)} lower layers, the kernel takes {MAX_LOWERS}")
    _check_lowers(lowers)
    held: list[int] = []
    try:
        if upper is not None and work is not None:
            held = _open_upper_and_work(upper, work)
        fs = mountapi.fsopen("overlay")
        try:
            mountapi.fsconfig_string(fs, "source", "dsec", "overlay")
            for key, value in OVERLAY_OPTIONS:
                mountapi.fsconfig_string(fs, key, value, "overlay")
            for fd in lowers:
                _set_layer(fs, "lowerdir+", fd, "overlay")
            if held:
                # By descriptor: overlayfs undoes backslashes in a path that comes as a string.
                _set_layer(fs, "upperdir", held[0], f"overlay with upper {upper}")
                _set_layer(fs, "workdir", held[1], f"overlay with work {work}")
            mountapi.fsconfig_create(fs, "overlay" if upper is None else f"overlay with upper {upper}")
            attributes = mountapi.MOUNT_ATTR_NODEV | (0 if held else mountapi.MOUNT_ATTR_RDONLY)
            return mountapi.fsmount(fs, attributes, "overlay")
        finally:
            os.close(fs)
    finally:
        for fd in held:
            os.close(fd)


def _set_layer(fs: int, key: str, fd: int, subject: str) -> None:
    """A layer by its descriptor, or by the descriptor's name in /proc where the kernel takes none (before 6.13)."""
    try:
        mountapi.fsconfig_fd(fs, key, fd, subject)
    except LinuxError as error:
        if error.errno != errno.EINVAL:
            raise
        mountapi.fsconfig_string(fs, key, f"/proc/self/fd/{fd}", subject)


def _check_lowers(lowers: Sequence[int]) -> None:
    call = "mount_overlay(lower)"
    seen: dict[tuple[int, int], int] = {}
    for position, fd in enumerate(lowers, 1):
        try:
            info = os.fstat(fd)
        except OSError as error:
            raise from_os_error(error, call, f"descriptor {fd}") from error
        if not stat.S_ISDIR(info.st_mode):
            raise _refuse(call, f"descriptor {fd}", "not a directory", errno.ENOTDIR)
        other = seen.setdefault((info.st_dev, info.st_ino), position)
        if other != position:
            raise _refuse(call, f"descriptor {fd}", f"lower layers {other} and {position} are the same", errno.ELOOP)


def _open_upper_and_work(upper: str, work: str) -> list[int]:
    """O_PATH descriptors of both, checked for what overlayfs refuses with its text only in dmesg."""
    held: list[int] = []
    try:
        for path in (upper, work):
            held.append(_open_path(path, "mount_overlay"))
            if not stat.S_ISDIR(os.fstat(held[-1]).st_mode):
                raise _refuse("mount_overlay", path, "not a directory", errno.ENOTDIR)
            kind = statfs_name(held[-1])
            if kind in ("overlayfs", "erofs", "squashfs"):
                raise _refuse("mount_overlay", path, f"it lies on {kind}, which overlayfs does not take as an upper")
            if os.fstatvfs(held[-1]).f_flag & os.ST_RDONLY:
                raise _refuse("mount_overlay", path, "it lies on a read-only file system", errno.EROFS)
        one, two = os.fstat(held[0]), os.fstat(held[1])
        if one.st_dev != two.st_dev:
            raise _refuse("mount_overlay", work, f"it lies on another file system than the upper {upper}", errno.EXDEV)
        real_upper, real_work = (os.readlink(f"/proc/self/fd/{fd}") + "/" for fd in held)
        same = one.st_ino == two.st_ino
        if same or real_upper.startswith(real_work) or real_work.startswith(real_upper):
            raise _refuse("mount_overlay", work, f"it is not apart from the upper {upper}")
    except BaseException:
        for fd in held:
            os.close(fd)
        raise
    return held


def clone_mount(fd: int) -> int:
    """Another detached mount of the same file system (one superblock, one page cache) with the same attributes.

    Cloning a mount that is itself detached needs Linux 6.15; EINVAL before.
    """
    return mountapi.open_tree(fd, clone=True)


def attach(fd: int, target: str) -> None:
    """Mount a detached mount on the directory ``target`` of the caller's mount namespace.

    The caller closes the descriptor then: while it is open, unmounting is EBUSY.
    """
    mountapi.move_mount(fd, target)


def mount_fuse(device: int) -> int:
    """A detached, read-only FUSE mount served by whoever reads ``device`` (an open /dev/fuse).

    Nothing has to be answered before this returns; the first use of the mount waits for INIT.
    """
    fs = mountapi.fsopen("fuse")
    try:
        for key, value in (
            ("source", "dsec"),
            ("subtype", "dsec"),
            ("fd", str(device)),
            ("rootmode", "40000"),
            ("user_id", "0"),
            ("group_id", "0"),
        ):
            mountapi.fsconfig_string(fs, key, value, "fuse")
        mountapi.fsconfig_flag(fs, "allow_other", "fuse")
        mountapi.fsconfig_flag(fs, "default_permissions", "fuse")
        mountapi.fsconfig_create(fs, "fuse")
        return mountapi.fsmount(fs, _FUSE_ATTRIBUTES, "fuse")
    finally:
        os.close(fs)


_FUSE_ATTRIBUTES = (
    mountapi.MOUNT_ATTR_RDONLY | mountapi.MOUNT_ATTR_NOSUID | mountapi.MOUNT_ATTR_NODEV | mountapi.MOUNT_ATTR_NOEXEC
)


def _mount_simple(fstype: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
    fs = mountapi.fsopen(fstype)
    try:
        for key, value in options:
            mountapi.fsconfig_string(fs, key, value, fstype)
        mountapi.fsconfig_create(fs, fstype)
        return mountapi.fsmount(fs, attributes, fstype)
    finally:
        os.close(fs)


def mount_proc() -> int:
    """A detached /proc of the caller's pid namespace."""
    return _mount_simple(
        "proc",
        [("source", "proc")],
        mountapi.MOUNT_ATTR_NOSUID | mountapi.MOUNT_ATTR_NODEV | mountapi.MOUNT_ATTR_NOEXEC,
    )


def mount_tmpfs(size: str, mode: int = 0o755) -> int:
    """A detached tmpfs of at most ``size`` (tmpfs(5): bytes, or with k, m, g or %)."""
    options = [("source", "dsec"), ("size", size), ("mode", f"{mode:o}")]
    return _mount_simple("tmpfs", options, mountapi.MOUNT_ATTR_NOSUID | mountapi.MOUNT_ATTR_NODEV)


def mount_fusectl() -> int:
    """A detached fusectl: ``<minor of st_dev>/abort`` and ``waiting`` of every FUSE mount."""
    return _mount_simple("fusectl", [("source", "fusectl")], mountapi.MOUNT_ATTR_NOSUID | mountapi.MOUNT_ATTR_NODEV)


def make_slave(path: str = "/") -> None:
    """Let mounts of this namespace no longer reach the one it was copied from (and still receive from there)."""
    mountapi.mount(None, path, None, mountapi.MS_SLAVE | mountapi.MS_REC)


def umount(path: str, detach: bool = False) -> None:
    """Unmount; ``detach`` takes it out of the tree at once and lets users end later. Never follows a symlink."""
    mountapi.umount2(path, mountapi.UMOUNT_NOFOLLOW | (mountapi.MNT_DETACH if detach else 0))


class MountInfo:
    """One line of /proc/PID/mountinfo (proc(5)), octal escapes undone."""

    __slots__ = ("fstype", "id", "major_minor", "options", "parent", "root", "source", "super_options", "target")

    def __init__(
        self,
        id: int,
        parent: int,
        major_minor: str,
        root: str,
        target: str,
        options: list[str],
        fstype: str,
        source: str,
        super_options: list[str],
    ) -> None:
        self.id = id
        self.parent = parent
        self.major_minor = major_minor
        self.root = root
        self.target = target
        self.options = options
        self.fstype = fstype
        self.source = source
        self.super_options = super_options

    def __repr__(self) -> str:
        return f"MountInfo({self.id} {self.fstype} {self.source} on {self.target})"


def mountinfo(pid: int | str = "self") -> list[MountInfo]:
    """The mounts that a process sees, in the kernel's order (later ones on top)."""
    path = f"/proc/{pid}/mountinfo"
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    found = []
    for line in raw.splitlines():
        before, _, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        found.append(
            MountInfo(
                int(fields[0]),
                int(fields[1]),
                fields[2].decode(),
                _unescape(fields[3]),
                _unescape(fields[4]),
                _unescape(fields[5]).split(","),
                tail[0].decode(),
                _unescape(tail[1]),
                _unescape(b" ".join(tail[2:])).split(","),
            )
        )
    return found


def _unescape(field: bytes) -> str:
    # The kernel writes space, tab, newline and backslash as a backslash and three octal digits. Not with re: its import
    # costs more than this module's.
    first, *rest = field.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))
