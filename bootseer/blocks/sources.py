"""The stores that have a tree's packs, in order of preference: one that fails moves to the end for a while.

Each has a reader of its own, which learns its speed. A peer that has only some packs is a full source: the next
store is read for those that it lacks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError, NotFound
from bootseer.storage import RangeReader, SecondHand, Store

DOWN_S = 10.0  # a store that failed is read last for so long


class StoreSource(NamedTuple):
    place: int
    store: Store
    reader: RangeReader


class StoreSources:
    """`stores` have the directory of the tree as their root. For one event loop."""

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ConfigError("there is no store to fetch blocks from")
        self._sources = [StoreSource(place, store, RangeReader(store)) for place, store in enumerate(stores)]
        self._down_until_s = [0.0] * len(stores)

    def ordered(self) -> list[StoreSource]:
        """Return the sources in the order in which to try them."""
        now_s = time.monotonic()
        return sorted(self._sources, key=lambda source: (self._down_until_s[source.place] > now_s, source.place))

    def failed(self, source: StoreSource, error: BootseerError) -> None:
        """Record that a read failed for good; a missing file is ignored, as other files may be there."""
        if not isinstance(error, NotFound):
            self._down_until_s[source.place] = time.monotonic() + DOWN_S

    def wrong(self, source: StoreSource, path: str, offset: int, length: int) -> None:
        """Record that bytes from it are wrong: the peer that sent them is distrusted."""
        if isinstance(source.store, SecondHand):
            source.store.distrust(path, offset, length)

    def statistics(self) -> dict[str, int]:
        """Return the totals of all readers: requests, bytes, retries."""
        totals = {"requests": 0, "read_bytes": 0, "retries": 0, "hedges": 0, "timeouts": 0}
        for source in self._sources:
            found = source.reader.statistics()
            for name in totals:
                totals[name] += found[name]
        return totals
