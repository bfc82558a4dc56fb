"""Fills this node's cache with blocks of a tree that nothing mounts yet, so that the next start finds them.

In: a tree by digest, which blocks are wanted, limits. Out: they are in the cache, with the index and the metadata
that a mount takes, and how much of them had to be fetched; or one error, and what was fetched stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks import Prefetcher
from bootseer.errors import ConfigError, StorageError
from bootseer.mounts.tree_parts import open_parts
from bootseer.mounts.tree_settings import Settings
from bootseer.storage import redact

TICK_S = 0.2
WIDTH = 16  # spans at once

Progress = Callable[[int, int], object]  # bytes done, and in all
# Of a tree with so many blocks: those that are wanted, in order; None: all.
Choose = Callable[[int], Awaitable[Sequence[int] | None]]


class Limits(NamedTuple):
    """What filling may take."""

    most_bytes: int | None = None  # stored bytes of what is wanted; more is an error, before anything is fetched
    most_bytes_per_s: float | None = None


class Filled(NamedTuple):
    """What is cached now."""

    blocks: int  # that were wanted
    fetched_blocks: int  # the others were there
    size: int  # stored bytes of those wanted
    fetched_bytes: int


async def fill_cache(
    settings: Settings, digest: str, choose: Choose, progress: Progress, limits: Limits | None = None
) -> Filled:
    """Of the tree at `settings.url` the blocks that `choose` names.

    Raises: ConfigError when they are more than `limits` allow; StorageError when they cannot be brought or kept;
        IntegrityError.
    """
    limits = limits or Limits()
    told: list[str] = []
    async with AsyncExitStack() as stack:
        parts = await open_parts(stack, settings, digest, told.append)
        await parts.metadata()
        await parts.finish()
        index, cache = parts.index, parts.tree_cache
        chosen = await choose(index.block_count)
        wanted: Sequence[int] = range(index.block_count) if chosen is None else chosen
        sizes = {number: index.block(number).stored_bytes for number in wanted}
        total = sum(sizes.values())
        before = await aio.run_io(cache.missing, wanted)
        missing_bytes = sum(sizes[number] for number in before)
        if limits.most_bytes is not None and missing_bytes > limits.most_bytes:
            raise ConfigError(
                f"{redact(settings.url)}: {missing_bytes:,} bytes are to be fetched, and only"
                f" {limits.most_bytes:,} are allowed"
            )
        prefetcher = Prefetcher(
            parts.fetcher,
            () if chosen is None else wanted,
            is_whole=chosen is None,
            quiet_s=0.0,
            hot_width=WIDTH,
            cold_width=WIDTH,
            most_bytes_per_s=limits.most_bytes_per_s,
            limits_hot=True,
            log=told.append,
        )

        async def tell() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                missing = await aio.run_io(cache.missing, wanted)
                progress(total - sum(sizes[number] for number in missing), total)

        async with asyncio.TaskGroup() as group:
            telling = group.create_task(tell())
            await prefetcher.run()
            telling.cancel()
        await parts.keep()
        left = await aio.run_io(cache.missing, wanted)
        left_bytes = sum(sizes[number] for number in left)
        progress(total - left_bytes, total)
    if left:
        why = told[-1] if told else "the store does not give them"
        raise StorageError(
            f"{redact(settings.url)}: {len(left)} of {len(wanted)} blocks could not be fetched: {why}"
        )
    return Filled(len(wanted), len(before), total, missing_bytes - left_bytes)
