"""The next generation of compile caches: the last one merged with the files of a node, within limits. Pure.

In: the newest generation, the finished files of one node, the limits. Out: the files of the next generation, whose
bytes come from the node or from the last tree. It merges files of different models, nodes and jobs. Most names are
digests of the inputs, so files rarely conflict. If two do, the newer one stays; an indivisible unit comes from one
side. Nodes of a job make the same files at the same time, with different bytes. So files that another node has
published since this start was seeded are equivalent to its own. The least recently used units are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.env.compile_cache.document import MAX_FILES, CachedFile, CacheGeneration
from bootseer.env.compile_cache.kinds import KINDS, NCCL, CacheKind, unit_of
from bootseer.tuning import DEFAULTS

USE_STEP_S = 3600  # a use causes a new generation if the last recorded use is so long ago
_BY_NAME = {kind.name: kind for kind in (*KINDS, NCCL)}


class FoundFile(NamedTuple):
    """A finished file of this node."""

    path: str  # as of a Fact
    size: int
    mtime_ns: int
    sha256: str
    is_used: bool  # this start has made it or read it
    source: str  # its absolute path here


class SeedState(NamedTuple):
    """The generation that a start was seeded with."""

    number: int  # of the generation, 0 for none
    at_ns: int  # time of the seed, since the epoch


class MergedGeneration(NamedTuple):
    files: list[CachedFile]  # sorted by path
    ours: frozenset[str]  # paths whose bytes come from the node; all others come from the last tree
    added: int  # files that are new or changed
    evicted: int
    is_worth_it: bool  # whether it differs enough from the last one

    @property
    def size(self) -> int:
        return sum(fact.size for fact in self.files)


def kind_named(name: str) -> CacheKind:
    """Return the kind of that name; for the user's own caches, which have no rules, a plain one."""
    return _BY_NAME.get(name) or CacheKind(name)


def unit_of_path(path: str) -> str:
    """Return the unit of a file of a generation."""
    name, _, rest = path.partition("/")
    kind = kind_named(name)
    if not kind.is_bound:
        return f"{name}/{unit_of(kind, rest)}"
    place, _, rest = rest.partition("/")
    return f"{name}/{place}/{unit_of(kind, rest)}"


def is_indivisible(path: str) -> bool:
    """Return whether the unit of a path is kept whole or not at all."""
    return kind_named(path.partition("/")[0]).is_whole


def merge(
    last: CacheGeneration | None,
    found: Sequence[FoundFile],
    now_s: int,
    *,
    number: int,
    limit_bytes: int = DEFAULTS.env.cache_bytes,
    max_files: int = MAX_FILES,
    given: SeedState | None = None,
) -> MergedGeneration:
    """Return generation `number`. `now_s`: since the epoch. `given` None: of two files the newer one stays."""
    old = {} if last is None else {fact.path: fact for fact in last.files}
    files = dict(old)
    ours: set[str] = set()
    for unit in _by_unit(found):
        if is_indivisible(unit[0].path):
            _take_whole(files, ours, unit, number, now_s, given)
        else:
            for each in unit:
                _take(files, ours, each, number, now_s, given)
    used = (fact.used_s for path, fact in old.items() if path in files and files[path].used_in == number)
    stale_s = min(used, default=now_s)
    evicted = _evict(files, limit_bytes, max_files) if files else 0
    added = sum(1 for path in ours if path in files)
    gone = any(path not in files for path in old)
    kept = [files[path] for path in sorted(files)]
    is_worth_it = bool(kept or old) and (added > 0 or gone or now_s - stale_s >= USE_STEP_S)
    return MergedGeneration(kept, frozenset(path for path in ours if path in files), added, evicted, is_worth_it)


def _by_unit(found: Iterable[FoundFile]) -> list[list[FoundFile]]:
    units: dict[str, list[FoundFile]] = {}
    for each in found:
        units.setdefault(unit_of_path(each.path), []).append(each)
    return list(units.values())


def _take(
    files: dict[str, CachedFile], ours: set[str], each: FoundFile, number: int, now_s: int, given: SeedState | None
) -> None:
    there = files.get(each.path)
    if not each.is_used:
        return  # a file that the store has evicted must not return only because a node still has it
    is_named = kind_named(each.path.partition("/")[0]).is_by_content
    if there is not None and (there.sha256 == each.sha256 or (is_named and _is_as_good([there], [each], given))):
        files[each.path] = _used(there, number, now_s)
    elif there is None or there.mtime_ns < each.mtime_ns:
        files[each.path] = CachedFile(each.path, each.size, each.mtime_ns, each.sha256, number, number, now_s)
        ours.add(each.path)


def _take_whole(
    files: dict[str, CachedFile],
    ours: set[str],
    unit: list[FoundFile],
    number: int,
    now_s: int,
    given: SeedState | None,
) -> None:
    """Merge a unit whole or not at all: files of different builds do not fit together."""
    name = unit_of_path(unit[0].path)
    there = {path: fact for path, fact in files.items() if is_in(path, name)}
    new = {each.path: each for each in unit}
    if not any(each.is_used for each in unit):
        return
    is_same = there.keys() == new.keys() and all(fact.sha256 == new[path].sha256 for path, fact in there.items())
    newest_ns = max((fact.mtime_ns for fact in there.values()), default=None)
    if is_same or (there and _is_as_good(list(there.values()), unit, given)):
        files.update((path, _used(fact, number, now_s)) for path, fact in there.items())
        return
    if newest_ns is not None and newest_ns >= max(each.mtime_ns for each in unit):
        return
    for path in there:
        del files[path]
    for each in unit:
        files[each.path] = CachedFile(each.path, each.size, each.mtime_ns, each.sha256, number, number, now_s)
        ours.add(each.path)


def _is_as_good(there: Sequence[CachedFile], here: Sequence[FoundFile], given: SeedState | None) -> bool:
    """Return whether this start has made its files without having seen those, so both are equivalent."""
    if given is None:
        return False
    is_since = all(fact.since > given.number for fact in there)
    return is_since or all(each.mtime_ns <= given.at_ns for each in here)


def is_in(path: str, unit: str) -> bool:
    """Return whether a file belongs to a unit that is a directory."""
    return path == unit or path.startswith(unit.rstrip("/") + "/")


def _used(fact: CachedFile, number: int, now_s: int) -> CachedFile:
    return CachedFile(
        fact.path, fact.size, fact.mtime_ns, fact.sha256, fact.since, number, max(fact.used_s, now_s)
    )


def _evict(files: dict[str, CachedFile], limit_bytes: int, max_files: int) -> int:
    """Remove units until the rest is within the limits; return the number of removed files."""
    total, count = sum(fact.size for fact in files.values()), len(files)
    if total <= limit_bytes and count <= max_files:
        return 0
    units: dict[str, list[CachedFile]] = {}
    for path, fact in files.items():
        units.setdefault(unit_of_path(path), []).append(fact)
    # The store numbers the generations, while clocks of nodes may differ.
    order = sorted(
        units.items(),
        key=lambda unit: (
            max(fact.used_in for fact in unit[1]),
            max(fact.used_s for fact in unit[1]),
            -sum(fact.size for fact in unit[1]),
            unit[0],
        ),
    )
    evicted = 0
    for _, facts in order:
        if total <= limit_bytes and count <= max_files:
            break
        for fact in facts:
            del files[fact.path]
            total -= fact.size
        count -= len(facts)
        evicted += len(facts)
    return evicted
