"""The cache folder of one model of the Hugging Face hub: which of its folders has the files.

    models--ORG--NAME/  blobs/  refs/main  snapshots/REVISION/  (links into blobs)

In: a store and the listing of a folder. Out: the path of the snapshot below it. Read as a whole every byte would
be read twice, under names that nobody opens.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.checkpoint.small_files import read_small
from bootseer.errors import StorageError
from bootseer.storage.paths import join
from bootseer.storage.protocol import Entry, Store

SNAPSHOTS, BLOBS, REFS = "snapshots", "blobs", "refs"
MAIN = "main"


async def snapshot_of(store: Store, path: str, entries: Sequence[Entry]) -> str:
    """Below `path`: what `main` means, else the newest; "" where the folder is no such cache."""
    if not {SNAPSHOTS, BLOBS} <= {entry.name for entry in entries if entry.is_folder}:
        return ""
    try:
        found = await store.list(join(path, SNAPSHOTS))
    except StorageError:
        return ""
    folders = sorted((entry.mtime_s, entry.name) for entry in found if entry.is_folder)
    try:
        revision = (await read_small(store, join(path, f"{REFS}/{MAIN}"), 256)).decode("ascii", "replace").strip()
    except StorageError:
        revision = ""
    names = [name for _, name in folders]
    if not names:
        return ""
    return f"{SNAPSHOTS}/{revision if revision in names else names[-1]}"
