"""Checks of URLs that do not exist yet, to distinguish a first start from a typo.

In: a URL from the user. Out: a line with the fix, or "" where its parent directory exists or cannot be inspected.
Object stores have no directories: there any listing reports a missing bucket (objects.py).
"""

from __future__ import annotations

import os
import shlex

from bootseer import aio
from bootseer.errors import ConfigError, NoSuchLocation, NotFound, StorageError
from bootseer.storage.open import local_path, open_at, open_store, split_url
from bootseer.storage.paths import HDFS_SCHEMES, is_chained, redact, scheme_of


async def why_url_is_invalid(url: str) -> str:
    """Return why a missing URL cannot exist; "" if it can. Raises: ConfigError."""
    scheme = scheme_of(url)
    if is_chained(url):
        return ""
    if scheme in ("", "file", "local"):
        return await aio.run_abandonable(_why_not_local, url, local_path(url), timeout_s=30.0)
    if scheme not in HDFS_SCHEMES:
        return ""
    try:
        above = split_url(url)[0]
        store, name = open_at(above)
    except ConfigError:
        return ""  # its parent is the root
    try:
        await store.list(name)
    except NotFound:
        return (
            f"{redact(url)}: its parent directory does not exist: make it (hdfs dfs -mkdir -p {redact(above)}), or"
            " correct the URL"
        )
    except StorageError:
        pass  # it cannot be determined
    finally:
        await store.aclose()
    return ""


async def check_url(url: str) -> None:
    """Check that a directory, which its first writer makes, can exist at a URL.

    Raises: NoSuchLocation for a typo: an unknown scheme, or a missing parent directory or bucket.
    """
    store = open_store(url)
    try:
        try:
            found = await store.list("")
        except StorageError as error:
            if not isinstance(error, NotFound):
                return  # later users of the store report it
            found = []
        why = "" if found else await why_url_is_invalid(url)
    finally:
        await store.aclose()
    if why:
        raise NoSuchLocation(why)


def _why_not_local(url: str, path: str) -> str:
    parent = os.path.dirname(path)
    if os.path.exists(path) or os.path.isdir(parent):
        return ""
    if os.path.exists(parent):
        return f"{redact(url)}: {parent} is not a directory: correct the path"
    return (
        f"{redact(url)}: its parent directory {parent} does not exist: make it (mkdir -p {shlex.quote(parent)}) or"
        " correct the path"
    )
