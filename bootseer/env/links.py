"""Symbolic links in an environment store that is a folder of this machine: there are none, but an attacker's.

A store that several users write to could else lead a writer, or the garbage collection, to folders outside. Looked
at is the way from the store's root down, before anything is done there; the root itself may be a link. This is
against what lies there, not against somebody who exchanges names at the same moment: from such a place nothing is
believed without a signature, and what is written has no name that matters elsewhere.
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
    """Raises: Untrusted when something on the way to one of them is a symbolic link; StorageError."""
    if scheme_of(store.url) != "file":
        return
    root = os.fsdecode(unquote_to_bytes(store.url.removeprefix("file://")))
    try:
        found = await aio.run_apart(lambda: _first_link(root, paths), timeout_s=TIMEOUT_S)
    except TimeoutError as error:
        raise StorageTimeout(f"{root}: the file system did not answer within {TIMEOUT_S:g} s") from error
    if found:
        raise Untrusted(f"{found!r} is a symbolic link, which no environment store has: delete it")


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
                break  # nothing there yet
            except OSError as error:
                raise to_storage_error(error, full) from error
            if stat.S_ISLNK(mode):
                return full
    return ""
