"""How a difference gets into a folder: as an overlay would show it, by as few moves as can be. On models."""

from __future__ import annotations

import stat
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.env.capture.subtree import subtree
from bootseer.env.restore.apply_plan import Step, StepKind, plan
from bootseer.tree.index import Index, check
from tests.made_trees import Entry, file, folder, make, symlink, whiteout

FILE, DIR = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755
Model = dict[bytes, int]  # path -> st_mode; what a folder has, without itself


def tree_of(*entries: Entry) -> Index:
    return make([folder(b"0"), *entries]).index


def names_of(model: Mapping[bytes, int], path: bytes) -> dict[bytes, int]:
    prefix = path + b"/" if path else b""
    return {
        each[len(prefix) :]: mode
        for each, mode in model.items()
        if each.startswith(prefix) and b"/" not in each[len(prefix) :]
    }


def steps_for(index: Index, model: Model) -> tuple[list[Step], list[bytes]]:
    below = subtree(index, b"0")
    made = plan(below, lambda path: names_of(model, path))
    return made.steps, [below.tree.path(entry) for entry in made.folders]


def carried_out(index: Index, model: Model) -> Model:
    """What the moves make of a model; each is what it says."""
    below = subtree(index, b"0")
    new = {below.tree.path(entry): below.tree.modes[entry] for entry in range(1, len(below.tree))}
    steps, _ = steps_for(index, model)
    assert len({step.path for step in steps}) == len(steps), "each path once"
    found = dict(model)
    for step in steps:
        is_there = step.path in found
        assert is_there == (step.kind is not StepKind.ADD), step
        above = step.path.rpartition(b"/")[0]
        assert not above or stat.S_ISDIR(found[above]), "it goes into a folder"
        found = {path: mode for path, mode in found.items() if not is_at(path, step.path)}
        if step.kind is not StepKind.REMOVE:
            found |= {path: mode for path, mode in new.items() if is_at(path, step.path)}
    return found


def is_at(path: bytes, above: bytes) -> bool:
    return path == above or path.startswith(above + b"/")


def overlaid(index: Index, model: Model) -> Model:
    """As overlayfs merges them, said once more in another way."""
    upper = {index.path(entry)[2:]: entry for entry in range(1, len(index)) if index.path(entry) != b"0"}
    opaque = {index.path(entry)[2:] for entry in index.opaque}
    found = {}
    for path, mode in model.items():
        hidden = b"" in opaque
        parts = path.split(b"/")
        for depth in range(1, len(parts) + 1):
            entry = upper.get(b"/".join(parts[:depth]))
            if entry is None:
                continue
            is_folder = stat.S_ISDIR(index.modes[entry])
            lower_is_directory = stat.S_ISDIR(model[b"/".join(parts[:depth])])
            is_last = depth == len(parts)
            if is_last or not is_folder or not lower_is_directory or b"/".join(parts[:depth]) in opaque:
                hidden = True
        if not hidden:
            found[path] = mode
    for path, entry in upper.items():
        if not (stat.S_ISCHR(index.modes[entry]) and index.rdevs[entry] == (0, 0)):
            found[path] = index.modes[entry]
    return found


# ---- cases -------------------------------------------------------------------------------------------------


def test_a_new_directory_is_one_step_however_much_is_in_it() -> None:
    index = tree_of(
        folder(b"0/lib"), folder(b"0/lib/new"), *(file(b"0/lib/new/%d" % number, b"x") for number in range(100))
    )
    steps, merged = steps_for(index, {b"lib": DIR, b"lib/old": DIR})
    assert steps == [Step(StepKind.ADD, b"lib/new")]
    assert merged == [b"", b"lib"]


def test_files_are_replaced_and_names_removed() -> None:
    index = tree_of(
        folder(b"0/bin"), file(b"0/bin/pip", b"new"), whiteout(b"0/bin/gone"), whiteout(b"0/bin/never")
    )
    steps, _ = steps_for(index, {b"bin": DIR, b"bin/pip": FILE, b"bin/gone": FILE})
    assert steps == [Step(StepKind.REMOVE, b"bin/gone"), Step(StepKind.REPLACE, b"bin/pip")]


def test_kinds_that_differ_are_replaced_whole() -> None:
    index = tree_of(folder(b"0/a"), file(b"0/a/x", b""), file(b"0/b", b""), symlink(b"0/c", b"elsewhere"))
    model = {b"a": FILE, b"b": DIR, b"b/x": FILE, b"c": DIR}
    steps, merged = steps_for(index, model)
    assert steps == [Step(StepKind.REPLACE, b"a"), Step(StepKind.REPLACE, b"b"), Step(StepKind.REPLACE, b"c")]
    assert merged == [b""]


def test_a_link_to_a_directory_is_no_directory() -> None:
    """Nothing is written behind it."""
    index = tree_of(folder(b"0/a"), file(b"0/a/x", b""))
    assert steps_for(index, {b"a": stat.S_IFLNK | 0o777})[0] == [Step(StepKind.REPLACE, b"a")]


def test_opaque_directories_hide_what_was_there() -> None:
    index = tree_of(folder(b"0/a", is_opaque=True), file(b"0/a/x", b""))
    assert steps_for(index, {b"a": DIR, b"a/y": FILE})[0] == [Step(StepKind.REPLACE, b"a")]
    assert steps_for(index, {})[0] == [Step(StepKind.ADD, b"a")]


def test_an_opaque_target_keeps_only_its_place() -> None:
    index = make([folder(b"0", is_opaque=True), folder(b"0/a"), file(b"0/b", b"")]).index
    steps, merged = steps_for(index, {b"a": DIR, b"c": FILE})
    assert steps == [Step(StepKind.REMOVE, b"c"), Step(StepKind.REPLACE, b"a"), Step(StepKind.ADD, b"b")]
    assert merged == [b""]


def test_what_lies_below_a_new_directory_is_not_looked_for() -> None:
    index = tree_of(folder(b"0/new"), whiteout(b"0/new/gone"), folder(b"0/new/deep", is_opaque=True))
    below = subtree(index, b"0")
    looked: list[bytes] = []

    def look(path: bytes) -> dict[bytes, int]:
        looked.append(path)
        return {}

    assert plan(below, look).steps == [Step(StepKind.ADD, b"new")]
    assert looked == [b""]


# ---- subtrees ----------------------------------------------------------------------------------------------


def test_a_subtree_is_a_tree() -> None:
    index = make([
        folder(b"0"),
        file(b"0/first", b"data", xattrs=((b"user.a", b"b"),)),
        folder(b"1", mode=0o700),
        file(b"1/also", link=b"0/first"),
        file(b"1/and", link=b"0/first"),
        file(b"1/z", b"other"),
        whiteout(b"1/gone"),
    ]).index  # fmt: skip
    one = subtree(index, b"1")
    check(one.tree, "a subtree")
    assert one.tree.names == [b"", b"also", b"and", b"z"]
    assert one.tree.links == [-1, -1, 1, -1], "the first name that is here has the file"
    assert one.tree.sizes == [0, 4, 4, 5]
    assert one.tree.runs[1]
    assert one.tree.xattrs == {1: [(b"user.a", b"b")]}
    assert one.deleted == [b"gone"]
    assert one.tree.modes[0] == stat.S_IFDIR | 0o700


# ---- all cases ---------------------------------------------------------------------------------------------

NAMES = [b"a", b"b", b"c"]


@st.composite
def models(draw: st.DrawFn) -> Model:
    found: Model = {}
    directories = [b""]
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(directories))
        path = (above + b"/" if above else b"") + draw(st.sampled_from(NAMES))
        if path in found or path.count(b"/") > 3:
            continue
        found[path] = draw(st.sampled_from([FILE, DIR, DIR, stat.S_IFLNK | 0o777]))
        if found[path] == DIR:
            directories.append(path)
    return found


@st.composite
def differences(draw: st.DrawFn) -> Index:
    entries = [folder(b"0", is_opaque=draw(st.integers(0, 9)) == 0)]
    kinds: Model = draw(models())
    for path, mode in kinds.items():
        full = b"0/" + path
        if stat.S_ISDIR(mode):
            entries.append(folder(full, is_opaque=draw(st.integers(0, 4)) == 0))
        elif stat.S_ISLNK(mode):
            entries.append(draw(st.sampled_from([symlink(full, b"x"), whiteout(full)])))
        else:
            entries.append(file(full, b"x"))
    return make(entries).index


@settings(max_examples=300, deadline=None)
@given(index=differences(), model=models())
def test_as_overlayfs(index: Index, model: Model) -> None:
    check(subtree(index, b"0").tree, "a subtree")
    assert carried_out(index, model) == overlaid(index, model)


@settings(max_examples=100, deadline=None)
@given(index=differences(), model=models())
def test_again_changes_nothing_that_can_be_seen(index: Index, model: Model) -> None:
    once = carried_out(index, model)
    assert carried_out(index, once) == once
