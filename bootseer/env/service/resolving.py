"""Selection of the environment for a start: the lists of reads in a store are applied to this node.

In: the store, the key without reads, a sample of this node. Out: the key, and the snapshot if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bootseer import aio
from bootseer.env.key.keying import Keyed
from bootseer.env.reads.current_state import ReadStates
from bootseer.env.reads.read_list import Reads
from bootseer.env.store.reads_store import Refused
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.errors import KeyUnknown


class Resolved(NamedTuple):
    """The selected environment."""

    keyed: Keyed  # by the reads of the snapshot; else by the newest reads, or by the first guess
    found: FoundSnapshot | None
    candidates: tuple[Keyed, ...] = ()  # one for each trusted list of reads


async def resolve(
    store: EnvStore, keyed: Keyed, now: ReadStates, now_s: float, refused: Refused | None = None
) -> Resolved:
    """Select an environment. Raises: StorageError.

    Args: now_s: since the epoch. refused: gets why items are skipped (default: it is logged).
    """
    lists = await store.reads.find(keyed.guess_key, refused)
    candidates = tuple(await aio.run_io(apply_reads, keyed, lists, now))
    for candidate in candidates:
        found = await store.find(candidate.key, now_s, refused)
        if found is not None:
            return Resolved(candidate, found, candidates)
    return Resolved(candidates[0] if candidates else keyed, None, candidates)


def apply_reads(keyed: Keyed, lists: Iterable[Reads], now: ReadStates) -> list[Keyed]:
    """Return a key for each list of reads, without duplicates; skip lists with too much to read."""
    found: dict[str, Keyed] = {}
    for reads in lists:
        try:
            candidate = keyed.with_reads(reads, now)
        except KeyUnknown:
            continue
        found.setdefault(candidate.key, candidate)
    return list(found.values())


def with_reads_of(before: Keyed, fresh: Keyed, now: ReadStates) -> Keyed:
    """Apply the reads of the earlier key to a new key. Raises: KeyUnknown."""
    return fresh if before.reads is None else fresh.with_reads(before.reads, now)
