"""Two walks to a difference, against a model: laid over what was before, it gives what is there after."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.capture.difference import Difference, compare
from bootseer.env.capture.walk import Entry, Walk

NAMES = (b"a", b"b", b"b-c", b"b.", b"\xff")
DIRECTORY, FILE, LINK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777


class Disk:
    """A file system: every change of an inode sets its ctime, as the kernel does."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.clock = 1000
        self.number = 0
        self.make(b"", DIRECTORY)

    def copy(self) -> Walk:
        return dict(self.entries)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def make(self, path: bytes, mode: int) -> None:
        now, self.number = self.tick(), self.number + 1
        target = b"to %d" % now if stat.S_ISLNK(mode) else b""
        size = 0 if stat.S_ISDIR(mode) else 3
        self.entries[path] = Entry(mode, 0, 0, size, now, now, self.number, 1, 1, target)
        self.touch_above(path)

    def remove(self, path: bytes) -> None:
        for each in [each for each in self.entries if each == path or each.startswith(path + b"/")]:
            del self.entries[each]
        self.touch_above(path)

    def move(self, path: bytes, to: bytes) -> None:
        """All below keeps its inodes; that of the path itself gets a new ctime."""
        moved = {to + each[len(path) :]: self.entries[each] for each in self.below(path)}
        self.remove(path)
        self.entries |= moved
        self.edit(to, {})
        self.touch_above(to)

    def below(self, path: bytes) -> list[bytes]:
        return [each for each in self.entries if each == path or each.startswith(path + b"/")]

    def edit(self, path: bytes, values: dict[str, int]) -> None:
        self.entries[path] = self.entries[path]._replace(**values, ctime_ns=self.tick())

    def touch_above(self, path: bytes) -> None:
        if path:
            now = self.tick()
            above = path.rpartition(b"/")[0]
            self.entries[above] = self.entries[above]._replace(mtime_ns=now, ctime_ns=now)


@st.composite
def disks(draw: st.DrawFn) -> tuple[Walk, Walk]:
    """Before, and after some operations."""
    disk = Disk()
    _change(draw, disk, draw(st.integers(0, 12)))
    before = disk.copy()
    _change(draw, disk, draw(st.integers(0, 8)))
    return before, disk.copy()


def _change(draw: st.DrawFn, disk: Disk, count: int) -> None:
    for _ in range(count):
        directories = sorted(path for path, entry in disk.entries.items() if stat.S_ISDIR(entry.mode))
        above = draw(st.sampled_from(directories))
        path = (above + b"/" if above else b"") + draw(st.sampled_from(NAMES))
        if path not in disk.entries:
            disk.make(path, draw(st.sampled_from((DIRECTORY, DIRECTORY, FILE, LINK))))
            continue
        what = draw(st.sampled_from(("remove", "replace", "edit", "keep times", "mode", "move")))
        if what == "remove":
            disk.remove(path)
        elif what == "replace":
            disk.remove(path)
            disk.make(path, draw(st.sampled_from((DIRECTORY, FILE, LINK))))
        elif what == "edit" and stat.S_ISREG(disk.entries[path].mode):
            disk.edit(path, {"mtime_ns": disk.tick(), "size": 5})
        elif what == "keep times":
            disk.edit(path, {})
        elif what == "mode":
            disk.edit(path, {"mode": disk.entries[path].mode ^ 0o001})
        elif what == "move":
            to = draw(st.sampled_from(NAMES))
            if to not in disk.entries:
                disk.move(path, to)


def apply(before: Walk, difference: Difference, after: Walk) -> Walk:
    """As overlayfs would show it."""
    found = dict(before)
    for path in difference.opaque:
        found = {each: entry for each, entry in found.items() if not each.startswith(path + b"/")}
    for path in difference.deleted:
        found = {each: entry for each, entry in found.items() if each != path and not each.startswith(path + b"/")}
    for path in difference.changed:
        if not stat.S_ISDIR(after[path].mode):
            found = {each: entry for each, entry in found.items() if not each.startswith(path + b"/")}
        found[path] = after[path]
    return found


@given(disks())
def test_difference_over_before_is_after(walks: tuple[Walk, Walk]) -> None:
    before, after = walks
    difference = compare(before, after)
    assert apply(before, difference, after) == after
    for paths in difference:
        assert paths == sorted(set(paths))


@given(disks())
def test_nothing_is_taken_that_did_not_change(walks: tuple[Walk, Walk]) -> None:
    """But for what lies in a folder of which nothing shows through."""
    before, after = walks
    difference = compare(before, after)
    for path in difference.changed:
        hidden = [
            directory for directory in difference.opaque if path.startswith(directory + b"/" if directory else b"")
        ]
        assert hidden or before.get(path) != after[path]
    for path in difference.deleted:
        assert path in before
        assert path not in after
        assert stat.S_ISDIR(after[path.rpartition(b"/")[0]].mode)
        assert not any(path.startswith(directory + b"/") for directory in difference.opaque)


def entry(**values: object) -> Entry:
    return Entry(FILE, 0, 0, 3, 10, 10, 7, 1, 1, b"")._replace(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"mode": FILE | 0o100},
        {"uid": 5},
        {"gid": 5},
        {"size": 4},
        {"mtime_ns": 11},
        {"ctime_ns": 11},
        {"ino": 8},
        {"mode": LINK, "target": b"x"},
    ],
)
def test_each_attribute_counts(values: dict[str, object]) -> None:
    root = entry(mode=DIRECTORY)
    found = compare({b"": root, b"f": entry()}, {b"": root, b"f": entry(**values)})
    assert found == Difference([b"f"], [], [])


def test_directory_numbered_again_is_the_same() -> None:
    """Overlayfs makes numbers up when nothing else is there; a folder that was replaced has a new ctime."""
    root, old = entry(mode=DIRECTORY), entry(mode=DIRECTORY, ino=8)
    before = {b"": root, b"d": old, b"d/f": entry()}
    assert compare(before, {b"": root, b"d": old._replace(ino=9), b"d/f": entry()}) == Difference([], [], [])
    found = compare(before, {b"": root, b"d": old._replace(ino=9, ctime_ns=11), b"d/f": entry()})
    assert found == Difference([b"d", b"d/f"], [], [b"d"])


def test_whole_target() -> None:
    root, file = entry(mode=DIRECTORY), entry()
    assert compare({}, {}) == Difference([], [], [])
    assert compare({}, {b"": root, b"f": file}) == Difference([b"", b"f"], [], [])
    assert compare({b"": root, b"f": file}, {}) == Difference([], [b""], [])
