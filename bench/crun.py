"""The same container without dsec: crun on a plain directory, with the specification that ``dsec run`` would give it.

What dsec adds is then what is left between the two: the node, the mounts, the record, the limits' group.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dsec_linux import cgroups
from runtimes.container import find_runtime
from runtimes.oci import Process, bundle_config
from runtimes.seccomp_bpf import ANNOTATION, filter_text
from runtimes.settings import environment

# crun refuses a machine whose cgroup2 has controllers beside a full cgroup v1: such a one is hidden from it, in a
# mount namespace of its own, as dsec does.
_HIDDEN = 'umount -l "$1" && shift && exec "$@"'


def make_bundle(folder: Path, rootfs: Path, argv: Sequence[str], cwd: str, name: str, env: Sequence[str] = ()) -> Path:
    """Write ``config.json`` for a command of root on ``rootfs`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = environment({}, env, home="/root", hostname=name, terminal=False)
    config = bundle_config(
        Process(argv, variables, cwd, 0, 0, ()),
        rootfs=str(rootfs),
        hostname=name,
        cgroup=f"/dsec-bench-{name}",
        host_network=False,
    )
    linux = config["linux"]
    assert isinstance(linux, dict)
    if program := filter_text(str(folder)):
        config["annotations"] = {ANNOTATION: program}
        del linux["seccomp"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(bundle: Path, name: str) -> list[str]:
    """The command line that runs the bundle in the foreground and takes its container away at the end."""
    run = [find_runtime().path, "--root", str(bundle / "state"), "run", "--bundle", str(bundle), name]
    layout = cgroups.detect()
    if layout.kind != "hybrid" or layout.unified is None:
        return run
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _HIDDEN, "sh", layout.unified, *run]


def start(bundle: Path, name: str) -> subprocess.Popen[bytes]:
    """Start it with a pipe as its stdout."""
    return subprocess.Popen(
        command(bundle, name), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}
    )
