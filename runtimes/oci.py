"""The config.json of an OCI bundle: what ``docker run`` gives a container by default, in the runtime
specification's words.

Memory and pids are not limited here: the limits are on the group above the container's own (supervisor.py), where an
OCI runtime does not reach and where the count of out-of-memory kills is read.
"""

from __future__ import annotations

from runtimes.capabilities import MASKED_PATHS, READONLY_PATHS, device_rules, process_capabilities
from runtimes.errors import SettingsError
from runtimes.seccomp import policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# (target, type, source, options)
_MOUNTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")),
    ("/dev/shm", "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
    ("/sys/fs/cgroup", "cgroup", "cgroup", ("nosuid", "noexec", "nodev", "relatime", "ro")),
)

# Directories of the root file system that the mounts above cover; the others lie on those mounts.
MOUNT_POINTS = ("proc", "dev", "sys")


def check_text(text: str, what: str) -> str:
    """The text, unless it has bytes that are not UTF-8: JSON cannot carry them, and a runtime would hand the command
    others. Raises SettingsError that begins with ``what``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        from erofs_tools.errors import show_path

        shown = show_path(text.encode("utf-8", "surrogateescape" if _is_bytes(text) else "surrogatepass"))
        raise SettingsError(f"{what} '{shown}' is not UTF-8; a container's configuration cannot hold it") from None
    return text


def _is_bytes(text: str) -> bool:
    """Whether every surrogate stands for a byte (os.fsdecode), as in what the system gave us."""
    return all("\udc80" <= c <= "\udcff" for c in text if "\ud800" <= c <= "\udfff")


class Process:
    """What runs: ``argv``, ``env`` (``K=V``), an absolute ``cwd``, numeric ids, and whether it has a terminal of
    ``rows`` and ``columns``. Raises SettingsError for a ``cwd`` that is not UTF-8."""

    __slots__ = ("argv", "columns", "cwd", "env", "gid", "groups", "rows", "terminal", "uid")

    def __init__(
        self,
        argv: Sequence[str],
        env: Sequence[str],
        cwd: str,
        uid: int,
        gid: int,
        groups: Sequence[int],
        terminal: bool = False,
        rows: int = 0,
        columns: int = 0,
    ) -> None:
        self.argv = list(argv)
        self.env = list(env)
        self.cwd = check_text(cwd, "the working directory")
        self.uid = uid
        self.gid = gid
        self.groups = list(groups)
        self.terminal = terminal
        self.rows = rows
        self.columns = columns


def bundle_config(
    process: Process,
    *,
    rootfs: str,
    hostname: str,
    cgroup: str,
    host_network: bool,
    binds: Sequence[tuple[str, str]] = (),
) -> dict[str, object]:
    """The configuration. ``rootfs`` is a path, ``cgroup`` the container's own group below the root of every hierarchy,
    ``binds`` are (file of the host, absolute target that exists in the root file system)."""
    namespaces = ["pid", "ipc", "uts", "mount"]
    sysctl: dict[str, str] = {}
    if not host_network:
        namespaces.append("network")
        # As docker: any user may listen on low ports and ping; both are per network namespace.
        sysctl = {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0 2147483647"}
    mounts = [
        {"destination": target, "type": kind, "source": source, "options": list(options)}
        for target, kind, source, options in _MOUNTS
    ]
    mounts += [
        {"destination": target, "type": "bind", "source": source, "options": ["bind", "rprivate"]}
        for source, target in binds
    ]
    user: dict[str, object] = {"uid": process.uid, "gid": process.gid}
    if process.groups:
        user["additionalGids"] = process.groups
    what: dict[str, object] = {
        "terminal": process.terminal,
        "user": user,
        "args": process.argv,
        "env": process.env,
        "cwd": process.cwd,
        "capabilities": process_capabilities(process.uid),
        "noNewPrivileges": False,
    }
    if process.terminal and process.rows and process.columns:
        what["consoleSize"] = {"height": process.rows, "width": process.columns}
    linux: dict[str, object] = {
        "namespaces": [{"type": name} for name in namespaces],
        "cgroupsPath": cgroup,
        "resources": {"devices": device_rules()},
        "maskedPaths": list(MASKED_PATHS),
        "readonlyPaths": list(READONLY_PATHS),
        "seccomp": policy(),
    }
    if sysctl:
        linux["sysctl"] = sysctl
    return {
        "ociVersion": "1.0.2",
        "process": what,
        "root": {"path": rootfs, "readonly": False},
        "hostname": hostname,
        "mounts": mounts,
        "linux": linux,
    }
