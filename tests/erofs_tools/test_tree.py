"""A tree behaves like a directory that a tar is extracted into."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erofs_tools.errors import SourceError
from erofs_tools.tree import BytesContent, Entry, Tree

FILE, DIRECTORY, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


def file(path: bytes, data: bytes = b"") -> Entry:
    return Entry(path, FILE, size=len(data), content=BytesContent(data))


def built(*entries: Entry) -> Tree:
    tree = Tree()
    for entry in entries:
        tree.add(entry)
    return tree


def paths(tree: Tree) -> list[bytes]:
    return [entry.path for entry in tree.entries()]


def test_missing_parents_are_plain_directories_of_root() -> None:
    tree = built(file(b"a/b/c"))
    assert [(e.path, e.mode, e.uid, e.gid, e.mtime) for e in tree.entries()][:3] == [
        (b"", DIRECTORY, 0, 0, 0),
        (b"a", DIRECTORY, 0, 0, 0),
        (b"a/b", DIRECTORY, 0, 0, 0),
    ]


def test_entries_come_in_byte_order_component_by_component() -> None:
    tree = built(*(file(path) for path in (b"a-", b"a/b", b"a.", b"\xff", b"A", b"a/!", b"ab")))
    assert paths(tree) == [b"", b"A", b"a", b"a/!", b"a/b", b"a-", b"a.", b"ab", b"\xff"]


def test_the_last_of_equal_paths_wins_with_all_that_it_says() -> None:
    first = file(b"x", b"old")
    first.xattrs = {b"user.a": b"1"}
    tree = built(first, Entry(b"x", LINK, target=b"y"))
    (entry,) = [e for e in tree.entries() if e.path == b"x"]
    assert (entry.mode, entry.target, entry.xattrs) == (LINK, b"y", {})


def test_a_directory_over_a_directory_keeps_what_is_in_it() -> None:
    tree = built(file(b"d/x"), Entry(b"d", stat.S_IFDIR | 0o700, uid=5))
    assert paths(tree) == [b"", b"d", b"d/x"]
    assert tree.resolve(b"d") == Entry(b"d", stat.S_IFDIR | 0o700, uid=5)


def test_anything_else_over_a_directory_drops_what_is_below() -> None:
    tree = built(file(b"d/e/x"), file(b"d/y"), file(b"d"))
    assert paths(tree) == [b"", b"d"]
    tree.add(Entry(b"d", DIRECTORY))
    assert paths(tree) == [b"", b"d"] and tree.children(b"d") == []


def test_the_first_path_in_order_holds_an_inode() -> None:
    one = built(file(b"b", b"1"), Entry(b"c", FILE, hardlink_to=b"b"), Entry(b"a", FILE, hardlink_to=b"c"))
    other = built(file(b"a", b"1"), Entry(b"b", FILE, hardlink_to=b"a"), Entry(b"c", FILE, hardlink_to=b"a"))
    assert list(one.entries()) == list(other.entries())
    assert one.resolve(b"c") is one.resolve(b"a") is not None


def test_replacing_a_file_leaves_its_other_paths_alone() -> None:
    tree = built(file(b"b", b"old"), Entry(b"c", FILE, hardlink_to=b"b"), Entry(b"a", FILE, hardlink_to=b"b"))
    tree.add(file(b"b", b"new"))
    found = {path: tree.resolve(path) for path in (b"a", b"b", b"c")}
    assert found[b"a"] is found[b"c"]
    assert [e.content.data for e in found.values() if e and isinstance(e.content, BytesContent)] == [
        b"old",
        b"new",
        b"old",
    ]


@pytest.mark.parametrize(
    "path", [b"/a", b"a/", b"a//b", b"./a", b"a/../b", b"..", b"a\0b", b"n" * 256, b"a/" * 9000 + b"a"]
)
def test_paths_that_no_directory_can_hold_are_refused(path: bytes) -> None:
    with pytest.raises(SourceError):
        Tree().add(file(path))


@pytest.mark.parametrize("above", [file(b"d"), Entry(b"d", LINK, target=b"/etc")])
def test_nothing_goes_below_what_is_not_a_directory(above: Entry) -> None:
    tree = built(above)
    with pytest.raises(SourceError, match="goes through the") as caught:
        tree.add(file(b"d/x"))
    assert caught.value.path == b"d/x"


@pytest.mark.parametrize(
    "entry",
    [
        Entry(b"x", FILE, uid=-1),
        Entry(b"x", FILE, gid=0xFFFFFFFF),
        Entry(b"x", FILE, mtime=1 << 63),
        Entry(b"x", FILE, mtime=-(1 << 63) - 1),
        Entry(b"x", FILE, mtime_ns=1_000_000_000),
        Entry(b"x", FILE, size=1),
        Entry(b"x", 0o644),
        Entry(b"x", LINK, target=b""),
        Entry(b"x", LINK, target=b"t" * 4096),
        Entry(b"x", LINK, target=b"a\0b"),
        Entry(b"", FILE),
        Entry(b"x", FILE, hardlink_to=b"nothing"),
        Entry(b"x", FILE, hardlink_to=b""),
    ],
    ids=repr,
)
def test_what_no_inode_can_hold_is_refused(entry: Entry) -> None:
    with pytest.raises(SourceError):
        Tree().add(entry)


_NAMES = st.sampled_from([b"a", b"b", b"c"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map(b"/".join)
_STEPS = st.lists(st.tuples(st.sampled_from("fdlr"), _PATHS, _PATHS), max_size=30)


class _Model:
    """The same as nested dictionaries: a directory is a dict, a file an object that several names may share."""

    def __init__(self) -> None:
        self.root: dict[bytes, object] = {}

    def above(self, path: bytes, make: bool) -> dict[bytes, object] | None:
        at = self.root
        for name in path.split(b"/")[:-1]:
            below = at.get(name)
            if below is None and make:
                below = at[name] = {}
            if not isinstance(below, dict):
                return None
            at = below
        return at

    def flat(self) -> dict[bytes, object]:
        found: dict[bytes, object] = {}

        def walk(at: dict[bytes, object], prefix: bytes) -> None:
            for name, what in at.items():
                found[prefix + name] = "directory" if isinstance(what, dict) else what
                if isinstance(what, dict):
                    walk(what, prefix + name + b"/")

        walk(self.root, b"")
        return found


@given(_STEPS)
def test_any_sequence_of_steps_gives_what_nested_directories_would(steps: list[tuple[str, bytes, bytes]]) -> None:
    tree, model = Tree(), _Model()
    for number, (step, path, other) in enumerate(steps):
        name = path.rpartition(b"/")[2]
        other_above = model.above(other, make=False)
        target = (other_above or {}).get(other.rpartition(b"/")[2])
        if step == "r":
            tree.remove(path)
            (model.above(path, make=False) or {}).pop(name, None)
            continue
        hopeless = step == "l" and (not isinstance(target, int) or other.startswith(path + b"/") or other == path)
        entry = Entry(path, FILE if step != "d" else DIRECTORY, mtime=number)
        if step == "l":
            entry.hardlink_to = other
        try:
            tree.add(entry)
        except SourceError:
            above = model.above(path, make=False)
            same = above is not None and name in above and above[name] is target
            held_below = step == "l" and isinstance((above or {}).get(name), dict)
            assert hopeless or same or held_below or _blocked(model, path)
            if step == "l" and not _blocked(model, path):
                model.above(path, make=True)
            continue
        assert not hopeless
        above = model.above(path, make=True)
        assert above is not None
        if step == "d":
            if not isinstance(above.get(name), dict):
                above[name] = {}
        else:
            above[name] = target if step == "l" else number
    found = {e.path: "directory" if e.is_dir else _number(tree, e) for e in tree.entries() if e.path}
    assert found == model.flat()


def _blocked(model: _Model, path: bytes) -> bool:
    at: object = model.root
    for name in path.split(b"/")[:-1]:
        if not isinstance(at, dict):
            return True
        at = at.get(name, {})
    return not isinstance(at, dict)


def _number(tree: Tree, entry: Entry) -> int:
    holder = tree.resolve(entry.path)
    assert holder is not None
    return holder.mtime
