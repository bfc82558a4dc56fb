"""Decides which files of an environment store are removed. Pure.

In: the files of each key, limits, the time. Out: removals, in order, each with its reason. A key whose builder is
alive is kept, and so are files that may belong to an unpublished build. Keys that a job may read are kept unless
the user forces their removal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bootseer.counted import format_time

READS_UNUSED_S = 180 * 86_400.0  # lists of reads are small, and a start without one runs set-up
GRACE_S = 86_400.0  # for files that belong to no snapshot (yet), and for readers of expired ones
RECENT_S = 7_200.0  # the time of use is updated hourly, also by jobs that have it mounted: they may read it


class TreeFile(NamedTuple):
    """A file in a tree's directory."""

    path: str  # from the store's root
    size: int  # bytes
    mtime_s: float  # since the epoch; 0 if unknown


class SnapshotGeneration(NamedTuple):
    """An env-NNNNNN.json."""

    number: int
    created_s: float  # as recorded in it
    expires_s: float | None  # None: never


class KeyFacts(NamedTuple):
    """The files and the state of a key."""

    key: str
    generations: tuple[SnapshotGeneration, ...]  # all readable ones, trusted or not
    pieces: tuple[TreeFile, ...]
    needed: frozenset[str] | None  # paths of pieces that live generations need; None if unknown
    used_s: float  # last use or publication, since the epoch; 0 if unknown
    youngest_s: float  # of all its files; 0 if unknown
    is_leased: bool  # its builder is alive

    @property
    def stored_bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Limits(NamedTuple):
    """Limits of a store; None: no limit."""

    max_bytes: int | None = None
    max_unused_s: float | None = None
    takes_recent: bool = False  # also keys that were used within RECENT_S


class Removal(NamedTuple):
    key: str
    paths: tuple[str, ...]  # of pieces; empty: the key with all its files
    freed_bytes: int
    why: str


class Plan(NamedTuple):
    """The result of `plan`."""

    removals: list[Removal]
    left_bytes: int
    leased: int  # keys that are kept, as their builders are alive
    recent: int  # keys beyond the limits that are kept, as they are in use or new


def plan(keys: Sequence[KeyFacts], limits: Limits, now_s: float) -> Plan:
    """Choose the keys and pieces to remove."""
    removals: list[Removal] = []
    left: list[tuple[KeyFacts, int]] = []  # with its bytes
    leased = 0
    spared = set[str]()  # keys beyond a limit that are in use
    for facts in sorted(keys):
        if facts.is_leased:
            leased += 1
            left.append((facts, facts.stored_bytes))
            continue
        why = _why_gone(facts, limits, now_s)
        if why and is_recent(facts, now_s) and not limits.takes_recent:
            spared.add(facts.key)
            why = ""
        if why:
            removals.append(Removal(facts.key, (), facts.stored_bytes, why))
            continue
        surplus = list(_surplus(facts, now_s))
        freed = sum(piece.size for piece in surplus)
        if surplus:
            paths = tuple(piece.path for piece in surplus)
            removals.append(Removal(facts.key, paths, freed, "no longer belongs to a snapshot"))
        left.append((facts, facts.stored_bytes - freed))
    total = sum(size for _, size in left)
    if limits.max_bytes is not None:
        for facts, size in sorted(left, key=lambda each: (each[0].used_s, each[0].key)):
            if total <= limits.max_bytes:
                break
            if facts.is_leased or (not size and not facts.generations):
                continue
            is_spared = not limits.takes_recent and not _is_older(facts.used_s, RECENT_S, now_s)
            if is_spared or not is_live(facts, now_s):
                spared.add(facts.key)
                continue
            total -= size
            removals.append(
                Removal(facts.key, (), size, "was used least recently, and the store is over its limit")
            )
    return Plan(removals, total, leased, len(spared))


def is_recent(facts: KeyFacts, now_s: float) -> bool:
    """Return whether a start has used it so recently that a job may read it now."""
    return facts.used_s > 0 and not _is_older(facts.used_s, RECENT_S, now_s)


def is_live(facts: KeyFacts, now_s: float) -> bool:
    """Return whether a generation is not expired, or a start may still read it."""
    return any(is_alive(each, now_s) for each in facts.generations)


def is_alive(generation: SnapshotGeneration, now_s: float) -> bool:
    """Return whether this generation is not expired, or a start may still read it."""
    return generation.expires_s is None or now_s < generation.expires_s + GRACE_S


def are_reads_over(used_s: float, limits: Limits, now_s: float) -> bool:
    """Return whether lists of reads are to be removed. Args: used_s: the last use or change; 0 if unknown."""
    min_s = READS_UNUSED_S if limits.max_unused_s is None else limits.max_unused_s
    return _is_older(used_s, max(GRACE_S, min_s), now_s)


def _why_gone(facts: KeyFacts, limits: Limits, now_s: float) -> str:
    """Return why the whole key is removed; "" if it stays."""
    if not is_live(facts, now_s):
        if not _is_older(facts.youngest_s, GRACE_S, now_s):
            return ""
        return "has expired" if facts.generations else "has no snapshot"
    if limits.max_unused_s is not None and _is_older(facts.used_s, limits.max_unused_s, now_s):
        return f"was not used for {format_time(now_s - facts.used_s)}"
    return ""


def _surplus(facts: KeyFacts, now_s: float) -> Iterator[TreeFile]:
    """Yield pieces that no live generation needs; none of a key without one, as they may belong to a build."""
    if facts.needed is None or not is_live(facts, now_s):
        return
    for piece in facts.pieces:
        if piece.path not in facts.needed and _is_older(piece.mtime_s, GRACE_S, now_s):
            yield piece


def _is_older(time_s: float, age_s: float, now_s: float) -> bool:
    """Return whether a time is older than `age_s`; an unknown time is not."""
    return time_s > 0 and now_s - time_s >= age_s
