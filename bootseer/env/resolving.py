"""Which environment of a store a start wants: lists of what set-up reads, each with what this node has of it.

In: the store, what the key has without that, a look at this node. Out: the key, and the snapshot if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bootseer import aio
from bootseer.env.keying import Keyed
from bootseer.env.reads import Reads
from bootseer.env.reads_now import Now
from bootseer.env.store import EnvStore, Found
from bootseer.errors import KeyUnknown

Say = Callable[[str], object]


class Resolved(NamedTuple):
    """See the module's docstring."""

    keyed: Keyed  # by the reads of the snapshot; without one by the newest there are, or by the first guess
    found: Found | None
    candidates: tuple[Keyed, ...] = ()  # by each list of reads that is believed


async def resolve(store: EnvStore, keyed: Keyed, now: Now, now_s: float, refused: Say | None = None) -> Resolved:
    """Args: now_s: since the epoch. refused: told of each that is passed over. Raises: StorageError."""
    lists = await store.reads.find(keyed.guess_key, refused)
    candidates = tuple(await aio.run_io(with_each, keyed, lists, now))
    for candidate in candidates:
        found = await store.find(candidate.key, now_s, refused)
        if found is not None:
            return Resolved(candidate, found, candidates)
    return Resolved(candidates[0] if candidates else keyed, None, candidates)


def with_each(keyed: Keyed, lists: Iterable[Reads], now: Now) -> list[Keyed]:
    """By each list, without those by which there is too much to read; each key once."""
    found: dict[str, Keyed] = {}
    for reads in lists:
        try:
            candidate = keyed.with_reads(reads, now)
        except KeyUnknown:
            continue
        found.setdefault(candidate.key, candidate)
    return list(found.values())


def like(before: Keyed, fresh: Keyed, now: Now) -> Keyed:
    """What was keyed anew, by the reads that it was keyed by before. Raises: KeyUnknown."""
    return fresh if before.reads is None else fresh.with_reads(before.reads, now)
