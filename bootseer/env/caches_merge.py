"""What the next generation of first-step caches holds: the last one and what a start found, within limits. Pure.

In: the newest generation, the finished files of one node, the limits. Out: the files of the next generation, whose
bytes come from the node or from the last tree. Different models, nodes and jobs meet here: files are named by what
they were made of, so most never conflict. Where two do, the newer one stays; a unit that is only whole together is
taken from one side. But nodes of a job make the same at the same time, with other bytes: what another one has
published since this start was seeded is as good as its own. What was not of use for the longest time goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.env.caches_document import MOST_FILES, Fact, Generation
from bootseer.env.caches_kinds import KINDS, NCCL, Kind, unit_of

LIMIT_BYTES = 2 << 30
USE_STEP_S = 3600  # a use is worth a new generation when the last known one is so long ago
_BY_NAME = {kind.name: kind for kind in (*KINDS, NCCL)}


class Found(NamedTuple):
    """A finished file of this node."""

    path: str  # as of a Fact
    size: int
    mtime_ns: int
    sha256: str
    is_used: bool  # this start has made it or read it
    source: str  # its absolute path here


class Given(NamedTuple):
    """What the start began with."""

    number: int  # the generation that is in its folders, 0 for none
    at_ns: int  # when it was, since the epoch: what is older here was not made for want of it


class Merged(NamedTuple):
    """The next generation."""

    files: list[Fact]  # sorted by path
    ours: frozenset[str]  # paths whose bytes are the node's; of the others they are in the last tree
    added: int  # files that are new or changed
    evicted: int
    is_worth_it: bool  # whether it differs enough from the last one

    @property
    def size(self) -> int:
        return sum(fact.size for fact in self.files)


def kind_named(name: str) -> Kind:
    """The kind of that name; of the user's own ones, which have no rules, a plain one."""
    return _BY_NAME.get(name) or Kind(name)


def unit_of_path(path: str) -> str:
    """What a file of a generation belongs to."""
    name, _, rest = path.partition("/")
    kind = kind_named(name)
    if not kind.is_bound:
        return f"{name}/{unit_of(kind, rest)}"
    place, _, rest = rest.partition("/")
    return f"{name}/{place}/{unit_of(kind, rest)}"


def is_whole_path(path: str) -> bool:
    """Whether its unit is taken whole or not at all."""
    return kind_named(path.partition("/")[0]).is_whole


def merge(
    last: Generation | None,
    found: Sequence[Found],
    now_s: int,
    *,
    number: int,
    limit_bytes: int = LIMIT_BYTES,
    most_files: int = MOST_FILES,
    given: Given | None = None,
) -> Merged:
    """The generation `number`. `now_s`: since the epoch. `given`: not known: of two files the newer one stays."""
    old = {} if last is None else {fact.path: fact for fact in last.files}
    files = dict(old)
    ours: set[str] = set()
    for unit in _by_unit(found):
        if is_whole_path(unit[0].path):
            _take_whole(files, ours, unit, number, now_s, given)
        else:
            for each in unit:
                _take(files, ours, each, number, now_s, given)
    used = (fact.used_s for path, fact in old.items() if path in files and files[path].used_in == number)
    stale_s = min(used, default=now_s)
    evicted = _evict(files, limit_bytes, most_files) if files else 0
    added = sum(1 for path in ours if path in files)
    gone = any(path not in files for path in old)
    kept = [files[path] for path in sorted(files)]
    is_worth_it = bool(kept or old) and (added > 0 or gone or now_s - stale_s >= USE_STEP_S)
    return Merged(kept, frozenset(path for path in ours if path in files), added, evicted, is_worth_it)


def _by_unit(found: Iterable[Found]) -> list[list[Found]]:
    units: dict[str, list[Found]] = {}
    for each in found:
        units.setdefault(unit_of_path(each.path), []).append(each)
    return list(units.values())


def _take(
    files: dict[str, Fact], ours: set[str], each: Found, number: int, now_s: int, given: Given | None
) -> None:
    there = files.get(each.path)
    if not each.is_used:
        return  # what went from the store is not to come back because a node still has it
    is_named = kind_named(each.path.partition("/")[0]).is_by_content
    if there is not None and (there.sha256 == each.sha256 or (is_named and _is_as_good([there], [each], given))):
        files[each.path] = _used(there, number, now_s)
    elif there is None or there.mtime_ns < each.mtime_ns:
        files[each.path] = Fact(each.path, each.size, each.mtime_ns, each.sha256, number, number, now_s)
        ours.add(each.path)


def _take_whole(
    files: dict[str, Fact], ours: set[str], unit: list[Found], number: int, now_s: int, given: Given | None
) -> None:
    """All of it or nothing: files of different builds do not fit together."""
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
        files[each.path] = Fact(each.path, each.size, each.mtime_ns, each.sha256, number, number, now_s)
        ours.add(each.path)


def _is_as_good(there: Sequence[Fact], here: Sequence[Found], given: Given | None) -> bool:
    """Whether this start has not made its own because those were there and of no use to it."""
    if given is None:
        return False
    is_since = all(fact.since > given.number for fact in there)
    return is_since or all(each.mtime_ns <= given.at_ns for each in here)


def is_in(path: str, unit: str) -> bool:
    """Whether a file belongs to a unit of those that are folders."""
    return path == unit or path.startswith(unit.rstrip("/") + "/")


def _used(fact: Fact, number: int, now_s: int) -> Fact:
    return Fact(fact.path, fact.size, fact.mtime_ns, fact.sha256, fact.since, number, max(fact.used_s, now_s))


def _evict(files: dict[str, Fact], limit_bytes: int, most_files: int) -> int:
    """Takes away units until the rest is within the limits; gives how many files went."""
    total, count = sum(fact.size for fact in files.values()), len(files)
    if total <= limit_bytes and count <= most_files:
        return 0
    units: dict[str, list[Fact]] = {}
    for path, fact in files.items():
        units.setdefault(unit_of_path(path), []).append(fact)
    # Generations are counted by the store; clocks of nodes may differ.
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
        if total <= limit_bytes and count <= most_files:
            break
        for fact in facts:
            del files[fact.path]
            total -= fact.size
        count -= len(facts)
        evicted += len(facts)
    return evicted
