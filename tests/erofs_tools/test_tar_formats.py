"""Every header format, and every way in which an archive can be broken."""

from __future__ import annotations

import io
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erofs_tools.errors import SourceError
from erofs_tools.tar_fields import pax_time
from tests.erofs_tools.trees import (
    END,
    archive,
    directory,
    header,
    member,
    opened,
    padded,
    pax,
    record,
    symlink,
    tar_values,
    with_checksum,
)

LONG = b"d" * 90 + b"/" + b"e" * 200 + b"/f"


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "in.tar"


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught, opened(path):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_v7_headers_have_no_types_for_directories(tar: Path) -> None:
    v7: dict[str, Any] = {"magic": b"", "devices": (b"", b"")}
    found = tar_values(
        archive(
            tar,
            header(b"d/", b"\0", mode=b"0000700", **v7),
            member(b"d/f", b"data", b"\0", **v7),
            header(b"d/l", b"1", target=b"d/f", **v7),
            header(b"d/s", b"2", target=b"f", rest=b"not a prefix", **v7),
        )
    )
    assert found[b"d"]["mode"] == "0o40700" and found[b"d/f"]["contents"] == b"data"
    assert found[b"d/l"] == {"hardlink_to": b"d/f"} and found[b"d/s"]["target"] == b"f"


def test_the_prefix_counts_in_ustar_headers_only(tar: Path) -> None:
    ustar = header(b"name", rest=b"some/prefix")
    gnu = header(b"name", magic=b"ustar  \0", rest=b"17777777777\0")  # the access time stands there
    star = header(b"name2", rest=b"p" * 131 + b"17777777777\0" * 2 + bytes(8) + b"tar\0")
    assert list(tar_values(archive(tar, ustar, gnu, star))) == [
        b"",
        b"name",
        b"p" * 131,
        b"p" * 131 + b"/name2",
        b"some",
        b"some/prefix",
        b"some/prefix/name",
    ]


def test_full_fields_need_no_terminator(tar: Path) -> None:
    found = tar_values(archive(tar, header(b"n" * 100, b"2", target=b"t" * 100)))
    assert found[b"n" * 100]["target"] == b"t" * 100


def test_gnu_long_names_and_targets(tar: Path) -> None:
    target = b"t" * 4000
    found = tar_values(
        archive(
            tar,
            member(b"././@LongLink", LONG + b"\0", b"L", magic=b"ustar  \0"),
            member(b"././@LongLink", target + b"\0", b"K", magic=b"ustar  \0"),
            header(LONG[:100], b"2", target=target[:100], magic=b"ustar  \0"),
            member(b"next", b"1"),
        )
    )
    assert found[LONG]["target"] == target and b"next" in found


def test_pax_wins_over_gnu_over_the_header(tar: Path) -> None:
    names = (member(b"L", b"gnu\0", b"L"), pax({b"path": b"pax"}), member(b"header"))
    assert list(tar_values(archive(tar, *names))) == [b"", b"pax"]


def test_global_headers_hold_until_they_are_changed(tar: Path) -> None:
    found = tar_values(
        archive(
            tar,
            pax({b"uid": b"5", b"mtime": b"9", b"comment": b"git"}, b"g"),
            member(b"a", b"1", uid=b"0000001"),
            pax({b"uid": b"6"}),
            member(b"b"),
            pax({b"uid": b"", b"gid": b"7"}, b"g"),
            member(b"c", uid=b"0000001"),
            pax({b"comment": b"a global header may end an archive"}, b"g"),
        )
    )
    assert [found[name]["ids"] for name in (b"a", b"b", b"c")] == [(5, 0), (6, 0), (1, 7)]
    assert {found[name]["mtime"] for name in (b"a", b"b", b"c")} == {(9, 0)}


def test_a_size_beyond_the_octal_field_is_base_256_or_pax(tar: Path) -> None:
    base_256 = struct.pack(">I", 0x80000000) + struct.pack(">Q", 3)
    assert tar_values(archive(tar, header(b"f", size_field=base_256) + padded(b"abc")))[b"f"]["contents"] == b"abc"
    assert tar_values(archive(tar, pax({b"size": b"3"}) + header(b"f") + padded(b"abc")))[b"f"]["contents"] == b"abc"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"0", (0, 0)),
        (b"1.", (1, 0)),
        (b"1700000000.123456789", (1700000000, 123456789)),
        (b"1700000000.1234567899999", (1700000000, 123456789)),
        (b"9007199254740993.000000001", (9007199254740993, 1)),  # 2**53 + 1: no float has it
        (b"-1", (-1, 0)),
        (b"-0.5", (-1, 500_000_000)),
        (b"-1.000000001", (-2, 999_999_999)),
        (b"-1.0000000001", (-2, 999_999_999)),
        (b"-9223372036854775808", (-(1 << 63), 0)),
        (b"9223372036854775807.999999999", ((1 << 63) - 1, 999_999_999)),
    ],
)
def test_times_are_exact(tar: Path, text: bytes, wanted: tuple[int, int]) -> None:
    assert pax_time(text, "here") == wanted
    assert tar_values(archive(tar, pax({b"mtime": text}), member(b"f")))[b"f"]["mtime"] == wanted


@pytest.mark.parametrize("text", [b"9223372036854775808", b"-9223372036854775808.1", b"9" * 40, b"1e9", b"nan", b"1,5"])
def test_times_beyond_the_range_and_no_times_are_refused(tar: Path, text: bytes) -> None:
    refusal(archive(tar, pax({b"mtime": text}), member(b"f")))


def test_header_times_may_be_negative_in_base_256(tar: Path) -> None:
    field = (-5).to_bytes(12, "big", signed=True)
    assert tar_values(archive(tar, member(b"f", mtime=field)))[b"f"]["mtime"] == (-5, 0)


@pytest.mark.parametrize("field", [b"0000644 ", b" 644 \0\0\0", b"    644\0", b"\x00000644", b"644\0junk", b"0100644"])
def test_octal_numbers_stand_between_spaces_and_nuls(tar: Path, field: bytes) -> None:
    assert tar_values(archive(tar, member(b"f", mode=field)))[b"f"]["mode"] == "0o100644"


@pytest.mark.parametrize("field", [b"9", b"-1", b"+1", b"1_0", b"0o7", b"abc", b"\x7f"])
def test_numbers_that_are_none_are_refused(tar: Path, field: bytes) -> None:
    assert "octal" in refusal(archive(tar, member(b"f", uid=field)))


def test_a_checksum_may_be_of_signed_bytes(tar: Path) -> None:
    block = header(b"\xff\xe9")
    signed = sum(struct.unpack("512b", block)) - sum(block[148:156]) + 256
    found = tar_values(archive(tar, block[:148] + b"%06o\0 " % signed + block[156:]))
    assert b"\xff\xe9" in found


def test_a_volume_label_is_no_member_and_a_dumpdir_a_directory(tar: Path) -> None:
    found = tar_values(archive(tar, header(b"label", b"V"), member(b"d/", b"Yfile\0\0", b"D"), member(b"f", b"1")))
    assert list(found) == [b"", b"d", b"f"] and found[b"d"]["mode"] == "0o40644"


def test_the_size_of_a_member_without_data_is_not_believed(tar: Path) -> None:
    parts = (header(b"d/", b"5", 4096), header(b"l", b"1", 5, target=b"f"), header(b"p", b"6", 99))
    assert list(tar_values(archive(tar, member(b"f", b"12345"), *parts))) == [b"", b"d", b"f", b"l", b"p"]


# What is broken


def small() -> list[bytes]:
    return [
        directory(b"d/"),
        pax({b"path": LONG, b"mtime": b"1.5"}),
        member(b"x", b"contents" * 100),
        member(b"L", b"n" * 150 + b"\0", b"L"),
        symlink(b"short", b"t"),
        member(b"last", b"z"),
    ]


def test_an_archive_cut_anywhere_before_its_end_is_refused(tar: Path) -> None:
    whole = b"".join(small())
    for length in [*range(0, len(whole), 97), *range(0, len(whole) + 1, 512)]:
        tar.write_bytes(whole[:length])
        text = refusal(tar)
        assert "truncated" in text or "empty" in text, (length, text)


def test_one_zero_block_ends_an_archive(tar: Path) -> None:
    assert len(tar_values(archive(tar, *small(), end=bytes(512)))) == 7
    assert len(tar_values(archive(tar, *small(), end=bytes(10240 * 300)))) == 7


@pytest.mark.parametrize("position", [0, 511, 512, 1024, 3_000_000])
def test_anything_behind_the_end_is_refused(tar: Path, position: int) -> None:
    end = bytearray(max(1024, position + 1) + 512)
    end[512 + position] = 1
    text = refusal(archive(tar, *small(), end=bytes(end)))
    assert "garbage" in text and str(len(b"".join(small())) + 512 + position) in text


@pytest.mark.parametrize(
    "junk", [b"x" * 512, b"\xff" * 1024, b"<html>" + bytes(2000), random.Random(1).randbytes(5000)]
)
def test_garbage_is_not_a_tar(tar: Path, junk: bytes) -> None:
    tar.write_bytes(junk)
    assert "not a tar" in refusal(tar)


def test_a_damaged_header_in_the_middle_is_an_error_and_not_an_end(tar: Path) -> None:
    for index in (2, 4, 5):
        parts = small()
        parts[index] = b"!" + parts[index][1:]
        archive(tar, *parts)
        assert f"damaged header at byte {len(b''.join(parts[:index]))}" in refusal(tar)
        if index == 5:
            with tarfile.open(tar) as theirs:
                assert len(theirs.getmembers()) == 3  # of 4, in silence: why there is a parser of our own


@given(st.integers(0, 511), st.integers(0, 7), st.sampled_from([0, 3, 5]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_a_flipped_bit_in_a_header_is_found_or_says_nothing(tar: Path, position: int, bit: int, index: int) -> None:
    parts = small()
    wanted = tar_values(archive(tar, *parts))
    damaged = bytearray(parts[index])
    damaged[position] ^= 1 << bit
    parts[index] = bytes(damaged)
    try:
        found = tar_values(archive(tar, *parts))
    except SourceError:
        return
    assert found == wanted and 148 <= position < 156  # another way to write the same checksum


@given(st.binary(max_size=3000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_random_bytes_behind_a_good_header_are_refused_or_read_but_never_a_crash(tar: Path, junk: bytes) -> None:
    tar.write_bytes(member(b"h", junk, b"x") + member(b"f") + END)
    try:
        tar_values(tar)
    except SourceError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"5 a=b\n",
        b"7 a=b\n",
        b"6 a=b ",
        b"5 =b\n",
        b"5 ab\n",
        b"999999 a=b\n",
        b"-6 a=b\n",
        b"6 a=b\n\0",
        b"99999999999999999999999999 a=b\n",
    ],
)
def test_malformed_pax_records_are_refused(tar: Path, body: bytes) -> None:
    assert "pax" in refusal(archive(tar, member(b"h", body, b"x"), member(b"f")))


def test_an_extended_header_needs_its_member(tar: Path) -> None:
    for part in (pax({b"mtime": b"1"}), member(b"L", b"n\0", b"L")):
        assert "extended header" in refusal(archive(tar, member(b"f"), part))


def test_a_monstrous_extended_header_is_not_read_into_memory(tar: Path) -> None:
    assert "extended header" in refusal(archive(tar, header(b"h", b"x", 1 << 30)))
    assert refusal(archive(tar, header(b"h", b"L", size_field=b"\xff" * 12)))


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\x7f" * 11])
def test_impossible_sizes_are_refused(tar: Path, size: bytes) -> None:
    refusal(archive(tar, header(b"f", size_field=size)))
    refusal(archive(tar, pax({b"size": b"-1"}) + header(b"f")))


def test_a_member_without_a_name_is_refused(tar: Path) -> None:
    assert "without a name" in refusal(archive(tar, member(b"")))


def test_names_with_nul_bytes_are_refused(tar: Path) -> None:
    assert "NUL" in refusal(archive(tar, pax({b"path": b"a\0b"}), member(b"x")))
    refusal(archive(tar, pax({b"linkpath": b"a\0b"}), symlink(b"x", b"t")))


def test_an_archive_written_to_while_it_is_read_is_an_error(tar: Path) -> None:
    archive(tar, member(b"f", b"contents"))
    with opened(tar) as tree:
        entry = tree.get(b"f")
        assert entry is not None and entry.content is not None
        with tar.open("r+b") as file:
            file.seek(512)
            file.write(b"CONTENTS")
        with pytest.raises(SourceError, match="changed"):
            entry.content.open()


def test_an_archive_that_shrinks_under_a_reader_is_an_error(tar: Path) -> None:
    archive(tar, member(b"f", b"c" * 5000))
    with opened(tar) as tree:
        entry = tree.get(b"f")
        assert entry is not None and entry.content is not None
        with entry.content.open() as reader:
            assert reader.read(100) == b"c" * 100
            with tar.open("r+b") as file:
                file.truncate(1000)
            with pytest.raises(SourceError, match="truncated") as caught:
                reader.read()
    assert caught.value.path == b"f"


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: None, lambda p: p.symlink_to("nothing")])
def test_a_path_that_is_no_file_is_a_clear_error(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "it"
    make(path)
    assert "it" in refusal(path)


@pytest.mark.parametrize(
    ("magic", "name"),
    [(b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh9", "bzip2"), (b"PK\x03\x04", "zip")],
)
def test_other_compressions_are_named(tar: Path, magic: bytes, name: str) -> None:
    tar.write_bytes(magic + bytes(1000))
    assert name in refusal(tar)


def test_readers_seek_and_read_in_pieces(tar: Path) -> None:
    data = random.Random(2).randbytes(300_000)
    with opened(archive(tar, member(b"f", data))) as tree:
        entry = tree.get(b"f")
        assert entry is not None and entry.content is not None
        with entry.content.open() as reader, io.BufferedReader(entry.content.open()) as buffered:  # type: ignore[type-var]
            assert reader.seek(-10, 2) == len(data) - 10 and reader.read() == data[-10:] and reader.read(5) == b""
            assert reader.seek(1000) == 1000 and reader.read(70_000) == data[1000:71_000] and reader.tell() == 71_000
            assert reader.seek(len(data) + 50) and reader.read(1) == b""
            assert buffered.read() == data


def test_a_record_may_be_as_long_as_its_length_says(tar: Path) -> None:
    # lengths around which the number of digits changes
    for length in (*range(80, 100), *range(980, 1000)):
        body = record(b"comment", b"c" * length) + record(b"mtime", b"3")
        assert tar_values(archive(tar, member(b"h", body, b"x"), member(b"f")))[b"f"]["mtime"] == (3, 0)


def test_the_checksum_helper_of_these_tests_agrees_with_pythons_tarfile() -> None:
    info = tarfile.TarInfo("x")
    made = info.tobuf(tarfile.USTAR_FORMAT)
    assert with_checksum(made)[148:156] == made[148:156]
