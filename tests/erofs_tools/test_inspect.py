"""``dsec erofs inspect`` and what it is made of."""

from __future__ import annotations

from pathlib import Path

from erofs_tools.inspect import describe
from tests.conftest import Dsec
from tests.erofs_tools.images import every_kind, file, tree_of, write


def test_counts_and_sizes_are_those_of_the_tree(tmp_path: Path) -> None:
    pair = write(every_kind(), tmp_path)
    found = describe(pair.meta)
    stats = pair.stats
    assert (found["inodes"], found["hard_links"]) == (stats.inodes, stats.hard_links)
    assert found["names"] == stats.inodes + stats.hard_links
    assert (found["files"], found["directories"], found["symlinks"]) == (stats.files, stats.directories, stats.symlinks)
    assert (found["character_devices"], found["block_devices"], found["fifos"], found["sockets"]) == (3, 1, 1, 1)
    assert (found["whiteouts"], found["opaque_directories"]) == (1, 1)
    assert found["contents"]["size"] == stats.file_size
    assert found["metadata_size"] == stats.metadata_size
    assert [device["size"] for device in found["devices"]] == [stats.data_size]
    assert found["superblock"]["features_incompatible"] == ["chunked", "device_table"]
    assert found["largest_files"][0] == {"path": "sparse", "size": 10_000_000}


def test_paths_are_text_whatever_their_bytes_are(tmp_path: Path) -> None:
    found = describe(write(tree_of(file(b"\xff\n\xc3\xa4", b"x")), tmp_path).meta)
    assert found["largest_files"] == [{"path": "\\xff\\nä", "size": 1}]


def test_the_command_prints_json_and_text(tmp_path: Path, dsec: Dsec) -> None:
    pair = write(every_kind(), tmp_path / "pair")
    assert dsec.json("erofs", "inspect", pair.meta) == describe(pair.meta)
    text = dsec("erofs", "inspect", pair.meta).stdout
    assert "device_table" in text and "sparse" in text and str(pair.stats.inodes) in text


def test_what_is_no_image_is_one_line_and_exit_1(tmp_path: Path, dsec: Dsec) -> None:
    bad = tmp_path / "bad"
    for content in (b"", b"x" * 10, bytes(100_000)):
        bad.write_bytes(content)
        done = dsec("erofs", "inspect", bad, check=False)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith(f"dsec: {bad}: ") and done.stderr.count("\n") == 1
    assert dsec("erofs", "inspect", tmp_path / "none", check=False).returncode == 1
