"""A directory as a tree: all that lies there, nothing from elsewhere, and nothing that moved meanwhile."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from erofs_tools.content import DirectoryFds
from erofs_tools.directory import Rules, from_directory, scan
from erofs_tools.errors import SourceError
from erofs_tools.source_rules import layer_xattrs
from erofs_tools.tree import Entry, Tree
from tests.erofs_tools.trees import contents, value, values


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "top"
    folder.mkdir()
    return folder


def entry(tree: Tree, path: bytes) -> Entry:
    found = tree.get(path)
    assert found is not None
    return found


def refusal(top: Path, **options: bool) -> SourceError:
    with pytest.raises(SourceError) as caught:
        from_directory(top, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_every_kind_of_entry_keeps_everything(top: Path) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    (top / "file").write_bytes(b"contents")
    os.chown(top / "file", 12345, 4294967294)
    (top / "file").chmod(0o6751)
    os.setxattr(top / "file", "user.bin", b"\0\n\xff")
    os.setxattr(top / "file", "trusted.t", b"")
    os.setxattr(top / "file", "security.capability", capability)
    os.utime(top / "file", ns=(1, -1_500_000_001))
    os.symlink(b"target \xff", os.fsencode(top / "link"))
    os.mkfifo(top / "fifo", 0o640)
    os.mknod(top / "chr", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top / "blk", stat.S_IFBLK | 0o660, os.makedev(259, 70000))
    (top / "dir").mkdir()
    for name, mode in (("fifo", 0o640), ("chr", 0o666), ("blk", 0o660), ("dir", 0o700)):
        (top / name).chmod(mode)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "sock"))
    os.link(top / "file", top / "dir" / "hard")
    os.link(top / "link", top / "dir" / "hard link to a link", follow_symlinks=False)
    found = values(from_directory(top))
    assert found[b"dir/hard"] == {
        "mode": "0o106751",
        "ids": (12345, 4294967294),
        "mtime": (-2, 499_999_999),
        "rdev": 0,
        "size": 8,
        "xattrs": {b"security.capability": capability, b"trusted.t": b"", b"user.bin": b"\0\n\xff"},
        "target": b"",
        "contents": b"contents",
    }
    link = found[b"dir/hard link to a link"]
    assert found[b"file"] == {"hardlink_to": b"dir/hard"}
    assert found[b"link"] == {"hardlink_to": b"dir/hard link to a link"}
    assert (link["mode"], link["target"]) == ("0o120777", b"target \xff")
    assert found[b"fifo"]["mode"] == "0o10640" and found[b"sock"]["mode"].startswith("0o140")
    assert (found[b"chr"]["mode"], found[b"chr"]["rdev"]) == ("0o20666", os.makedev(1, 3))
    assert (found[b"blk"]["mode"], found[b"blk"]["rdev"]) == ("0o60660", os.makedev(259, 70000))
    assert found[b"dir"]["mode"] == "0o40700"


def test_the_top_directory_gives_the_roots_attributes(top: Path) -> None:
    top.chmod(0o1750)
    os.chown(top, 7, 8)
    os.setxattr(top, "user.r", b"root")
    os.utime(top, ns=(0, 1_700_000_000_123_456_789))
    root = value(entry(from_directory(top), b""))
    assert (root["mode"], root["ids"], root["mtime"]) == ("0o41750", (7, 8), (1_700_000_000, 123_456_789))
    assert root["xattrs"] == {b"user.r": b"root"}


def test_names_are_bytes(top: Path) -> None:
    names = [b"\xff\xfe", "é".encode(), b"a\nb", b"\x01", b"n" * 255, b" ", b"\\", b"-"]
    for name in names:
        (top / os.fsdecode(name)).write_bytes(name)
    found = values(from_directory(top))
    assert {path: one["contents"] for path, one in found.items() if path} == {name: name for name in names}


def test_symbolic_links_are_never_followed(top: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (top / "to-directory").symlink_to("../outside")
    (top / "to-file").symlink_to("../outside/secret")
    (top / "dangling").symlink_to("nothing")
    assert [e.path for e in from_directory(top).entries()] == [b"", b"dangling", b"to-directory", b"to-file"]


def test_a_tree_deeper_than_a_path_may_be_long(top: Path) -> None:
    fd = os.open(top, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 200, dir_fd=fd)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    with os.fdopen(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd), "w") as file:
        file.write("deep")
    os.close(fd)
    try:
        tree = from_directory(top)
        path = b"/".join([b"d" * 200] * 60) + b"/file"
        assert len(tree) == 62 and contents(entry(tree, path)) == b"deep"
    finally:
        subprocess.run(["rm", "-rf", top], check=True)


def test_descriptors_stay_few_and_are_closed_with_the_tree(top: Path) -> None:
    for number in range(50):
        folder = top / "/".join(f"{number}-{level}" for level in range(number))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text(str(number))
    before = len(os.listdir("/proc/self/fd"))
    tree = from_directory(top)
    assert {contents(e) for e in tree.entries() if e.content} == {str(n).encode() for n in range(50)}
    assert len(os.listdir("/proc/self/fd")) < before + 40
    del tree
    assert len(os.listdir("/proc/self/fd")) == before


def test_holes_are_not_read(top: Path) -> None:
    places = (0, 5 << 30, (1 << 40) - 7)
    with (top / "disk").open("wb") as file:
        for offset in places:
            file.seek(offset)
            file.write(b"piece..")
    disk = entry(from_directory(top), b"disk")
    assert disk.content is not None and disk.size == 1 << 40
    segments = list(disk.content.segments())
    assert sum(length for _, length in segments) <= 3 * 65536
    for offset in places:
        assert any(start <= offset and offset + 7 <= start + length for start, length in segments)


@pytest.mark.parametrize("name", [".wh.x", ".wh..wh..opq", ".wh."])
def test_whiteout_names_are_refused_unless_meant_literally(top: Path, name: str) -> None:
    (top / "d").mkdir()
    (top / "d" / name).write_text("1")
    assert refusal(top).path == b"d/" + name.encode()
    assert refusal(top, strip_overlay=True).path == b"d/" + name.encode()
    assert b"d/" + name.encode() in from_directory(top, literal_whiteouts=True)


def test_a_whiteout_device_is_refused_or_dropped(top: Path) -> None:
    os.mknod(top / "w", stat.S_IFCHR, 0)
    os.link(top / "w", top / "v")
    os.mknod(top / "block", stat.S_IFBLK, 0)
    assert refusal(top).path == b"v"
    assert [e.path for e in from_directory(top, strip_overlay=True).entries()] == [b"", b"block"]


@pytest.mark.parametrize("name", ["trusted.overlay.opaque", "trusted.overlay.redirect", "user.overlay.opaque"])
def test_attributes_of_overlayfs_are_refused_or_dropped(top: Path, name: str) -> None:
    (top / "d").mkdir()
    os.setxattr(top / "d", name, b"y")
    os.setxattr(top / "d", "user.keep", b"1")
    assert refusal(top).path == b"d" and name in str(refusal(top))
    assert entry(from_directory(top, strip_overlay=True), b"d").xattrs == {b"user.keep": b"1"}
    os.setxattr(top, name, b"y")
    assert name in str(refusal(top))


def test_escaped_attributes_of_a_nested_overlay_are_content(top: Path) -> None:
    os.setxattr(top, "trusted.overlay.overlay.opaque", b"y")
    assert entry(from_directory(top), b"").xattrs == {b"trusted.overlay.overlay.opaque": b"y"}


def test_the_selinux_label_is_ignored(top: Path) -> None:
    try:
        os.setxattr(top, "security.selinux", b"system_u:object_r:tmp_t:s0\0")
    except OSError as error:
        pytest.skip(f"no labels here: {error}")
    assert entry(from_directory(top), b"").xattrs == {}


def overwrite(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def overwrite_and_reset_mtime(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.write_bytes(b"x" * 100_000)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def shorten(path: Path) -> None:
    os.truncate(path, 50_000)


def close_to_all(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize(
    "change",
    [
        overwrite,
        overwrite_and_reset_mtime,
        replace,
        replace_by_link,
        replace_by_fifo,
        Path.unlink,
        shorten,
        close_to_all,
    ],
)
def test_a_file_that_changed_since_it_was_listed_is_an_error_that_names_it(
    top: Path, change: Callable[[Path], None]
) -> None:
    (top / "d").mkdir()
    path = top / "d" / "file"
    path.write_bytes(random.Random(6).randbytes(100_000))
    listed = entry(from_directory(top), b"d/file")
    assert listed.content is not None
    change(path)
    with pytest.raises(SourceError) as caught:
        listed.content.open()
    assert caught.value.path == b"d/file"


@pytest.mark.parametrize("between", ["d", "other"])
def test_a_directory_moved_away_leads_to_its_own_files_or_nowhere(top: Path, between: str) -> None:
    for folder in ("d", "other", "evil"):
        (top / folder).mkdir()
        (top / folder / "file").write_text(folder)
    tree = from_directory(top)
    contents(entry(tree, f"{between}/file".encode()))
    (top / "d").rename(top / "moved")
    (top / "d").symlink_to("evil")
    try:
        assert contents(entry(tree, b"d/file")) == b"d"
    except SourceError as error:
        assert error.path == b"d/file"


@pytest.mark.parametrize("change", [overwrite, shorten])
def test_a_file_that_changes_under_a_reader_is_an_error_that_names_it(
    top: Path, change: Callable[[Path], None]
) -> None:
    path = top / "file"
    path.write_bytes(bytes(100_000))
    listed = entry(from_directory(top), b"file")
    assert listed.content is not None
    with listed.content.open() as reader:
        assert len(reader.read(40_000)) == 40_000
        change(path)
        with pytest.raises(SourceError) as caught:
            reader.read()
    assert caught.value.path == b"file"


class _Meddling(Rules):
    """Rules of a source in which something happens at the moment when a name is looked at."""

    def __init__(self, at: bytes, what: Callable[[], object]) -> None:
        self._at, self._what = at, what

    def check_name(self, name: bytes, path: bytes) -> None:
        if path == self._at:
            self._what()

    def xattrs(self, found: dict[bytes, bytes], path: bytes, mode: int) -> dict[bytes, bytes]:
        return layer_xattrs(found, path, strip_overlay=False)

    def whiteout(self, tree: Tree, path: bytes) -> None:
        tree.add_whiteout(path)


def test_what_vanishes_while_it_is_listed_is_an_error_that_names_it(top: Path) -> None:
    (top / "d").mkdir()
    (top / "d" / "file").write_text("1")
    with pytest.raises(SourceError, match="removed") as caught:
        scan(top, _Meddling(b"d/file", (top / "d" / "file").unlink))
    assert caught.value.path == b"d/file"


def test_a_directory_that_vanishes_or_changes_while_it_is_listed_is_an_error(top: Path) -> None:
    (top / "d").mkdir()
    (top / "d" / "file").write_text("1")
    with pytest.raises(SourceError, match="changed") as caught:
        scan(top, _Meddling(b"d/file", lambda: (top / "d" / "new").write_text("2")))
    assert caught.value.path == b"d"
    (top / "e").mkdir()
    with pytest.raises(SourceError, match="removed") as caught:
        scan(top, _Meddling(b"d/new", (top / "e").rmdir))
    assert caught.value.path == b"e"


ROOT_WITHOUT_ITS_POWERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
READ_ALL = """
import sys
from erofs_tools.directory import from_directory
from erofs_tools.errors import SourceError
try:
    for entry in from_directory(sys.argv[1]).entries():
        if entry.content:
            entry.content.open().close()
except SourceError as error:
    print(error)
"""


def test_what_may_not_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "closed-file").mkdir()
    (tmp_path / "closed-file" / "f").write_text("s")
    (tmp_path / "closed-file" / "f").chmod(0)
    (tmp_path / "closed-directory" / "d").mkdir(parents=True)
    (tmp_path / "closed-directory" / "d").chmod(0)
    (tmp_path / "closed-top").mkdir(mode=0)
    for name, wanted in (
        ("closed-file", "f: cannot open: Permission denied (EACCES)"),
        ("closed-directory", "d: cannot open the directory: Permission denied (EACCES)"),
        ("closed-top", f"cannot open {tmp_path / 'closed-top'}: Permission denied (EACCES)"),
    ):
        done = subprocess.run(
            [*ROOT_WITHOUT_ITS_POWERS, sys.executable, "-c", READ_ALL, tmp_path / name],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == wanted, done.stderr


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.write_text("x"), lambda p: p.symlink_to("nothing")])
def test_a_top_that_is_no_directory_is_a_clear_error(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "it")
    assert "it" in str(refusal(tmp_path / "it"))


def test_a_walker_by_descriptors_opens_what_the_path_says(top: Path) -> None:
    deep = ["l"] * 50
    paths = ["", "a", "a/b", "a/b/c", "x", "/".join(["a", *deep]), "/".join(["a", *deep[1:]]), "/".join(deep[:32])]
    for path in paths:
        (top / path).mkdir(parents=True, exist_ok=True)
    fds = DirectoryFds(top)
    try:
        for path in random.Random(7).choices(paths, k=200):
            fd = fds.open(path.encode())
            assert os.fstat(fd).st_ino == (top / path).stat().st_ino
            os.close(fd)
    finally:
        fds.close()
