"""Imports of a tree's daemon before it has its order: nothing is left to import between the order and the mount.

First the modules of its maker, which then is forked. As the maker takes longest, an order that arrives during the
other imports is noticed between any two modules. tests/guards check that nothing is left to import, and that no
heavy module is imported for a tree in a directory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from bootseer import crc
from bootseer.errors import ConfigError
from bootseer.storage.paths import OBJECT_SCHEMES, WEB_SCHEMES

_FOR_THE_MAKER = ("bootseer.mounts.tree_daemon.metadata_maker", "zstandard")
# In short pieces; last the modules that are otherwise imported at first use.
_MODULES = (
    "logging",
    "ssl",
    "asyncio",
    "bootseer.aio",
    "bootseer.log_handler",
    "bootseer.mounts.device.file",
    "bootseer.mounts.tree_daemon.prefetch_worker",
    "bootseer.mounts.tree_daemon.serving",
    "bootseer.blocks.cache",
    "bootseer.blocks.device",
    "bootseer.blocks.fetch",
    "bootseer.storage.open",
    "bootseer.storage.paths",
    "bootseer.storage.engine.ranges",
    "bootseer.tree.opening",
    "encodings.ascii",
    "resource",
)
# By scheme: the module of the store, as bootseer.storage.open chooses it, and its late imports; for remote stores
# also those of peers.
_PEERS = ("bootseer.peers.store", "bootseer.peers.membership")
_STORES = {
    **dict.fromkeys(("", "file", "local"), ("bootseer.storage.local.store",)),
    **dict.fromkeys(WEB_SCHEMES, ("bootseer.storage.http.store", "encodings.idna", *_PEERS)),
    **dict.fromkeys(OBJECT_SCHEMES, ("bootseer.storage.fsspec.objects", *_PEERS)),
    "oci": ("bootseer.storage.oci.store", "encodings.idna", *_PEERS),
}


def warm_maker() -> None:
    """Import modules of both maker and daemon. Here and below, missing ones are errors at their first use."""
    gc.disable()  # modules are no garbage
    for name in _FOR_THE_MAKER:
        with suppress(ImportError):
            import_module(name)


def warm(scheme: str, look: Callable[[], None] = lambda: None) -> None:
    """Import the rest. Args: scheme: of the expected URL; look: called often."""
    for name in (*_MODULES, *_STORES.get(scheme, ())):
        with suppress(ImportError):
            import_module(name)
        look()
    with suppress(ConfigError):
        crc.load()
