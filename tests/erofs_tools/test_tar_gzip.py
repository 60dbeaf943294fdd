"""Gzip archives: the same tree as uncompressed, or an error, and never a file left in the spool directory."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from erofs_tools.errors import SourceError
from erofs_tools.tar import from_tar
from tests.erofs_tools.trees import END, archive, directory, member, opened, pax, tar_values, values

PLAIN = b"".join(
    (
        directory(b"d/"),
        pax({b"mtime": b"1.5"}),
        member(b"d/f", random.Random(3).randbytes(200_000)),
        member(b"g", b"1"),
        END,
    )
)


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "in.tar"


@pytest.fixture
def wanted(tmp_path: Path) -> dict[bytes, dict[str, object]]:
    return tar_values(archive(tmp_path / "plain.tar", PLAIN, end=b""))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "dsec-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught, opened(path):
        pass
    assert "\n" not in str(caught.value)
    assert os.listdir(path.parent) == [path.name]
    return str(caught.value)


def test_a_gzip_archive_is_known_by_its_first_bytes(tar: Path, wanted: dict[bytes, object]) -> None:
    tar.write_bytes(gzip.compress(PLAIN))
    assert tar_values(tar) == wanted


@pytest.mark.parametrize("cut", [1, 300, 512, 100_000])
def test_members_follow_each_other_and_zeros_may_pad_the_end(tar: Path, wanted: dict[bytes, object], cut: int) -> None:
    named = b"\x1f\x8b\x08\x08" + bytes(6) + b"name\0" + gzip.compress(PLAIN[:cut], mtime=0)[10:]
    for padding in (b"", bytes(1), bytes(700_000)):
        tar.write_bytes(named + gzip.compress(b"") + gzip.compress(PLAIN[cut:]) + padding)
        assert tar_values(tar) == wanted


def test_the_spool_has_no_name_and_goes_with_the_context(tar: Path, tmp_path: Path) -> None:
    tar.write_bytes(gzip.compress(PLAIN))
    spool = tmp_path / "spool"
    spool.mkdir()

    def descriptors() -> list[str]:
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
        return [link for link in links if link.startswith(str(spool))]

    with from_tar(tar, kind="base", spool_dir=spool):
        assert not os.listdir(spool) and len(descriptors()) == 1
    assert not descriptors()


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_gzip_file_cut_anywhere_is_refused(tar: Path) -> None:
    whole = gzip.compress(PLAIN[:2048] + END) + gzip.compress(bytes(512))
    for length in range(2, len(whole)):
        if length == len(gzip.compress(PLAIN[:2048] + END)):
            continue  # between the members: whole, and whole as a tar too
        tar.write_bytes(whole[:length])
        refusal(tar)


@pytest.mark.parametrize("from_end", [1, 4, 5, 8])
def test_a_wrong_checksum_or_length_is_corrupt(tar: Path, from_end: int) -> None:
    data = bytearray(gzip.compress(PLAIN))
    data[-from_end] ^= 0x10
    tar.write_bytes(data)
    assert "corrupt gzip" in refusal(tar)


def test_a_flipped_bit_in_the_middle_is_corrupt(tar: Path) -> None:
    whole = gzip.compress(PLAIN)
    for position in range(10, len(whole), len(whole) // 37):
        data = bytearray(whole)
        data[position] ^= 1
        tar.write_bytes(data)
        refusal(tar)


@pytest.mark.parametrize("junk", [b"x", b"\x1f", b"garbage" * 100, b"\0\0x"])
def test_garbage_behind_the_last_member_is_refused(tar: Path, junk: bytes) -> None:
    tar.write_bytes(gzip.compress(PLAIN) + junk)
    assert "garbage" in refusal(tar)


def test_a_compressed_thing_that_is_no_tar_is_refused(tar: Path) -> None:
    tar.write_bytes(gzip.compress(b"hello" * 1000))
    assert "not a tar" in refusal(tar)
    tar.write_bytes(gzip.compress(b""))
    assert "empty" in refusal(tar)
    tar.write_bytes(gzip.compress(gzip.compress(PLAIN)))
    assert "not a tar" in refusal(tar)


def test_a_full_spool_disk_is_one_clear_line_and_leaves_nothing(tar: Path, small_disk: Path) -> None:
    tar.write_bytes(gzip.compress(member(b"f", random.Random(4).randbytes(3 << 20)) + END))
    with (
        pytest.raises(SourceError, match=r"No space left on device \(ENOSPC\)") as caught,
        from_tar(tar, kind="base", spool_dir=small_disk),
    ):
        pass
    assert str(small_disk) in str(caught.value)
    assert not os.listdir(small_disk)
    usage = os.statvfs(small_disk)
    assert usage.f_bfree == usage.f_blocks
    tar.write_bytes(gzip.compress(PLAIN))
    with from_tar(tar, kind="base", spool_dir=small_disk) as tree:
        assert b"d/f" in tree


def test_a_bomb_of_zeros_costs_no_disk(tar: Path, small_disk: Path) -> None:
    size = 200 << 20
    squeeze = zlib.compressobj(1, zlib.DEFLATED, 31)
    whole = member(b"small", b"s") + pax({b"size": b"%d" % size}) + member(b"zeros")
    parts = [squeeze.compress(whole), *(squeeze.compress(bytes(1 << 20)) for _ in range(200)), squeeze.compress(END)]
    tar.write_bytes(b"".join(parts) + squeeze.flush())
    with from_tar(tar, kind="base", spool_dir=small_disk) as tree:
        entry = tree.get(b"zeros")
        assert entry is not None and entry.content is not None and entry.size == size
        assert sum(length for _, length in entry.content.segments()) < 1 << 20


def test_a_spool_directory_that_is_not_there_is_a_clear_error(tar: Path, tmp_path: Path) -> None:
    tar.write_bytes(gzip.compress(PLAIN))
    with pytest.raises(SourceError, match="nowhere"), from_tar(tar, kind="base", spool_dir=tmp_path / "nowhere"):
        pass


@pytest.mark.parametrize("data", [PLAIN, gzip.compress(PLAIN)], ids=["plain", "gzip"])
def test_an_archive_may_come_through_a_pipe(tmp_path: Path, wanted: dict[bytes, object], data: bytes) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def feed() -> None:
        with fifo.open("wb", buffering=0) as file:
            file.write(data[:1])
            file.write(data[1:])

    thread = threading.Thread(target=feed)
    thread.start()
    with opened(fifo) as tree:
        assert values(tree) == wanted
    thread.join()
