"""One tree, whichever way it comes in: from a directory or from tars of any format, order, locale and umask."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import shutil
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erofs_tools.directory import from_directory
from tests.erofs_tools.trees import PAX, gnu_tar, tar_values, values

FORMATS = {"posix": PAX, "gnu": ("--format=gnu",), "ustar": ("--format=ustar",), "oldgnu": ("--format=oldgnu",)}


def make(folder: Path, *, plain: bool) -> None:
    """A tree with something of everything; ``plain`` keeps to what formats without pax headers can say."""
    noise = random.Random(8)
    for name in ("usr/bin", "usr/lib/deep/er", "etc", "empty"):
        (folder / name).mkdir(parents=True)
    for number in range(30):
        path = folder / noise.choice(["usr/bin", "usr/lib/deep/er", "etc"]) / f"file{number}"
        path.write_bytes(noise.randbytes(noise.choice([0, 1, 511, 512, 513, 5000])))
        path.chmod(noise.choice([0o644, 0o755, 0o4755, 0o600]))
        os.chown(path, noise.choice([0, 33, 65534]), noise.choice([0, 42]))
    (folder / "usr/bin/link").symlink_to("../lib/none")
    if not plain:
        os.link(folder / "usr/bin/link", folder / "etc/same link", follow_symlinks=False)
    (folder / "etc/first").write_text("hard")
    for name in ("etc/second", "usr/lib/a", "zz"):
        os.link(folder / "etc/first", folder / name)
    os.mkfifo(folder / "etc/fifo")
    os.mknod(folder / "etc/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "etc/null").chmod(0o666)
    (folder / os.fsdecode(b"etc/\xff\xfe\n")).write_text("name")
    if not plain:
        (folder / ("n" * 255)).write_text("long")
        os.setxattr(folder / "etc", "user.x", b"\0\n\xff")
        os.setxattr(folder / "etc/first", "trusted.y", b"")
        os.chown(folder / "empty", 3_000_000_000, 4_000_000_000)
    folder.chmod(0o751)
    for index, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        nanoseconds = index * 1_000_000_000 if plain else index * 1_234_567_891_234 - 10**12
        os.utime(path, ns=(0, nanoseconds), follow_symlinks=False)
    os.utime(folder, (12, 12))


Case = tuple[Path, dict[bytes, dict[str, Any]]]


@pytest.fixture(params=["rich", "plain"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder, plain=request.param == "plain")
    return folder, values(from_directory(folder))


@pytest.mark.parametrize(
    ("tree", "format_"), [("rich", "posix"), *(("plain", format_) for format_ in FORMATS)], indirect=["tree"]
)
def test_format_order_locale_and_umask_make_no_difference(tmp_path: Path, tree: Case, format_: str) -> None:
    folder, wanted = tree
    names = [os.fsencode(path.relative_to(folder)) for path in folder.rglob("*")]
    orders: list[tuple[tuple[str, ...], list[bytes]]] = [
        (("--sort=name",), [b"."]),
        (("--sort=inode",), [b"."]),
        (("--no-recursion",), [b"./" + name for name in sorted(names, reverse=True)] + [b"."]),
        (("--no-recursion",), [b".", *random.Random(9).sample(names, len(names))]),
    ]
    for (options, order), (umask, locale) in itertools.product(orders, [(0o022, "C.UTF-8"), (0o077, "C")]):
        archive = gnu_tar(
            tmp_path / "x.tar", folder, *FORMATS[format_], *options, names=order, umask=umask, locale=locale
        )
        assert tar_values(archive) == wanted
    (tmp_path / "x.tar").write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))
    assert tar_values(tmp_path / "x.tar") == wanted


@pytest.mark.parametrize("tree", ["plain"], indirect=True)  # tarfile packs no attributes
@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_pythons_tarfile_makes_the_same_tree(tmp_path: Path, tree: Case, format_: int) -> None:
    folder, wanted = tree
    with tarfile.open(tmp_path / "x.tar", "w", format=format_) as made:
        made.add(folder, ".", recursive=True)
    assert tar_values(tmp_path / "x.tar") == wanted


def test_the_directory_may_lie_elsewhere(tmp_path: Path, tree: Case) -> None:
    folder, wanted = tree
    moved = tmp_path / "some" / "other place"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    assert values(from_directory(moved)) == wanted


NAMES = (
    st.binary(min_size=1, max_size=20)
    .filter(lambda n: not set(n) & {0, 0x2F} and n not in (b".", b".."))
    .filter(lambda n: not n.startswith(b".wh."))
)
XATTRS = st.dictionaries(
    st.binary(min_size=1, max_size=12).filter(lambda n: 0 not in n).map(lambda n: b"user.n" + n),
    st.binary(max_size=100),
    max_size=2,
)
TIMES = st.integers(-(2**31) * 10**9, 2**34 * 10**9 - 2 * 10**9)  # what ext4 stores
NODES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["file", "file", "directory", "link", "fifo", "device", "hard link", "sparse"]),
        "mode": st.integers(0, 0o7777),
        "ids": st.tuples(st.sampled_from([0, 1, 65534, 2**31, 2**32 - 2]), st.integers(0, 2**32 - 2)),
        "mtime": TIMES,
        "xattrs": XATTRS,
        "data": st.binary(min_size=1, max_size=1500),
        "where": st.integers(0, 1000),
    }
)


def build(top: bytes, nodes: list[tuple[bytes, dict[str, Any]]], linked: tuple[str, ...]) -> None:
    """Nodes below directories that came before them; names that are taken already are left out.

    ``linked`` are the kinds that get hard links.
    """
    directories = [top]
    files: list[bytes] = []
    made = []
    for name, node in nodes:
        path = directories[node["where"] % len(directories)] + b"/" + name
        if os.path.lexists(path):
            continue
        kind = node["kind"]
        if kind == "hard link":
            if files:
                os.link(files[node["where"] % len(files)], path, follow_symlinks=False)
            continue
        if kind == "directory":
            os.mkdir(path)
            directories.append(path)
        elif kind == "link":
            os.symlink(node["data"].replace(b"\0", b"x"), path)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            os.mknod(path, stat.S_IFBLK, os.makedev(node["where"], node["mode"]))
        else:
            with open(path, "wb") as file:
                if kind == "sparse":
                    file.seek(node["where"] * 1000)
                file.write(node["data"])
                if kind == "sparse":
                    file.truncate(node["where"] * 1500 + len(node["data"]))
        if kind in linked:
            files.append(path)
        made.append((path, node))
    for path, node in reversed(made):
        link = node["kind"] == "link"
        os.chown(path, *node["ids"], follow_symlinks=False)
        if not link:
            os.chmod(path, node["mode"])
            for name, data in node["xattrs"].items() if node["kind"] in ("file", "sparse", "directory") else ():
                os.setxattr(path, name, data)
        os.utime(path, ns=(0, node["mtime"]), follow_symlinks=False)
    os.utime(top, ns=(0, 1))


@given(st.lists(st.tuples(NAMES, NODES), max_size=12), st.sampled_from(["0.0", "0.1", "1.0", "none"]), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_tree_is_the_same_through_gnu_tar(
    tmp_path: Path, nodes: list[tuple[bytes, dict[str, Any]]], sparse: str, order: random.Random
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    try:
        build(os.fsencode(folder), nodes, ("file", "sparse", "link"))  # of others GNU tar packs each path
        wanted = values(from_directory(folder))
        options = () if sparse == "none" else ("-S", f"--sparse-version={sparse}")
        names = [b"./" + path for path in wanted if path]
        order.shuffle(names)
        # without --null a name from the command line may still be an option: hence "./"
        archive = gnu_tar(
            folder.with_suffix(".tar"), folder, *PAX, *options, "--no-unquote", "--no-recursion", names=[b".", *names]
        )
        assert tar_values(archive) == wanted
        archive.unlink()
    finally:
        shutil.rmtree(folder)


@given(st.lists(st.tuples(NAMES, NODES), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_any_tree_is_the_same_through_pythons_tarfile(
    tmp_path: Path, nodes: list[tuple[bytes, dict[str, Any]]]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    archive = folder.with_suffix(".tar")
    for _, node in nodes:
        node["mtime"] -= node["mtime"] % 10**9  # tarfile makes floats of them
        node["mtime"] = max(node["mtime"], 0)
        node["xattrs"] = {}
    try:
        build(os.fsencode(folder), nodes, ("file", "sparse"))  # of others tarfile packs each path by itself
        os.utime(folder, (1, 1))
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as made:
            made.add(folder, ".")
        assert tar_values(archive) == values(from_directory(folder))
        archive.unlink()
    finally:
        shutil.rmtree(folder)
