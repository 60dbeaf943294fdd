"""The C library and raw system calls through ctypes.

The numbers of the new mount API and of everything younger than Linux 5.1 are the same on x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import os

from dsec_linux.errors import failure

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_SYMLINK_FOLLOW = 0x400
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

SYS_PIDFD_SEND_SIGNAL = 424
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
SYS_FSOPEN = 430
SYS_FSCONFIG = 431
SYS_FSMOUNT = 432
SYS_FSPICK = 433
SYS_PIDFD_OPEN = 434
SYS_OPENAT2 = 437
SYS_MOUNT_SETATTR = 442

# use_errno: each thread has its own copy, so that another thread's call cannot change what we read.
libc = ctypes.CDLL(None, use_errno=True)

_c_int, _c_char_p, _c_void_p = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
_c_long, _c_ulong, _c_int64 = ctypes.c_long, ctypes.c_ulong, ctypes.c_int64

libc.syscall.restype = _c_long
libc.mount.argtypes = (_c_char_p, _c_char_p, _c_char_p, _c_ulong, _c_char_p)
libc.umount2.argtypes = (_c_char_p, _c_int)
libc.unshare.argtypes = (_c_int,)
libc.setns.argtypes = (_c_int, _c_int)
libc.prctl.argtypes = (_c_int, _c_ulong, _c_ulong, _c_ulong, _c_ulong)
libc.fallocate.argtypes = (_c_int, _c_int, _c_int64, _c_int64)
libc.linkat.argtypes = (_c_int, _c_char_p, _c_int, _c_char_p, _c_int)
libc.statfs.argtypes = (_c_char_p, _c_void_p)
libc.fstatfs.argtypes = (_c_int, _c_void_p)
libc.statx.argtypes = (_c_int, _c_char_p, _c_int, ctypes.c_uint, _c_void_p)


def check(result: int, call: str, subject: str) -> int:
    """``result`` unless it is negative, which raises LinuxError with this thread's errno."""
    if result < 0:
        raise failure(ctypes.get_errno(), call, subject)
    return result


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """The raw call; -1 and ctypes' errno when it fails. Integers are passed as C longs, None as a null pointer."""
    converted = [_c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(libc.syscall(_c_long(number), *converted))


def encode(path: str | bytes) -> bytes:
    """A path as the kernel gets it. Raises ValueError for a NUL inside, which the C string would cut off."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError(f"embedded null byte in the path {path!r}")
    return raw
