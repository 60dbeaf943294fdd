"""Files: what the standard library lacks, and the ways to make one that is whole or not there."""

# pathlib costs more to import than this module.
# ruff: noqa: PTH104, PTH108, PTH120

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from dsec_linux.errors import failure, from_os_error
from dsec_linux.libc import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    SYS_OPENAT2,
    check,
    encode,
    libc,
    syscall,
)

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
FALLOC_FL_ZERO_RANGE = 0x10

STATX_BASIC_STATS = 0x7FF
STATX_BTIME = 0x800
STATX_MNT_ID = 0x1000
AT_STATX_DONT_SYNC = 0x4000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8

# include/uapi/linux/magic.h and the file systems' own headers.
FILE_SYSTEMS = {
    0xEF53: "ext4",  # ext2 and ext3 share it
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x9123683E: "btrfs",
    0x58465342: "xfs",
    0x65735546: "fuse",
    0xE0F5E1E2: "erofs",
    0x73717368: "squashfs",
    0x0027E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x00009FA0: "proc",
    0x62656572: "sysfs",
    0x00006969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x00C36400: "ceph",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x01021997: "9p",
    0x6A656A63: "virtiofs",
    0x00001CD1: "devpts",
    0x65735543: "fusectl",
    0x6E736673: "nsfs",
    0x19800202: "mqueue",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
}


class Statx:
    """What statx(2) says. Times are nanoseconds since 1970; ``btime_ns`` and ``mnt_id`` are None where not known."""

    __slots__ = (
        "atime_ns",
        "attributes",
        "blksize",
        "blocks",
        "btime_ns",
        "ctime_ns",
        "dev_major",
        "dev_minor",
        "gid",
        "ino",
        "mnt_id",
        "mode",
        "mtime_ns",
        "nlink",
        "rdev_major",
        "rdev_minor",
        "size",
        "uid",
    )  # fmt: skip

    def __init__(self, raw: bytes) -> None:
        mask, self.blksize, self.attributes = struct.unpack_from("=IIQ", raw, 0)
        self.nlink, self.uid, self.gid, self.mode = struct.unpack_from("=IIIH", raw, 16)
        self.ino, self.size, self.blocks = struct.unpack_from("=QQQ", raw, 32)

        def nanoseconds(offset: int) -> int:
            seconds, fraction = struct.unpack_from("=qI", raw, offset)
            return int(seconds) * 1_000_000_000 + int(fraction)

        self.atime_ns, self.ctime_ns, self.mtime_ns = nanoseconds(64), nanoseconds(96), nanoseconds(112)
        self.btime_ns: int | None = nanoseconds(80) if mask & STATX_BTIME else None
        self.rdev_major, self.rdev_minor, self.dev_major, self.dev_minor = struct.unpack_from("=IIII", raw, 128)
        self.mnt_id: int | None = struct.unpack_from("=Q", raw, 144)[0] if mask & STATX_MNT_ID else None


def statx(path: str | int, *, follow: bool = True, sync: bool = True) -> Statx:
    """statx(2) of a path, or of an open descriptor (O_PATH ones too).

    ``sync=False`` takes what the kernel knows without asking the server of a network or FUSE file system.
    """
    mask = STATX_BASIC_STATS | STATX_BTIME | STATX_MNT_ID
    flags = (0 if follow else AT_SYMLINK_NOFOLLOW) | (0 if sync else AT_STATX_DONT_SYNC)
    buffer = ctypes.create_string_buffer(256)
    if isinstance(path, int):
        result = libc.statx(path, b"", flags | AT_EMPTY_PATH, mask, buffer)
    else:
        result = libc.statx(AT_FDCWD, encode(path), flags, mask, buffer)
    check(result, "statx", _subject(path))
    return Statx(buffer.raw)


def _subject(path: str | int) -> str:
    return f"descriptor {path}" if isinstance(path, int) else path


def statfs_magic(path: str | int) -> int:
    """The magic number of the file system that holds a path or an open descriptor."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; f_type is its first long
    result = libc.fstatfs(path, buffer) if isinstance(path, int) else libc.statfs(encode(path), buffer)
    check(result, "statfs", _subject(path))
    return int(struct.unpack_from("=q", buffer.raw)[0]) & 0xFFFFFFFF


def statfs_name(path: str | int) -> str:
    """The name of that file system (``ext4``, ``tmpfs``, ``overlayfs`` …), or the magic number in hex if unknown."""
    magic = statfs_magic(path)
    return FILE_SYSTEMS.get(magic, hex(magic))


def copy_file_range(source: int, target: int, count: int, source_offset: int, target_offset: int) -> None:
    """Copy exactly ``count`` bytes inside the kernel, without moving either file's position.

    Raises LinuxError with EXDEV, EOPNOTSUPP and the like where the file systems cannot (the caller chooses what to do
    then), and EIO when the source ends before.
    """
    subject = f"descriptors {source} to {target}"
    done = 0
    while done < count:
        try:
            copied = os.copy_file_range(source, target, count - done, source_offset + done, target_offset + done)
        except OSError as error:
            raise from_os_error(error, "copy_file_range", subject) from error
        if copied == 0:
            raise failure(
                errno.EIO,
                "copy_file_range",
                subject,
                [f"the source ends {count - done} bytes before {count} were copied"],
            )
        done += copied


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) with FALLOC_FL_* in ``mode``; never emulated by writing zeros."""
    check(libc.fallocate(fd, mode, offset, length), "fallocate", f"descriptor {fd}")


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the blocks of a range back; it reads as zeros, the size stays."""
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length)


def memfd(name: str, content: bytes = b"", *, sealed: bool = False) -> int:
    """A file without a name in memory, close-on-exec, positioned at 0. ``sealed``: nobody can change it any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        if sealed:
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    """write(2) until everything is written."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def fsync_dir(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file_durable(path: str, content: bytes, mode: int = 0o600) -> None:
    """Replace a file so that after a power cut it is the old or the new one, whole; on return it is the new one.

    A temporary name in the same folder, fsync, rename, fsync of the folder. An error leaves no temporary file.
    """
    folder = os.path.dirname(path) or "."
    temporary = f"{folder}/.tmp-{os.getpid()}-{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)  # not the umask's choice
            write_all(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    fsync_dir(folder)


def unnamed_file(folder: str, mode: int = 0o600) -> int:
    """A file without a name in a folder's file system (O_TMPFILE), read-write; it is gone when its descriptor is.

    ``link_fd`` gives it a name.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
    except OSError as error:
        raise from_os_error(error, "open(O_TMPFILE)", folder) from error


def link_fd(fd: int, path: str) -> None:
    """Give an open file (of ``unnamed_file``) a name. Raises FileExistsError when there is one already.

    The name is durable after ``fsync_dir`` of its folder; the content after ``os.fsync`` before.
    """
    source = encode(f"/proc/self/fd/{fd}")
    check(libc.linkat(AT_FDCWD, source, AT_FDCWD, encode(path), AT_SYMLINK_FOLLOW), "linkat", path)


def open_beneath(folder: int, path: str | bytes, flags: int = os.O_RDONLY, mode: int = 0) -> int:
    """Open a path that cannot leave the folder: no ``..`` out of it, no absolute path or symlink, no magic link.

    openat2(2) with RESOLVE_BENEATH. Raises LinuxError: EXDEV when the path would leave, ELOOP at a magic link.
    """
    return _openat2(folder, path, flags, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS, "openat2(RESOLVE_BENEATH)")


def open_in_root(folder: int, path: str | bytes, flags: int = os.O_RDONLY, mode: int = 0) -> int:
    """Open a path as a process whose root is the folder: absolute paths and symlinks start there, ``..`` ends there.

    openat2(2) with RESOLVE_IN_ROOT. Raises LinuxError: ELOOP at a magic link.
    """
    return _openat2(folder, path, flags, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS, "openat2(RESOLVE_IN_ROOT)")


def _openat2(folder: int, path: str | bytes, flags: int, mode: int, resolve: int, call: str) -> int:
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve), 24)  # struct open_how
    return check(syscall(SYS_OPENAT2, folder, encode(path), how, 24), call, os.fsdecode(path))
