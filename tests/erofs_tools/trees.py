"""Trees as values that can be compared, GNU tar, and tar headers made by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from erofs_tools.tar import from_tar
from erofs_tools.tree import Entry, Tree

END = bytes(1024)


def contents(entry: Entry) -> bytes:
    """The whole content, read once straight through and once by its segments only."""
    if entry.content is None:
        return bytes(entry.size)
    with entry.content.open() as reader:
        straight = reader.read()
    assert len(straight) == entry.size
    pieces = bytearray(entry.size)
    end = 0
    with entry.content.open() as reader:
        for offset, length in entry.content.segments():
            assert offset >= end and length >= 0 and offset + length <= entry.size
            end = offset + length
            reader.seek(offset)
            pieces[offset:end] = reader.read(length)
    assert straight == pieces
    return straight


def value(entry: Entry) -> dict[str, Any]:
    """Everything that an entry says, contents included."""
    if entry.hardlink_to is not None:
        return {"hardlink_to": entry.hardlink_to}
    return {
        "mode": oct(entry.mode),
        "ids": (entry.uid, entry.gid),
        "mtime": (entry.mtime, entry.mtime_ns),
        "rdev": entry.rdev,
        "size": entry.size,
        "xattrs": dict(sorted(entry.xattrs.items())),
        "target": entry.target,
        "contents": contents(entry),
    }


def values(tree: Tree) -> dict[bytes, dict[str, Any]]:
    """The whole tree as a value, in its own order."""
    return {entry.path: value(entry) for entry in tree.entries()}


@contextlib.contextmanager
def opened(path: Path, kind: str = "base", **options: Any) -> Iterator[Tree]:
    with from_tar(path, kind=kind, spool_dir=path.parent, **options) as tree:
        yield tree


def tar_values(path: Path, kind: str = "base", **options: Any) -> dict[bytes, dict[str, Any]]:
    with opened(path, kind, **options) as tree:
        return values(tree)


def gnu_tar(
    archive: Path,
    folder: Path,
    *options: str,
    names: Sequence[bytes] = (b".",),
    umask: int = 0o022,
    locale: str = "C.UTF-8",
) -> Path:
    """Pack ``names`` of ``folder`` with GNU tar."""
    subprocess.run(
        ["tar", "--numeric-owner", "-C", folder, *options, "-cf", archive, *names],
        check=True,
        umask=umask,
        env={**os.environ, "LC_ALL": locale},
        capture_output=True,
    )
    return archive


PAX = ("--format=posix", "--xattrs", "--xattrs-include=*", "--pax-option=delete=atime,delete=ctime")


def header(
    name: bytes,
    type_: bytes = b"0",
    size: int = 0,
    *,
    mode: bytes = b"0000644",
    uid: bytes = b"0000000",
    gid: bytes = b"0000000",
    mtime: bytes = b"00000000000",
    target: bytes = b"",
    magic: bytes = b"ustar\0" + b"00",
    devices: tuple[bytes, bytes] = (b"0000000", b"0000000"),
    rest: bytes = b"",
    size_field: bytes | None = None,
) -> bytes:
    """One 512-byte header with the right checksum; ``rest`` is what stands from byte 345 on."""
    block = bytearray(512)

    def put(offset: int, length: int, data: bytes) -> None:
        assert len(data) <= length
        block[offset : offset + len(data)] = data

    put(0, 100, name)
    put(100, 8, mode)
    put(108, 8, uid)
    put(116, 8, gid)
    put(124, 12, b"%011o" % size if size_field is None else size_field)
    put(136, 12, mtime)
    put(156, 1, type_)
    put(157, 100, target)
    put(257, 8, magic)
    put(329, 8, devices[0])
    put(337, 8, devices[1])
    put(345, 167, rest)
    return with_checksum(bytes(block))


def with_checksum(block: bytes) -> bytes:
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: bytes, data: bytes = b"", type_: bytes = b"0", **fields: Any) -> bytes:
    return header(name, type_, len(data), **fields) + padded(data)


def directory(name: bytes, **fields: Any) -> bytes:
    return header(name, b"5", mode=fields.pop("mode", b"0000755"), **fields)


def link(name: bytes, target: bytes) -> bytes:
    return header(name, b"1", target=target)


def symlink(name: bytes, target: bytes) -> bytes:
    return header(name, b"2", target=target)


def record(keyword: bytes, text: bytes) -> bytes:
    length = len(keyword) + len(text) + 3
    total = length + len(str(length))
    total = length + len(str(total))
    return b"%d %s=%s\n" % (total, keyword, text)


def pax(records: Mapping[bytes, bytes] | Sequence[tuple[bytes, bytes]], type_: bytes = b"x") -> bytes:
    pairs = records.items() if isinstance(records, Mapping) else records
    return member(b"PaxHeaders/x", b"".join(record(k, v) for k, v in pairs), type_)


def archive(path: Path, *parts: bytes, end: bytes = END) -> Path:
    path.write_bytes(b"".join(parts) + end)
    return path
