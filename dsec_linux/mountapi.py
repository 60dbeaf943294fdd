"""The mount system calls, one function each (fsopen(2) and its companions; man pages of util-linux and the kernel).

Descriptors are close-on-exec. Errors carry the kernel's log, which is read from the fsopen descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from dsec_linux.errors import LinuxError, failure
from dsec_linux.libc import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_RECURSIVE,
    SYS_FSCONFIG,
    SYS_FSMOUNT,
    SYS_FSOPEN,
    SYS_MOUNT_SETATTR,
    SYS_MOVE_MOUNT,
    SYS_OPEN_TREE,
    check,
    encode,
    libc,
    syscall,
)

FSOPEN_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_SET_BINARY, FSCONFIG_SET_PATH = 0, 1, 2, 3
FSCONFIG_SET_PATH_EMPTY, FSCONFIG_SET_FD, FSCONFIG_CMD_CREATE, FSCONFIG_CMD_RECONFIGURE = 4, 5, 6, 7
FSCONFIG_STRING_MAX = 255  # strndup_user(value, 256) in fs/fsopen.c: a longer one is EINVAL with an empty log
FSMOUNT_CLOEXEC = 1
MOVE_MOUNT_F_EMPTY_PATH = 0x04
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
MOUNT_ATTR_NOATIME, MOUNT_ATTR_IDMAP = 0x10, 0x100000
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE, MS_SHARED = 4096, 16384, 1 << 18, 1 << 19, 1 << 20


def kernel_log(fs: int) -> list[str]:
    """The messages waiting on an fsopen descriptor, without their severity letter; each is read once."""
    lines: list[str] = []
    while True:
        try:
            raw = os.read(fs, 4096)
        except OSError:  # ENODATA: no more
            return lines
        if not raw:
            return lines
        text = raw.decode(errors="replace").strip()
        lines.append(text[2:] if text[1:2] == " " and text[0] in "eiw" else text)


def _fs_check(result: int, fs: int, call: str, subject: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise failure(number, call, subject, kernel_log(fs))
    return result


def fsopen(fstype: str) -> int:
    """A descriptor to configure a new file system of a type with. ENODEV: the kernel has no such type."""
    return check(syscall(SYS_FSOPEN, fstype.encode(), FSOPEN_CLOEXEC), "fsopen", fstype)


def fsconfig_flag(fs: int, key: str, subject: str) -> None:
    """Set an option without a value. ``subject`` names the file system in errors."""
    _fs_check(syscall(SYS_FSCONFIG, fs, FSCONFIG_SET_FLAG, key.encode(), None, 0), fs, f"fsconfig({key})", subject)


def fsconfig_string(fs: int, key: str, value: str, subject: str) -> None:
    """Set an option to a string of at most 255 bytes."""
    raw = encode(value)
    if len(raw) > FSCONFIG_STRING_MAX:
        raise failure(
            errno.ENAMETOOLONG,
            f"fsconfig({key})",
            subject,
            [f"the value has {len(raw)} bytes, the kernel takes {FSCONFIG_STRING_MAX}"],
        )
    _fs_check(syscall(SYS_FSCONFIG, fs, FSCONFIG_SET_STRING, key.encode(), raw, 0), fs, f"fsconfig({key}=...)", subject)


def fsconfig_path(fs: int, key: str, path: str, subject: str, folder: int = AT_FDCWD) -> None:
    """Set an option to a path, looked up from ``folder``; few file systems take one."""
    result = syscall(SYS_FSCONFIG, fs, FSCONFIG_SET_PATH, key.encode(), encode(path), folder)
    _fs_check(result, fs, f"fsconfig({key}=path)", subject)


def fsconfig_fd(fs: int, key: str, fd: int, subject: str) -> None:
    """Set an option to an open descriptor."""
    _fs_check(syscall(SYS_FSCONFIG, fs, FSCONFIG_SET_FD, key.encode(), None, fd), fs, f"fsconfig({key}=fd)", subject)


def fsconfig_create(fs: int, subject: str) -> None:
    """Make (or find) the superblock that was described."""
    _fs_check(syscall(SYS_FSCONFIG, fs, FSCONFIG_CMD_CREATE, None, None, 0), fs, "fsconfig(create)", subject)


def fsmount(fs: int, attributes: int, subject: str) -> int:
    """A detached mount of it with MOUNT_ATTR_* ``attributes``; it is gone with its last descriptor unless attached."""
    return _fs_check(syscall(SYS_FSMOUNT, fs, FSMOUNT_CLOEXEC, attributes), fs, "fsmount", subject)


def move_mount(fd: int, target: str | int) -> None:
    """Attach a detached mount to a directory (a path, or an open descriptor of it)."""
    if isinstance(target, int):
        flags = MOVE_MOUNT_F_EMPTY_PATH | 0x40  # MOVE_MOUNT_T_EMPTY_PATH
        check(syscall(SYS_MOVE_MOUNT, fd, b"", target, b"", flags), "move_mount", f"descriptor {target}")
    else:
        result = syscall(SYS_MOVE_MOUNT, fd, b"", AT_FDCWD, encode(target), MOVE_MOUNT_F_EMPTY_PATH)
        check(result, "move_mount", target)


def open_tree(path: str | int, *, clone: bool, recursive: bool = False) -> int:
    """A descriptor of a mounted tree; with ``clone`` a detached copy of the mount.

    A descriptor as ``path`` stands for the mount that it lies in.
    """
    flags = OPEN_TREE_CLOEXEC | (OPEN_TREE_CLONE if clone else 0) | (AT_RECURSIVE if recursive else 0)
    if isinstance(path, int):
        return check(syscall(SYS_OPEN_TREE, path, b"", flags | AT_EMPTY_PATH), "open_tree", f"descriptor {path}")
    return check(syscall(SYS_OPEN_TREE, AT_FDCWD, encode(path), flags), "open_tree", path)


def mount_setattr(
    fd: int,
    *,
    set_attributes: int = 0,
    clear_attributes: int = 0,
    propagation: int = 0,
    userns: int = 0,
    recursive: bool = False,
) -> None:
    """Change a mount's attributes; ``userns`` is a descriptor of a user namespace for MOUNT_ATTR_IDMAP."""
    attr = ctypes.create_string_buffer(struct.pack("=QQQQ", set_attributes, clear_attributes, propagation, userns), 32)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    check(syscall(SYS_MOUNT_SETATTR, fd, b"", flags, attr, 32), "mount_setattr", f"descriptor {fd}")


def umount2(path: str, flags: int = 0) -> None:
    check(libc.umount2(encode(path), flags), "umount2", path)


def mount(source: str | None, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    """mount(2), for propagation changes and binds; file systems are made with ``fsopen`` (mount cuts their options)."""
    raw = [None if text is None else encode(text) for text in (source, fstype, data)]
    check(libc.mount(raw[0], encode(target), raw[1], flags, raw[2]), "mount", target)


def with_log(error: LinuxError, *lines: str) -> LinuxError:
    """The same error with further lines of explanation."""
    return failure(error.errno or errno.EIO, error.call, error.subject, [*error.log, *lines])
