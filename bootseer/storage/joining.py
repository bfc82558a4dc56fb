"""Concatenation for stores without it: the bytes pass through this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from bootseer.errors import StorageError
from bootseer.storage.protocol import Store

_STEP_BYTES = 8 << 20


async def concat_by_copy(store: Store, path: str, parts: Sequence[str]) -> None:
    """Implement `Store.concat` by copying."""
    if not parts:
        raise StorageError(f"{store.url}: {path!r} cannot be joined from no parts")
    found = [await store.stat(part) for part in parts]
    step = memoryview(bytearray(min(_STEP_BYTES, max(stat.size for stat in found))))
    async with store.create(path, size=sum(stat.size for stat in found)) as writer:
        for part, stat in zip(parts, found, strict=True):
            for offset in range(0, stat.size, _STEP_BYTES):
                view = step[: min(_STEP_BYTES, stat.size - offset)]
                await store.read_into(part, offset, view, etag=stat.etag)
                await writer.write(view)
    for part in parts:
        with suppress(StorageError):  # the file is complete
            await store.delete(part)
