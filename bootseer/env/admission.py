"""Looks whether a tree can be an environment while its daemon is mounting it: the longer of the two counts.

In: where the tree is, how many targets it is for. Out: nothing, or the reason why it is not used. The daemon
checks what holds for every tree, and serves images by the same digests, which may have what no environment may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from bootseer import aio
from bootseer.env.admissible import why_no_environment
from bootseer.errors import BootseerError, IntegrityError
from bootseer.tree import compression
from bootseer.tree.head import split_pin
from bootseer.tree.index import MOST_RAW_INDEX_BYTES

if TYPE_CHECKING:
    from bootseer.storage import Store


class _Columns(msgspec.Struct, frozen=True):
    """Of an index, what is looked at: the rest takes longer to decode. Read from bytes of the right digest."""

    parents: list[int]
    names: list[bytes]
    modes: list[int]
    rdevs: dict[int, tuple[int, int]]
    xattrs: dict[int, list[tuple[bytes, bytes]]]

    def path(self, entry: int) -> bytes:
        names = []
        while entry:
            names.append(self.names[entry])
            # Nobody has checked that it is above.
            entry = min(self.parents[entry], entry - 1)
        return b"/".join(reversed(names))


class Admission:
    """Begins at once, in a thread that nobody has to wait for."""

    def __init__(
        self, url: str, digest: str, targets: int, options: Mapping[str, object], environ: Mapping[str, str]
    ) -> None:
        """Args: url: of the tree's folder; options: of its store; environ: says where the cache is."""
        self._url, self._digest, self._targets = url, digest, targets
        self._options, self._environ = options, environ
        self._error: BootseerError | None = None
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Waits for it. Raises: IntegrityError when it is no environment; StorageError, ConfigError."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._look()
        except BootseerError as error:
            self._error = error
        except Exception as error:  # it is not admitted
            self._error = IntegrityError(f"{self._url}: cannot be looked at: {error}")

    def _look(self) -> None:
        from bootseer.blocks import open_cache

        data = open_cache(self._environ).read_index(self._digest)
        if data is None:
            data = aio.run_sync(self._fetch())
        raw = compression.decompress(data, MOST_RAW_INDEX_BYTES, self._url)
        reason = why_no_environment(msgspec.msgpack.decode(raw, type=_Columns), self._targets)
        if reason:
            raise IntegrityError(f"{self._url}: {reason}")

    async def _fetch(self) -> bytes:
        from bootseer.storage import open_store
        from bootseer.tree.opening import read_index_bytes

        store: Store = open_store(split_pin(self._url)[0], options=dict(self._options))
        try:
            return await read_index_bytes(store, self._digest)
        finally:
            await store.aclose()
