"""Puts the files of a generation where ranks will look for them, beside what is there, which is never overwritten.

They are unpacked into a folder apart and get their names one by one, units that are only whole together as one
folder. So ranks of another job, which may use the same caches at this moment, see each file whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bootseer.cache_folder import make_private
from bootseer.env import caches_own
from bootseer.env.caches_collect import prefix
from bootseer.env.caches_document import Fact
from bootseer.env.caches_folders import STAGING, Place, mark
from bootseer.env.caches_kinds import MOST_JSON_BYTES, is_group, is_own, is_taken, unit_of, with_folder
from bootseer.env.caches_tree import LastTree, select
from bootseer.errors import StorageTimeout
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.materialise import materialise
from bootseer.tree.reading import BlockSource
from bootseer.trust.owned_files import NotOwnedError

_MOST_REFUSED = 3  # lines


class Wanted(NamedTuple):
    """A file that is to be there."""

    fact: Fact
    place: Place
    path: str  # in the place


class Unpacked(NamedTuple):
    """What was done."""

    files: int
    size: int  # bytes
    refused: list[str]  # why some were not put there, lines for people


def choose(facts: Sequence[Fact], places: Sequence[Place]) -> list[Wanted]:
    """What is missing here of a generation, in its order. Of units that are only whole together all or nothing.

    What is there stays, whatever it is: it is this node's own, and newer.
    """
    homes = {prefix(place): place for place in places}
    wanted: list[Wanted] = []
    has_unit: dict[tuple[str, str], bool] = {}
    for fact in facts:
        home = next((start for start in homes if fact.path.startswith(start)), None)
        if home is None:
            continue
        place, path = homes[home], fact.path[len(home) :]
        if not is_taken(place.kind, path):
            continue
        if place.kind.is_whole:
            unit = os.path.join(place.path, unit_of(place.kind, path))
            known = (place.kind.name, unit)
            if known not in has_unit:
                has_unit[known] = _has_files(unit)
            if has_unit[known]:
                continue
        elif os.path.lexists(os.path.join(place.path, path)):
            continue
        wanted.append(Wanted(fact, place, path))
    return wanted


def _has_files(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def unpack(
    wanted: Sequence[Wanted], tree: LastTree, root: str, *, has_time: Callable[[], bool] = lambda: True
) -> Unpacked:
    """Unpacks into a folder below `root` and moves from there.

    Raises: StorageTimeout when `has_time` says no; StorageError, IntegrityError. What has its name then is whole.
    """

    def check(*_: int) -> None:
        if not has_time():
            raise StorageTimeout(f"{root}: the first-step caches were not there in time")

    refused: dict[str, None] = {}
    for place in {each.place for each in wanted if is_own(each.place.kind)}:
        try:
            caches_own.make(place.path)
        except NotOwnedError as error:
            refused[_refused(error)] = None
            wanted = [each for each in wanted if each.place != place]
    with map_os_errors(root):
        staging = tempfile.mkdtemp(prefix=STAGING, dir=root)
    try:
        part = select(tree.tree, [tree.entries[each.fact.path] for each in wanted])
        materialise(part, staging, _InTime(tree.blocks, check), owners="mine", on_progress=check)
        files = size = 0
        for each in _in_units(wanted):
            check()
            try:
                with map_os_errors(each[0].place.path):
                    is_moved = _move(each, staging)
            except NotOwnedError as error:
                refused[_refused(error)] = None
                continue
            if is_moved:
                files += len(each)
                size += sum(one.fact.size for one in each)
        return Unpacked(files, size, list(refused)[:_MOST_REFUSED])
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refused(error: NotOwnedError) -> str:
    return f"first-step caches: {error}: nothing is put there"


class _InTime:
    """Blocks, as long as there is time for them."""

    def __init__(self, blocks: BlockSource, check: Callable[[], None]) -> None:
        self._blocks = blocks
        self._check = check

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        self._check()
        for each in self._blocks.read_blocks(numbers):
            yield each
            self._check()


def _in_units(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Each alone, or with those that it has to be moved with."""
    units: dict[str, list[Wanted]] = {}
    for each in wanted:
        if each.place.kind.is_whole:
            units.setdefault(prefix(each.place) + unit_of(each.place.kind, each.path), []).append(each)
        else:
            yield [each]
    yield from units.values()


def _move(files: Sequence[Wanted], staging: str) -> bool:
    """Whether it was moved: somebody may have made the same meanwhile. Raises: NotOwnedError; OSError."""
    place = files[0].place
    for each in files:
        _make_ready(each, os.path.join(staging, each.fact.path))
    if place.kind.is_whole:
        unit = unit_of(place.kind, files[0].path)
        source, target = os.path.join(staging, prefix(place), unit), os.path.join(place.path, unit)
        make_private(os.path.dirname(target.rstrip("/")))
        try:
            os.rename(source.rstrip("/"), target.rstrip("/"))  # fails on a folder with something in it
        except OSError:
            if _has_files(target):
                return False
            raise
        return True
    path = files[0].path
    if not is_own(place.kind):
        make_private(place.path)  # a rank may have taken it away
    fd = caches_own.open_below(place.path, path)
    try:
        return caches_own.put(os.path.join(staging, files[0].fact.path), fd, os.path.basename(path))
    finally:
        os.close(fd)


def _make_ready(each: Wanted, source: str) -> None:
    if is_group(each.path):
        with open(source, "rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
        here = with_folder(data, os.path.dirname(os.path.join(each.place.path, each.path)))
        if here is not None:
            with open(source, "wb") as file:
                file.write(here)
    mark(source, each.fact.mtime_ns, each.fact.used_s)
