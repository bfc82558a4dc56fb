"""The place of the status folder in an index: as if the tree had been built with that directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from bootseer.errors import IntegrityError
from bootseer.tree import erofs
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index, check
from bootseer.tree.status_folder import MARK_NS, MODE, NAME, is_marked, with_place
from tests.made_trees import Made, everything, file, folder, in_directories, make, symlink, trees
from tests.unit.bootseer.tree.test_erofs import fsck, needs_fsck, write

PLACE = folder(NAME.encode(), MODE, mtime_ns=MARK_NS)
ON_DISK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def entry_of(index: Index, path: bytes) -> int:
    return next(each for each in range(len(index)) if index.path(each) == path)


def by_path(index: Index) -> dict[bytes, tuple[object, ...]]:
    """Everything of an index but for the numbers of entries."""
    return {
        index.path(entry): (
            *(column[entry] for column in (index.modes, index.uids, index.gids, index.mtimes_ns, index.sizes)),
            *(index.runs[entry], index.targets[entry], index.rdevs.get(entry), index.xattrs.get(entry)),
            entry in index.opaque,
            index.path(index.links[entry]) if index.links[entry] != -1 else None,
        )
        for entry in range(len(index))
    }


@pytest.mark.parametrize("first", [b"", b".a", b".zz", b"a", b"~"], ids=repr)
def test_the_metadata_is_that_of_a_tree_built_with_it(first: bytes) -> None:
    entries = [file(b"z/file", b"z"), folder(b"z"), symlink(b"link", b"z/file"), folder(b"y"), file(b"y/f", b"y")]
    entries = [each for each in entries if not first or each.path == b"y"]
    entries += [folder(first or b".h"), file((first or b".h") + b"/file", b"h")]
    plain, built = make(entries), make([*entries, PLACE])
    index = with_place(in_directories(plain.index))
    wanted = in_directories(built.index)
    assert msgspec.structs.replace(index, packs=wanted.packs, blocks=wanted.blocks) == wanted
    assert erofs.metadata(index, plain.digest) == erofs.metadata(wanted, plain.digest)


@ON_DISK
@given(made=trees())
def test_nothing_else_changes_in_any_tree(made: Made) -> None:
    for index in (made.index, in_directories(made.index)):
        before = by_path(index)
        found = with_place(index)
        check(found, "the tree")
        after = by_path(found)
        assert after.pop(NAME.encode())[:5] == (stat.S_IFDIR | MODE, 0, 0, MARK_NS, 0)
        assert after == before == by_path(index)


@needs_fsck
def test_fsck_takes_it(tmp_path: Path) -> None:
    made = everything()
    done = fsck(*write(made._replace(index=with_place(made.index)), tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("own", [folder(NAME.encode()), file(NAME.encode(), b"x"), symlink(NAME.encode(), b"a")])
def test_a_name_of_the_trees_own_stays(own: object) -> None:
    made = make([file(b"a", b"a"), own])  # type: ignore[list-item]
    assert with_place(made.index) is made.index


def test_the_same_name_deeper_is_no_place() -> None:
    made = make([folder(b"a"), folder(b"a/" + NAME.encode())])
    index = with_place(made.index)
    assert index.path(entry_of(index, NAME.encode())) == NAME.encode() and len(index) == len(made.index) + 1


def test_an_index_that_makes_no_sense_is_an_error_later() -> None:
    made = make([file(b"a", b"a")])
    for wrong in (
        {"parents": []},
        {"names": [b""]},
        {"parents": [5, 5]},
        {"links": []},
        {"modes": []},
    ):
        with pytest.raises(IntegrityError):
            check(with_place(msgspec.structs.replace(made.index, **wrong)), "the tree")


def test_builders_leave_it_out_and_keep_a_directory_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / NAME).mkdir()
    place = tmp_path / "tree" / NAME
    place.mkdir()
    (place / "state").write_text("mounted\n")
    assert not is_marked(os.lstat(place))
    for is_ours in (False, True):
        if is_ours:
            os.chmod(place, MODE)
            os.utime(place, ns=(0, MARK_NS))
        built = build(DirectorySource(os.fspath(tmp_path / "tree")), lambda _digest, _data: None, threads=1)
        names = {built.tree.path(entry) for entry in range(len(built.tree))}
        assert names >= {b"a/" + NAME.encode()} and (NAME.encode() in names) is not is_ours
