"""Whether a URL can be a place at all: for what is not there yet, to tell a first start from a typo.

In: a URL that somebody has typed. Out: a line with the way out, or "" where its folder is there, or cannot be
looked at. Object stores have no folders: there a missing bucket is an error of any listing (objects.py).
"""

from __future__ import annotations

import difflib
import os
import shlex

from bootseer import aio
from bootseer.errors import ConfigError, NoSuchPlace, NotFound, StorageError
from bootseer.storage.open import local_path, open_at, open_store, split_url
from bootseer.storage.paths import is_chained, redact, scheme_of

SCHEMES = (
    *("file", "memory", "http", "https", "hdfs", "viewfs", "webhdfs", "swebhdfs", "oci"),
    *("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"),
)
_HDFS = ("hdfs", "viewfs", "webhdfs", "swebhdfs")


def unknown_scheme(url: str) -> str:
    """PURE: the line for a URL whose scheme nobody knows."""
    scheme = scheme_of(url)
    near = difflib.get_close_matches(scheme, SCHEMES, n=1)
    hint = f"did you mean {near[0]}://?" if near else f"there are {', '.join(SCHEMES)} and those of fsspec"
    return f"{redact(url)}: no store has the scheme {scheme!r}: {hint}"


async def why_misplaced(url: str) -> str:
    """Why nothing can be at this URL, which was not found; "" where it can. Raises: ConfigError."""
    scheme = scheme_of(url)
    if is_chained(url):
        return ""
    if scheme in ("", "file", "local"):
        return await aio.run_apart(_why_not_local, url, local_path(url), timeout_s=30.0)
    if scheme not in _HDFS:
        return ""
    try:
        above = split_url(url)[0]
        store, name = open_at(above)
    except ConfigError:
        return ""  # it is in the root
    try:
        await store.list(name)
    except NotFound:
        return (
            f"{redact(url)}: its parent folder does not exist: make it (hdfs dfs -mkdir -p {redact(above)}), or"
            " correct the URL"
        )
    except StorageError:
        pass  # it cannot be told
    finally:
        await store.aclose()
    return ""


async def check_place(url: str) -> None:
    """For a folder that the first who writes makes: whether it can be there.

    Raises: NoSuchPlace for a typo: an unknown scheme, a parent folder or a bucket that does not exist.
    """
    store = open_store(url)
    try:
        try:
            found = await store.list("")
        except StorageError as error:
            if not isinstance(error, NotFound):
                return  # whoever uses the store says so
            found = []
        why = "" if found else await why_misplaced(url)
    finally:
        await store.aclose()
    if why:
        raise NoSuchPlace(why)


def _why_not_local(url: str, path: str) -> str:
    parent = os.path.dirname(path)
    if os.path.exists(path) or os.path.isdir(parent):
        return ""
    if os.path.exists(parent):
        return f"{redact(url)}: {parent} is no folder: correct the path"
    return (
        f"{redact(url)}: its parent folder {parent} does not exist: make it (mkdir -p {shlex.quote(parent)}), or"
        " correct the path"
    )
