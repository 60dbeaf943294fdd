"""What a source may carry into a layer: extended attributes and names that mean something to overlayfs or OCI.

A layer's ``trusted.overlay.*`` attributes and 0/0 character devices are instructions to overlayfs. Only what makes
layers may write them; when they come in with the input they are forged (a redirect shows one layer's files under
another's name) or leftovers of an overlay that would mean something else here.
"""

from __future__ import annotations

from erofs_tools.errors import SourceError, show_path

WHITEOUT_PREFIX = b".wh."
"""OCI image specification, "Representing Changes": a name that removes the rest of the name from the layers below."""
WHITEOUT_META_PREFIX = b".wh..wh."
OPAQUE_WHITEOUT = b".wh..wh..opq"

OVERLAY_PREFIX = b"trusted.overlay."
USER_OVERLAY_PREFIX = b"user.overlay."
ESCAPED_PREFIX = b"trusted.overlay.overlay."
"""What overlayfs stores for a ``trusted.overlay.*`` attribute that was set through it: content of a nested overlay."""

_IGNORED = frozenset((b"security.selinux",))
"""The label is what the machine that labels says it is, not what the one that built the tree said."""
_STORAGE_PREFIXES = (b"btrfs.",)
"""Properties of how the source's file system stores a file, which it lists as attributes."""


def layer_xattrs(xattrs: dict[bytes, bytes], path: bytes, *, strip_overlay: bool) -> dict[bytes, bytes]:
    """The attributes (full names) that go into a layer: without labels and without what overlayfs would obey.

    Raises SourceError with the path for ``trusted.overlay.*`` (escaped ones are content and stay) and
    ``user.overlay.*``, unless strip_overlay drops them.
    """
    if not xattrs:
        return xattrs
    kept = {}
    for name, value in xattrs.items():
        if name in _IGNORED or name.startswith(_STORAGE_PREFIXES):
            continue
        if is_overlay_xattr(name):
            if strip_overlay:
                continue
            raise SourceError(f"extended attribute {show_path(name)} belongs to overlayfs", path)
        kept[name] = value
    return kept


def is_overlay_xattr(name: bytes) -> bool:
    """Whether overlayfs (mounted by root or with userxattr) would take this attribute as its own."""
    if name.startswith(OVERLAY_PREFIX):
        return not name.startswith(ESCAPED_PREFIX)
    return name.startswith(USER_OVERLAY_PREFIX)


def refuse_whiteout_device(path: bytes) -> SourceError:
    """The error for a 0/0 character device that came in with the input."""
    return SourceError("a character device 0/0 is a whiteout to overlayfs", path)


def refuse_whiteout_name(path: bytes) -> SourceError:
    """The error for a ``.wh.`` name where it is neither an OCI whiteout nor wanted literally."""
    return SourceError("a name that starts with .wh. is a whiteout to OCI images", path)
