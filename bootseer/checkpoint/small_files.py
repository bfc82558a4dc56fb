"""Small files of a store, whole: manifests, pointers, indexes."""

from __future__ import annotations

from bootseer.errors import IntegrityError, SourceChanged
from bootseer.storage.protocol import Store

CALLS = 32  # at once, where many files are looked at
TRIES = 3


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


def where(store: Store, path: str) -> str:
    """Names a path for people."""
    return f"{store.url.rstrip('/')}/{path}" if path else store.url
