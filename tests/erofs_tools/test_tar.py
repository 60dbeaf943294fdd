"""What a tar means: the tree that extracting it in order would give, or a refusal that names the path."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest

from erofs_tools.errors import SourceError
from tests.erofs_tools.trees import (
    archive,
    directory,
    header,
    link,
    member,
    opened,
    pax,
    record,
    symlink,
    tar_values,
)


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "in.tar"


def refusal(path: Path, kind: str = "base", **options: bool) -> SourceError:
    with pytest.raises(SourceError) as caught, opened(path, kind, **options):
        pass
    text = str(caught.value)
    assert "\n" not in text
    return caught.value


def test_an_empty_archive_is_an_empty_root(tar: Path) -> None:
    found = tar_values(archive(tar))
    assert list(found) == [b""]
    assert (found[b""]["mode"], found[b""]["mtime"]) == ("0o40755", (0, 0))


def test_the_last_of_equal_paths_wins_type_attributes_and_contents(tar: Path) -> None:
    old = pax({b"SCHILY.xattr.user.old": b"1"}) + member(b"x", b"old", mode=b"0004755", uid=b"0000007")
    assert tar_values(archive(tar, old, member(b"x", b"new!")))[b"x"] == {
        "mode": "0o100644",
        "ids": (0, 0),
        "mtime": (0, 0),
        "rdev": 0,
        "size": 4,
        "xattrs": {},
        "target": b"",
        "contents": b"new!",
    }
    assert tar_values(archive(tar, old, symlink(b"x", b"y")))[b"x"]["target"] == b"y"
    assert list(tar_values(archive(tar, member(b"d/x", b"1"), symlink(b"d", b"y")))) == [b"", b"d"]


def test_a_directory_twice_keeps_its_children_and_takes_the_later_attributes(tar: Path) -> None:
    found = tar_values(
        archive(tar, directory(b"d/"), member(b"d/x"), directory(b"d/", mode=b"0001777", gid=b"0000011"))
    )
    assert found[b"d"]["mode"] == "0o41777" and found[b"d"]["ids"] == (0, 9) and b"d/x" in found


def test_a_directory_may_come_after_what_is_in_it(tar: Path) -> None:
    found = tar_values(archive(tar, member(b"d/e/x", b"1"), directory(b"d/e/", mode=b"0000700", mtime=b"00000000007")))
    assert (found[b"d"]["mode"], found[b"d/e"]["mode"]) == ("0o40755", "0o40700")
    assert found[b"d/e"]["mtime"] == (7, 0)


@pytest.mark.parametrize("name", [b"./", b"."])
def test_the_root_entry_sets_the_roots_attributes(tar: Path, name: bytes) -> None:
    records = pax({b"mtime": b"5.25", b"SCHILY.xattr.user.r": b"root"})
    found = tar_values(archive(tar, records, directory(name, mode=b"0000711", uid=b"0000003")))
    assert found[b""]["mode"] == "0o40711" and found[b""]["ids"] == (3, 0)
    assert found[b""]["mtime"] == (5, 250_000_000) and found[b""]["xattrs"] == {b"user.r": b"root"}


def test_a_root_that_is_no_directory_is_refused(tar: Path) -> None:
    assert "root" in str(refusal(archive(tar, symlink(b"./", b"/etc"))))


@pytest.mark.parametrize("name", [b"./a/b", b"a//b", b"a/./b", b"././a/b"])
def test_dots_and_double_slashes_say_nothing(tar: Path, name: bytes) -> None:
    assert list(tar_values(archive(tar, member(name)))) == [b"", b"a", b"a/b"]


@pytest.mark.parametrize("name", [b"../x", b"a/../x", b"a/..", b"..", b"/x", b"/", b"//x", b"a/../../x"])
@pytest.mark.parametrize("type_", [b"0", b"5", b"2"])
def test_paths_that_leave_the_tree_are_refused(tar: Path, name: bytes, type_: bytes) -> None:
    error = refusal(archive(tar, header(name, type_, target=b"t")))
    assert error.path == name


def test_a_long_path_of_a_pax_header_that_leaves_the_tree_is_refused(tar: Path) -> None:
    assert refusal(archive(tar, pax({b"path": b"a/" * 200 + b"../x"}), member(b"harmless"))).path.endswith(b"../x")


@pytest.mark.parametrize("target", [b"/etc/passwd", b"../x", b"a/../../x"])
def test_hard_links_out_of_the_tree_are_refused(tar: Path, target: bytes) -> None:
    assert refusal(archive(tar, link(b"x", target))).path == b"x"


@pytest.mark.parametrize("target", [b"/etc", b"..", b"real", b"nothing"])
def test_a_path_through_a_symbolic_link_of_the_tar_is_refused(tar: Path, target: bytes) -> None:
    parts = (directory(b"real/"), symlink(b"d/link", target))
    error = refusal(archive(tar, *parts, member(b"d/link/x", b"1")))
    assert error.path == b"d/link/x" and "symbolic link d/link" in str(error)
    assert refusal(archive(tar, *parts, directory(b"d/link/x/y"))).path == b"d/link/x/y"
    # a hard link to a symbolic link is one too
    assert refusal(archive(tar, *parts, link(b"l", b"d/link"), member(b"l/x"))).path == b"l/x"


def test_a_path_through_a_file_is_refused(tar: Path) -> None:
    assert refusal(archive(tar, member(b"f", b"1"), member(b"f/x"))).path == b"f/x"


def test_a_symbolic_link_that_became_a_directory_is_no_obstacle(tar: Path) -> None:
    assert b"a/x" in tar_values(archive(tar, symlink(b"a", b"/etc"), directory(b"a/"), member(b"a/x")))


def test_a_hard_link_joins_what_its_target_is_at_that_moment(tar: Path) -> None:
    found = tar_values(archive(tar, member(b"f", b"old"), link(b"g", b"f"), member(b"f", b"new")))
    assert (found[b"f"]["contents"], found[b"g"]["contents"]) == (b"new", b"old")


def test_hard_links_to_links_and_to_symbolic_links_share_the_inode(tar: Path) -> None:
    found = tar_values(
        archive(tar, member(b"z", b"1"), link(b"y", b"./z"), link(b"x", b"y"), symlink(b"s", b"t"), link(b"r", b"s"))
    )
    assert found[b"x"]["contents"] == b"1"
    assert found[b"y"] == found[b"z"] == {"hardlink_to": b"x"}
    assert found[b"r"]["target"] == b"t" and found[b"s"] == {"hardlink_to": b"r"}


def test_a_hard_link_may_come_before_its_target(tar: Path) -> None:
    late = tar_values(archive(tar, link(b"c", b"b"), link(b"b", b"a"), member(b"a", b"1")))
    assert late == tar_values(archive(tar, member(b"a", b"1"), link(b"b", b"a"), link(b"c", b"b")))
    # what takes the link's own path afterwards wins
    assert tar_values(archive(tar, link(b"b", b"a"), member(b"b", b"2"), member(b"a", b"1")))[b"b"]["contents"] == b"2"


@pytest.mark.parametrize("target", [b"nothing", b"x", b"d/../f", b"link/f"])
def test_a_hard_link_to_nothing_is_refused(tar: Path, target: bytes) -> None:
    parts = (directory(b"d/"), member(b"d/f"), symlink(b"link", b"d"))
    error = refusal(archive(tar, *parts, link(b"x", target)))
    assert error.path == b"x" and os.fsdecode(target) in str(error)


def test_hard_links_that_only_name_each_other_are_refused(tar: Path) -> None:
    refusal(archive(tar, link(b"a", b"b"), link(b"b", b"a")))


def test_a_hard_link_to_a_directory_is_refused(tar: Path) -> None:
    assert "directory" in str(refusal(archive(tar, directory(b"d/"), link(b"x", b"d"))))


def test_a_file_that_links_to_itself_is_the_file_added_twice(tar: Path) -> None:
    found = tar_values(archive(tar, member(b"x", b"1"), link(b"y", b"x"), link(b"x", b"x"), link(b"x", b"y")))
    assert found[b"x"]["contents"] == b"1" and found[b"y"] == {"hardlink_to": b"x"}


def test_devices_and_fifos_keep_their_numbers(tar: Path) -> None:
    found = tar_values(
        archive(
            tar,
            header(b"null", b"3", devices=(b"0000001", b"0000003"), mode=b"0000666"),
            header(b"disk", b"4", devices=(b"0007777", b"3777777")),
            pax({b"SCHILY.devmajor": b"300", b"SCHILY.devminor": b"1048575"}) + header(b"star", b"4"),
            header(b"pipe", b"6", mode=b"0000600"),
        )
    )
    assert (found[b"null"]["mode"], found[b"null"]["rdev"]) == ("0o20666", os.makedev(1, 3))
    assert (found[b"disk"]["mode"], found[b"disk"]["rdev"]) == ("0o60644", os.makedev(0o7777, 0o3777777))
    assert found[b"star"]["rdev"] == os.makedev(300, 1048575)
    assert found[b"pipe"]["mode"] == "0o10600"


@pytest.mark.parametrize("numbers", [(b"0010000", b"0000000"), (b"0000001", b"4000000"), (b"\xff" * 8, b"0000000")])
def test_device_numbers_that_linux_cannot_pack_are_refused(tar: Path, numbers: tuple[bytes, bytes]) -> None:
    assert refusal(archive(tar, header(b"dev", b"3", devices=numbers))).path == b"dev"


def test_a_whiteout_device_is_refused_or_dropped(tar: Path) -> None:
    archive(tar, member(b"f", b"1"), header(b"d/w", b"3"), link(b"v", b"d/w"))
    assert refusal(tar).path == b"d/w"
    assert refusal(tar, "diff").path == b"d/w"
    assert list(tar_values(tar, strip_overlay=True)) == [b"", b"f"]
    assert list(tar_values(archive(tar, header(b"b", b"4")))) == [b"", b"b"]  # a block device 0/0 is none


@pytest.mark.parametrize(
    "name",
    [
        b"trusted.overlay.opaque",
        b"trusted.overlay.redirect",
        b"trusted.overlay.metacopy",
        b"trusted.overlay.x",
        b"user.overlay.opaque",
        b"user.overlay.overlay.x",
    ],
)
@pytest.mark.parametrize("style", ["schily", "libarchive", "hard link"])
def test_attributes_of_overlayfs_are_refused_or_dropped(tar: Path, name: bytes, style: str) -> None:
    key = b"LIBARCHIVE.xattr." + name.replace(b".", b"%2E") if style == "libarchive" else b"SCHILY.xattr." + name
    what = link(b"d/", b"f") if style == "hard link" else directory(b"d/")
    archive(tar, member(b"f"), pax({key: b"Lw", b"SCHILY.xattr.user.keep": b"1"}) + what)
    error = refusal(tar)
    assert error.path == b"d" and name.decode() in str(error)
    found = tar_values(tar, strip_overlay=True)
    if style != "hard link":
        assert found[b"d"]["xattrs"] == {b"user.keep": b"1"}


def test_escaped_attributes_of_a_nested_overlay_are_content(tar: Path) -> None:
    records = pax({b"SCHILY.xattr.trusted.overlay.overlay.opaque": b"y", b"SCHILY.xattr.trusted.overlayed": b"1"})
    found = tar_values(archive(tar, records + directory(b"d/")))
    assert found[b"d"]["xattrs"] == {b"trusted.overlay.overlay.opaque": b"y", b"trusted.overlayed": b"1"}


def test_the_selinux_label_is_ignored(tar: Path) -> None:
    records = pax({b"SCHILY.xattr.security.selinux": b"l\0", b"RHT.security.selinux": b"l\0"})
    assert tar_values(archive(tar, records + member(b"f")))[b"f"]["xattrs"] == {}


def test_attributes_are_raw_bytes(tar: Path) -> None:
    every = bytes(range(256)) * 3 + b"\n12 path=evil\n\0"
    wanted = {
        b"user.every": every,
        b"user.invalid-utf-8": b"\xff\xfe\xc3",
        b"user.utf-8": "é\N{SNOWMAN}".encode(),
        b"user.empty": b"",
        b"user.a=b%c": b"=",
        b"user.\xff": b"name",
        b"security.capability": struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0),
    }
    escaped = {b"SCHILY.xattr." + k.replace(b"%", b"%25").replace(b"=", b"%3D"): v for k, v in wanted.items()}
    assert tar_values(archive(tar, pax(escaped) + member(b"f")))[b"f"]["xattrs"] == dict(sorted(wanted.items()))


def test_attributes_in_libarchives_way_are_read_and_schilys_win(tar: Path) -> None:
    records = pax(
        {
            b"LIBARCHIVE.xattr.user.a%20b%3D%25": b"AP8K",  # without the padding, as libarchive writes it
            b"LIBARCHIVE.xattr.user.both": b"AA",
            b"SCHILY.xattr.user.both": b"raw",
        }
    )
    found = tar_values(archive(tar, records + member(b"f")))
    assert found[b"f"]["xattrs"] == {b"user.a b=%": b"\0\xff\n", b"user.both": b"raw"}
    assert refusal(archive(tar, pax({b"LIBARCHIVE.xattr.user.x": b"*"}) + member(b"f"))).path == b"f"


def test_names_are_bytes(tar: Path) -> None:
    names = [b"\xff\xfe", "é".encode(), b"a\nb", b"\x01", b"n" * 255, b"sp ace ", b"\\", b"-", b"!"]
    parts = [pax({b"path": name}) + member(b"short", name) for name in names]
    found = tar_values(archive(tar, *parts))
    assert {path: one["contents"] for path, one in found.items() if path} == {name: name for name in names}


def test_a_name_of_256_bytes_is_refused(tar: Path) -> None:
    error = refusal(archive(tar, pax({b"path": b"d/" + b"n" * 256}) + member(b"x")))
    assert "256" in str(error)


@pytest.mark.parametrize("kind", ["base", "workspace", "toolkit"])
@pytest.mark.parametrize("name", [b".wh.x", b"d/.wh.x", b".wh..wh..opq", b".wh.d/x", b".wh."])
def test_whiteout_names_are_refused_outside_a_diff(tar: Path, kind: str, name: bytes) -> None:
    assert refusal(archive(tar, member(name)), kind).path == name
    assert name in tar_values(tar, kind, literal_whiteouts=True)


def test_names_that_only_look_like_whiteouts_are_names(tar: Path) -> None:
    assert list(tar_values(archive(tar, member(b"a.wh.x"), member(b".whx")))) == [b"", b".whx", b"a.wh.x"]


@pytest.mark.parametrize("type_", [b"M", b"N", b"Z", b"9"])
def test_unknown_types_of_members_are_refused(tar: Path, type_: bytes) -> None:
    assert refusal(archive(tar, header(b"f", type_))).path == b"f"


def test_a_symbolic_link_has_the_mode_that_linux_gives_it(tar: Path) -> None:
    assert stat.S_IMODE(int(tar_values(archive(tar, symlink(b"l", b"t")))[b"l"]["mode"], 8)) == 0o777


@pytest.mark.parametrize("text", [b"1", b"x", b"1e3", b"0x1", b""])
def test_an_owner_is_a_number_in_range(tar: Path, text: bytes) -> None:
    path = archive(tar, member(b"p") + pax({b"uid": text}) + member(b"f", uid=b"0000005"))
    if text in (b"1", b""):  # an empty value hands the question back to the header
        assert tar_values(path)[b"f"]["ids"] == (1 if text else 5, 0)
    else:
        refusal(path)


def test_owners_go_up_to_what_linux_can_tell_from_none(tar: Path) -> None:
    big = struct.pack(">q", (1 << 63) - 1 - ((1 << 63) - 1) + 0xFFFFFFFE - (1 << 63))  # base 256
    assert tar_values(archive(tar, member(b"f", uid=big)))[b"f"]["ids"] == (0xFFFFFFFE, 0)
    assert refusal(archive(tar, pax({b"gid": b"4294967295"}) + member(b"f"))).path == b"f"
    assert refusal(archive(tar, member(b"f", uid=b"\xff" * 8))).path == b"f"


def test_records_survive_in_any_order_and_last_wins(tar: Path) -> None:
    body = record(b"mtime", b"1") + record(b"mtime", b"2")
    assert tar_values(archive(tar, member(b"h", body, b"x"), member(b"f")))[b"f"]["mtime"] == (2, 0)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_a_device_is_no_archive(device: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"^{device} is a character device"), opened(Path(device)):
        pass


def test_a_block_device_is_no_archive(tmp_path: Path) -> None:
    os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with pytest.raises(SourceError, match="disk is a block device"), opened(tmp_path / "disk"):
        pass


def test_a_path_of_many_components_is_cut_in_the_message(tar: Path) -> None:
    name = b"/".join([b"deep"] * 20_000) + b"/../end"
    with pytest.raises(SourceError) as caught, opened(archive(tar, pax({b"path": name}) + member(b"x"))):
        pass
    assert len(str(caught.value)) < 400
    assert str(caught.value).startswith("deep/deep/") and "/../end" in str(caught.value)
