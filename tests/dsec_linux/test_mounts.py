"""Detached mounts under the real kernel, and what is said when one is refused."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dsec_linux import bdi, mountapi, mounts
from dsec_linux.errors import LinuxError

from tests.dsec_linux.conftest import MakePair, Pair
from tests.waiting import until


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair("layer", {"file": os.urandom(100_000), "dir/other": b"text"})


def folder(path: Path) -> str:
    path.mkdir()
    return str(path)


def targets() -> set[str]:
    return {mount.target for mount in mounts.mountinfo()}


def refusal(call: Callable[[], int], number: int, *words: str) -> LinuxError:
    """The error of a call that must be refused, with our explanation in one line."""
    with pytest.raises(LinuxError) as caught:
        call()
    text = str(caught.value)
    assert caught.value.errno == number, text
    assert all(word in text for word in words) and "\n" not in text, text
    assert caught.value.log
    return caught.value


def test_a_detached_layer_is_read_by_its_descriptor_and_is_in_no_mount_table(pair: Pair) -> None:
    before = targets()
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    root = f"/proc/self/fd/{layer}"
    assert Path(f"{root}/file").read_bytes() == (pair.source / "file").read_bytes()
    assert os.fstatvfs(layer).f_flag & os.ST_RDONLY and os.fstatvfs(layer).f_flag & os.ST_NODEV
    assert targets() == before
    os.close(layer)


def test_an_attached_mount_shows_its_source_and_is_unmounted_when_the_descriptor_is_closed(
    pair: Pair, tmp_path: Path
) -> None:
    target = folder(tmp_path / "a target with \\ and\ttab")
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    mounts.attach(layer, target)
    try:
        with pytest.raises(LinuxError) as caught:
            mounts.umount(target)
        assert caught.value.errno == errno.EBUSY
    finally:
        os.close(layer)
        [info] = [mount for mount in mounts.mountinfo() if mount.target == target]
        mounts.umount(target)
    assert (info.fstype, info.source, info.root) == ("erofs", pair.meta, "/")
    assert "ro" in info.options and "nodev" in info.options
    assert target not in targets()


def test_mountinfo_agrees_with_the_kernels_own_numbers(tmp_path: Path) -> None:
    root = [mount for mount in mounts.mountinfo(os.getpid()) if mount.target == "/"][-1]
    device = os.stat("/").st_dev
    assert root.major_minor == f"{os.major(device)}:{os.minor(device)}"


def test_a_long_path_of_image_and_device(pair: Pair, tmp_path: Path) -> None:
    """fsconfig takes strings of 255 bytes; longer paths go by descriptor."""
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    shutil.copy(pair.meta, deep / "meta")
    shutil.copy(pair.blob, deep / "blob")
    layer = mounts.mount_erofs(str(deep / "meta"), [str(deep / "blob")])
    assert Path(f"/proc/self/fd/{layer}/dir/other").read_bytes() == b"text"
    for name in ("upper", "work"):
        (deep / name).mkdir()
    overlay = mounts.mount_overlay([layer], str(deep / "upper"), str(deep / "work"))
    Path(f"/proc/self/fd/{overlay}/new").write_bytes(b"!")
    assert (deep / "upper" / "new").read_bytes() == b"!"
    os.close(overlay)
    os.close(layer)


@pytest.mark.parametrize("kernel_takes_descriptors", [True, False])
def test_the_first_lower_is_on_top_and_the_upper_on_top_of_all(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_takes_descriptors: bool
) -> None:
    if not kernel_takes_descriptors:  # what Linux 6.12 answers

        def refuse(fs: int, key: str, fd: int, subject: str) -> None:
            raise LinuxError(errno.EINVAL, f"fsconfig({key}=fd)", subject)

        monkeypatch.setattr(mountapi, "fsconfig_fd", refuse)
    pairs = [make_pair(name, {"who": name.encode(), f"only-{name}": b""}) for name in ("base", "middle", "top")]
    layers = [mounts.mount_erofs(pair.meta, [pair.blob]) for pair in pairs]
    upper, work = folder(tmp_path / "upper:with,odd\\characters"), folder(tmp_path / "work:x")
    overlay = mounts.mount_overlay(layers[::-1], upper, work)
    target = folder(tmp_path / "target")
    mounts.attach(overlay, target)
    os.close(overlay)
    try:
        who = Path(target, "who")
        assert who.read_bytes() == b"top"
        assert {"only-base", "only-middle", "only-top"} <= set(os.listdir(target))
        who.write_bytes(b"upper")
        os.unlink(f"{target}/only-base")
        assert who.read_bytes() == b"upper"
        [info] = [mount for mount in mounts.mountinfo() if mount.target == target]
        assert "redirect_dir=nofollow" in info.super_options and "nodev" in info.options
        assert Path(upper, "who").read_bytes() == b"upper"
    finally:
        mounts.umount(target)
        for layer in layers:
            os.close(layer)


def test_a_read_only_overlay_refuses_writes(make_pair: MakePair) -> None:
    layers = [mounts.mount_erofs(p.meta, [p.blob]) for p in (make_pair("a", {"a": b"1"}), make_pair("b", {"b": b"2"}))]
    overlay = mounts.mount_overlay(layers)
    with pytest.raises(OSError) as caught:
        os.open(f"/proc/self/fd/{overlay}/new", os.O_CREAT | os.O_WRONLY)
    assert caught.value.errno == errno.EROFS
    assert sorted(os.listdir(f"/proc/self/fd/{overlay}")) == ["a", "b"]
    for fd in (overlay, *layers):
        os.close(fd)


def test_a_device_in_a_layer_or_an_upper_cannot_be_opened(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair("layer", {"file": b"x"})
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    upper, work = folder(tmp_path / "upper"), folder(tmp_path / "work")
    overlay = mounts.mount_overlay([layer], upper, work)
    os.mknod(f"/proc/self/fd/{overlay}/null", 0o20666, os.makedev(1, 3))
    with pytest.raises(PermissionError):
        os.open(f"/proc/self/fd/{overlay}/null", os.O_RDONLY)
    os.close(overlay)
    os.close(layer)


def test_a_clone_is_another_mount_of_the_same_superblock(pair: Pair, tmp_path: Path) -> None:
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    device = os.fstat(layer).st_dev
    first, second = mounts.clone_mount(layer), mounts.clone_mount(layer)
    os.close(layer)
    ones = [folder(tmp_path / "one"), folder(tmp_path / "two")]
    for fd, target in zip((first, second), ones, strict=True):
        mounts.attach(fd, target)
        os.close(fd)
        assert os.stat(target).st_dev == device
        assert Path(target, "dir/other").read_bytes() == b"text"
    infos = [mount for mount in mounts.mountinfo() if mount.target in ones]
    assert all("nodev" in info.options and "ro" in info.options for info in infos) and len(infos) == 2
    for target in ones:
        mounts.umount(target)


def test_500_lowers_are_mounted_and_501_refused(make_pair: MakePair) -> None:
    pair = make_pair("many", {f"{i:03}/file-{i:03}": b"" for i in range(501)})
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    folders = [os.open(f"/proc/self/fd/{layer}/{i:03}", os.O_PATH) for i in range(501)]
    try:
        overlay = mounts.mount_overlay(folders[:500])
        assert sorted(os.listdir(f"/proc/self/fd/{overlay}")) == [f"file-{i:03}" for i in range(500)]
        os.close(overlay)
        refusal(lambda: mounts.mount_overlay(folders), errno.EINVAL, "501 lower layers", "500")
    finally:
        for fd in (layer, *folders):
            os.close(fd)


def test_a_killed_process_leaves_no_mount(pair: Pair) -> None:
    before = targets()
    known = bdi.names()
    script = f"""
import os, signal
from dsec_linux import bdi, mounts
fd = mounts.mount_erofs({pair.meta!r}, [{pair.blob!r}])
print(bdi.names() - {known!r}, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    [made] = [name for name in ast.literal_eval(done.stdout) if name.startswith("erofs-")]
    assert targets() == before
    until(lambda: made not in bdi.names(), f"{made} to be released")


def test_small_file_systems_are_made_detached() -> None:
    proc, tmpfs = mounts.mount_proc(), mounts.mount_tmpfs("1m")
    assert os.readlink(f"/proc/self/fd/{proc}/self") == str(os.getpid())
    assert os.fstatvfs(tmpfs).f_blocks * os.fstatvfs(tmpfs).f_frsize == 1 << 20
    os.close(proc)
    os.close(tmpfs)


# --- what is refused, and what is said ---


def test_a_wrong_number_of_devices_is_named(pair: Pair) -> None:
    refusal(lambda: mounts.mount_erofs(pair.meta), errno.EINVAL, pair.meta, "names 1 devices, 0 were given")
    refusal(
        lambda: mounts.mount_erofs(pair.meta, [pair.blob, pair.blob]), errno.EINVAL, "names 1 devices, 2 were given"
    )


@pytest.mark.parametrize("where", ["/dev/shm", "overlay"])
def test_an_image_on_a_file_system_that_cannot_carry_it_is_named(pair: Pair, tmp_path: Path, where: str) -> None:
    if where == "overlay":
        layer = mounts.mount_erofs(pair.meta, [pair.blob])
        fd = mounts.mount_overlay([layer], folder(tmp_path / "upper"), folder(tmp_path / "work"))
        os.close(layer)
    else:
        fd = mounts.mount_tmpfs("16m")
    kind = "overlayfs" if where == "overlay" else "tmpfs"
    copy = f"/proc/self/fd/{fd}/meta"
    shutil.copy(pair.meta, copy)
    refusal(lambda: mounts.mount_erofs(copy, [pair.blob]), errno.ENOTBLK, copy, kind, "ext4")
    os.close(fd)


def test_an_image_inside_a_mounted_layer_is_refused_with_the_file_systems_name(make_pair: MakePair, pair: Pair) -> None:
    outer = make_pair("outer", {"meta": Path(pair.meta).read_bytes()})
    layer = mounts.mount_erofs(outer.meta, [outer.blob])
    inner = f"/proc/self/fd/{layer}/meta"
    refusal(lambda: mounts.mount_erofs(inner, [pair.blob]), errno.ENOTBLK, "erofs cannot carry an EROFS image")
    os.close(layer)


def test_images_and_devices_that_are_none(pair: Pair, tmp_path: Path) -> None:
    empty, garbage = tmp_path / "empty", tmp_path / "garbage"
    empty.write_bytes(b"")
    garbage.write_bytes(os.urandom(8192))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for image in (empty, garbage):
        refusal(lambda image=image: mounts.mount_erofs(str(image), []), errno.EINVAL, str(image), "superblock")  # type: ignore[misc]
    refusal(lambda: mounts.mount_erofs(str(tmp_path), []), errno.EINVAL, "not a regular file")
    refusal(lambda: mounts.mount_erofs(str(fifo), []), errno.EINVAL, "not a regular file")
    refusal(lambda: mounts.mount_erofs(pair.meta, [str(fifo)]), errno.EINVAL, str(fifo), "neither a regular file")
    with pytest.raises(FileNotFoundError, match="no-image"):
        mounts.mount_erofs(str(tmp_path / "no-image"), [])
    with pytest.raises(FileNotFoundError, match="no-blob"):
        mounts.mount_erofs(pair.meta, [str(tmp_path / "no-blob")])


def test_a_device_that_is_short_or_no_whole_blocks_is_named(pair: Pair, tmp_path: Path) -> None:
    content = Path(pair.blob).read_bytes()
    short, odd = tmp_path / "short", tmp_path / "odd"
    short.write_bytes(content[:-4096])
    odd.write_bytes(content[:-1])
    refusal(
        lambda: mounts.mount_erofs(pair.meta, [str(short)]),
        errno.EINVAL,
        str(short),
        f"it has {len(content) - 4096} bytes",
        f"says {len(content)}",
    )
    refusal(lambda: mounts.mount_erofs(pair.meta, [str(odd)]), errno.EINVAL, str(odd), "not whole blocks of 4096")


def test_a_forged_superblock_is_refused_by_the_kernel_and_the_error_names_the_image(pair: Pair, tmp_path: Path) -> None:
    raw = bytearray(Path(pair.meta).read_bytes())
    raw[1024 + 80 + 2] |= 0x80  # a feature that no kernel knows
    forged = tmp_path / "forged"
    forged.write_bytes(raw)
    with pytest.raises(LinuxError) as caught:
        mounts.mount_erofs(str(forged), [pair.blob])
    assert caught.value.subject == str(forged) and "fsconfig(create)" in str(caught.value)


def test_the_kernels_log_is_in_the_error() -> None:
    fs = mountapi.fsopen("overlay")
    try:
        with pytest.raises(LinuxError) as caught:
            mountapi.fsconfig_string(fs, "no_such_option", "1", "overlay")
        assert caught.value.log == ["overlay: Unknown parameter 'no_such_option'"]
        expected = "fsconfig(no_such_option=...) on overlay: Invalid argument (EINVAL): overlay: Unknown parameter"
        assert str(caught.value).startswith(expected)
        with pytest.raises(LinuxError) as caught:
            mountapi.fsconfig_string(fs, "upperdir", "/no/such/upper", "overlay")
        assert caught.value.errno == errno.ENOENT
    finally:
        os.close(fs)


def test_an_unknown_file_system_is_enodev() -> None:
    with pytest.raises(LinuxError, match="fsopen on nosuchfs: No such device"):
        mountapi.fsopen("nosuchfs")


def test_overlays_that_overlayfs_refuses_without_a_word(pair: Pair, tmp_path: Path) -> None:
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    upper, work = folder(tmp_path / "upper"), folder(tmp_path / "work")
    inside = folder(tmp_path / "upper" / "inside")
    tmpfs = mounts.mount_tmpfs("1m")
    elsewhere = folder(Path(f"/proc/self/fd/{tmpfs}/work"))
    nested = mounts.mount_overlay([layer], upper, work)
    file = os.open(pair.blob, os.O_RDONLY)
    overlay = mounts.mount_overlay
    try:
        refusal(lambda: overlay([]), errno.EINVAL, "no lower layer")
        refusal(lambda: overlay([layer]), errno.EINVAL, "single layer without an upper")
        refusal(lambda: overlay([layer], upper), errno.EINVAL, "together or not at all")
        refusal(lambda: overlay([layer, layer]), errno.ELOOP, "lower layers 1 and 2 are the same")
        refusal(lambda: overlay([layer, file]), errno.ENOTDIR, f"descriptor {file}", "not a directory")
        refusal(lambda: overlay([layer], upper, upper), errno.EINVAL, "not apart from the upper")
        refusal(lambda: overlay([layer], upper, inside), errno.EINVAL, "not apart from the upper")
        refusal(lambda: overlay([layer], inside, upper), errno.EINVAL, "not apart from the upper")
        refusal(lambda: overlay([layer], upper, elsewhere), errno.EXDEV, "another file system")
        refusal(lambda: overlay([layer], pair.blob, work), errno.ENOTDIR, pair.blob)
        on_overlay = f"/proc/self/fd/{nested}"
        refusal(lambda: overlay([layer], f"{on_overlay}/inside", work), errno.EINVAL, "lies on overlayfs")
        refusal(lambda: overlay([layer], f"/proc/self/fd/{layer}/dir", work), errno.EINVAL, "lies on erofs")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            overlay([layer], str(tmp_path / "nowhere"), work)
        with pytest.raises(LinuxError, match="EBADF"):
            overlay([layer, 99999])
    finally:
        for fd in (layer, tmpfs, nested, file):
            os.close(fd)


def test_an_upper_on_a_read_only_mount_is_named(pair: Pair, tmp_path: Path) -> None:
    layer, tmpfs = mounts.mount_erofs(pair.meta, [pair.blob]), mounts.mount_tmpfs("1m")
    root = f"/proc/self/fd/{tmpfs}"
    upper, work = folder(Path(root, "upper")), folder(Path(root, "work"))
    mountapi.mount_setattr(tmpfs, set_attributes=mountapi.MOUNT_ATTR_RDONLY)
    refusal(lambda: mounts.mount_overlay([layer], upper, work), errno.EROFS, upper, "read-only file system")
    os.close(tmpfs)
    os.close(layer)


def test_unmounting_what_is_not_mounted_is_an_error_and_a_symlink_is_not_followed(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(LinuxError, match="umount2"):
        mounts.umount(str(tmp_path))
    target, link = folder(tmp_path / "target"), tmp_path / "link"
    link.symlink_to(target)
    layer = mounts.mount_erofs(pair.meta, [pair.blob])
    mounts.attach(layer, target)
    os.close(layer)
    with pytest.raises(LinuxError):
        mounts.umount(str(link))
    assert target in targets()
    mounts.umount(target, detach=True)
    assert target not in targets()


def test_a_mount_in_a_slave_namespace_does_not_reach_ours(pair: Pair, tmp_path: Path) -> None:
    target = folder(tmp_path / "target")
    script = f"""
import os
from dsec_linux import mounts, namespaces
namespaces.unshare(namespaces.CLONE_NEWNS)
mounts.make_slave()
fd = mounts.mount_erofs({pair.meta!r}, [{pair.blob!r}])
mounts.attach(fd, {target!r})
os.close(fd)
print(sorted(os.listdir({target!r})))
print(os.listdir("/proc/{os.getpid()}/root{target}"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['dir', 'file']", "[]"]
    assert os.listdir(target) == []
