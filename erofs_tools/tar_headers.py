"""The members of a tar archive, strictly: v7, ustar, GNU, star and pax headers, every byte accounted for.

Python's tarfile stops in silence at a damaged header, takes an archive without an end for a whole one and turns times
into floats; a layer must not be made from half an archive. Sources: POSIX.1-2017 pax, GNU tar manual "Basic Tar
Format" and "Storing Sparse Files", star(5), libarchive's tar(5).
"""

from __future__ import annotations

import base64
import binascii
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from erofs_tools.acl import ACCESS_XATTR, DEFAULT_XATTR, acl_from_text
from erofs_tools.content import Archive, Piece
from erofs_tools.errors import SourceError, show, show_path
from erofs_tools.tar_fields import number, pax_integer, pax_records, pax_time, string
from erofs_tools.tar_sparse import BLOCK, Pairs, old_gnu_pairs, pairs_from_text, pax_1_0_pairs, place

_ZERO = bytes(BLOCK)
_MAX_SPECIAL = 64 << 20
"""The largest extended header: it is held in memory. (A file's attributes are 64 KiB each.)"""

_SCHILY_XATTR = b"SCHILY.xattr."
_LIBARCHIVE_XATTR = b"LIBARCHIVE.xattr."
_ACLS = {b"SCHILY.acl.access": ACCESS_XATTR, b"SCHILY.acl.default": DEFAULT_XATTR}
_GNU_ESCAPE = re.compile(rb"%(3D|25)")
_FIELDS = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12s")

LINK = -1
"""The kind of a hard link; other kinds are the S_IFMT bits of st_mode."""

_KINDS = {
    b"0": stat.S_IFREG,
    b"\0": stat.S_IFREG,
    b"7": stat.S_IFREG,  # "contiguous", which means nothing here
    b"S": stat.S_IFREG,
    b"1": LINK,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"D": stat.S_IFDIR,  # GNU incremental: the data is a list of names
    b"6": stat.S_IFIFO,
}
_SPECIAL = frozenset((b"x", b"X", b"g", b"L", b"K"))
_WITH_DATA = frozenset((b"0", b"\0", b"7", b"S", b"D"))


@dataclass(slots=True)
class Member:
    """One header with its extensions. ``name`` and ``target`` are as the archive has them; sizes in bytes."""

    offset: int
    name: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    size: int = 0
    data: int = 0  # where the stored bytes begin
    pieces: list[Piece] | None = None  # for a sparse file
    target: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


class _Extensions:
    """What the headers before a member, and global ones, say about it."""

    __slots__ = ("everywhere", "name", "pairs", "records", "target")

    def __init__(self) -> None:
        self.everywhere: dict[bytes, bytes] = {}
        self.forget()

    def forget(self) -> None:
        """A member took them: only the global ones stay."""
        self.records: dict[bytes, bytes] = self.everywhere
        self.pairs: Pairs = []  # of pax 0.0, whose keywords repeat
        self.name: bytes | None = None
        self.target: bytes | None = None

    def waiting(self) -> bool:
        return self.records is not self.everywhere or self.name is not None or self.target is not None

    def add(self, type_: bytes, data: bytes, where: str) -> None:
        if type_ == b"L":
            self.name = string(data)
        elif type_ == b"K":
            self.target = string(data)
        elif type_ == b"g":
            changed = {**self.everywhere, **dict(pax_records(data, where))}
            self.records = changed if self.records is self.everywhere else {**changed, **self.records}
            self.everywhere = changed
        else:
            found = pax_records(data, where)
            self.records = {**self.records, **dict(found)}
            if b"GNU.sparse.offset" in self.records:
                numbers = [v for k, v in found if k in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")]
                self.pairs += pairs_from_text(numbers, where)

    def get(self, keyword: bytes) -> bytes | None:
        """The value; an empty one says that the header's own field counts (POSIX)."""
        return self.records.get(keyword) or None


def members(archive: Archive) -> Iterator[Member]:
    """All members in order. Raises SourceError for anything that is not a whole archive, naming the byte."""
    offset = 0
    extensions = _Extensions()
    while True:
        where = f"{archive.name}: header at byte {offset}"
        if offset >= archive.size:
            if not archive.size:
                raise SourceError(f"{archive.name}: empty; expected a tar archive")
            raise SourceError(f"{archive.name}: truncated: no end-of-archive block at byte {offset}")
        header = archive.read(offset, BLOCK, "a header")
        if header == _ZERO:
            if extensions.waiting():
                raise SourceError(f"{where}: end of the archive; expected the member of the extended header before it")
            _check_end(archive, offset)
            return
        _check_sum(header, archive, offset)
        type_ = header[156:157]
        size = number(header[124:136], where)
        if type_ in _SPECIAL:
            if not 0 <= size <= _MAX_SPECIAL:
                raise SourceError(f"{where}: an extended header of {size} bytes; expected at most {_MAX_SPECIAL}")
            extensions.add(type_, archive.read(offset + BLOCK, size, "an extended header"), where)
            offset += BLOCK + _padded(size)
            continue
        member, offset = _member(archive, header, type_, size, offset, extensions)
        extensions.forget()
        if member is not None:
            yield member


def _padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def _member(
    archive: Archive, header: bytes, type_: bytes, size: int, offset: int, extensions: _Extensions
) -> tuple[Member | None, int]:
    """The member of a header (None for a volume's label) and the offset of the next header."""
    raw_name, mode, uid, gid, _, mtime, _, _, raw_target, magic, _, _, major, minor, prefix, tail = _FIELDS.unpack(
        header
    )
    records = extensions.records
    name = string(raw_name) if extensions.name is None else extensions.name
    if extensions.name is None and magic.startswith(b"ustar\0"):
        if tail.endswith(b"tar\0"):  # star keeps times behind 131 bytes of prefix
            prefix = prefix[:131]
        if prefix[0]:
            name = string(prefix) + b"/" + name
    if records:
        name = extensions.get(b"GNU.sparse.name") or extensions.get(b"path") or name
    where = f"{archive.name}: header at byte {offset}"
    kind = _KINDS.get(type_)
    if kind is None:
        if type_ == b"V":
            return None, offset + BLOCK
        if type_ == b"M":
            raise SourceError(f"{where}: goes on from another volume; expected a whole archive", name)
        raise SourceError(f"{where}: unknown type of member {type_!r}", name)
    if kind == stat.S_IFREG and name.endswith(b"/"):
        kind = stat.S_IFDIR  # v7 has no type for directories
    member = Member(
        offset,
        name,
        kind,
        number(mode, where) & 0o7777,
        number(uid, where),
        number(gid, where),
        number(mtime, where),
        0,
    )
    if records:
        size = _apply_records(member, extensions, size, where)
    stored = size if type_ in _WITH_DATA else 0  # of other types some programs give the size but no data
    if stored < 0:
        raise SourceError(f"{where}: a size of {stored} bytes", name)
    data = offset + BLOCK
    following = data + _padded(stored)
    if kind == stat.S_IFREG:
        member.size, member.data = stored, data
        if type_ == b"S" or extensions.pairs or any(key.startswith(b"GNU.sparse.") for key in records):
            following = _apply_sparse(archive, member, header, type_, extensions, where)
        elif data + stored > archive.size:
            raise archive.truncated("contents", data + stored, name)
    elif kind in (LINK, stat.S_IFLNK):
        member.target = string(raw_target) if extensions.target is None else extensions.target
        if records:
            member.target = extensions.get(b"linkpath") or member.target
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        member.major = _integer(extensions, b"SCHILY.devmajor", major, where)
        member.minor = _integer(extensions, b"SCHILY.devminor", minor, where)
    return member, following


def _integer(extensions: _Extensions, keyword: bytes, header_field: bytes, where: str) -> int:
    text = extensions.get(keyword)
    return number(header_field, where) if text is None else pax_integer(text, where)


def _apply_records(member: Member, extensions: _Extensions, size: int, where: str) -> int:
    """Take what the pax records say into the member; the size that they or else the header gives."""
    get = extensions.get
    text = get(b"mtime")
    if text is not None:
        member.mtime, member.mtime_ns = pax_time(text, where)
    text = get(b"uid")
    if text is not None:
        member.uid = pax_integer(text, where)
    text = get(b"gid")
    if text is not None:
        member.gid = pax_integer(text, where)
    member.xattrs = _xattrs(extensions.records, member.name)
    text = get(b"size")
    return size if text is None else pax_integer(text, where)


def _xattrs(records: dict[bytes, bytes], path: bytes) -> dict[bytes, bytes]:
    xattrs: dict[bytes, bytes] = {}
    others: dict[bytes, bytes] = {}
    acls: list[bytes] = []
    for key, value in records.items():
        if key.startswith(_SCHILY_XATTR):
            # GNU tar escapes what would end the keyword
            name = _GNU_ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), key[len(_SCHILY_XATTR) :])
            xattrs[name] = value
        elif key.startswith(_LIBARCHIVE_XATTR):
            name = unquote_to_bytes(key[len(_LIBARCHIVE_XATTR) :])
            try:
                others[name] = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
            except binascii.Error as error:
                raise SourceError(f"{show_path(key)} is not base64: {error}", path) from error
        elif key.startswith(b"SCHILY.acl.") and value:
            if key not in _ACLS:
                raise SourceError(f"{show_path(key)}: only POSIX lists can be kept", path)
            acls.append(key)
    for name in others:  # bsdtar writes attributes both ways; the raw bytes are exact
        xattrs.setdefault(name, others[name])
    for key in acls:
        if _ACLS[key] not in xattrs:  # tar --xattrs --acls writes both; the text can have names for numbers
            acl = acl_from_text(records[key], path, default=_ACLS[key] == DEFAULT_XATTR)
            if acl is not None:
                xattrs[_ACLS[key]] = acl
    if b"" in xattrs:
        raise SourceError("an extended attribute without a name", path)
    return xattrs


def _apply_sparse(
    archive: Archive, member: Member, header: bytes, type_: bytes, extensions: _Extensions, where: str
) -> int:
    """Fill in pieces and size of a sparse file, whose stored bytes are member.size; the offset of the next header."""
    stored, data = member.size, member.data
    if type_ == b"S":
        pairs, data = old_gnu_pairs(archive, header, data)
        size = number(header[483:495], where)
        following = data + _padded(stored)
    else:
        following = data + _padded(stored)
        version = (extensions.get(b"GNU.sparse.major") or b"0", extensions.get(b"GNU.sparse.minor") or b"0")
        text = extensions.get(b"GNU.sparse.realsize") or extensions.get(b"GNU.sparse.size")
        if text is None:
            raise SourceError(f"{where}: a sparse file without its size", member.name)
        size = pax_integer(text, where)
        if version == (b"1", b"0"):
            pairs, used = pax_1_0_pairs(archive, data, stored, where)
            data, stored = data + used, stored - used
        elif version[0] == b"0":
            listed = extensions.get(b"GNU.sparse.map")
            pairs = extensions.pairs if listed is None else pairs_from_text(listed.split(b","), where)
        else:
            raise SourceError(
                f"{where}: sparse format {show(b'.'.join(version))}; expected 0.0, 0.1 or 1.0", member.name
            )
    if data + stored > archive.size:
        raise archive.truncated("contents", data + stored, member.name)
    member.pieces = place(pairs, size, data, stored, where)
    member.size = size
    return following


def _check_sum(header: bytes, archive: Archive, offset: int) -> None:
    found = header[148:156]
    try:
        said = number(found, "")
    except SourceError:
        said = -1
    # the field itself counts as eight spaces
    computed = sum(header) - sum(found) + 256
    if said == computed:
        return
    signed = sum(struct.unpack("512b", header)) - sum(struct.unpack("8b", found)) + 256  # some old programs' sums
    if said == signed:
        return
    if offset == 0:
        raise SourceError(f"{archive.name}: not a tar archive (its first header's checksum is wrong)")
    shown = found.strip(b" \0")
    raise SourceError(f"{archive.name}: damaged header at byte {offset}: checksum {shown!r}, expected {computed:o}")


def _check_end(archive: Archive, offset: int) -> None:
    while offset < archive.size:
        piece = archive.read(offset, min(1 << 20, archive.size - offset), "the end of the archive")
        if piece.count(0) != len(piece):
            at = offset + len(piece) - len(piece.lstrip(b"\0"))
            raise SourceError(f"{archive.name}: garbage at byte {at}, behind the end of the archive")
        offset += len(piece)
