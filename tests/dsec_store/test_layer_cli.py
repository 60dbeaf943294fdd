"""The layer commands as a person types them: what they print, what a mistake costs, what they leave."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import tarfile
from pathlib import Path

import pytest

from dsec_store.backends.local import LocalBackend
from dsec_store.home import Home
from dsec_store.layers.build import build_layer
from dsec_store.layers.store import LayerStore
from dsec_store.refs import parse_reference
from tests.conftest import DSEC, Dsec
from tests.servers import registry_thread


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(b"#!/bin/sh\n" * 20_000)
    (root / "link").symlink_to("bin/tool")
    return root


def refused(dsec: Dsec, *arguments: str | os.PathLike[str], code: int = 1) -> str:
    """The one line that a failing command prints."""
    done = dsec(*arguments, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("dsec: ") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_layer_is_built_listed_shown_and_removed(dsec: Dsec, home: Home, source: Path) -> None:
    built = dsec.json("layer", "build", source, "--ref", "team/tool:v1", "--kind", "toolkit")
    assert built["reference"] == "team/tool:v1"
    assert built["sizes"]["data"] == 200_704
    assert built["counts"] == {"inodes": 4, "files": 1, "directories": 2, "symlinks": 1, "others": 0, "chunks": 1}

    (listed,) = dsec.json("layer", "ls")
    assert listed == {
        "reference": "team/tool:v1",
        "kind": "toolkit",
        "id": built["id"],
        "manifest": built["manifest"],
        "data_size": 200_704,
        "stored_size": built["sizes"]["stored"],
    }
    assert "team/tool:v1  toolkit" in dsec("layer", "ls").stdout

    shown = dsec.json("layer", "show", "team/tool:v1")
    assert (shown["id"], shown["manifest"], shown["counts"]) == (built["id"], built["manifest"], built["counts"])
    assert shown["config"]["data"]["size"] == shown["sizes"]["data"] == 200_704
    assert shown["manifest_document"]["config"]["digest"] == built["id"]
    assert shown["raw"] == str(home.raw_file(built["id"]))
    assert dsec.json("layer", "show", f"any@{built['manifest']}")["id"] == built["id"]
    assert built["id"] in dsec("layer", "show", "team/tool:v1").stdout

    assert dsec("layer", "rm", "team/tool:v1").stdout == ""
    assert dsec.json("layer", "ls") == []
    assert "team/tool:v1" in refused(dsec, "layer", "show", "team/tool:v1")


def test_settings_of_a_base_are_kept(dsec: Dsec, source: Path) -> None:
    options = ["--env", "PATH=/bin", "--env", "A=b=c", "--workdir", "/w", "--user", "1:2", "--cmd", "sh -c 'a b'"]
    dsec("layer", "build", source, "--ref", "base:1", "--kind", "base", "--entrypoint", "/init --", *options)
    run = dsec.json("layer", "show", "base:1")["config"]["run"]
    assert run == {
        "Env": ["PATH=/bin", "A=b=c"],
        "Entrypoint": ["/init", "--"],
        "Cmd": ["sh", "-c", "a b"],
        "User": "1:2",
        "WorkingDir": "/w",
        "Labels": {},
    }


def test_the_output_is_plain_where_there_is_no_terminal(dsec: Dsec, source: Path) -> None:
    done = dsec("layer", "build", source, "--ref", "a:1", "--kind", "workspace")
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "201 kB" in done.stdout


def test_a_bar_is_drawn_on_a_terminal_and_stdout_stays_plain(home: Home, source: Path) -> None:
    leader, follower = pty.openpty()
    try:
        arguments = [str(DSEC), "layer", "build", str(source), "--ref", "a:1", "--kind", "base", "--json"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=follower, env=environment) as process:
            assert process.stdout is not None
            output = process.stdout.read()
        assert process.returncode == 0
        assert json.loads(output)["reference"] == "a:1"
        drawn = b""
        while select.select([leader], [], [], 0)[0]:
            drawn += os.read(leader, 65536)
        assert b"building a:1" in drawn
    finally:
        os.close(leader)
        os.close(follower)


def test_a_tar_of_kind_diff_has_whiteouts(dsec: Dsec, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "diff.tar", "w") as tar:
        for name in ("d/.wh.gone", "d/new"):
            tar.addfile(tarfile.TarInfo(name))
    built = dsec.json("layer", "build", tmp_path / "diff.tar", "--ref", "diff:1", "--kind", "diff")
    assert built["counts"]["others"] == 1
    assert ".wh.gone" in refused(dsec, "layer", "build", tmp_path / "diff.tar", "--ref", "base:1", "--kind", "base")
    literal = dsec.json(
        "layer", "build", tmp_path / "diff.tar", "--ref", "base:1", "--kind", "base", "--literal-whiteouts"
    )
    assert literal["counts"]["files"] == 2


def test_overlay_marks_are_refused_or_dropped(dsec: Dsec, source: Path) -> None:
    os.setxattr(source / "bin", "trusted.overlay.opaque", b"y")
    command = ("layer", "build", source, "--ref", "a:1", "--kind", "base")
    assert "bin" in refused(dsec, *command)
    assert dsec.json(*command, "--strip-overlay-xattrs")["counts"]["inodes"] == 4


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["layer", "build", "/nowhere", "--ref", "a:1", "--kind", "base"], ["/nowhere"], 1),
        (["layer", "build", "/dev/null", "--ref", "a:1", "--kind", "base"], ["/dev/null"], 1),
        (["layer", "build", "/etc", "--ref", "A:1", "--kind", "base"], ["A"], 1),
        (["layer", "build", "/etc", "--ref", "localhost:5000/a:1", "--kind", "base"], ["local store"], 1),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "hat"], ["hat", "base"], 2),
        (["layer", "build", "/etc", "--ref", "a:1"], ["--kind"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "diff", "--env", "A=1"], ["base"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "base", "--env", "A"], ["KEY=VALUE"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "base", "--cmd", "'open"], ["--cmd"], 2),
        (["layer", "build", "", "--ref", "a:1", "--kind", "base"], ["SOURCE", "empty"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "base", "--workdir", "rel"], ["absolute"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "base", "--workdir", "/a\x1b[1m"], ["control"], 2),
        (["layer", "build", "/etc", "--ref", "a:1", "--kind", "base", "--user", "a\nb"], ["--user", "control"], 2),
        (["layer", "build", "/dev/zero", "--ref", "a:1", "--kind", "base"], ["/dev/zero", "character device"], 1),
        (["layer", "build", "/", "--ref", "a:1", "--kind", "base"], ["holds the home", "DSEC_HOME"], 1),
        (["layer", "pull", "a..b/a:1", "--ref", "p:1"], ["a..b"], 1),
        (["layer", "push", "a:1", "x" * 64 + ".b/a:1"], ["host"], 1),
        (["registry", "serve", "--listen", "a" * 300 + ":1"], ["cannot listen"], 1),
        (["layer", "show", "nothing:1"], ["nothing:1"], 1),
        (["layer", "show", "a@sha256:" + "0" * 64], ["sha256:000"], 1),
        (["layer", "show", "localhost:5000/a:1"], ["local store"], 1),
        (["layer", "rm", "nothing:1"], ["nothing:1"], 1),
        (["layer", "rm"], ["REF"], 2),
        (["layer", "rm", "a@sha256:" + "0" * 64], ["tag"], 1),
        (["layer", "hat"], ["hat"], 2),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(
    dsec: Dsec, home: Home, arguments: list[str], words: list[str], code: int
) -> None:
    line = refused(dsec, *arguments, code=code)
    for word in words:
        assert word in line
    assert list(home.store.rglob("refs/*")) == []


def test_removing_several_is_all_or_nothing(dsec: Dsec, source: Path) -> None:
    for tag in ("1", "2"):
        dsec("layer", "build", source, "--ref", f"a:{tag}", "--kind", "base")
    refused(dsec, "layer", "rm", "a:1", "a:3")
    assert len(dsec.json("layer", "ls")) == 2
    dsec("layer", "rm", "a:1", "a:2")
    assert dsec.json("layer", "ls") == []


def test_one_damaged_reference_does_not_hide_the_others(dsec: Dsec, home: Home, source: Path) -> None:
    built = dsec.json("layer", "build", source, "--ref", "a:1", "--kind", "base")
    (source / "more").write_text("x")
    dsec("layer", "build", source, "--ref", "b:1", "--kind", "base")
    blob = home.store / "blobs" / "sha256" / built["manifest"][7:9] / built["manifest"][7:]
    blob.write_bytes(blob.read_bytes().replace(b"dsec", b"DSEC"))
    assert [(item["reference"], item["kind"]) for item in dsec.json("layer", "ls")] == [
        ("a:1", "damaged"),
        ("b:1", "base"),
    ]
    assert built["manifest"] in refused(dsec, "layer", "show", "a:1")


def test_a_damaged_reference_is_listed_and_removed(dsec: Dsec, home: Home, source: Path) -> None:
    built = dsec.json("layer", "build", source, "--ref", "a:1", "--kind", "base")
    dsec("layer", "build", source, "--ref", "z:1", "--kind", "base")
    (home.store / "refs" / "a" / "_tags" / "1").write_bytes(b"\xffjunk")
    illegal = home.store / "refs" / os.fsdecode(b"Not a name\n\x1b[31m\xff") / "_tags"
    illegal.mkdir(parents=True)
    (illegal / "t").write_text(built["manifest"] + "\n")
    hostlike = home.store / "refs" / "a.b" / "c" / "_tags"
    hostlike.mkdir(parents=True)
    (hostlike / "t").write_text(built["manifest"] + "\n")
    listed = {item["reference"]: item["kind"] for item in dsec.json("layer", "ls")}
    assert sorted(listed.values()) == ["base", "base", "damaged", "damaged"]
    assert (listed["a:1"], listed["z:1"]) == ("damaged", "base")
    lines = dsec("layer", "ls").stdout.splitlines()
    assert len(lines) == 5 and "\x1b" not in "".join(lines)
    assert "a:1" in refused(dsec, "layer", "show", "a:1")
    dsec("layer", "rm", "a:1", lines[1].split("  ")[0], "a.b/c:t")
    assert [item["reference"] for item in dsec.json("layer", "ls")] == ["z:1"]
    assert "nothing" in refused(dsec, "layer", "rm", "nothing here:1")


def test_a_layer_that_was_damaged_is_built_again(dsec: Dsec, home: Home, source: Path) -> None:
    command = ("layer", "build", source, "--ref", "a:1", "--kind", "base")
    built = dsec.json(*command)
    shown = dsec.json("layer", "show", "a:1")
    for path in (home.store / "blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(b"!" * path.stat().st_size)
    assert built["manifest"] in refused(dsec, "layer", "show", "a:1")
    assert dsec.json(*command) == built
    assert dsec.json("layer", "show", "a:1") == shown


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure_and_nothing_is_written_into_blobs(
    dsec: Dsec, home: Home, source: Path, closed: str
) -> None:
    script = f'exec "$0" layer build "$1" --ref a:1 --kind base {closed}'
    done = subprocess.run(["sh", "-c", script, DSEC, source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("a:1" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    with registry_thread(LocalBackend(home.store)) as host:
        for arguments in (["push", "a:1", f"{host}/b:1"], ["pull", f"{host}/b:1"], ["ls"], ["show", "b:1", "--json"]):
            script = f'exec "$0" layer "$@" {closed}'
            done = subprocess.run(["sh", "-c", script, DSEC, *arguments], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), arguments
    assert all(LocalBackend(home.store).sound(digest) for digest in LocalBackend(home.store).blobs())
    assert len({item["id"] for item in dsec.json("layer", "ls")}) == 1


def test_an_error_with_a_closed_stderr_still_has_its_exit_code(dsec: Dsec, source: Path) -> None:
    script = 'exec "$0" layer show nothing:1 2>&-'
    done = subprocess.run(["sh", "-c", script, DSEC], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_what_others_wrote_is_escaped_in_text_and_whole_in_json(home: Home, dsec: Dsec, source: Path) -> None:
    """The command refuses such values; a foreign layer can have them."""
    run = {"User": "root\nid   forged", "Cmd": ["\x1b[2J"], "Labels": {"\x1b]0;t\x07": "\u2028"}}
    build_layer(LayerStore(home), source, parse_reference("a:1"), "base", run=run)
    text = dsec("layer", "show", "a:1").stdout
    assert "\x1b" not in text and "\u2028" not in text
    assert [line for line in text.splitlines() if line.startswith("id ")] == [f"id         {text.split()[5]}"]
    assert r"root\nid   forged" in text
    shown = dsec.json("layer", "show", "a:1")["config"]["run"]
    assert {key: shown[key] for key in run} == run


def test_a_home_that_cannot_hold_a_store_is_one_line(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = dsec("layer", "ls", home=tmp_path / "file", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    on_tmpfs = Path("/dev/shm/dsec-test-home/deep")
    done = dsec("layer", "ls", home=on_tmpfs, check=False)
    assert done.returncode == 1 and "tmpfs" in done.stderr and done.stderr.count("\n") == 1
    assert not on_tmpfs.parent.exists()
