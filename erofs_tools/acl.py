"""POSIX access control lists: from the text of a pax header to the attribute that Linux keeps.

Text: ``acl_to_text(3)``, entries between commas or line ends, as star and GNU tar write it into ``SCHILY.acl.access``
and ``SCHILY.acl.default``; star adds the numeric id as a fourth field. Attribute: linux/posix_acl_xattr.h, version 2.
"""

from __future__ import annotations

import struct

from erofs_tools.errors import SourceError, escape, shorten

ACCESS_XATTR = b"system.posix_acl_access"
DEFAULT_XATTR = b"system.posix_acl_default"

_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_TAGS = {
    b"user": (_USER_OBJ, _USER),
    b"u": (_USER_OBJ, _USER),
    b"group": (_GROUP_OBJ, _GROUP),
    b"g": (_GROUP_OBJ, _GROUP),
    b"mask": (_MASK, None),
    b"m": (_MASK, None),
    b"other": (_OTHER, None),
    b"o": (_OTHER, None),
}
_PERMISSIONS = {ord("r"): 4, ord("w"): 2, ord("x"): 1}


def acl_from_text(text: bytes, path: bytes, *, default: bool = False) -> bytes | None:
    """The value of the attribute; None for an access list that says no more than a mode does (Linux keeps none then).

    Raises SourceError for text that is no list, for one that the kernel would refuse, and for users or groups that
    are given by name only: which number a name has is known only where the archive was made.
    """
    entries: dict[tuple[int, int], int] = {}
    for raw in text.replace(b"\n", b",").split(b","):
        item = raw.split(b"#", 1)[0].strip()
        if not item:
            continue
        key, permissions = _parse_entry(item, path)
        if key in entries:
            raise _bad(f"the entry {_show(item)} twice", path)
        entries[key] = permissions
    if default and not entries:
        return None
    tags = {tag for tag, _ in entries}
    if not {_USER_OBJ, _GROUP_OBJ, _OTHER} <= tags:
        raise _bad("no entry for the owner, the group or others", path)
    if tags & {_USER, _GROUP} and _MASK not in tags:
        raise _bad("named users or groups but no mask", path)
    if len(entries) == 3 and not default:
        return None
    # the kernel wants ascending tags; libacl sorts by id, so equal lists become equal bytes
    packed = b"".join(struct.pack("<HHI", tag, permissions, id_) for (tag, id_), permissions in sorted(entries.items()))
    return struct.pack("<I", 2) + packed


def _parse_entry(item: bytes, path: bytes) -> tuple[tuple[int, int], int]:
    fields = [field.strip() for field in item.split(b":")]
    if fields[0] in (b"default", b"d"):
        fields = fields[1:]
    if len(fields) not in (3, 4) and not (len(fields) == 2 and fields[0] in (b"mask", b"m", b"other", b"o")):
        raise _bad(f"the entry {_show(item)}", path)
    if len(fields) == 2:
        fields.insert(1, b"")
    kind, who, permissions = fields[:3]
    if kind not in _TAGS:
        raise _bad(f"the entry {_show(item)}", path)
    unnamed, named = _TAGS[kind]
    tag, id_ = unnamed, _NO_ID
    if who:
        number = fields[3] if len(fields) == 4 else who
        if named is None or not number.isdigit() or len(number) > 20:
            raise _bad(f"{_show(item)} by name; expected a number (tar --xattrs keeps it)", path)
        tag, id_ = named, int(number)
        if id_ >= _NO_ID:
            raise _bad(f"the id in {_show(item)}", path)
    bits = 0
    for letter in permissions:
        if letter != ord("-"):
            if letter not in _PERMISSIONS:
                raise _bad(f"the permissions of {_show(item)}", path)
            bits |= _PERMISSIONS[letter]
    return (tag, id_), bits


def _show(item: bytes) -> str:
    return shorten(escape(item.decode("utf-8", "backslashreplace")))


def _bad(what: str, path: bytes) -> SourceError:
    return SourceError(f"access control list with {what}", path)
