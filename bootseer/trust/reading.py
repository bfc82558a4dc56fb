"""Whole small files of a store, whose size is bounded whatever the store says."""

from __future__ import annotations

from bootseer.errors import IntegrityError, SourceChanged, Truncated
from bootseer.storage import RangeReader, RangeRequest, Store

TRIES = 3


async def read_whole(store: Store, path: str, most_bytes: int) -> bytes:
    """A file as one version of it; again if it is replaced meanwhile.

    Raises: NotFound; IntegrityError if it is larger than `most_bytes`; StorageError.
    """
    where = place_of(store, path)
    for _ in range(TRIES):
        found = await store.stat(path)
        if found.size > most_bytes:
            raise IntegrityError(f"{where}: {found.size} bytes; at most {most_bytes}")
        target = bytearray(found.size)
        try:
            if target:
                await RangeReader(store).read([RangeRequest(path, 0, memoryview(target), found.etag)])
            return bytes(target)
        except (SourceChanged, Truncated):
            continue
    raise SourceChanged(f"{where}: changes faster than it can be read")


def place_of(store: Store, path: str) -> str:
    """A file of a store, for messages."""
    return f"{store.url.rstrip('/')}/{path}"
