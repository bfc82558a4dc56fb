"""What is wanted of blocks, and blocks on their way: what the parts of a fetcher tell each other."""

from __future__ import annotations

import asyncio

from bootseer.blocks.spans import StoredBlock
from bootseer.errors import BootseerError


class Want:
    """What somebody wants of some blocks."""

    def __init__(
        self,
        *,
        is_demand: bool,
        raws: dict[int, memoryview] | None = None,
        keeps: bool = True,
        try_s: float | None = None,
    ) -> None:
        self.is_demand = is_demand
        self.raws = raws  # to be filled; None: it is enough that the cache has them
        self.keeps = keeps  # in the cache
        self.try_s = try_s  # of one try at one store
        self.is_alone = False  # waits for nobody any more


class Flight:
    """A block on its way."""

    def __init__(self, block: StoredBlock, *, is_wanted: bool) -> None:
        self.block = block
        self.is_wanted = is_wanted  # its bytes, not only that they are in the cache
        self.is_done = asyncio.Event()
        self.raw: memoryview | None = None
        self.error: BootseerError | None = None  # of a demand: whoever waits has it as well
