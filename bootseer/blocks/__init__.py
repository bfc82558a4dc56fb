"""Blocks of trees on this node: cached, fetched once, in the order of the access trace.

`open_cache` opens the cache of this user, `BlockFetcher` fills it, `device.open_device` presents it to a mount.
`Prefetcher` fetches blocks ahead of readers, `Recorder` records accesses. Traces are in `bootseer.blocks.trace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.blocks.cache import Cache as Cache
    from bootseer.blocks.cache import open_cache as open_cache
    from bootseer.blocks.device import BlockSource as BlockSource
    from bootseer.blocks.fetch import BlockFetcher as BlockFetcher
    from bootseer.blocks.prefetch import Prefetcher as Prefetcher
    from bootseer.blocks.recorder import Recorder as Recorder
    from bootseer.blocks.tree_cache import TreeCache as TreeCache

_HOMES = {
    "BlockFetcher": "fetch",
    "BlockSource": "device",
    "Cache": "cache",
    "Prefetcher": "prefetch",
    "Recorder": "recorder",
    "TreeCache": "tree_cache",
    "open_cache": "cache",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
