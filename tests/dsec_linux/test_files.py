"""Files that are whole or not there, and what the kernel says about files."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dsec_linux import files, mounts
from dsec_linux.errors import LinuxError, LinuxExists, LinuxNotFound, failure


@pytest.mark.parametrize(
    ("path", "name"),
    [("/proc", "proc"), ("/sys", "sysfs"), ("/dev/shm", "tmpfs")],
)
def test_file_systems_are_named(path: str, name: str) -> None:
    assert files.statfs_name(path) == name
    fd = os.open(path, os.O_PATH)
    assert files.statfs_name(fd) == name
    os.close(fd)


def test_the_name_of_the_disk_is_what_the_mount_table_says(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    assert files.statfs_name(str(tmp_path)) == kind.strip().replace("ext2/ext3", "ext4")


def test_an_unknown_file_system_is_its_number_in_hex(monkeypatch: pytest.MonkeyPatch) -> None:
    number = files.statfs_magic("/proc")
    monkeypatch.delitem(files.FILE_SYSTEMS, number)
    assert files.statfs_name("/proc") == "0x9fa0"


def test_statx_agrees_with_stat(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    os.chown(path, 12345, 54321)
    info, known = files.statx(str(path)), path.stat()
    assert (info.mode, info.size, info.ino, info.nlink) == (known.st_mode, 5000, known.st_ino, 1)
    assert (info.uid, info.gid, info.blocks) == (12345, 54321, known.st_blocks)
    assert (info.mtime_ns, info.atime_ns, info.ctime_ns) == (known.st_mtime_ns, 1, known.st_ctime_ns)
    assert os.makedev(info.dev_major, info.dev_minor) == known.st_dev
    assert info.mnt_id == files.statx(str(tmp_path)).mnt_id != files.statx("/proc").mnt_id
    assert info.btime_ns is not None
    link = tmp_path / "link"
    link.symlink_to("file")
    assert stat.S_ISLNK(files.statx(str(link), follow=False).mode)
    assert files.statx(str(link)).ino == known.st_ino
    fd = os.open(link, os.O_PATH | os.O_NOFOLLOW)
    assert stat.S_ISLNK(files.statx(fd).mode)
    os.close(fd)
    null = files.statx("/dev/null")
    assert (null.rdev_major, null.rdev_minor) == (1, 3)


def test_an_error_names_call_and_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        files.statx(str(tmp_path / "none"))
    assert str(caught.value) == f"statx on {tmp_path}/none: No such file or directory (ENOENT)"
    with pytest.raises(ValueError, match="null byte"):
        files.statx("a\0b")


def test_a_range_is_copied_inside_the_kernel_to_its_place(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(content)
    with open(tmp_path / "a", "rb") as a, open(tmp_path / "b", "w+b") as b:
        files.copy_file_range(a.fileno(), b.fileno(), 2_000_000, 1000, 50)
        assert a.tell() == b.tell() == 0
        with pytest.raises(LinuxError, match="the source ends 1 bytes before"):
            files.copy_file_range(a.fileno(), b.fileno(), 1001, 2_999_000, 0)
    assert (tmp_path / "b").read_bytes()[1000:2_000_050] == content[1950:2_001_000]


def test_copying_to_where_the_kernel_cannot_raises_and_does_not_emulate(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4096)
    reader, writer = os.pipe()
    with open(tmp_path / "a", "rb") as a, pytest.raises(LinuxError) as caught:
        files.copy_file_range(a.fileno(), writer, 4096, 0, 0)
    assert caught.value.call == "copy_file_range" and caught.value.errno in (errno.EINVAL, errno.ESPIPE)
    os.close(reader)
    os.close(writer)


def test_a_punched_hole_reads_as_zeros_and_gives_blocks_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 65536)
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        before = path.stat().st_blocks
        files.punch_hole(file.fileno(), 4096, 32768)
        os.fsync(file.fileno())
    assert path.stat().st_blocks == before - 64 and path.stat().st_size == 65536
    assert path.read_bytes() == b"x" * 4096 + bytes(32768) + b"x" * 28672


def test_a_preallocated_file_has_its_blocks_and_a_full_file_system_is_enospc() -> None:
    tmpfs = mounts.mount_tmpfs("1m")
    with open(f"/proc/self/fd/{tmpfs}/file", "w+b") as file:
        files.fallocate(file.fileno(), 0, 0, 1 << 19)
        assert os.fstat(file.fileno()).st_size == 1 << 19 and os.fstat(file.fileno()).st_blocks == 1024
        with pytest.raises(LinuxError) as caught:
            files.fallocate(file.fileno(), 0, 0, 1 << 21)
        assert caught.value.errno == errno.ENOSPC and caught.value.call == "fallocate"
    os.close(tmpfs)


def test_a_sealed_memfd_cannot_be_changed() -> None:
    fd = files.memfd("name", b"content", sealed=True)
    assert os.read(fd, 100) == b"content"
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_durable_write_replaces_whole_files_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    old = os.umask(0o777)
    try:
        files.write_file_durable(str(path), b"one", 0o640)
    finally:
        os.umask(old)
    assert path.read_bytes() == b"one" and stat.S_IMODE(path.stat().st_mode) == 0o640
    files.write_file_durable(str(path), b"two" * 100_000)
    assert path.read_bytes() == b"two" * 100_000
    assert os.listdir(tmp_path) == [path.name]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_file_durable(str(tmp_path / "folder"), b"x")
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "folder"])


def test_an_unnamed_file_appears_whole_and_replaces_nothing(tmp_path: Path) -> None:
    fd = files.unnamed_file(str(tmp_path))
    os.write(fd, b"content")
    assert os.listdir(tmp_path) == []
    files.link_fd(fd, str(tmp_path / "name"))
    files.fsync_dir(str(tmp_path))
    assert (tmp_path / "name").read_bytes() == b"content"
    with pytest.raises(FileExistsError) as caught:
        files.link_fd(fd, str(tmp_path / "name"))
    assert isinstance(caught.value, LinuxExists) and caught.value.subject == str(tmp_path / "name")
    os.close(fd)


def test_an_unnamed_file_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    script = f"""
import os, signal
from dsec_linux import files, mounts
fd = files.unnamed_file({str(tmp_path)!r})
os.write(fd, b"x" * 100)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert os.listdir(tmp_path) == []


def test_a_path_cannot_leave_the_folder_that_it_is_opened_beneath(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "file").write_bytes(b"in")
    (tmp_path / "outside").write_bytes(b"out")
    (inside / "up").symlink_to("../outside")
    (inside / "absolute").symlink_to(tmp_path / "outside")
    (inside / "fine").symlink_to("sub/../sub/file")
    folder = os.open(inside, os.O_PATH)
    try:
        for good in ("sub/file", "sub/../sub/file", "fine", b"sub/file"):
            fd = files.open_beneath(folder, good)
            assert os.read(fd, 10) == b"in" and not os.get_inheritable(fd)
            os.close(fd)
        for bad in ("../outside", "up", "absolute", str(tmp_path / "outside"), "sub/../../outside"):
            with pytest.raises(LinuxError) as caught:
                files.open_beneath(folder, bad)
            assert caught.value.errno == errno.EXDEV
    finally:
        os.close(folder)


def test_a_path_in_a_root_stays_in_it_as_after_chroot(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "passwd").write_bytes(b"in")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_bytes(b"out")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../etc/passwd")
    folder = os.open(root, os.O_PATH)
    try:
        for path in ("absolute", "up", "/etc/passwd", "../etc/passwd"):
            fd = files.open_in_root(folder, path)
            assert os.read(fd, 10) == b"in" and not os.get_inheritable(fd)
            os.close(fd)
    finally:
        os.close(folder)


def test_errors_are_pythons_own_too_and_survive_pickling() -> None:
    error = failure(errno.ENOENT, "fsconfig(a=...)", "overlay", ["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, LinuxNotFound) and str(again) == str(error)
    assert str(error) == "fsconfig(a=...) on overlay: No such file or directory (ENOENT): one; two"
    assert (again.call, again.subject, again.log, again.errno) == ("fsconfig(a=...)", "overlay", ["one", "two"], 2)
