"""Blocks of trees on this node: cached, fetched once, in the order that a start touched them.

`open_cache` gives the cache of this user, `BlockFetcher` fills it, `open_device` shows it to a mount,
`Prefetcher` runs ahead of the readers, `Recorder` notes what they touch. Traces are in `bootseer.blocks.trace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.blocks.cache import Cache, open_cache
    from bootseer.blocks.device import BlockSource, CachedDevice, open_device
    from bootseer.blocks.donors import Donors
    from bootseer.blocks.fetch import BlockFetcher
    from bootseer.blocks.prefetch import Prefetcher
    from bootseer.blocks.recorder import Recorder
    from bootseer.blocks.tree_cache import TreeCache

_HOMES = {
    "BlockFetcher": "fetch",
    "BlockSource": "device",
    "Cache": "cache",
    "CachedDevice": "device",
    "Donors": "donors",
    "Prefetcher": "prefetch",
    "Recorder": "recorder",
    "TreeCache": "tree_cache",
    "open_cache": "cache",
    "open_device": "device",
}

__all__ = [
    "BlockFetcher",
    "BlockSource",
    "Cache",
    "CachedDevice",
    "Donors",
    "Prefetcher",
    "Recorder",
    "TreeCache",
    "open_cache",
    "open_device",
]
__getattr__ = loader(__name__, _HOMES)
