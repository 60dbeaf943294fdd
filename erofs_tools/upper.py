"""The upper directory of an overlay as the tree of a diff layer.

Kernel documentation, filesystems/overlayfs: a 0/0 character device is a whiteout, ``trusted.overlay.opaque`` = ``y``
hides what is below a directory. Both are kept. ``origin``, ``impure``, ``uuid``, ``nlink`` and ``upper`` describe where
this upper came from and mean nothing elsewhere: dropped, but directories that hold whiteouts get an empty ``origin``
again (without it overlayfs lists the whiteouts' names when no other layer has the directory).
"""

from __future__ import annotations

import os
import stat

from erofs_tools.directory import Rules, scan
from erofs_tools.errors import SourceError, show_path
from erofs_tools.source_rules import OVERLAY_PREFIX, is_overlay_xattr, layer_xattrs
from erofs_tools.tree import OPAQUE_VALUE, OPAQUE_XATTR, Tree

_LOCAL = frozenset(OVERLAY_PREFIX + name for name in (b"origin", b"impure", b"uuid", b"nlink", b"upper"))
_LACKS_CONTENT = {
    OVERLAY_PREFIX + b"redirect": "what it holds lies under another name in a lower layer",
    OVERLAY_PREFIX + b"metacopy": "its contents lie in a lower layer",
}


class _UpperRules(Rules):
    def check_name(self, name: bytes, path: bytes) -> None:
        """Any name: ``.wh.`` means nothing to overlayfs, so what the overlay showed under such a name is a file."""

    def xattrs(self, found: dict[bytes, bytes], path: bytes, mode: int) -> dict[bytes, bytes]:
        opaque = False
        others, content = {}, {}
        for name, value in found.items():
            if name in _LOCAL:
                continue
            if name in _LACKS_CONTENT:
                reason = f"{name.decode()}: {_LACKS_CONTENT[name]}"
                raise SourceError(f"{reason}; expected an overlay with redirect_dir=nofollow,metacopy=off", path)
            if name == OPAQUE_XATTR and value == OPAQUE_VALUE and stat.S_ISDIR(mode):
                opaque = True
            elif is_overlay_xattr(name) and name.startswith(OVERLAY_PREFIX):
                raise SourceError(f"{show_path(name)} = {value[:40]!r} is not understood", path)
            elif is_overlay_xattr(name):
                content[name] = value  # user.overlay.*: the sandbox wrote it, and our overlays do not obey it
            else:
                others[name] = value
        kept = {**layer_xattrs(others, path, strip_overlay=False), **content}
        return {**kept, OPAQUE_XATTR: OPAQUE_VALUE} if opaque else kept

    def whiteout(self, tree: Tree, path: bytes) -> None:
        tree.add_whiteout(path)


def from_upper(path: str | os.PathLike[str]) -> Tree:
    """The tree of an upper directory that no overlay writes to meanwhile (frozen, or unmounted).

    ``user.overlay.*`` is content: any user may set it, and an overlay without ``userxattr``, as ours are, shows it.
    Raises SourceError, with the path, for an upper that lacks content (``redirect``, ``metacopy``), for attributes of
    overlayfs that are not known, and for all that ``from_directory`` raises it for.
    """
    return scan(path, _UpperRules())
