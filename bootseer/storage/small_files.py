"""Whole small files of a store (manifests, heads, pointers), whose size the caller bounds, and listings."""

from __future__ import annotations

from bootseer import aio
from bootseer.errors import IntegrityError, NotFound, SourceChanged, Truncated
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.protocol import Entry, Store

CONCURRENT_READS = 32  # where many small files are read
TRIES = 3
_RETRIES = aio.RetryPolicy(tries=4, base_s=0.1, max_s=2.0, budget_s=20.0)


async def read_small(store: Store, path: str, max_bytes: int) -> bytes:
    """Return a file as one version of it; read again if it is replaced meanwhile.

    Raises: NotFound; IntegrityError if it is larger than `max_bytes`; SourceChanged; StorageError.
    """
    where = url_of(store, path)
    for _ in range(TRIES):
        found = await store.stat(path)
        if found.size > max_bytes:
            raise IntegrityError(f"{where}: {found.size} bytes; at most {max_bytes}")
        target = bytearray(found.size)
        try:
            if target:
                await RangeReader(store).read([RangeRequest(path, 0, memoryview(target), found.etag)])
            return bytes(target)
        except (SourceChanged, Truncated):
            continue
    raise SourceChanged(f"{where}: changes faster than it can be read")


async def list_if_there(store: Store, directory: str) -> list[Entry]:
    """Return the entries of a directory, none if it is missing. Raises: StorageError."""
    try:
        return await store.list(directory)
    except NotFound:
        return []


async def read_range(store: Store, path: str, offset: int, target: memoryview) -> None:
    """Read a few bytes; retry, as a store that fails once has not lost a checkpoint. Raises: StorageError."""

    async def attempt(number: int) -> None:
        await store.read_into(path, offset, target, attempt=number)

    await aio.retry(_RETRIES, attempt)


def url_of(store: Store, path: str) -> str:
    """Return the URL of a file, "" for the store itself, for messages."""
    return f"{store.url.rstrip('/')}/{path}" if path else store.url
