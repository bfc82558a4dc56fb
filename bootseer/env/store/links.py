"""Refuses symbolic links in an environment store that is a local directory: only an attacker makes them.

A link in a store that several users write to could lead a writer, or the garbage collection, to other directories.
Each path is checked from the store's root down before it is used; the root itself may be a link. This does not
protect against a user who exchanges names at the same moment. But files of such a store need a signature, and the
written names do no harm elsewhere.
"""

from __future__ import annotations

import os
import stat
from urllib.parse import unquote_to_bytes

from bootseer import aio
from bootseer.errors import StorageTimeout, Untrusted
from bootseer.storage import Store
from bootseer.storage.os_errors import to_storage_error
from bootseer.storage.paths import check_path, scheme_of

TIMEOUT_S = 30.0  # a network file system may hang


async def refuse_links(store: Store, *paths: str) -> None:
    """Refuse paths with a symbolic link in them. Raises: Untrusted; StorageError."""
    if scheme_of(store.url) != "file":
        return
    root = os.fsdecode(unquote_to_bytes(store.url.removeprefix("file://")))
    try:
        found = await aio.run_abandonable(lambda: _first_link(root, paths), timeout_s=TIMEOUT_S)
    except TimeoutError as error:
        raise StorageTimeout(f"{root}: the file system did not answer within {TIMEOUT_S:g} s") from error
    if found:
        raise Untrusted(f"{found!r} is a symbolic link, which an environment store must not contain; delete it")


def _first_link(root: str, paths: tuple[str, ...]) -> str:
    seen = set[str]()
    for path in paths:
        full = root
        for name in check_path(root, path).split("/"):
            full = os.path.join(full, name)
            if full in seen:
                continue
            seen.add(full)
            try:
                mode = os.lstat(full).st_mode
            except (FileNotFoundError, NotADirectoryError):
                break  # it does not exist yet
            except OSError as error:
                raise to_storage_error(error, full) from error
            if stat.S_ISLNK(mode):
                return full
    return ""
