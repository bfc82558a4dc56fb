"""Small files of a store, whole: manifests, pointers, indexes."""

from __future__ import annotations

from bootseer import aio
from bootseer.errors import IntegrityError, SourceChanged
from bootseer.storage.protocol import Store

CALLS = 32  # at once, where many files are looked at
TRIES = 3
_PATIENCE = aio.RetryPolicy(tries=4, base_s=0.1, most_s=2.0, budget_s=20.0)


async def read_small(store: Store, path: str, most_bytes: int) -> bytes:
    """A whole file, again if it changes meanwhile; IntegrityError if it is larger than it may be."""
    for _ in range(TRIES):
        found = await store.stat(path)
        if found.size > most_bytes:
            raise IntegrityError(f"{where(store, path)}: {found.size} bytes; at most {most_bytes} make sense")
        data = bytearray(found.size)
        try:
            await store.read_into(path, 0, memoryview(data), etag=found.etag)
        except SourceChanged:
            continue
        return bytes(data)
    raise SourceChanged(f"{where(store, path)}: changes faster than it can be read")


async def read_range(store: Store, path: str, offset: int, target: memoryview) -> None:
    """A few bytes, again where that may help: a store that fails once has not lost a checkpoint."""

    async def attempt(number: int) -> None:
        await store.read_into(path, offset, target, attempt=number)

    await aio.retry(_PATIENCE, attempt)


def where(store: Store, path: str) -> str:
    """Names a path for people."""
    return f"{store.url.rstrip('/')}/{path}" if path else store.url
