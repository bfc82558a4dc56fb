"""Fills this node's cache with blocks of a tree that is not mounted yet, so that the next start finds them.

In: a tree by digest, the wanted blocks, limits. Out: they are in the cache, with the index and the metadata that a
mount needs, and how much of them had to be fetched. On an error, fetched blocks stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks.prefetch import Prefetcher
from bootseer.errors import ConfigError, StorageError
from bootseer.logs import sent_to
from bootseer.mounts.tree_daemon.parts import open_parts
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.storage import redact

TICK_S = 0.2
WIDTH = 16  # spans at once

Progress = Callable[[int, int], object]  # bytes done, and in all
# From the number of blocks of a tree to the wanted ones, in order; None: all.
Choose = Callable[[int], Awaitable[Sequence[int] | None]]


class FillLimits(NamedTuple):
    max_bytes: int | None = None  # stored bytes of wanted blocks; more is an error before any fetch
    max_bytes_per_s: float | None = None


class FillResult(NamedTuple):
    blocks: int  # that were wanted
    fetched_blocks: int  # the others were there
    size: int  # stored bytes of those wanted
    fetched_bytes: int


async def fill_cache(
    settings: Settings, digest: str, choose: Choose, progress: Progress, limits: FillLimits | None = None
) -> FillResult:
    """Fetch the blocks that `choose` selects of the tree at `settings.url` into the cache.

    Raises: ConfigError when they are more than `limits` allow; StorageError when they cannot be fetched or stored;
        IntegrityError.
    """
    limits = limits or FillLimits()
    told: list[str] = []
    async with AsyncExitStack() as stack:
        with sent_to(told.append):
            parts = await open_parts(stack, settings, digest)
            await parts.metadata()
            await parts.finish()
        index, cache = parts.index, parts.tree_cache
        chosen = await choose(index.block_count)
        wanted: Sequence[int] = range(index.block_count) if chosen is None else chosen
        sizes = {number: index.block(number).stored_bytes for number in wanted}
        total = sum(sizes.values())
        before = await aio.run_io(cache.missing, wanted)
        missing_bytes = sum(sizes[number] for number in before)
        if limits.max_bytes is not None and missing_bytes > limits.max_bytes:
            raise ConfigError(
                f"{redact(settings.url)}: {missing_bytes:,} bytes must be fetched, but only"
                f" {limits.max_bytes:,} are allowed"
            )
        prefetcher = Prefetcher(
            parts.fetcher,
            () if chosen is None else wanted,
            is_whole=chosen is None,
            quiet_s=0.0,
            hot_width=WIDTH,
            cold_width=WIDTH,
            max_bytes_per_s=limits.max_bytes_per_s,
            limits_hot=True,
        )

        async def tell() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                missing = await aio.run_io(cache.missing, wanted)
                progress(total - sum(sizes[number] for number in missing), total)

        with sent_to(told.append):
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(tell())
                await prefetcher.run()
                telling.cancel()
            await parts.keep()
        left = await aio.run_io(cache.missing, wanted)
        left_bytes = sum(sizes[number] for number in left)
        progress(total - left_bytes, total)
    if left:
        why = told[-1] if told else "the store does not return them"
        raise StorageError(
            f"{redact(settings.url)}: {len(left)} of {len(wanted)} blocks could not be fetched: {why}"
        )
    return FillResult(len(wanted), len(before), total, missing_bytes - left_bytes)
