"""What this machine has of what dsec needs, and what does not work without it (``dsec doctor``).

Kernel features are tried, not looked up: a tiny layer is made, mounted from a file and over FUSE, and stacked.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from dsec_linux import cgroups, features
from dsec_linux.files import statfs_name
from dsec_store.home import Home
from erofs_tools.ondisk import BLOCK
from erofs_tools.tree import BytesContent, Entry, Tree
from erofs_tools.writer import write_image

OK, LIMITED, MISSING = "ok", "limited", "missing"
MINIMUM_KERNEL = (6, 12)
DISK_FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
ENOUGH_FILES = 4096
"""A node holds about four descriptors for each mounted layer."""
ENOUGH_SPACE = 1 << 20
"""Bytes that must fit on the home's disk, or nothing else will."""
SPARE_FOLDERS = ("/var/tmp", "/tmp")
PREFIX = ".dsec-doctor-"
READ_PAGES = 256
"""Pages of one FUSE read of 1 MiB, what the node's readahead is set to."""


@dataclass(frozen=True)
class Check:
    """One line. ``status`` is ok, limited (something works less well) or missing (``needed_for`` does not work);
    ``required``: the main job, running a sandbox from layers, needs it."""

    name: str
    status: str
    found: str
    needed_for: str
    required: bool

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def able(checks: list[Check]) -> bool:
    """Whether sandboxes can be run here."""
    return not any(check.required and check.status == MISSING for check in checks)


def examine(home: Home) -> list[Check]:
    """Look at everything; takes some milliseconds and leaves nothing. Creates nothing in a home that does not exist."""
    place, trouble = _place(home.path)
    # The kinds of process first: they fork, which a process with threads should not.
    return [*_permissions(), *_kernel(place), *_groups(), _home(home, place, trouble), *_programs()]


def _place(path: Path) -> tuple[Path, str]:
    """The folder that a home is in or would be made in, and why it cannot be (empty: it can)."""
    for folder in (path, *path.parents):
        if os.path.isdir(folder):  # noqa: PTH112 (Path's raises where it may not look)
            return folder, _trial(folder)
        try:
            mode = folder.lstat().st_mode
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # what is above it says more
                continue
            return folder, f"{folder}: {error.strerror}"
        kind = "a symbolic link that leads to no folder" if stat.S_ISLNK(mode) else "not a folder"
        return folder, f"{folder} is {kind}"
    raise AssertionError("the root is a folder")


def _trial(folder: Path) -> str:
    """Why nothing can be written in a folder; empty when something can."""
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as scratch:
            (Path(scratch) / "file").write_bytes(bytes(ENOUGH_SPACE))
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror}"
    return ""


def _probe(name: str, needed_for: str, probe: Callable[[], str], *, required: bool = True) -> Check:
    try:
        return Check(name, OK, probe(), needed_for, required)
    except OSError as error:
        text = str(error) if type(error) is not OSError else error.strerror or str(error)
        return Check(name, MISSING, text, needed_for, required)


def _permissions() -> Iterator[Check]:
    uid = os.geteuid()
    yield Check("root", OK if uid == 0 else MISSING, f"uid {uid}", "mounts, sandboxes", True)
    admin = features.has_capability(features.CAP_SYS_ADMIN)
    yield Check(
        "CAP_SYS_ADMIN", OK if admin else MISSING, "in effect" if admin else "dropped", "mounts, namespaces", True
    )
    raise_limits = features.has_capability(features.CAP_SYS_RESOURCE)
    yield Check(
        "CAP_SYS_RESOURCE",
        OK if raise_limits else LIMITED,
        "in effect" if raise_limits else "dropped: hard limits cannot be raised, oom_score_adj not lowered",
        "limits for a sandbox above this process's own",
        False,
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    yield Check(
        "open files",
        OK if unlimited or hard >= ENOUGH_FILES else LIMITED,
        "hard limit " + ("none" if unlimited else str(hard)),
        f"{ENOUGH_FILES // 4} mounted layers at once",
        False,
    )
    yield _probe("namespaces", "sandboxes", features.probe_namespaces)


def _kernel(place: Path) -> Iterator[Check]:
    version = features.kernel_version()
    yield Check(
        "kernel",
        OK if version >= MINIMUM_KERNEL else MISSING,
        os.uname().release,
        "everything: 6.12 is the first with file-backed EROFS",
        True,
    )
    yield from _kernel_features(place)
    pages = _number("/proc/sys/fs/fuse/max_pages_limit", READ_PAGES)
    yield Check(
        "FUSE read size",
        OK if pages >= READ_PAGES else LIMITED,
        f"fs.fuse.max_pages_limit {pages}",
        "reads of 1 MiB (fewer requests)",
        False,
    )
    yield Check(
        "FUSE resend",
        OK if version >= (6, 9) else LIMITED,
        "by version" if version >= (6, 9) else f"Linux {version[0]}.{version[1]}",
        "readers that live through a restart of the node (not yet used)",
        False,
    )
    bdi = Path("/sys/class/bdi")
    writable = bdi.is_dir() and not os.statvfs(bdi).f_flag & os.ST_RDONLY
    yield Check(
        "readahead",
        OK if writable else LIMITED,
        "/sys/class/bdi " + ("writable" if writable else "not writable: 128 KiB"),
        "reads of 1 MiB (fewer requests)",
        False,
    )


def _kernel_features(place: Path) -> Iterator[Check]:
    """Tried in the home's file system; where that takes no file, in another one."""
    content, name = b"dsec doctor\n".ljust(BLOCK, b"."), "file"
    with ExitStack() as stack:
        scratch = _scratch(stack, place)
        image, data = f"{scratch}/image.erofs", f"{scratch}/data"

        def probe(title: str, needed_for: str, function: Callable[..., str], *args: object, must: bool = True) -> Check:
            def attempt() -> str:
                if not scratch:
                    raise OSError(f"not tried: no file can be made in {' or '.join([str(place), *SPARE_FOLDERS])}")
                return function(*args)

            return _probe(title, needed_for, attempt, required=must)

        if scratch:
            _write_pair(image, data, name, content)
        yield probe(
            "EROFS from files",
            "mounts, sandboxes (CONFIG_EROFS_FS_BACKED_BY_FILE)",
            features.probe_erofs_file,
            *(image, data, name, content),
        )
        yield probe(
            "EROFS over FUSE",
            "layers that are read on demand from a registry",
            features.probe_erofs_over_fuse,
            *(image, content, name, content),
        )
        yield probe(
            "overlayfs",
            "environments of several layers, writable mounts, sandboxes",
            features.probe_overlay,
            *(image, data, name, scratch),
        )
        yield probe(
            "clone of a mount",
            "a single layer mounted read-only (Linux 6.15)",
            features.probe_clone,
            *(image, data),
            must=False,
        )
        yield probe("xattrs", "uppers, layers with xattrs", features.probe_xattrs, scratch)


def _scratch(stack: ExitStack, place: Path) -> str:
    """A temporary folder that takes files, for as long as the stack; empty where there is none."""
    for folder in (place, *map(Path, SPARE_FOLDERS)):
        if os.path.isdir(folder) and not _trial(folder):  # noqa: PTH112
            return stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder))
    return ""


def _write_pair(image: str, data: str, name: str, content: bytes) -> None:
    tree = Tree()
    tree.add(Entry(b"", stat.S_IFDIR | 0o755))
    entry = Entry(name.encode(), stat.S_IFREG | 0o644, size=len(content), content=BytesContent(content))
    tree.add(entry)
    with Path(image).open("wb") as metadata, Path(data).open("wb") as blob:
        write_image(tree, metadata, blob.write)


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default


def _groups() -> Iterator[Check]:
    needed_for = "dsec run --memory, --pids; ending a sandbox whole"
    try:
        layout = cgroups.detect()
    except OSError as error:
        yield Check("cgroups", MISSING, str(error), needed_for, True)
        return
    wanted = ("memory", "pids", "freezer") if layout.kind != "v2" else ("memory", "pids")
    absent = [name for name in wanted if name not in layout.controllers]
    kinds = {"v1": "v1", "v2": "v2", "hybrid": "v1 with an unused v2 beside it"}
    found = kinds.get(layout.kind, layout.kind)
    if absent:
        found += f", without {', '.join(absent)}"
    yield Check("cgroups", LIMITED if absent else OK, found, needed_for, False)


def _home(home: Home, place: Path, trouble: str) -> Check:
    needed_for = f"layers, cache, sandboxes: a disk file system ({', '.join(DISK_FILE_SYSTEMS)}; others are not tried)"
    where = f"{home.path}{'' if home.path == place else ' (to be made)'}"
    try:
        if trouble:
            found = trouble if home.path == place else f"{home.path}: {trouble}"
            return Check("home", MISSING, found, needed_for, True)
        kind = statfs_name(str(place))
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("home", MISSING, f"{home.path}: {error.strerror}", needed_for, True)
    known = kind in DISK_FILE_SYSTEMS
    refused = kind in ("tmpfs", "ramfs", "overlayfs", "fuse", "erofs")
    status = OK if known else MISSING if refused else LIMITED
    return Check("home", status, f"{where} on {kind}, {free / 1e9:.0f} GB free", needed_for, True)


def _programs() -> Iterator[Check]:
    crun, runc = _version("crun"), _version("runc")
    yield Check("crun", OK if crun else LIMITED if runc else MISSING, crun or "not found", "dsec run", not runc)
    yield Check("runc", OK if runc else LIMITED, runc or "not found", "dsec run, where there is no crun", False)
    tools = os.environ.get("DSEC_EROFS_UTILS")
    built = Path(__file__).parent.parent / "build" / "erofs-utils" / "bin"  # of tools/erofs-utils, in a checkout
    search = os.pathsep.join(filter(None, [tools and f"{tools}/bin", str(built), os.environ.get("PATH")]))
    erofs = _version("mkfs.erofs", search)
    recent = erofs and tuple(int(part) for part in erofs.split(".")[:3]) >= (1, 9, 4)
    yield Check(
        "erofs-utils",
        OK if recent else LIMITED if erofs else MISSING,
        erofs or "not found (tools/erofs-utils builds it)",
        "only the tests: fsck.erofs ≥ 1.9.4 is their judge",
        False,
    )
    for program, needed_for in (("debootstrap", "only make demo"), ("zstd", "only make demo and the tests")):
        path = shutil.which(program)
        yield Check(program, OK if path else MISSING, path or "not found", needed_for, False)


def _version(program: str, search: str | None = None) -> str:
    """The version that a program prints; empty when it is not there."""
    path = shutil.which(program, path=search)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    return found[0] if found else ""
