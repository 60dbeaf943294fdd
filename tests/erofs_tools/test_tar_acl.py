"""Access control lists: text from an archive becomes what the kernel itself would have stored."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from erofs_tools.acl import acl_from_text
from erofs_tools.directory import from_directory
from erofs_tools.errors import SourceError
from tests.erofs_tools.trees import archive, directory, gnu_tar, member, opened, pax, tar_values, values

FULL = b"user::rw-,user:1000:r-x,user:7:rwx,group::r--,group:100:-w-,mask::rwx,other::---"
PACKED = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in (
        (1, 6, 0xFFFFFFFF),
        (2, 7, 7),
        (2, 5, 1000),
        (4, 4, 0xFFFFFFFF),
        (8, 2, 100),
        (16, 7, 0xFFFFFFFF),
        (32, 0, 0xFFFFFFFF),
    )
)


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        FULL.replace(b",", b"\n") + b"\n",
        FULL.replace(b"user", b"u").replace(b"group", b"g").replace(b"mask", b"m").replace(b"other", b"o"),
        FULL.replace(b"mask::", b"mask:").replace(b"other::", b"other:"),
        b",".join(reversed(FULL.split(b","))),
        FULL.replace(b"user:7:rwx", b"user:joe:rwx:7").replace(b"group:100:-w-", b"group:staff:-w-:100"),
        FULL.replace(b",group:100:-w-", b",group:100:-w-\t#effective:-w-\n# a comment\n"),
    ],
)
def test_every_way_to_write_a_list_gives_the_same_bytes(text: bytes) -> None:
    assert acl_from_text(text, b"f") == PACKED
    assert acl_from_text(text, b"f", default=True) == PACKED


def test_the_kernel_stores_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    subprocess.run(["setfacl", "--set", FULL.decode(), tmp_path / "f"], check=True)
    assert os.getxattr(tmp_path / "f", "system.posix_acl_access") == PACKED


def test_a_list_that_says_what_the_mode_says_is_kept_only_as_a_default() -> None:
    text = b"user::rwx,group::r-x,other::r--"
    assert acl_from_text(text, b"d") is None
    assert acl_from_text(text, b"d", default=True) == struct.pack(
        "<IHHIHHIHHI", 2, 1, 7, 0xFFFFFFFF, 4, 5, 0xFFFFFFFF, 32, 4, 0xFFFFFFFF
    )
    assert acl_from_text(b"", b"d", default=True) is None


@pytest.mark.parametrize(
    "text",
    [
        FULL.replace(b"user:7", b"user:joe"),
        FULL.replace(b"user:7", b"user:-7"),
        FULL.replace(b"user:7", b"user:4294967295"),
        FULL.replace(b",mask::rwx", b""),
        FULL.replace(b",other::---", b""),
        FULL + b",user:7:r--",
        FULL + b",other::r--",
        FULL.replace(b"rwx", b"rwz"),
        FULL + b",owner@:rw::allow",
        b"nonsense",
        b"",
    ],
)
def test_lists_that_the_kernel_would_refuse_or_that_have_names_are_refused(text: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        acl_from_text(text, b"some/file")
    assert caught.value.path == b"some/file"


def test_lists_of_a_tar_become_attributes(tmp_path: Path) -> None:
    records = pax({b"SCHILY.acl.access": FULL, b"SCHILY.acl.default": FULL})
    found = tar_values(archive(tmp_path / "x.tar", records + directory(b"d/")))
    assert found[b"d"]["xattrs"] == {b"system.posix_acl_access": PACKED, b"system.posix_acl_default": PACKED}


def test_names_do_not_matter_where_the_numbers_are_there_too(tmp_path: Path) -> None:
    named = {b"SCHILY.acl.access": FULL.replace(b"user:7", b"user:joe")}
    both = {**named, b"SCHILY.xattr.system.posix_acl_access": PACKED}
    found = tar_values(archive(tmp_path / "x.tar", pax(both) + member(b"f")))
    assert found[b"f"]["xattrs"] == {b"system.posix_acl_access": PACKED}
    with pytest.raises(SourceError, match="joe"), opened(archive(tmp_path / "x.tar", pax(named) + member(b"f"))):
        pass
    nfs = pax({b"SCHILY.acl.ace": b"owner@:rwx::allow"})
    with pytest.raises(SourceError, match="POSIX"), opened(archive(tmp_path / "x.tar", nfs + member(b"f"))):
        pass


@pytest.mark.parametrize("options", [("--acls",), ("--xattrs",), ("--acls", "--xattrs")])
def test_gnu_tars_lists_equal_the_directorys(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "in"
    (folder / "d").mkdir(parents=True)
    (folder / "f").touch()
    (folder / "plain").touch()
    # numbers that have no name here, so that the text has them as numbers
    subprocess.run(["setfacl", "-m", "u:54321:rw,u:1234567:r,g:54322:x", folder / "f"], check=True)
    subprocess.run(["setfacl", "-d", "-m", "u:54323:rwx", folder / "d"], check=True)
    for path in (folder / "d", folder / "f", folder / "plain", folder):
        os.utime(path, (1, 1))
    wanted = values(from_directory(folder))
    assert b"system.posix_acl_access" in wanted[b"f"]["xattrs"]
    assert tar_values(gnu_tar(tmp_path / "x.tar", folder, "--format=posix", *options)) == wanted
