"""Uppers that real overlays made, as diff layers: stacked again they show what the overlay showed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsec_linux.mounts import mount_erofs, mount_overlay
from erofs_tools.errors import SourceError
from erofs_tools.tree import BytesContent, Entry, Tree
from erofs_tools.upper import from_upper
from erofs_tools.writer import write_image
from tests.erofs_tools.trees import values

FILE = stat.S_IFREG | 0o644
NAMES = ("kept", "changed", "deleted", "to-directory", "chmod", "xattr", "again", "mtime")


def base() -> Tree:
    tree = Tree()
    for folder in ("", "d/", "d/e/"):
        for name in NAMES:
            data = f"base {folder}{name}".encode()
            content = BytesContent(data)
            path = (folder + name).encode()
            tree.add(Entry(path, FILE, mtime=5, size=len(data), content=content, xattrs={b"user.b": b"1"}))
    for folder in ("to-file", "emptied", "opaque", "gone", "dir-chmod", "deep/deep/deep"):
        for name in ("x", "y/z"):
            tree.add(Entry(f"{folder}/{name}".encode(), FILE, size=1, content=BytesContent(b"b")))
    tree.add(Entry(b"link", stat.S_IFLNK | 0o777, target=b"kept"))
    tree.add(Entry(b"h1", FILE, size=4, content=BytesContent(b"hard")))
    tree.add(Entry(b"h2", FILE, hardlink_to=b"h1"))
    return tree


def change(top: Path) -> None:
    """A bit of everything that a sandbox may do to its tree."""
    (top / "created").write_text("new")
    os.mkfifo(top / "created-fifo")
    (top / "created-link").symlink_to("anywhere")
    (top / "created-dir" / "sub").mkdir(parents=True)
    (top / "created-dir" / "sub" / "f").write_text("1")
    os.link(top / "created-dir" / "sub" / "f", top / "created-hard")
    (top / ".wh.literal").write_text("a name like any other")
    for folder in (top, top / "d", top / "d" / "e"):
        (folder / "changed").write_text("changed")
        (folder / "deleted").unlink()
        (folder / "to-directory").unlink()
        (folder / "to-directory" / "in").mkdir(parents=True)
        os.chown(folder / "chmod", 77, 78)
        (folder / "chmod").chmod(0o4711)
        os.setxattr(folder / "xattr", "user.new", b"\0\xff")
        os.removexattr(folder / "xattr", "user.b")
        (folder / "again").unlink()
        (folder / "again").write_text("again")
        os.utime(folder / "mtime", ns=(1, -7_000_000_001))
    shutil.rmtree(top / "to-file")
    (top / "to-file").write_text("was a directory")
    shutil.rmtree(top / "emptied")
    (top / "emptied").mkdir()
    shutil.rmtree(top / "opaque")
    (top / "opaque").mkdir()
    (top / "opaque" / "new").write_text("only this")
    shutil.rmtree(top / "gone")
    (top / "dir-chmod").chmod(0o700)
    os.setxattr(top / "dir-chmod", "user.d", b"1")
    (top / "deep/deep/deep/x").unlink()
    (top / "h1").write_text("copied up")
    (top / "link").unlink()
    top.chmod(0o711)


def change_back(top: Path) -> None:
    """What was replaced is replaced once more, the other way round."""
    shutil.rmtree(top / "to-directory")
    (top / "to-directory").write_text("a file again")
    (top / "to-file").unlink()
    (top / "to-file" / "y").mkdir(parents=True)
    (top / "to-file" / "y" / "n").write_text("a directory again")
    (top / "deleted").write_text("back")
    (top / "created").unlink()
    shutil.rmtree(top / "created-dir")
    (top / "gone").mkdir()
    (top / "gone" / "y").mkdir()
    shutil.rmtree(top / "opaque")


def remove_a_half(top: Path) -> None:
    shutil.rmtree(top / "d")
    (top / "emptied" / "x").write_text("other")


def seen(top: Path) -> dict[str, dict[str, Any]]:
    """What a process sees below ``top``."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[int, int], str] = {}
    paths = [Path(folder) / name for folder, folders, files in os.walk(f"{top}/.") for name in (*folders, *files)]
    for path in [top, *sorted(paths)]:
        status = path.stat() if path == top else path.lstat()  # (top itself is a link, to a descriptor)
        shown = str(path.relative_to(top))
        kind = stat.S_IFMT(status.st_mode)
        found[shown] = {
            "mode": oct(status.st_mode),
            "ids": (status.st_uid, status.st_gid),
            "mtime": status.st_mtime_ns,
            "rdev": status.st_rdev,
            "xattrs": {
                name: os.getxattr(path, name, follow_symlinks=path == top) for name in _listed(path, path == top)
            },
            "what": path.read_bytes() if kind == stat.S_IFREG else b"",
            "target": str(path.readlink()) if kind == stat.S_IFLNK else "",
            "same": "" if kind == stat.S_IFDIR else groups.setdefault((status.st_dev, status.st_ino), shown),
        }
    return found


def _listed(path: Path, follow: bool) -> list[str]:
    return [name for name in os.listxattr(path, follow_symlinks=follow) if not name.startswith("trusted.overlay.")]


class Stack:
    """Layers on disk and overlays over them, all detached; closed as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors = ExitStack()
        self.layers: list[int] = []

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.close()

    def push(self, tree: Tree) -> None:
        name = self._folder / f"layer{len(self.layers)}"
        with name.with_suffix(".erofs").open("w+b") as metadata, name.with_suffix(".data").open("wb") as data:
            write_image(tree, metadata, data.write)
        self.layers.append(mount_erofs(str(name.with_suffix(".erofs")), [str(name.with_suffix(".data"))]))
        self._descriptors.callback(os.close, self.layers[-1])

    @contextmanager
    def overlay(self, upper: Path | None = None) -> Iterator[Path]:
        if upper is None:
            fd = mount_overlay(self.layers[::-1])
        else:
            work = upper.with_name(upper.name + ".work")
            for folder in (upper, work):
                folder.mkdir()
            fd = mount_overlay(self.layers[::-1], str(upper), str(work))
        try:
            yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as made:
        made.push(base())
        yield made


def test_three_generations_of_uppers_show_what_their_overlays_showed(stack: Stack, tmp_path: Path) -> None:
    for number, act in enumerate((change, change_back, remove_a_half)):
        upper = tmp_path / f"upper{number}"
        with stack.overlay(upper) as top:
            act(top)
            wanted = seen(top)
        stack.push(from_upper(upper))
        with stack.overlay() as top:
            assert seen(top) == wanted


def test_an_upper_says_only_what_means_something_elsewhere(stack: Stack, tmp_path: Path) -> None:
    with stack.overlay(tmp_path / "upper") as top:
        change(top)
    tree = from_upper(tmp_path / "upper")
    found = values(tree)
    whiteouts = [entry.path for entry in tree.entries() if entry.is_whiteout]
    assert set(whiteouts) == {b"deleted", b"d/deleted", b"d/e/deleted", b"gone", b"link", b"deep/deep/deep/x"}
    for path in whiteouts:
        assert (found[path]["mode"], found[path]["ids"], found[path]["mtime"]) == ("0o20000", (0, 0), (0, 0))
    marks: dict[bytes, dict[bytes, bytes]] = {}
    for path, one in found.items():
        for name, data in one.get("xattrs", {}).items():
            if name.startswith(b"trusted.overlay."):
                marks.setdefault(name, {})[path] = data
    assert set(marks) == {b"trusted.overlay.opaque", b"trusted.overlay.origin"}
    assert marks[b"trusted.overlay.origin"] == {path.rpartition(b"/")[0]: b"" for path in whiteouts}
    assert {b"opaque", b"emptied", b"to-directory"} <= set(marks[b"trusted.overlay.opaque"])
    assert b"kept" not in found and b"d/kept" not in found


def test_an_untouched_upper_is_its_root_only(stack: Stack, tmp_path: Path) -> None:
    with stack.overlay(tmp_path / "upper") as top:
        assert (top / "kept").read_text() == "base kept"
    assert list(values(from_upper(tmp_path / "upper"))) == [b""]


def test_equal_changes_give_equal_trees(stack: Stack, tmp_path: Path) -> None:
    trees = []
    for name in ("one", "two"):
        with stack.overlay(tmp_path / name) as top:
            for path in ("deleted", "d/deleted"):
                (top / path).unlink()
            shutil.rmtree(top / "gone")
            (top / "gone").mkdir()
            for folder in (top, top / "d", top / "gone"):
                os.utime(folder, (1, 1))
        trees.append(values(from_upper(tmp_path / name)))
    assert trees[0] == trees[1]


@contextmanager
def foreign_overlay(folder: Path, options: str) -> Iterator[Path]:
    """An overlay over plain directories with options that ours never have."""
    for name in ("lower/d/e", "upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    (folder / "lower" / "d" / "file").write_text("contents")
    text = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work,{options}"
    subprocess.run(["mount", "-t", "overlay", "-o", text, "dsec-test", folder / "merged"], check=True)
    try:
        yield folder / "merged"
    finally:
        subprocess.run(["umount", folder / "merged"], check=True)


def test_an_upper_with_a_redirect_is_refused_with_the_path(tmp_path: Path) -> None:
    with foreign_overlay(tmp_path, "redirect_dir=on,metacopy=off,index=off") as merged:
        (merged / "d").rename(merged / "moved")
    with pytest.raises(SourceError, match=r"trusted\.overlay\.redirect") as caught:
        from_upper(tmp_path / "upper")
    assert caught.value.path == b"moved"


def test_an_upper_with_metacopy_is_refused_with_the_path(tmp_path: Path) -> None:
    with foreign_overlay(tmp_path, "redirect_dir=on,metacopy=on,index=off") as merged:
        (merged / "d" / "file").chmod(0o600)
    with pytest.raises(SourceError, match=r"trusted\.overlay\.metacopy") as caught:
        from_upper(tmp_path / "upper")
    assert caught.value.path == b"d/file"


def test_an_index_and_a_uuid_mean_nothing_elsewhere(tmp_path: Path) -> None:
    with foreign_overlay(tmp_path, "redirect_dir=off,metacopy=off,index=on,uuid=on") as merged:
        (merged / "d" / "file").write_text("changed")
        (merged / "d" / "e").rmdir()
    upper = tmp_path / "upper"
    carried = {name for path in (upper, *upper.rglob("*")) for name in os.listxattr(path, follow_symlinks=False)}
    assert {"trusted.overlay.origin", "trusted.overlay.uuid"} <= carried
    found = values(from_upper(upper))
    assert found[b""]["xattrs"] == {} and found[b"d/file"]["xattrs"] == {}
    assert found[b"d"]["xattrs"] == {b"trusted.overlay.origin": b""} and found[b"d/e"]["mode"] == "0o20000"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("trusted.overlay.opaque", b"x"),
        ("trusted.overlay.whiteout", b""),
        ("trusted.overlay.protattr", b"i"),
    ],
)
def test_what_an_overlay_of_ours_never_writes_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "d").mkdir()
    os.setxattr(tmp_path / "d", name, data)
    with pytest.raises(SourceError, match=name) as caught:
        from_upper(tmp_path)
    assert caught.value.path == b"d"


def test_what_any_user_may_set_inside_is_content(stack: Stack, tmp_path: Path) -> None:
    with stack.overlay(tmp_path / "upper") as top:
        os.setxattr(top / "d", "user.overlay.opaque", b"y")
    tree = from_upper(tmp_path / "upper")
    assert values(tree)[b"d"]["xattrs"] == {b"user.overlay.opaque": b"y"}
    stack.push(tree)
    with stack.overlay() as top:
        assert os.getxattr(top / "d", "user.overlay.opaque") == b"y"
        assert (top / "d" / "kept").exists()


def test_opaque_means_nothing_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    os.setxattr(tmp_path / "f", "trusted.overlay.opaque", b"y")
    with pytest.raises(SourceError):
        from_upper(tmp_path)


def test_attributes_of_an_overlay_inside_the_sandbox_stay_escaped(stack: Stack, tmp_path: Path) -> None:
    with stack.overlay(tmp_path / "upper") as top:
        os.setxattr(top / "d", "trusted.overlay.opaque", b"y")  # as a nested overlay does with its upper
    tree = from_upper(tmp_path / "upper")
    assert values(tree)[b"d"]["xattrs"] == {b"trusted.overlay.overlay.opaque": b"y"}
    stack.push(tree)
    with stack.overlay() as top:
        assert os.getxattr(top / "d", "trusted.overlay.opaque") == b"y"
        assert (top / "d" / "kept").exists()
