"""What goes from an environment store. Pure.

In: what there is of each key, limits, the time. Out: removals, in order, each with its reason. A key whose builder
lives is left alone, and so is what may belong to a build that is not published yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bootseer.counted import counted

READS_UNUSED_S = 180 * 86_400.0  # lists of reads are small, and whoever misses one runs set-up
GRACE_S = 86_400.0  # for what belongs to no snapshot (yet), and for readers of what has expired
RECENT_S = 7_200.0  # stamps are touched hourly: a start may still read it
_DAY_S = 86_400.0


class Piece(NamedTuple):
    """A file of a tree's folder."""

    path: str  # from the store's root
    size: int  # bytes
    mtime_s: float  # since the epoch; 0 if it is not known


class Generation(NamedTuple):
    """An env-NNNNNN.json."""

    number: int
    created_s: float  # by itself
    expires_s: float | None  # None: never


class KeyFacts(NamedTuple):
    """What there is of a key."""

    key: str
    generations: tuple[Generation, ...]  # those that can be read, whoever signed them
    pieces: tuple[Piece, ...]
    needed: frozenset[str] | None  # paths of pieces that live generations need; None if that is not known
    used_s: float  # when it was used or published last, since the epoch; 0 if that is not known
    youngest_s: float  # of all its files; 0 if that is not known
    is_leased: bool  # its builder lives

    @property
    def stored_bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Limits(NamedTuple):
    """None: no limit."""

    most_bytes: int | None = None
    most_unused_s: float | None = None


class Removal(NamedTuple):
    """What goes."""

    key: str
    paths: tuple[str, ...]  # of pieces; empty: the key with all that there is of it
    freed_bytes: int
    why: str


class Plan(NamedTuple):
    """What comes of it."""

    removals: list[Removal]
    left_bytes: int
    leased: int  # keys that were left alone, as their builders live
    recent: int  # keys beyond the limit that were left, as they are in use or were made a moment ago


def plan(keys: Sequence[KeyFacts], limits: Limits, now_s: float) -> Plan:
    """Which keys and pieces go."""
    removals: list[Removal] = []
    left: list[tuple[KeyFacts, int]] = []  # with its bytes
    leased = 0
    for facts in sorted(keys):
        if facts.is_leased:
            leased += 1
            left.append((facts, facts.stored_bytes))
            continue
        why = _why_gone(facts, limits, now_s)
        if why:
            removals.append(Removal(facts.key, (), facts.stored_bytes, why))
            continue
        surplus = list(_surplus(facts, now_s))
        freed = sum(piece.size for piece in surplus)
        if surplus:
            paths = tuple(piece.path for piece in surplus)
            removals.append(Removal(facts.key, paths, freed, "belongs to no snapshot any more"))
        left.append((facts, facts.stored_bytes - freed))
    total = sum(size for _, size in left)
    recent = 0
    if limits.most_bytes is not None:
        for facts, size in sorted(left, key=lambda each: (each[0].used_s, each[0].key)):
            if total <= limits.most_bytes:
                break
            if facts.is_leased or (not size and not facts.generations):
                continue
            if not _is_older(facts.used_s, RECENT_S, now_s) or not is_live(facts, now_s):
                recent += 1
                continue
            total -= size
            removals.append(
                Removal(facts.key, (), size, "was used least recently, and the store is over its limit")
            )
    return Plan(removals, total, leased, recent)


def is_live(facts: KeyFacts, now_s: float) -> bool:
    """Whether a generation is not expired, or a start may still read it."""
    return any(is_alive(each, now_s) for each in facts.generations)


def is_alive(generation: Generation, now_s: float) -> bool:
    """The same of one generation."""
    return generation.expires_s is None or now_s < generation.expires_s + GRACE_S


def are_reads_over(used_s: float, limits: Limits, now_s: float) -> bool:
    """Whether lists of reads go. Args: used_s: when one of them was used or made last; 0 if that is not known."""
    least_s = READS_UNUSED_S if limits.most_unused_s is None else limits.most_unused_s
    return _is_older(used_s, max(GRACE_S, least_s), now_s)


def _why_gone(facts: KeyFacts, limits: Limits, now_s: float) -> str:
    """Why all of it goes; "" if it stays."""
    if not is_live(facts, now_s):
        if not _is_older(facts.youngest_s, GRACE_S, now_s):
            return ""
        return "has expired" if facts.generations else "has no snapshot"
    if limits.most_unused_s is not None and _is_older(facts.used_s, limits.most_unused_s, now_s):
        return f"was not used for {counted(limits.most_unused_s / _DAY_S, 'day')}"
    return ""


def _surplus(facts: KeyFacts, now_s: float) -> Iterator[Piece]:
    """What no live generation needs. That of a key without one may belong to a build: it goes with the key."""
    if facts.needed is None or not is_live(facts, now_s):
        return
    for piece in facts.pieces:
        if piece.path not in facts.needed and _is_older(piece.mtime_s, GRACE_S, now_s):
            yield piece


def _is_older(time_s: float, age_s: float, now_s: float) -> bool:
    """What has no time is young."""
    return time_s > 0 and now_s - time_s >= age_s
