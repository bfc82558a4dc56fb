"""Blocks of trees on this node: cached, fetched once, in the order of the access trace.

`open_cache` opens the cache of this user, `BlockFetcher` fills it, `open_device` presents it to a mount.
`Prefetcher` fetches blocks ahead of readers, `Recorder` records accesses. Traces are in `bootseer.blocks.trace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.blocks.cache import Cache, open_cache
    from bootseer.blocks.device import BlockSource, CachedDevice, open_device
    from bootseer.blocks.donors import DedupSources
    from bootseer.blocks.fetch import BlockFetcher
    from bootseer.blocks.prefetch import Prefetcher
    from bootseer.blocks.recorder import Recorder
    from bootseer.blocks.tree_cache import TreeCache

_HOMES = {
    "BlockFetcher": "fetch",
    "BlockSource": "device",
    "Cache": "cache",
    "CachedDevice": "device",
    "DedupSources": "donors",
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
    "DedupSources",
    "Prefetcher",
    "Recorder",
    "TreeCache",
    "open_cache",
    "open_device",
]
__getattr__ = loader(__name__, _HOMES)
