"""What root may do in a container: docker's default set of capabilities, devices and hidden paths.

Source: the documented defaults of ``docker run`` (capabilities(7) for the meaning). Everything else is dropped:
there is no CAP_SYS_ADMIN (no mounts), no CAP_SYS_PTRACE, no CAP_NET_ADMIN, no CAP_SYS_MODULE.
"""

from __future__ import annotations

# Ownership and modes of files.
_FILES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD", "CAP_SETFCAP")
# Becoming another user, and sending signals to one.
_IDENTITY = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
_NETWORK = ("CAP_NET_BIND_SERVICE", "CAP_NET_RAW")
_REST = ("CAP_SYS_CHROOT", "CAP_AUDIT_WRITE")

DEFAULT = _FILES + _IDENTITY + _NETWORK + _REST

# Paths of /proc and /sys that tell of, or reach into, the machine below.
MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)

READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# (type, major, minor) that may be opened; None is any. Any node may be made (mknod is what tar and debootstrap do),
# but only these open: null, zero, full, random, urandom, tty, console, ptmx and the pseudo terminals.
DEVICES: tuple[tuple[str, int, int | None], ...] = (
    ("c", 1, 3),
    ("c", 1, 5),
    ("c", 1, 7),
    ("c", 1, 8),
    ("c", 1, 9),
    ("c", 5, 0),
    ("c", 5, 1),
    ("c", 5, 2),
    ("c", 136, None),
)


def process_capabilities(uid: int) -> dict[str, list[str]]:
    """The ``process.capabilities`` of an OCI config.

    A user other than root has them in the bounding set alone, as after execve(2): a set-uid program can gain them.
    """
    names = list(DEFAULT)
    if uid:
        return {"bounding": names}
    return {"bounding": names, "effective": names, "permitted": names}


def device_rules() -> list[dict[str, object]]:
    """The ``linux.resources.devices`` of an OCI config: deny all, then what may be made and what may be opened."""
    rules: list[dict[str, object]] = [{"allow": False, "access": "rwm"}]
    rules += [{"allow": True, "type": kind, "access": "m"} for kind in ("c", "b")]
    for kind, major, minor in DEVICES:
        rule: dict[str, object] = {"allow": True, "type": kind, "major": major, "access": "rwm"}
        if minor is not None:
            rule["minor"] = minor
        rules.append(rule)
    return rules
