"""OCI whiteouts in a tar of kind diff, by the image specification and, at the end, by the kernel's word."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from dsec_linux.mounts import mount_erofs, mount_overlay
from erofs_tools.errors import SourceError
from erofs_tools.tree import Tree
from erofs_tools.writer import write_image
from tests.erofs_tools.trees import archive, directory, link, member, opened, symlink, tar_values

OPAQUE = {b"trusted.overlay.opaque": b"y"}
ORIGIN = {b"trusted.overlay.origin": b""}


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "in.tar"


def diff(tar: Path, *parts: bytes, **options: Any) -> dict[bytes, dict[str, Any]]:
    return tar_values(archive(tar, *parts), "diff", **options)


def test_a_whiteout_becomes_a_device_whose_attributes_are_always_equal(tar: Path) -> None:
    found = diff(tar, directory(b"d/", mode=b"0000700"), member(b"d/.wh.x", uid=b"0000005", mtime=b"00000000007"))
    assert list(found) == [b"", b"d", b"d/x"]
    assert found[b"d/x"]["mode"] == "0o20000" and found[b"d/x"]["rdev"] == 0
    assert found[b"d/x"]["ids"] == (0, 0) and found[b"d/x"]["mtime"] == (0, 0)
    assert found[b"d"]["mode"] == "0o40700" and found[b"d"]["xattrs"] == ORIGIN and found[b""]["xattrs"] == {}


def test_a_whiteout_may_be_of_any_type_and_in_a_directory_without_an_entry(tar: Path) -> None:
    found = diff(
        tar, member(b".wh.a"), symlink(b"p/q/.wh.b", b"t"), link(b".wh.c", b".wh..wh.aufs"), directory(b".wh.d/")
    )
    assert [path for path, one in found.items() if one["mode"] == "0o20000"] == [b"a", b"c", b"d", b"p/q/b"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_in_the_same_tar_replaces_what_is_below_whatever_the_order(tar: Path, order: tuple[int, ...]) -> None:
    of_directory = (member(b".wh.x"), directory(b"x/"), member(b"x/f", b"1"))
    found = diff(tar, *(of_directory[i] for i in order))
    assert list(found) == [b"", b"x", b"x/f"] and found[b"x"]["xattrs"] == OPAQUE and found[b""]["xattrs"] == {}
    of_file = (member(b".wh.x"), member(b"x", b"1"), member(b"y", b"2"))
    found = diff(tar, *(of_file[i] for i in order))
    assert list(found) == [b"", b"x", b"y"] and found[b"x"]["contents"] == b"1" and found[b"x"]["xattrs"] == {}
    implied = (member(b".wh.x"), member(b"x/f", b"1"), member(b"x/g", b"2"))
    found = diff(tar, *(implied[i] for i in order))
    assert found[b"x"]["xattrs"] == OPAQUE
    opaque = (member(b"x/.wh..wh..opq"), member(b"x/f", b"1"), directory(b"x/", mode=b"0000711"))
    found = diff(tar, *(opaque[i] for i in order))
    assert list(found) == [b"", b"x", b"x/f"] and found[b"x"]["xattrs"] == OPAQUE and found[b"x"]["mode"] == "0o40711"


def test_other_names_of_aufs_are_ignored(tar: Path) -> None:
    found = diff(
        tar, member(b".wh..wh.aufs"), directory(b".wh..wh.plnk/"), member(b".wh..wh.plnk/1.2", b"x"), member(b"f")
    )
    assert list(found) == [b"", b"f"]


def test_literal_whiteouts_stay_files(tar: Path) -> None:
    assert b".wh.x" in diff(tar, member(b".wh.x", b"1"), literal_whiteouts=True)


@pytest.mark.parametrize("name", [b".wh.", b".wh..", b".wh...", b"d/.wh.", b".wh.x/y"])
def test_whiteouts_that_name_nothing_are_refused(tar: Path, name: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        diff(tar, member(name))
    assert caught.value.path == name


def test_an_opaque_root_is_refused_because_overlayfs_would_not_obey(tar: Path) -> None:
    with pytest.raises(SourceError, match="root"):
        diff(tar, member(b".wh..wh..opq"))


def test_a_whiteout_through_a_symbolic_link_is_refused(tar: Path) -> None:
    for name in (b"l/.wh.x", b"l/.wh..wh..opq"):
        with pytest.raises(SourceError) as caught:
            diff(tar, symlink(b"l", b"/etc"), member(name))
        assert caught.value.path == name


def test_a_file_in_a_directorys_place_hides_all_that_was_below_by_itself(tar: Path) -> None:
    found = diff(tar, member(b"d/.wh.x"), member(b"d/e/.wh..wh..opq"), member(b"d", b"1"))
    assert list(found) == [b"", b"d"]
    found = diff(tar, member(b"d/.wh.x"), member(b"f"), link(b"d", b"f"))
    assert list(found) == [b"", b"d", b"f"]


def mounted(folder: Path, name: str, tree: Tree) -> int:
    meta, data = folder / f"{name}.erofs", folder / f"{name}.data"
    with meta.open("w+b") as metadata, data.open("wb") as blob:
        write_image(tree, metadata, blob.write)
    return mount_erofs(str(meta), [str(data)])


def listing(fd: int) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    top = Path(f"/proc/self/fd/{fd}")
    for folder, folders, files in os.walk(f"{top}/."):
        for name in files:
            path = Path(folder) / name
            found[str(path.relative_to(top))] = path.read_text()
        for name in folders:
            found[str((Path(folder) / name).relative_to(top))] = None
    return found


def test_the_kernel_shows_what_the_whiteouts_leave(tmp_path: Path) -> None:
    below = archive(
        tmp_path / "below.tar",
        *(
            member(path, b"old")
            for path in (b"keep", b"gone", b"d/keep", b"d/gone", b"opq/a", b"opq/b/c", b"dir/x", b"file")
        ),
    )
    above = archive(
        tmp_path / "above.tar",
        *(
            member(name)
            for name in (b".wh.gone", b"d/.wh.gone", b"opq/.wh..wh..opq", b".wh.dir", b".wh.file", b"new/.wh.x")
        ),
        *(member(path, b"new") for path in (b"opq/n", b"dir/y", b"file/z", b"opq/b", b"new/.wh..wh.junk")),
    )
    descriptors = []
    try:
        with opened(below) as tree:
            descriptors.append(mounted(tmp_path, "below", tree))
        with opened(above, "diff") as tree:
            descriptors.append(mounted(tmp_path, "above", tree))
        overlay = mount_overlay(descriptors[::-1])
        descriptors.append(overlay)
        assert listing(overlay) == {
            "keep": "old",
            "d": None,
            "d/keep": "old",
            "opq": None,
            "opq/n": "new",
            "opq/b": "new",
            "dir": None,
            "dir/y": "new",
            "file": None,
            "file/z": "new",
            "new": None,
        }
    finally:
        for fd in reversed(descriptors):
            os.close(fd)
