"""What a caller and the node say to each other (standard library only).

Two sockets, both mode 0600. ``run/node.sock`` is HTTP: status, stats, release, stop. ``run/node-fd.sock`` is
SOCK_SEQPACKET: one message with a MountRequest as JSON goes in, one message comes back, either ``{"error": …}`` or
a Mounted with exactly one descriptor attached (SCM_RIGHTS): the finished, detached mount. Version 1; a peer that
finds another number refuses it by name.
"""

from __future__ import annotations

import json
from typing import Any

from dsec_store.errors import NodeError

VERSION = 1
MAX_MESSAGE = 160 * 1024
"""Bytes: below the default socket buffer of Linux, which bounds a SOCK_SEQPACKET message."""


class LayerArg:
    """One argument of a mount: a reference and what it must be (``base``: a base layer or an environment)."""

    __slots__ = ("reference", "role")

    def __init__(self, reference: str, role: str | None = None) -> None:
        self.reference = reference
        self.role = role


class MountRequest:
    """Ask for an environment. ``upper`` and ``work`` are absolute folders or None (read-only). ``owner`` says who uses
    it: ``{"sandbox": id}`` or ``{"target": folder}``.
    """

    __slots__ = ("id", "layers", "owner", "plain_http", "upper", "work")

    def __init__(
        self,
        id: str,
        layers: list[LayerArg],
        upper: str | None,
        work: str | None,
        owner: dict[str, str],
        plain_http: bool = False,
    ) -> None:
        self.id = id
        self.layers = layers
        self.upper = upper
        self.work = work
        self.owner = owner
        self.plain_http = plain_http

    def to_bytes(self) -> bytes:
        return encode(
            {
                "version": VERSION,
                "id": self.id,
                "layers": [[layer.reference, layer.role] for layer in self.layers],
                "upper": self.upper,
                "work": self.work,
                "owner": self.owner,
                "plain_http": self.plain_http,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> MountRequest:
        try:
            raw = json.loads(data)
            if raw["version"] != VERSION:
                raise NodeError(
                    f"the caller speaks version {raw['version']} of the node's protocol, this node {VERSION}"
                )
            return cls(
                str(raw["id"]),
                [LayerArg(str(reference), role) for reference, role in raw["layers"]],
                raw["upper"],
                raw["work"],
                dict(raw["owner"]),
                bool(raw["plain_http"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise NodeError(f"not a mount request: {type(error).__name__}: {error}") from None


class Mounted:
    """A mounted environment.

    ``layers`` is base first, each ``{"id", "kind", "manifest", "reference", "source", "data_root", "export"}``;
    ``source`` is ``HOST[:PORT]/NAME`` or None for this machine's store, ``export`` is ``direct`` or ``fuse``.
    ``run`` is the OCI execution config of the lowest base layer, ``environment`` the environment's id, ``device``
    the ``MAJOR:MINOR`` of the mount and ``mount_id`` its number in the mount table, whatever becomes of its path.
    """

    __slots__ = ("device", "environment", "id", "layers", "mount_id", "run")

    def __init__(
        self,
        id: str,
        layers: list[dict[str, Any]],
        run: dict[str, Any],
        environment: str,
        device: str,
        mount_id: int,
    ) -> None:
        self.id = id
        self.layers = layers
        self.run = run
        self.environment = environment
        self.device = device
        self.mount_id = mount_id

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def release_request(data: bytes) -> str | None:
    """The mount id of ``{"version": 1, "release": id}``, None for any other message."""
    try:
        raw = json.loads(data)
        if isinstance(raw, dict) and "release" in raw and raw.get("version") == VERSION:
            return str(raw["release"])
    except ValueError:
        pass
    return None


def encode(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE:
        raise NodeError(f"a message of {len(data)} bytes does not fit the node's socket; at most {MAX_MESSAGE} do")
    return data
