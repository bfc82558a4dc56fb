"""Moves the files of a generation to the directories that ranks read, without overwriting existing files.

They are unpacked into a staging directory and renamed one by one; an indivisible unit is renamed as one directory.
So ranks of another job, which may use the same caches at this moment, see each file whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bootseer.cache_folder import make_private_dir
from bootseer.env.compile_cache import user_directory as caches_own
from bootseer.env.compile_cache.collect import path_prefix
from bootseer.env.compile_cache.directories import STAGING, CachePlace, mark_unread
from bootseer.env.compile_cache.document import CachedFile
from bootseer.env.compile_cache.kinds import MAX_JSON_BYTES, is_group, is_kept, is_own, to_local_group, unit_of
from bootseer.env.compile_cache.tree import LastTree, select
from bootseer.errors import StorageTimeout
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.reading import BlockSource
from bootseer.tree.unpack.tree import materialise
from bootseer.trust.owned_files import NotOwnedError

_MAX_REFUSED = 3  # lines


class MissingFile(NamedTuple):
    fact: CachedFile
    place: CachePlace
    path: str  # in the place


class Unpacked(NamedTuple):
    """The result of `unpack`."""

    files: int
    size: int  # bytes
    refused: list[str]  # why some files were left out, lines for the user


def find_missing(facts: Sequence[CachedFile], places: Sequence[CachePlace]) -> list[MissingFile]:
    """Return the files of a generation that are missing here, in its order. Indivisible units: all files or none.

    Existing files stay, even if they differ: this node has made them, and they are newer.
    """
    homes = {path_prefix(place): place for place in places}
    wanted: list[MissingFile] = []
    has_unit: dict[tuple[str, str], bool] = {}
    for fact in facts:
        home = next((start for start in homes if fact.path.startswith(start)), None)
        if home is None:
            continue
        place, path = homes[home], fact.path[len(home) :]
        if not is_kept(place.kind, path):
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
        wanted.append(MissingFile(fact, place, path))
    return wanted


def _has_files(directory: str) -> bool:
    try:
        return bool(os.listdir(directory))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def unpack(
    wanted: Sequence[MissingFile], tree: LastTree, root: str, *, has_time: Callable[[], bool] = lambda: True
) -> Unpacked:
    """Unpack into a directory below `root` and move the files from there.

    Raises: StorageTimeout if `has_time` returns False; StorageError, IntegrityError. Files moved so far are whole.
    """

    def check(*_: int) -> None:
        if not has_time():
            raise StorageTimeout(f"{root}: the compile caches were not fetched in time")

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
        return Unpacked(files, size, list(refused)[:_MAX_REFUSED])
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refused(error: NotOwnedError) -> str:
    return f"compile caches: {error}: not filled"


class _InTime:
    """Blocks, until the time limit."""

    def __init__(self, blocks: BlockSource, check: Callable[[], None]) -> None:
        self._blocks = blocks
        self._check = check

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        self._check()
        for each in self._blocks.read_blocks(numbers):
            yield each
            self._check()


def _in_units(wanted: Sequence[MissingFile]) -> Iterator[list[MissingFile]]:
    """Yield each file alone, or with those that must be moved with it."""
    units: dict[str, list[MissingFile]] = {}
    for each in wanted:
        if each.place.kind.is_whole:
            units.setdefault(path_prefix(each.place) + unit_of(each.place.kind, each.path), []).append(each)
        else:
            yield [each]
    yield from units.values()


def _move(files: Sequence[MissingFile], staging: str) -> bool:
    """Move files; False if another process has made them meanwhile. Raises: NotOwnedError; OSError."""
    place = files[0].place
    for each in files:
        _make_ready(each, os.path.join(staging, each.fact.path))
    if place.kind.is_whole:
        unit = unit_of(place.kind, files[0].path)
        source, target = os.path.join(staging, path_prefix(place), unit), os.path.join(place.path, unit)
        make_private_dir(os.path.dirname(target.rstrip("/")))
        try:
            os.rename(source.rstrip("/"), target.rstrip("/"))  # fails if the directory is not empty
        except OSError:
            if _has_files(target):
                return False
            raise
        return True
    path = files[0].path
    if not is_own(place.kind):
        make_private_dir(place.path)  # a rank may have removed it
    fd = caches_own.open_below(place.path, path)
    try:
        return caches_own.put(os.path.join(staging, files[0].fact.path), fd, os.path.basename(path))
    finally:
        os.close(fd)


def _make_ready(each: MissingFile, source: str) -> None:
    if is_group(each.path):
        with open(source, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        here = to_local_group(data, os.path.dirname(os.path.join(each.place.path, each.path)))
        if here is not None:
            with open(source, "wb") as file:
                file.write(here)
    mark_unread(source, each.fact.mtime_ns, each.fact.used_s)
