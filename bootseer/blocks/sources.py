"""The stores that have a tree's packs, in order of preference: one that fails steps back for a while.

Each has a reader of its own, which knows how fast it is. A peer that has only some packs is as good as any: what
it does not have is asked of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError, NotFound
from bootseer.storage import RangeReader, SecondHand, Store

DOWN_S = 10.0  # a store that failed is asked last for so long


class Source(NamedTuple):
    """A store and its reader."""

    place: int
    store: Store
    reader: RangeReader


class Sources:
    """`stores` have the folder of the tree as their root. For one event loop."""

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ConfigError("there is no store to fetch blocks from")
        self._sources = [Source(place, store, RangeReader(store)) for place, store in enumerate(stores)]
        self._down_until_s = [0.0] * len(stores)

    def ordered(self) -> list[Source]:
        """Those to ask, one after the other."""
        now_s = time.monotonic()
        return sorted(self._sources, key=lambda source: (self._down_until_s[source.place] > now_s, source.place))

    def failed(self, source: Source, error: BootseerError) -> None:
        """A read of it failed for good; that it does not have a file says nothing about its others."""
        if not isinstance(error, NotFound):
            self._down_until_s[source.place] = time.monotonic() + DOWN_S

    def wrong(self, source: Source, path: str, offset: int, length: int) -> None:
        """Bytes that came of it are not what they should be: who handed them on has to know."""
        if isinstance(source.store, SecondHand):
            source.store.distrust(path, offset, length)

    def statistics(self) -> dict[str, int]:
        """Of all readers together: requests, bytes, retries."""
        totals = {"requests": 0, "read_bytes": 0, "retries": 0, "hedges": 0, "timeouts": 0}
        for source in self._sources:
            found = source.reader.statistics()
            for name in totals:
                totals[name] += found[name]
        return totals
