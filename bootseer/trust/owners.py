"""Whose a store is: where nobody but this user (or root) can have put a file, it is believed without a signature.

Local folders, HDFS with permissions, and memory of this process can be checked; of everything else nobody can tell
who wrote it. What was read before the check is compared with what is there after it, so that a place which was
exchanged in between does not count.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from bootseer import aio
from bootseer.errors import IntegrityError, NotFound, PermissionDenied
from bootseer.storage import Store
from bootseer.storage.paths import check_path, scheme_of
from bootseer.trust.owned_files import NotOwnedError, read_owned
from bootseer.trust.reading import read_whole

if TYPE_CHECKING:
    from bootseer.storage.hdfs import HdfsStore

LOCAL_S = 30.0  # a network file system may hang
_HDFS = ("hdfs", "webhdfs", "swebhdfs")
_OTHERS_WRITE = 0o022
_STICKY = 0o1000


def has_owners(url: str) -> bool:
    """PURE: whether it can be told at all who wrote to a store of this kind."""
    return scheme_of(url) in ("file", "memory", *_HDFS)


async def why_not_owned(store: Store, path: str, data: bytes) -> str:
    """Why `data`, read from `path`, may come from somebody else than this user or root; "" if it cannot."""
    scheme = scheme_of(store.url)
    if scheme == "file":
        from bootseer.storage.local import LocalStore

        if isinstance(store, LocalStore):
            return await _why_not_local(store, path, data)
    if scheme == "memory":
        from bootseer.storage.memory import MemoryStore

        if isinstance(store, MemoryStore):
            return ""
    if scheme in _HDFS:
        from bootseer.storage.hdfs import HdfsStore

        if isinstance(store, HdfsStore):
            return await _why_not_hdfs(store, path, data)
    return f"of a store like this one ({scheme or 'unknown'}) nobody can tell who wrote to it"


async def _why_not_local(store: Store, path: str, data: bytes) -> str:
    root = os.fsdecode(unquote_to_bytes(store.url.removeprefix("file://")))
    full = os.path.join(root, check_path(store.url, path))
    try:
        found, _ = await aio.run_apart(lambda: read_owned(full, most_bytes=len(data)), timeout_s=LOCAL_S)
    except NotOwnedError as error:
        return str(error)
    except FileNotFoundError:
        return f"{full} is gone"
    except TimeoutError:
        return f"{full} could not be looked at within {LOCAL_S:g} s"
    return "" if found == data else f"{full} was exchanged while it was read"


async def _why_not_hdfs(store: HdfsStore, path: str, data: bytes) -> str:
    try:
        chain, depth = await store.lineage(path)
        if reason := why_not_lineage(
            [(full, each.owner, each.mode) for full, each in chain.items()], store.user, depth
        ):
            return reason
        if not store.has_permissions:
            return "this HDFS has permissions switched off (dfs.permissions.enabled)"
        return "" if await read_whole(store, path, len(data)) == data else "it was exchanged while it was read"
    except (NotFound, PermissionDenied, IntegrityError) as error:
        return str(error)


def why_not_lineage(chain: list[tuple[str, str, int]], user: str, depth: int) -> str:
    """The same for paths, owners and modes from / down to a file; `depth`: which one is the store's root.

    Folders above the store may also belong to the owner of /, who is the superuser and can do anything anyway.
    """
    for place, (path, owner, mode) in enumerate(chain):
        if not owner or mode < 0:
            return f"HDFS does not say whose {path} is"
        if owner != user and (place >= depth or owner != chain[0][1]):
            return f"{path} belongs to user {owner}, not to {user}"
        if mode & _OTHERS_WRITE and (place >= depth or not mode & _STICKY):
            return f"{path} can be written to by others (mode {mode & 0o7777:04o}): hdfs dfs -chmod go-w {path}"
    return ""
