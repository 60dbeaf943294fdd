from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_store.backends.base import BlobWriter
from dsec_store.backends.local import LocalBackend, _Entry
from dsec_store.errors import (
    BlobUnknown,
    DsecError,
    IntegrityError,
    ReferenceConflict,
    ReferenceInvalid,
    ReferenceUnknown,
)
from dsec_store.home import Home

NOWHERE = "sha256:" + "0" * 64


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "store")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def put(backend: LocalBackend, data: bytes) -> str:
    with backend.writer() as writer:
        writer.write(data)
        return writer.commit()[0]


def names(backend: LocalBackend) -> list[str]:
    """Every file below the store but the lock."""
    return sorted(str(p.relative_to(backend.root)) for p in backend.root.rglob("*") if p.is_file() and p.name != "lock")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Blobs


def test_a_blob_is_named_by_its_digest(backend: LocalBackend) -> None:
    data = b"some bytes" * 1000
    with backend.writer() as writer:
        for at in range(0, len(data), 999):
            assert writer.write(data[at : at + 999]) == len(data[at : at + 999])
        assert not backend.has(digest_of(data))
        assert writer.commit(digest_of(data)) == (digest_of(data), len(data))
    path = backend.local_path(digest_of(data))
    assert path == backend.root / "blobs" / "sha256" / digest_of(data)[7:9] / digest_of(data)[7:]
    assert path.read_bytes() == data
    assert backend.stat(digest_of(data)) == len(data)
    assert backend.has(digest_of(data))


def test_a_blob_is_read_in_parts(backend: LocalBackend) -> None:
    data = bytes(range(256)) * 100
    digest = put(backend, data)
    assert backend.read(digest) == data
    assert backend.read(digest, 10, 20) == data[10:30]
    assert backend.read(digest, 25_590, 100) == data[25_590:]
    assert backend.read(digest, 30_000) == b""
    assert backend.read(digest, 5, 0) == b""
    assert list(backend.stream(digest, 1, 10, block=4)) == [data[1:5], data[5:9], data[9:11]]


def test_a_stream_closes_its_file_also_when_it_is_dropped(backend: LocalBackend) -> None:
    digest = put(backend, b"x" * 100)
    before = descriptors()
    list(backend.stream(digest))
    begun = backend.stream(digest, block=10)
    next(begun)
    never = backend.stream(digest)
    assert descriptors() == before + 2
    del begun, never
    assert descriptors() == before


def test_an_unknown_blob_is_an_error_of_the_call_itself(backend: LocalBackend) -> None:
    with pytest.raises(BlobUnknown, match=NOWHERE):
        backend.stat(NOWHERE)
    with pytest.raises(BlobUnknown, match=NOWHERE):
        backend.stream(NOWHERE)
    with pytest.raises(BlobUnknown, match=NOWHERE):
        backend.delete(NOWHERE)
    assert not backend.has(NOWHERE)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:../../../etc/passwd", "sha512:" + "0" * 128, "0" * 64])
def test_what_is_no_digest_never_becomes_a_path(backend: LocalBackend, text: str) -> None:
    for call in (backend.stat, backend.read, backend.delete, backend.local_path):
        with pytest.raises(ReferenceInvalid):
            call(text)


def test_a_wrong_digest_keeps_nothing(backend: LocalBackend) -> None:
    before = descriptors()
    with pytest.raises(IntegrityError, match=NOWHERE), backend.writer() as writer:
        writer.write(b"data")
        writer.commit(NOWHERE)
    assert names(backend) == []
    assert descriptors() == before


def test_a_blob_that_is_not_committed_leaves_nothing(backend: LocalBackend) -> None:
    before = descriptors()
    with backend.writer() as writer:
        writer.write(b"data" * 100_000)
        assert names(backend) == []
    with pytest.raises(KeyError), backend.writer() as writer:
        writer.write(b"data")
        raise KeyError
    assert names(backend) == []
    assert descriptors() == before


def test_the_same_blob_twice_is_one(backend: LocalBackend) -> None:
    digest = put(backend, b"data")
    inode = backend.local_path(digest).stat().st_ino
    assert put(backend, b"data") == digest
    assert backend.local_path(digest).stat().st_ino == inode
    assert list(backend.blobs()) == [digest]


def test_a_blob_that_was_cut_short_is_healed_by_the_next_one(backend: LocalBackend) -> None:
    digest = put(backend, b"data")
    os.truncate(backend.local_path(digest), 2)
    put(backend, b"data")
    assert backend.read(digest) == b"data"


def test_the_empty_blob_is_a_blob(backend: LocalBackend) -> None:
    assert backend.read(put(backend, b"")) == b""


def test_blobs_are_listed_in_order_and_deleted(backend: LocalBackend) -> None:
    digests = sorted(put(backend, bytes([i])) for i in range(20))
    assert list(backend.blobs()) == digests
    backend.delete(digests[3])
    assert list(backend.blobs()) == digests[:3] + digests[4:]


# Damage


@pytest.mark.parametrize("damage", [b"changed" + bytes(993), b"short", b"", b"longer" * 1000])
@pytest.mark.parametrize("with_reference", [False, True])
def test_a_damaged_blob_is_replaced_when_it_is_written_again(
    backend: LocalBackend, damage: bytes, with_reference: bool
) -> None:
    data = b"content".ljust(1000, b".")
    digest = put(backend, data)
    path = backend.local_path(digest)
    path.write_bytes(damage)
    assert not backend.sound(digest)
    with path.open("rb") as reader:
        with backend.writer() as writer:
            writer.write(data)
            backend.publish([writer], *(("a", "t", digest) if with_reference else ()))
        assert reader.read() == damage, "a file that somebody reads is not written to"
    assert backend.read(digest) == data and backend.sound(digest, 1000) and not backend.sound(digest, 999)
    kept = path.stat().st_ino
    assert put(backend, data) == digest
    assert path.stat().st_ino == kept, "a sound blob stays"
    assert len(names(backend)) == 1 + with_reference


def test_a_failed_publication_keeps_the_repair_and_no_half_named_file(backend: LocalBackend) -> None:
    digest = put(backend, b"data")
    backend.local_path(digest).write_bytes(b"DATA")
    with pytest.raises(ReferenceConflict), backend.writer() as writer:
        writer.write(b"data")
        backend.publish([writer], "a", "t", digest, expected=NOWHERE)
    (backend.root / "lock").write_text('{"blobs": [], "reference": null, "digest": null}')
    (backend.root / "blob").write_bytes(b"left by a killed process")
    put(backend, b"data")
    assert backend.read(digest) == b"data"
    assert len(names(backend)) == 1


def test_damaged_references_are_listed_and_can_be_removed(backend: LocalBackend) -> None:
    digest = put(backend, b"data")
    for name in ("a", "m", "z"):
        backend.put_ref(name, "t", digest)
    tags = backend.ref_root / "m" / "_tags"
    (tags / "t").write_bytes(b"\xff\0junk" * 1000)
    (tags / "link").symlink_to("nowhere")
    (tags / "Bad name\n").write_text(digest + "\n")
    illegal = backend.ref_root / "UPPER case" / "_tags"
    illegal.mkdir(parents=True)
    (illegal / "t").write_text(digest + "\n")
    found = {(r.name, r.tag): r.digest for r in backend.refs()}
    damaged = {("m", "t"), ("m", "link"), ("m", "Bad name\n"), ("UPPER case", "t")}
    assert found == {("a", "t"): digest, ("z", "t"): digest, **dict.fromkeys(damaged, "")}
    with pytest.raises(ReferenceConflict, match="holds"):
        backend.put_ref("m", "t", digest, expected=NOWHERE)
    for name, tag in damaged:
        backend.delete_ref(name, tag)
    assert [r.name for r in backend.refs()] == ["a", "z"]
    assert sorted(path.name for path in backend.ref_root.iterdir()) == ["a", "z"]
    with pytest.raises(ReferenceInvalid):
        backend.delete_ref("../../blobs", "t")


def test_a_stray_file_among_the_blobs_is_no_blob(backend: LocalBackend) -> None:
    digest = put(backend, b"data")
    (backend.blob_root / "stray").touch()
    assert list(backend.blobs()) == [digest]


def test_folders_are_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        backend = LocalBackend(tmp_path / "deep" / "store")
        backend.put_ref("a/b/c", "t", put(backend, b"data"))
        Home(tmp_path / "other" / "home").ensure()
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o077] == []


# References


def test_references_are_files_that_hold_a_digest(backend: LocalBackend) -> None:
    digest = put(backend, b"manifest")
    backend.put_ref("deepseek/cpp", "r42", digest)
    assert (backend.root / "refs/deepseek/cpp/_tags/r42").read_text() == digest + "\n"
    assert backend.get_ref("deepseek/cpp", "r42") == digest
    assert names(backend) == [f"blobs/sha256/{digest[7:9]}/{digest[7:]}", "refs/deepseek/cpp/_tags/r42"]


def test_names_that_look_alike_do_not_collide(backend: LocalBackend) -> None:
    digests = {name: put(backend, name.encode()) for name in ("a", "a/b", "a/b/c", "ab")}
    for name, digest in digests.items():
        backend.put_ref(name, "b", digest)
        backend.put_ref(name, "v", digest)
    assert [(r.name, r.tag) for r in backend.refs()] == sorted((n, t) for n in digests for t in ("b", "v"))
    assert {r.name for r in backend.refs("a")} == {"a", "a/b", "a/b/c"}
    assert all(backend.get_ref(name, "v") == digest for name, digest in digests.items())


def test_a_reference_is_compared_and_swapped(backend: LocalBackend) -> None:
    one, two = put(backend, b"1"), put(backend, b"2")
    with pytest.raises(ReferenceConflict, match=f"holds nothing, expected {one}"):
        backend.put_ref("a", "t", two, expected=one)
    backend.put_ref("a", "t", one, expected=None)
    with pytest.raises(ReferenceConflict, match=f"holds {one}, expected nothing"):
        backend.put_ref("a", "t", two, expected=None)
    backend.put_ref("a", "t", two, expected=one)
    assert backend.get_ref("a", "t") == two
    backend.put_ref("a", "t", one)
    assert backend.get_ref("a", "t") == one


def test_one_of_many_swappers_wins(backend: LocalBackend) -> None:
    digests = [put(backend, bytes([i])) for i in range(16)]

    def swap(digest: str) -> bool:
        try:
            backend.put_ref("a", "t", digest, expected=None)
        except ReferenceConflict:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(swap, digests))
    assert won.count(True) == 1
    assert backend.get_ref("a", "t") == digests[won.index(True)]


def test_a_reference_to_nothing_is_refused(backend: LocalBackend) -> None:
    with pytest.raises(BlobUnknown, match=NOWHERE):
        backend.put_ref("a", "t", NOWHERE)
    assert list(backend.refs()) == []


def test_an_unknown_reference_is_named(backend: LocalBackend) -> None:
    for call in (backend.get_ref, backend.delete_ref):
        with pytest.raises(ReferenceUnknown, match="a/b:t"):
            call("a/b", "t")


@pytest.mark.parametrize(
    ("name", "tag"), [("../x", "t"), ("a//b", "t"), ("_tags", "t"), ("a", "../t"), ("a", ""), ("", "t")]
)
def test_what_is_no_name_never_becomes_a_path(backend: LocalBackend, name: str, tag: str) -> None:
    digest = put(backend, b"x")
    with pytest.raises(ReferenceInvalid):
        backend.put_ref(name, tag, digest)
    with pytest.raises(ReferenceInvalid):
        backend.get_ref(name, tag)


def test_a_removed_reference_leaves_no_empty_folders(backend: LocalBackend) -> None:
    digest = put(backend, b"x")
    backend.put_ref("a/b/c", "t", digest)
    backend.put_ref("a", "t", digest)
    backend.delete_ref("a/b/c", "t")
    assert [str(p.relative_to(backend.ref_root)) for p in sorted(backend.ref_root.rglob("*"))] == [
        "a",
        "a/_tags",
        "a/_tags/t",
    ]


def test_a_damaged_reference_is_an_error_that_shows_the_file(backend: LocalBackend) -> None:
    backend.put_ref("a", "t", put(backend, b"x"))
    (backend.ref_root / "a/_tags/t").write_bytes(b"nonsense")
    with pytest.raises(IntegrityError, match="_tags/t"):
        backend.get_ref("a", "t")


# Publishing several names at once


def publication(backend: LocalBackend) -> tuple[list[BlobWriter], str]:
    writers = [backend.writer() for _ in range(4)]
    for index, writer in enumerate(writers):
        writer.write(b"blob %d" % index * 1000)
    return writers, writers[-1].digest


def test_a_publication_is_all_or_nothing(backend: LocalBackend) -> None:
    before = descriptors()
    writers, manifest = publication(backend)
    with pytest.raises(ReferenceConflict):
        backend.publish(writers, "a", "t", manifest, expected=NOWHERE)
    assert names(backend) == []
    backend.publish(writers, "a", "t", manifest, expected=None)
    assert len(list(backend.blobs())) == 4
    assert backend.get_ref("a", "t") == manifest
    for writer in writers:
        writer.close()
    assert descriptors() == before


SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path
    from dsec_store.backends.local import LocalBackend
    backend = LocalBackend(Path(sys.argv[1]))
    writers = [backend.writer() for _ in range(4)]
    for index, writer in enumerate(writers):
        writer.write(b"blob %d" % index * 1000)
    print("ready", flush=True)
    backend.publish(writers, "a/b", sys.argv[2], writers[-1].digest)
""")


def publish_under_strace(root: Path, tag: str, inject: str) -> subprocess.CompletedProcess[bytes]:
    strace = shutil.which("strace")
    assert strace, "strace is not installed: tools/setup test"
    call = inject.partition(":")[0]
    options = ["-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={inject}"]
    command = [strace, *options, sys.executable, "-c", SCRIPT, str(root), tag]
    return subprocess.run(command, capture_output=True, check=False)


KILLS = [
    f"{call}:signal=SIGKILL:when={n}" for call, count in (("linkat", 5), ("fsync", 12)) for n in range(1, count + 1)
]
KILLS += ["pwrite64:signal=SIGKILL:when=1", "ftruncate:signal=SIGKILL:when=1", "flock:signal=SIGKILL:when=1"]


@pytest.mark.parametrize("inject", KILLS)
def test_a_publication_killed_anywhere_is_whole_or_nothing(tmp_path: Path, inject: str) -> None:
    done = publish_under_strace(tmp_path / "store", "t", inject)
    assert b"ready" in done.stdout
    backend = LocalBackend(tmp_path / "store")
    if list(backend.refs()):
        assert len(list(backend.blobs())) == 4
        assert backend.read(backend.get_ref("a/b", "t")) == b"blob 3" * 1000
    else:
        assert names(backend) == []
        assert list(backend.ref_root.iterdir()) == []
        assert list(backend.blob_root.iterdir()) == []
    # and it can be done again
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store"), "t"], check=True, capture_output=True)
    assert len(list(LocalBackend(tmp_path / "store").blobs())) == 4


FAILURES = [f"linkat:error=ENOSPC:when={n}" for n in range(1, 6)] + [
    f"fsync:error=ENOSPC:when={n}" for n in range(1, 3)
]
FAILURES += ["pwrite64:error=ENOSPC:when=1", "mkdir:error=ENOSPC:when=4+"]


@pytest.mark.parametrize("inject", FAILURES)
def test_a_disk_full_anywhere_on_the_way_is_one_line_and_leaves_nothing(tmp_path: Path, inject: str) -> None:
    LocalBackend(tmp_path / "store")
    done = publish_under_strace(tmp_path / "store", "t", inject)
    error = done.stderr.decode().splitlines()[-1]
    assert "StoreFull: publishing: no space left on the file system of" in error
    # Seen before anything recovers: the failed process cleaned up by itself.
    backend = object.__new__(LocalBackend)
    backend.root, backend.ref_root = tmp_path / "store", tmp_path / "store" / "refs"
    assert names(backend) == []
    assert list(backend.ref_root.iterdir()) == []
    lock = tmp_path / "store" / "lock"
    assert not lock.exists() or lock.stat().st_size == 0


def test_a_failed_publication_keeps_what_was_there_before(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    kept = put(backend, b"blob 1" * 1000)
    backend.put_ref("old", "t", kept)
    publish_under_strace(tmp_path / "store", "t", "linkat:signal=SIGKILL:when=3")
    backend = LocalBackend(tmp_path / "store")
    assert list(backend.blobs()) == [kept]
    assert [r.name for r in backend.refs()] == ["old"]


def test_an_open_publication_of_another_process_is_left_alone(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    with backend.lock() as journal:
        digest = put_unlocked(backend)
        journal.begin(_Entry([digest], None, None))
        assert list(LocalBackend(tmp_path / "store").blobs()) == [digest]
        journal.end()


def put_unlocked(backend: LocalBackend) -> str:
    data = b"half published"
    path = backend.local_path(digest_of(data))
    path.parent.mkdir()
    path.write_bytes(data)
    return digest_of(data)


def test_a_list_that_was_cut_short_undoes_nothing(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    digest = put(backend, b"x")
    (tmp_path / "store" / "lock").write_text('{"blobs": ["' + digest)
    assert list(LocalBackend(tmp_path / "store").blobs()) == [digest]
    assert (tmp_path / "store" / "lock").read_bytes() == b""


def test_processes_that_publish_at_once_all_succeed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(store), f"t{i % 4}"], stdout=subprocess.DEVNULL)
        for i in range(8)
    ]
    assert [process.wait() for process in running] == [0] * 8
    backend = LocalBackend(store)
    assert [r.tag for r in backend.refs()] == ["t0", "t1", "t2", "t3"]
    assert len(list(backend.blobs())) == 4


# A disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 8 MiB on a loop device."""
    image, point = tmp_path / "disk", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", image], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def sync(folder: str) -> None:
    """Commit the file system's journal: blocks of removed files are free after that."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free(path: Path) -> int:
    sync(os.fspath(path))
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def test_a_full_disk_refuses_in_one_line_and_loses_no_space(small_disk: Path) -> None:
    backend = LocalBackend(small_disk / "store")
    backend.put_ref("old", "t", put(backend, b"kept"))
    before = free(small_disk)
    with pytest.raises(DsecError, match="writing a blob: no space left on the file system of") as caught:
        put(backend, os.urandom(before + 65536))
    assert "\n" not in str(caught.value)
    assert free(small_disk) == before
    assert [r.name for r in backend.refs()] == ["old"]


def test_with_any_number_of_free_blocks_a_publication_is_whole_or_nothing(small_disk: Path) -> None:
    """Needs about ten blocks: data, folders, reference, list. Fewer than that are left, one after the other."""
    store = LocalBackend(small_disk / "store")
    outcomes = set()
    filler = os.open(small_disk / "filler", os.O_RDWR | os.O_CREAT)
    try:
        for blocks in range(24):
            os.ftruncate(filler, 0)
            os.fsync(filler)
            os.posix_fallocate(filler, 0, free(small_disk) - blocks * 4096)
            before = free(small_disk)
            writers, name = [store.writer() for _ in range(4)], f"n{blocks}/x"
            try:
                for writer in writers:
                    writer.write(os.urandom(4096))
                store.publish(writers, name, "t", writers[-1].digest)
                outcomes.add("whole")
                assert store.has(store.get_ref(name, "t"))
            except DsecError as error:
                assert "no space left" in str(error)
                outcomes.add("nothing")
            finally:
                for writer in writers:
                    writer.close()
            if not any(r.name == name for r in store.refs()):
                assert all(not store.has(writer.digest) for writer in writers)
                assert not (store.ref_root / f"n{blocks}").exists()
                assert free(small_disk) == before
    finally:
        os.close(filler)
    assert outcomes == {"whole", "nothing"}
