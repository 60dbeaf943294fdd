"""Mount records, ``run/mounts/<id>.json``: which layers each environment uses.

The mount table does not name the layers of an overlay that was made from descriptors, so this does. A record is
written before the descriptor is handed over and removed when the environment is released, or when its owner is
found to be gone.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from dsec_linux.mounts import MountInfo, mountinfo
from dsec_store.errors import NodeError
from dsec_store.home import Home

RECORD_VERSION = 1


def record_path(home: Home, mount_id: str) -> Path:
    """Raises NodeError for an id that is no plain file name."""
    if (
        not mount_id
        or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in mount_id)
        or mount_id.startswith(".")
    ):
        raise NodeError(f"not a mount id: {mount_id!r}; expected letters, digits, - _ and .")
    return home.mounts / f"{mount_id}.json"


def write_record(home: Home, record: dict[str, Any]) -> None:
    """Under a temporary name first, so that a reader never sees half of it. ``run/`` does not outlive a reboot: no
    fsync.
    """
    path = record_path(home, record["id"])
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps({"version": RECORD_VERSION, **record}))
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_record(home: Home, mount_id: str) -> bool:
    try:
        record_path(home, mount_id).unlink()
    except FileNotFoundError:
        return False
    return True


def read_records(home: Home) -> list[dict[str, Any]]:
    """All records, by id. One that cannot be read is left out: its writer died before it was whole."""
    found: list[dict[str, Any]] = []
    try:
        names = sorted(entry.name for entry in os.scandir(home.mounts) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return found
    for name in names:
        try:
            record = json.loads((home.mounts / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("version") == RECORD_VERSION:
            found.append(record)
    return found


def in_use(home: Home, record: dict[str, Any]) -> bool:
    """Whether the environment's owner still has it: a sandbox by its lock, a mount by the mount table."""
    owner = record.get("owner", {})
    if "sandbox" in owner:
        return is_locked(home.sandbox(owner["sandbox"]) / "lock")
    if "target" in owner:
        if Path(f"/proc/{record.get('pid')}").exists():
            return True  # who asked for it may be about to attach it, in a mount namespace of its own
        return any(is_mount(mount, record) for mount in mountinfo())
    return False


def is_mount(mount: MountInfo, record: dict[str, Any]) -> bool:
    """Whether an entry of the mount table is the mount that a record is about; its path may have been renamed."""
    return mount.id == record.get("mount_id") and mount.major_minor == record.get("device")


def is_locked(path: Path) -> bool:
    """Whether somebody holds an exclusive flock, without getting in the way of who wants it or asks the same."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
