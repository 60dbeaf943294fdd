from __future__ import annotations

import gzip
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_store.errors import DsecError, IntegrityError, ReferenceInvalid, StoreFull, WrongKind
from dsec_store.home import Home
from dsec_store.layers.build import BuiltLayer, build_layer
from dsec_store.layers.store import Layer, LayerStore
from dsec_store.refs import Reference, parse_reference
from erofs_tools.errors import SourceError
from tests.conftest import DSEC, Dsec
from tests.dsec_store.snapshots import difference, mounted, snapshot

REF = Reference("a/layer", "1")


@pytest.fixture
def store(home: Home) -> LayerStore:
    return LayerStore(home)


def make_tree(root: Path, seed: int = 1, files: int = 60) -> Path:
    """Every type of entry, some hundred kilobytes, random and compressible."""
    source = random.Random(seed)
    root.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        folder = root / f"d{index % 7}" / f"e{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        size = source.choice([0, 1, 4095, 4096, 4097, 70_000])
        data = source.randbytes(size) if index % 2 else b"line %d\n" % index * (size // 8)
        (folder / f"f{index}").write_bytes(data)
        (folder / f"f{index}").chmod(source.choice([0o644, 0o755, 0o600, 0o4755]))
    (root / "link").symlink_to("d1/e1")
    os.link(root / "d0/e0/f0", root / "hard")
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(root / "socket"))
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    os.setxattr(root / "d1", "user.note", b"value")
    os.chown(root / "d2", 1000, 1001)
    (root / os.fsdecode(b"n\xff\xfe")).write_bytes(b"bytes in a name")
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, ns=(0, source.randrange(10**18, 2 * 10**18)), follow_symlinks=False)
    os.utime(root, ns=(0, 1_234_567_890_123_456_789))
    return root


def build(store: LayerStore, source: Path, reference: Reference = REF, kind: str = "workspace") -> BuiltLayer:
    return build_layer(store, source, reference, kind)


def load(store: LayerStore, reference: Reference = REF) -> Layer:
    found = store.resolve(reference)
    assert isinstance(found, Layer)
    return found


def left(store: LayerStore) -> list[str]:
    """Everything in the home that is a file, but the store's lock."""
    root = store.home.path
    return [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if p.is_file() and p.name != "lock"]


def test_a_built_layer_mounts_as_its_source(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    built = build(store, source)
    layer = load(store)
    assert (layer.id, layer.digest) == (built.id, built.manifest_digest)
    with mounted(store, layer) as root:
        assert difference(snapshot(source), snapshot(root)) == []


def test_the_stored_objects_are_those_of_the_format_page(store: LayerStore, tmp_path: Path) -> None:
    built = build(store, make_tree(tmp_path / "source"))
    layer = load(store)
    manifest, config = layer.manifest, layer.config
    table = store.chunk_table(layer)
    assert table.root() == config.data_root
    assert table.data_size == config.data_size == built.data_size
    assert len(store.metadata_image(layer)) == config.metadata_size == built.metadata_size
    raw = store.home.raw_file(layer.id).read_bytes()
    stored = store.backend.local_path(manifest.data.digest)
    restored = subprocess.run(["zstd", "-dcf", stored], capture_output=True, check=True)
    assert restored.stdout == raw
    assert len(raw) == config.data_size
    assert config.inodes == built.counts["inodes"]
    assert built.stored_size == manifest.metadata.size + manifest.chunks.size + manifest.data.size
    assert len(list(store.backend.blobs())) == 5


@pytest.mark.parametrize("umask", ["022", "077"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_equal_input_gives_an_equal_layer_wherever_it_is_built(
    dsec: Dsec, store: LayerStore, tmp_path: Path, umask: str, locale: str
) -> None:
    first = build(store, make_tree(tmp_path / "one"))
    elsewhere = tmp_path / "another place" / "with a longer name"
    elsewhere.parent.mkdir()
    subprocess.run(["cp", "-a", make_tree(tmp_path / "two"), elsewhere], check=True)
    command = f'umask {umask}; exec "{DSEC}" layer build . --ref again:1 --kind workspace --json'
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=elsewhere,
        env={**os.environ, "LC_ALL": locale, "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
    )
    assert first.id in done.stdout.decode()
    assert first.manifest_digest in done.stdout.decode()


def test_a_tar_and_the_directory_it_was_made_of_give_one_layer(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    (source / "socket").unlink()  # tar has no type for them
    os.utime(source, ns=(0, 1_234_567_890_123_456_789))
    options = ["--format=posix", "--xattrs", "--numeric-owner", "--pax-option=delete=atime,delete=ctime", "--sparse"]
    subprocess.run(["tar", *options, "-C", source, "-cf", tmp_path / "a.tar", "."], check=True)
    with gzip.open(tmp_path / "a.tgz", "wb") as packed:
        packed.write((tmp_path / "a.tar").read_bytes())
    ids = {build(store, path).id for path in (source, tmp_path / "a.tar", tmp_path / "a.tgz")}
    assert len(ids) == 1


def test_building_again_changes_nothing(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    build(store, source)
    before = left(store)
    build(store, source)
    assert left(store) == before


def test_a_reference_moves_to_what_was_built_last(store: LayerStore, tmp_path: Path) -> None:
    build(store, make_tree(tmp_path / "one", 1))
    second = build(store, make_tree(tmp_path / "two", 2))
    assert load(store).id == second.id


def test_an_empty_directory_is_a_layer(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    built = build(store, tmp_path / "source", kind="base")
    assert (built.data_size, built.chunks, built.counts["inodes"]) == (0, 0, 1)
    with mounted(store, load(store)) as root:
        assert os.listdir(root) == []


def test_the_run_part_is_the_base_s_alone(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=3)
    run = {"Env": ["A=1"], "Cmd": ["sh"]}
    build_layer(store, source, REF, "base", run=run)
    assert load(store).config.run["Env"] == ["A=1"]
    with pytest.raises(DsecError, match="only a base may"):
        build_layer(store, source, REF, "toolkit", run=run)


def test_progress_says_how_much_there_is_and_adds_up(store: LayerStore, tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []
    built = build_layer(
        store, make_tree(tmp_path / "s"), REF, "base", progress=lambda what, amount: events.append((what, amount))
    )
    assert events[0][0] == "total" and events[-1][0] == "publish"
    assert sum(amount for what, amount in events if what == "data") == built.data_size


# Bad input: one line, nothing visible, nothing left


def refuse(store: LayerStore, source: Path, *words: str, kind: str = "base", reference: Reference = REF) -> None:
    before = left(store)
    with pytest.raises((DsecError, SourceError)) as caught:
        build(store, source, reference, kind)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert left(store) == before


def test_a_truncated_tar_is_refused(store: LayerStore, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(make_tree(tmp_path / "source"), ".", filter=lambda m: None if m.name == "./socket" else m)
    whole = (tmp_path / "a.tar").read_bytes()
    for cut in (len(whole) // 2, 1 << 20, len(whole) - 20_000):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        refuse(store, tmp_path / "cut.tar")
    (tmp_path / "garbage.tar").write_bytes(random.Random(1).randbytes(100_000))
    refuse(store, tmp_path / "garbage.tar")


def test_a_source_that_is_not_there_is_named(store: LayerStore, tmp_path: Path) -> None:
    refuse(store, tmp_path / "nowhere", "nowhere")


def test_forged_overlay_attributes_are_refused_with_the_path(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=3)
    os.setxattr(source / "d1", "trusted.overlay.redirect", b"/secret")
    refuse(store, source, "d1", "trusted.overlay.redirect")


def test_an_unknown_kind_and_a_foreign_reference_are_refused_before_the_source_is_read(store: LayerStore) -> None:
    with pytest.raises(WrongKind, match="hat"):
        build(store, Path("/nowhere"), kind="hat")
    with pytest.raises(ReferenceInvalid, match="registry"):
        build(store, Path("/nowhere"), parse_reference("localhost:5000/a:1"))
    with pytest.raises(ReferenceInvalid, match="a tag"):
        build(store, Path("/nowhere"), parse_reference("a@sha256:" + "0" * 64))


# A full disk


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Home]:
    """A home on an ext4 of 40 MiB."""
    image, point = tmp_path / "disk", tmp_path / "small"
    with image.open("wb") as file:
        file.truncate(40 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", image], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        yield Home(point / "home").ensure()
    finally:
        subprocess.run(["umount", point], check=True)


def sync(folder: str) -> None:
    """Commit the file system's journal: blocks of removed files are free after that."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free(home: Home) -> int:
    sync(os.fspath(home.path))
    info = os.statvfs(home.path)
    return info.f_bfree * info.f_frsize


def test_a_full_disk_is_one_line_and_loses_no_space(small_home: Home, dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    for index in range(8):
        (tmp_path / "big" / str(index)).write_bytes(random.Random(index).randbytes(8 << 20))
    make_tree(tmp_path / "small-tree", files=5)
    dsec("layer", "build", tmp_path / "small-tree", "--ref", "small:1", "--kind", "base", home=small_home.path)
    before = free(small_home)
    done = dsec(
        "layer", "build", tmp_path / "big", "--ref", "big:1", "--kind", "base", home=small_home.path, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("dsec: ") and "no space left" in done.stderr and done.stderr.count("\n") == 1
    assert free(small_home) == before
    assert [item["reference"] for item in dsec.json("layer", "ls", home=small_home.path)] == ["small:1"]


def fill(fd: int, leave: int) -> None:
    """Make the file take all of its file system but about ``leave`` blocks."""
    os.ftruncate(fd, 0)
    os.fsync(fd)
    want = os.fstatvfs(fd).f_bavail - leave
    while want > 0:
        try:
            os.posix_fallocate(fd, 0, want * 4096)
            return
        except OSError:  # the extents' own blocks
            os.ftruncate(fd, 0)
            os.fsync(fd)
            want -= 1


def test_a_disk_that_fills_at_any_point_leaves_nothing(small_home: Home, tmp_path: Path) -> None:
    store = LayerStore(small_home)
    (tmp_path / "source").mkdir()
    outcomes = set()
    filler = os.open(small_home.path / "filler", os.O_RDWR | os.O_CREAT)
    try:
        # the layer needs 600 KB as it is, 600 KB as frames, and some blocks of folders and small objects
        for step, blocks in enumerate([0, 1, 4, 30, 149, 151, 160, 250, 299, 301, *range(302, 330, 2)]):
            (tmp_path / "source" / "file").write_bytes(random.Random(step).randbytes(600_000))
            fill(filler, blocks)
            before, names = free(small_home), left(store)
            reference = Reference(f"n{step}/x", "1")
            try:
                build(store, tmp_path / "source", reference)
                outcomes.add("whole")
                with mounted(store, load(store, reference)) as root:
                    assert snapshot(root)[b"file"]["size"] == 600_000
            except StoreFull as error:
                assert "no space left" in str(error)
                outcomes.add("nothing")
                assert left(store) == names
                assert free(small_home) == before
    finally:
        os.close(filler)
    assert outcomes == {"whole", "nothing"}


# Killed, and several at once


def test_a_build_killed_at_any_moment_leaves_nothing_or_everything(
    dsec: Dsec, store: LayerStore, tmp_path: Path
) -> None:
    source = make_tree(tmp_path / "source")
    (source / "big").write_bytes(random.Random(1).randbytes(12 << 20))
    whole = build(store, source, Reference("reference", "1"))
    complete = left(store)
    random_source = random.Random(7)
    killed = 0
    for attempt in range(14):
        home = Home(tmp_path / f"home{attempt}").ensure()
        arguments = ("layer", "build", source, "--ref", "reference:1", "--kind", "workspace")
        with dsec.start(*arguments, home=home.path) as process:
            try:
                # from the time the interpreter takes to start, to a little more than a build
                process.wait(timeout=0.15 + random_source.random() * 0.7)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                killed += 1
        after = LayerStore(home)
        if list(after.list()):
            assert after.resolve(Reference("reference", "1")).digest == whole.manifest_digest
            assert set(left(after)) <= set(complete)  # the raw file gets its name last
            assert len(left(after)) >= len(complete) - 1
        else:
            assert left(after) == []
        shutil.rmtree(home.path)
    assert killed


def test_two_processes_build_equal_and_different_layers_at_once(dsec: Dsec, store: LayerStore, tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one", 1), make_tree(tmp_path / "two", 2)
    jobs = [(one, "same:1"), (one, "same:1"), (one, "alias:1"), (two, "other:1"), (two, "same:2"), (one, "other:2")]
    running = [dsec.start("layer", "build", path, "--ref", ref, "--kind", "toolkit", "--json") for path, ref in jobs]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    ids = {ref: load(store, parse_reference(ref)).id for _, ref in jobs}
    assert ids["same:1"] == ids["alias:1"] == ids["other:2"]
    assert ids["other:1"] == ids["same:2"] != ids["same:1"]
    assert len(list(store.backend.blobs())) == 10
    for ref in ids:
        with mounted(store, load(store, parse_reference(ref))) as root:
            expected = snapshot(two if ids[ref] == ids["other:1"] else one)
            assert difference(expected, snapshot(root)) == []


# Repair


def test_building_again_repairs_what_is_damaged(store: LayerStore, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    built = build(store, source)
    paths = [store.backend.local_path(digest) for digest in store.backend.blobs()]
    paths.append(store.home.raw_file(built.id))
    whole = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(bytes([whole[path][0] ^ 1]) + whole[path][1:])
    with pytest.raises(IntegrityError, match=f"{REF}: damaged blob .*expected {built.manifest_digest}"):
        store.resolve(REF)
    assert build(store, source) == built
    assert {path: path.read_bytes() for path in paths} == whole
    store.home.raw_file(built.id).write_bytes(b"short")
    build(store, source)
    assert {path: path.read_bytes() for path in paths} == whole
    assert len(left(store)) == len(paths) + 1
    with mounted(store, load(store)) as root:
        assert difference(snapshot(source), snapshot(root)) == []


def test_a_damaged_part_is_named_with_layer_and_blob(store: LayerStore, tmp_path: Path) -> None:
    build(store, make_tree(tmp_path / "source"))
    layer = load(store)
    for blob in (layer.manifest.chunks, layer.manifest.metadata):
        path = store.backend.local_path(blob.digest)
        data = path.read_bytes()
        path.write_bytes(b"X" + data[1:])
        with pytest.raises(IntegrityError, match=f"^{REF}: layer {layer.id}: damaged blob .*expected {blob.digest}"):
            store.show(REF)
        path.write_bytes(data)
    store.show(REF)


def test_the_home_is_not_built_into_itself(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.home.path)
    for source in (store.home.path, tmp_path, Path("/"), tmp_path / "link"):
        with pytest.raises(DsecError, match="holds the home"):
            build(store, source)
    assert left(store) == []


def test_a_pipe_is_a_source(store: LayerStore, tmp_path: Path) -> None:
    make_tree(tmp_path / "source", files=5)
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["tar", "-C", tmp_path / "source", "-cf", tmp_path / "pipe", "d0"]) as tar:
        built = build(store, tmp_path / "pipe")
    assert tar.returncode == 0
    assert built.counts["files"]
