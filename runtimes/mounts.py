"""``dsec mount`` and ``dsec umount``: an environment at a directory, without a process that holds it.

A writable mount is a sandbox without a command: its changes lie in ``sandboxes/<id>/upper``, and it counts as
running while it is in the mount table. Unmounting ends it; when it has a name or something was changed it stays, for
``dsec pack-diff``, until ``dsec rm``.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH116, PTH208

from __future__ import annotations

import os

from dsec_linux.mounts import attach, mountinfo, umount
from dsec_store.node.client import LayerArg, MountRequest, NodeClient
from dsec_store.node.records import is_mount, read_records
from runtimes.errors import RuntimesError
from runtimes.sandboxes import Sandbox, claim, create, read_config, reap_stale, release_mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dsec_store.home import Home


def mount_environment(
    home: Home,
    references: list[str],
    target: str,
    *,
    writable: bool = False,
    name: str | None = None,
    plain_http: bool = False,
) -> str:
    """Mount an environment at ``target`` and return the mount's id; with ``writable`` it is a sandbox of that id.

    Raises NodeError (what the node refuses), NameInUse, LinuxError; nothing is left behind then.
    """
    reap_stale(home)
    place = os.path.realpath(target)
    client = NodeClient.connect(home)
    layers = [LayerArg(reference) for reference in references]
    if not writable:
        request = MountRequest(f"mount-{os.urandom(8).hex()}", layers, None, None, {"target": place}, plain_http)
        _mount(client, request, place)
        return request.id
    config: dict[str, Any] = {"keep": True, "name": name, "refs": references, "command": [], "mount": {"target": place}}
    sandbox = create(home, config)
    try:
        upper, work = sandbox.folder("upper"), sandbox.folder("work")
        request = MountRequest(sandbox.id, layers, upper, work, {"target": place}, plain_http)
        mounted = _mount(client, request, place)
        mount = {"target": place, "device": mounted.device, "mount_id": mounted.mount_id}
        sandbox.config.update(layers=mounted.layers, mount=mount, root=_attributes(upper))
        sandbox.write_config()
    except BaseException:
        sandbox.config["keep"] = False
        sandbox.finish({"kind": "unknown", "reason": "could not be mounted"})
        raise
    finally:
        sandbox.close()
    return sandbox.id


def _mount(client: NodeClient, request: MountRequest, place: str) -> Any:
    mounted, fd = client.mount(request)
    try:
        attach(fd, place)
    except BaseException:
        client.release(request.id)
        raise
    finally:
        os.close(fd)  # while it is open, unmounting is EBUSY
    return mounted


def _attributes(folder: str) -> list[Any]:
    """What a user can change of the root directory itself."""
    info = os.stat(folder)
    names = sorted(name for name in os.listxattr(folder) if not name.startswith("trusted.overlay."))
    return [info.st_mode, info.st_uid, info.st_gid, [[name, os.getxattr(folder, name).hex()] for name in names]]


def umount_environment(home: Home, target: str) -> str | None:
    """Unmount what ``mount_environment`` put at ``target``; the sandbox's name or id when changes are kept.

    Raises RuntimesError when nothing of this home is mounted there, LinuxError (EBUSY: somebody uses it).
    """
    place = os.path.realpath(target)
    there = [mount for mount in mountinfo() if mount.target == place][-1:]
    found = [record for record in read_records(home) if there and is_mount(there[0], record)]
    if not found:
        raise RuntimesError(f"nothing that dsec mounted is at {place}; dsec node status lists the mounts")
    umount(place)
    mount_id = str(found[0]["id"])
    release_mount(home, mount_id)
    config = read_config(home, mount_id)
    if not config:
        reap_stale(home)
        return None
    lock = claim(home, mount_id)
    if lock is None:
        return None  # another command reaps it just now, and keeps it
    sandbox = Sandbox(home, mount_id, lock, config)
    try:
        upper = sandbox.folder("upper")
        unchanged = not os.listdir(upper) and config.get("root") == _attributes(upper)
        if unchanged and config.get("name") is None:
            sandbox.config["keep"] = False
        sandbox.finish({"kind": "stopped"})
        return str(config.get("name") or mount_id) if sandbox.keep else None
    finally:
        sandbox.close()
        reap_stale(home)
