"""Requests for blocks and in-flight requests: shared by the parts of a fetcher."""

from __future__ import annotations

import asyncio

from bootseer.blocks.spans import StoredBlock
from bootseer.errors import BootseerError


class BlockRequest:
    """What a caller requests of some blocks."""

    def __init__(
        self,
        *,
        is_demand: bool,
        raws: dict[int, memoryview] | None = None,
        keeps: bool = True,
        try_s: float | None = None,
    ) -> None:
        self.is_demand = is_demand
        self.raws = raws  # filled with the bytes; None: the caller only needs them cached
        self.keeps = keeps  # store them in the cache
        self.try_s = try_s  # of one try at one store
        self.is_alone = False  # no longer waits for other requests


class InFlightBlock:
    def __init__(self, block: StoredBlock, *, is_wanted: bool) -> None:
        self.block = block
        self.is_wanted = is_wanted  # a reader wants its bytes, not only that it is cached
        self.is_done = asyncio.Event()
        self.raw: memoryview | None = None
        self.error: BootseerError | None = None  # of a demand read: all that wait for it get it as well
