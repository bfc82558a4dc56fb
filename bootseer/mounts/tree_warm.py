"""What the daemon of a tree imports before it has its order: nothing is left to import between that and the mount.

tests/guards look that this is so, and that nothing heavy is among it that a tree in a folder does not need.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from bootseer import crc

# What is imported late, where it is first used.
_MODULES = (
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
_OTHERS = ("zstandard",)
# By scheme: the module of the store, as bootseer.storage.open chooses it, and what that imports late.
_STORES = {
    **dict.fromkeys(("", "file", "local"), ("bootseer.storage.local",)),
    **dict.fromkeys(("http", "https"), ("bootseer.storage.http", "encodings.idna")),
    **dict.fromkeys(("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"), ("bootseer.storage.objects",)),
    "oci": ("bootseer.storage.oci", "encodings.idna"),
}


def warm(scheme: str) -> None:
    """`scheme`: of the URL that is expected. What is not installed is missed where it is needed."""
    gc.disable()  # modules are no garbage
    for name in _MODULES:
        import_module(name)
    for name in (*_OTHERS, *_STORES.get(scheme, ())):
        with suppress(ImportError):
            import_module(name)
    with suppress(ImportError):
        crc.load()
