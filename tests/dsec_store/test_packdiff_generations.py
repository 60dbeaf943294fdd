"""What a sandbox changed, packed and mounted again on top of what it saw, is what it saw; over several generations."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_store.home import Home
from dsec_store.layers.build import build_layer
from dsec_store.layers.packdiff import pack_diff
from dsec_store.layers.store import Environment, Layer, LayerStore
from dsec_store.manifest import EnvironmentLayer
from dsec_store.refs import Reference
from tests.dsec_store.snapshots import Snapshot, difference, mounted, snapshot


class Generations:
    """A chain of sandboxes, each on top of what the one before left."""

    def __init__(self, store: LayerStore, base: Path, folder: Path) -> None:
        built = build_layer(store, base, Reference("base", "1"), "base")
        self.store, self.folder = store, folder
        self.layers: list[EnvironmentLayer] = [built.in_environment()]
        self.top: Layer | Environment = store.load_layer(built.manifest_digest)
        self.count = 0

    def sandbox(self, change: Callable[[Path], object]) -> Snapshot:
        """Run ``change`` in a sandbox, pack it, and compare a mount of the result with what the sandbox saw."""
        self.count += 1
        writable = self.folder / f"sandbox{self.count}"
        with mounted(self.store, self.top, writable) as root:
            change(Path(root))
            seen = snapshot(root, writable / "upper")
        reference = Reference("generation", str(self.count))
        packed = pack_diff(self.store, writable / "upper", self.layers, reference)
        self.layers = list(packed.environment.layers)
        found = self.store.resolve(reference)
        assert isinstance(found, Environment)
        self.top = found
        with mounted(self.store, found) as root:
            assert difference(seen, snapshot(root)) == []
        # and so does another sandbox that has not changed anything yet
        with mounted(self.store, found, self.folder / f"fresh{self.count}") as root:
            assert difference(seen, snapshot(root)) == []
        return seen


@pytest.fixture
def base(tmp_path: Path) -> Path:
    root = tmp_path / "base"
    for folder in ("etc", "usr/bin", "usr/lib/deep/er", "var/log", "srv/a/b"):
        (root / folder).mkdir(parents=True)
    for index in range(24):
        folder = ("etc", "usr/bin", "usr/lib/deep/er", "var/log")[index % 4]
        (root / folder / f"f{index}").write_bytes(b"base %d\n" % index * 700)
    (root / "etc/link").symlink_to("f0")
    os.link(root / "etc/f0", root / "etc/hard")
    os.mkfifo(root / "srv/a/fifo")
    (root / "srv/a/b/file").write_text("deep")
    os.setxattr(root / "etc/f4", "user.note", b"old")
    return root


@pytest.fixture
def chain(home: Home, base: Path, tmp_path: Path) -> Generations:
    return Generations(LayerStore(home), base, tmp_path)


def test_created_entries_of_every_type(chain: Generations) -> None:
    def change(root: Path) -> None:
        (root / "new").mkdir()
        (root / "new/file").write_bytes(os.urandom(10_000))
        (root / "new/empty").touch()
        (root / "new/link").symlink_to("/nowhere")
        os.link(root / "new/file", root / "new/hard")
        os.mkfifo(root / "new/fifo", 0o600)
        os.mknod(root / "new/block", stat.S_IFBLK | 0o640, os.makedev(8, 1))
        os.mknod(root / "new/char", stat.S_IFCHR | 0o600, os.makedev(1, 7))
        with (root / "new/sparse").open("wb") as file:
            file.seek(1 << 20)
            file.write(b"end")
        (root / "etc/in-an-old-folder").write_text("x")
        (root / os.fsdecode(b"new/\xff\xfe")).write_text("bytes")

    seen = chain.sandbox(change)
    assert seen[b"new/file"]["links"] == (b"new/file", b"new/hard")


def test_changed_deleted_and_changed_in_attributes_alone(chain: Generations) -> None:
    def change(root: Path) -> None:
        (root / "etc/f0").write_text("changed")  # has another name, which keeps the old content
        with (root / "usr/bin/f1").open("ab") as file:
            file.write(b"appended")
        (root / "var/log/f3").unlink()
        (root / "etc/link").unlink()
        shutil.rmtree(root / "srv/a/b")
        (root / "usr/bin/f5").chmod(0o4711)
        (root / "usr/lib").chmod(0o700)
        os.chown(root / "var/log/f7", 12, 34)
        os.setxattr(root / "etc/f4", "user.note", b"new")
        os.setxattr(root / "etc/f8", "user.added", b"")
        os.setxattr(root / "usr/lib/deep", "user.folder", b"yes")
        os.utime(root / "etc/f12", ns=(1, 987_654_321_012_345_678))

    seen = chain.sandbox(change)
    assert b"var/log/f3" not in seen
    assert seen[b"etc/f12"]["mtime"] == 987_654_321_012_345_678


def test_replaced_by_another_type_and_back(chain: Generations) -> None:
    def file_by_folder(root: Path) -> None:
        (root / "etc/f0").unlink()
        (root / "etc/f0").mkdir()
        (root / "etc/f0/inside").write_text("x")
        shutil.rmtree(root / "usr/lib/deep")
        (root / "usr/lib/deep").write_text("was a folder")
        (root / "etc/link").unlink()
        os.mkfifo(root / "etc/link")

    def back(root: Path) -> None:
        shutil.rmtree(root / "etc/f0")
        (root / "etc/f0").write_text("a file again")
        (root / "usr/lib/deep").unlink()
        (root / "usr/lib/deep/er").mkdir(parents=True)
        (root / "etc/link").unlink()
        (root / "etc/link").symlink_to("f4")

    chain.sandbox(file_by_folder)
    seen = chain.sandbox(back)
    assert [name for name in seen if name.startswith(b"usr/lib/deep/")] == [b"usr/lib/deep/er"]
    chain.sandbox(file_by_folder)


def test_an_opaque_folder_hides_what_was_below_in_every_generation(chain: Generations) -> None:
    def replace(root: Path) -> None:
        shutil.rmtree(root / "etc")
        (root / "etc").mkdir()
        (root / "etc/only").write_text("this")

    def add(root: Path) -> None:
        (root / "etc/another").write_text("that")
        shutil.rmtree(root / "var")

    def again(root: Path) -> None:
        (root / "var/log").mkdir(parents=True)
        (root / "etc/only").unlink()

    assert sorted(n for n in chain.sandbox(replace) if n.startswith(b"etc/")) == [b"etc/only"]
    assert sorted(n for n in chain.sandbox(add) if n.startswith(b"etc/")) == [b"etc/another", b"etc/only"]
    seen = chain.sandbox(again)
    assert sorted(n for n in seen if n.startswith((b"etc/", b"var/"))) == [b"etc/another", b"var/log"]


def test_whiteouts_do_not_show_in_a_folder_of_one_layer(chain: Generations) -> None:
    """A folder that is made, filled and emptied over generations: its whiteouts must never be listed."""

    def fill(root: Path) -> None:
        for index in range(3):
            (root / f"n{index}").mkdir()
            (root / f"n{index}/f").write_text("x")

    def empty(root: Path) -> None:
        for index in range(3):
            (root / f"n{index}/f").unlink()

    chain.sandbox(fill)
    seen = chain.sandbox(empty)
    assert not any(name.endswith(b"/f") for name in seen)
    chain.sandbox(lambda root: (root / "n0/f").write_text("back"))


def test_renamed_files_and_folders_of_the_upper(chain: Generations) -> None:
    def change(root: Path) -> None:
        (root / "etc/f0").rename(root / "etc/renamed")
        (root / "fresh").mkdir()
        (root / "fresh/file").write_text("x")
        (root / "fresh").rename(root / "moved")
        with pytest.raises(OSError, match="cross-device"):
            (root / "etc").rename(root / "etc2")

    chain.sandbox(change)


def test_a_nested_overlay_s_attributes_are_content(chain: Generations) -> None:
    """overlayfs of the sandbox's own escapes its marks; they must reach the next sandbox as they are."""

    def change(root: Path) -> None:
        (root / "inner").mkdir()
        os.setxattr(root / "inner", "trusted.overlay.opaque", b"y")

    chain.sandbox(change)
    with mounted(chain.store, chain.top) as root:
        assert os.getxattr(f"{root}/inner", "trusted.overlay.opaque") == b"y"


def test_nothing_changed_is_nothing_packed(chain: Generations) -> None:
    seen = chain.sandbox(lambda root: None)
    assert chain.sandbox(lambda root: os.listdir(root)) == seen


def random_changes(seed: int) -> Callable[[Path], None]:
    source = random.Random(seed)

    def change(root: Path) -> None:
        for step in range(80):
            paths = [Path(folder) / name for folder, dirs, names in os.walk(root) for name in dirs + names]
            folders = [root, *(p for p in paths if p.is_dir() and not p.is_symlink())]
            victim = source.choice(paths) if paths else root
            fresh = source.choice(folders) / f"s{seed}-{step}"
            action = source.randrange(11)
            with contextlib.suppress(OSError):  # EXDEV, a link to a folder, a folder into itself
                if action <= 1:
                    fresh.write_bytes(source.randbytes(source.choice([0, 1, 4096, 9000])))
                elif action == 2:
                    fresh.mkdir()
                elif action == 3:
                    shutil.rmtree(victim) if victim.is_dir() and not victim.is_symlink() else victim.unlink()
                elif action == 4:
                    shutil.rmtree(victim) if victim.is_dir() and not victim.is_symlink() else victim.unlink()
                    victim.mkdir() if source.random() < 0.5 else victim.write_text("replaced")
                elif action == 5 and not victim.is_symlink():
                    victim.chmod(source.choice([0o600, 0o755, 0o4755, 0o1777]))
                elif action == 6:
                    os.setxattr(victim, "user.n", b"%d" % step, follow_symlinks=False)
                elif action == 7:
                    os.link(victim, fresh, follow_symlinks=False)
                elif action == 8:
                    victim.rename(fresh)
                elif action == 9:
                    fresh.symlink_to(source.choice(["/", "etc", "nothing"]))
                elif action == 10 and victim.is_file() and not victim.is_symlink():
                    with victim.open("r+b") as file:
                        file.seek(source.randrange(5000))
                        file.write(b"changed in the middle")

    return change


@pytest.mark.parametrize("seed", range(8))
def test_three_generations_of_random_changes(chain: Generations, seed: int) -> None:
    for generation in range(3):
        chain.sandbox(random_changes(seed * 10 + generation))
    assert len(chain.layers) == 4


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_generations_of_random_changes(chain: Generations, seed: int) -> None:
    for generation in range(8):
        chain.sandbox(random_changes(seed * 10 + generation))
