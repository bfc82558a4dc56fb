"""What the daemon of a tree imports before it has its order: nothing is left to import between that and the mount.

First what its maker needs, which then is forked; and as that takes longest, an order that comes while the rest is
imported is seen between any two modules. tests/guards look that nothing is left, and that nothing heavy is among
it that a tree in a folder does not need.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from bootseer import crc

_FOR_THE_MAKER = ("bootseer.mounts.tree_maker", "zstandard")
# In pieces that do not take long, then what is imported late, where it is first used.
_MODULES = (
    "logging",
    "ssl",
    "asyncio",
    "bootseer.aio",
    "bootseer.mounts.flat_file",
    "bootseer.mounts.tree_bringer",
    "bootseer.mounts.tree_serving",
    "bootseer.blocks.cache",
    "bootseer.blocks.device",
    "bootseer.blocks.fetch",
    "bootseer.storage.open",
    "bootseer.storage.paths",
    "bootseer.storage.ranges",
    "bootseer.tree.opening",
    "encodings.ascii",
)
# By scheme: the module of the store, as bootseer.storage.open chooses it, and what that imports late; with those
# that are far, who is asked before them.
_PEERS = ("bootseer.peers.store", "bootseer.peers.membership")
_OBJECTS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_STORES = {
    **dict.fromkeys(("", "file", "local"), ("bootseer.storage.local",)),
    **dict.fromkeys(("http", "https"), ("bootseer.storage.http", "encodings.idna", *_PEERS)),
    **dict.fromkeys(_OBJECTS, ("bootseer.storage.objects", *_PEERS)),
    "oci": ("bootseer.storage.oci", "encodings.idna", *_PEERS),
}


def warm_maker() -> None:
    """For both the maker and the daemon. What is not installed is missed where it is needed, here and below."""
    gc.disable()  # modules are no garbage
    for name in _FOR_THE_MAKER:
        with suppress(ImportError):
            import_module(name)


def warm(scheme: str, look: Callable[[], None] = lambda: None) -> None:
    """The rest. Args: scheme: of the URL that is expected; look: called often."""
    for name in (*_MODULES, *_STORES.get(scheme, ())):
        with suppress(ImportError):
            import_module(name)
        look()
    with suppress(ImportError):
        crc.load()
