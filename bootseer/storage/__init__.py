"""Bytes by URL and range: `open_store` opens the store of a directory, `open_at` the store of a file's directory.

Names are loaded when first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.storage.engine.ranges import RangeReader as RangeReader
    from bootseer.storage.engine.ranges import RangeRequest as RangeRequest
    from bootseer.storage.open import open_at as open_at
    from bootseer.storage.open import open_store as open_store
    from bootseer.storage.paths import redact as redact
    from bootseer.storage.protocol import Entry as Entry
    from bootseer.storage.protocol import Features as Features
    from bootseer.storage.protocol import HasPeers as HasPeers
    from bootseer.storage.protocol import SecondHand as SecondHand
    from bootseer.storage.protocol import Stat as Stat
    from bootseer.storage.protocol import Store as Store
    from bootseer.storage.protocol import StoreWriter as StoreWriter

_HOMES = {
    "open_at": "open",
    "open_store": "open",
    "redact": "paths",
    "Entry": "protocol",
    "Features": "protocol",
    "HasPeers": "protocol",
    "SecondHand": "protocol",
    "Stat": "protocol",
    "Store": "protocol",
    "StoreWriter": "protocol",
    "RangeReader": "bootseer.storage.engine.ranges",
    "RangeRequest": "bootseer.storage.engine.ranges",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
