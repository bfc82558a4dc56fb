"""Ownership of stores: a file that only this user (or root) can have written is trusted without a signature.

Local directories, HDFS with permissions, and memory of this process can be checked. For other stores, the writer
is unknown. After the check the file is read again and compared, so that a file exchanged in between does not
count.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from bootseer import aio
from bootseer.errors import IntegrityError, NotFound, PermissionDenied
from bootseer.storage import Store
from bootseer.storage.paths import check_path, scheme_of
from bootseer.storage.small_files import read_small
from bootseer.trust.owned_files import NotOwnedError, read_owned

if TYPE_CHECKING:
    from bootseer.storage.hdfs.store import HdfsStore

LOCAL_S = 30.0  # a network file system may hang
_HDFS = ("hdfs", "webhdfs", "swebhdfs")
_OTHERS_WRITE = 0o022
_STICKY = 0o1000


def has_owners(url: str) -> bool:
    """PURE: return whether stores of this kind have known writers."""
    return scheme_of(url) in ("file", "memory", *_HDFS)


async def why_not_trusted_owner(store: Store, path: str, data: bytes) -> str:
    """Return why `data`, read from `path`, may be of another user than this one or root; "" if it cannot."""
    scheme = scheme_of(store.url)
    if scheme == "file":
        from bootseer.storage.local.store import LocalStore

        if isinstance(store, LocalStore):
            return await _why_not_local(store, path, data)
    if scheme == "memory":
        from bootseer.storage.memory import MemoryStore

        if isinstance(store, MemoryStore):
            return ""
    if scheme in _HDFS:
        from bootseer.storage.hdfs.store import HdfsStore

        if isinstance(store, HdfsStore):
            return await _why_not_hdfs(store, path, data)
    return f"the writers of a store of this kind ({scheme or 'unknown'}) are unknown"


async def _why_not_local(store: Store, path: str, data: bytes) -> str:
    root = os.fsdecode(unquote_to_bytes(store.url.removeprefix("file://")))
    full = os.path.join(root, check_path(store.url, path))
    try:
        found, _ = await aio.run_abandonable(lambda: read_owned(full, max_bytes=len(data)), timeout_s=LOCAL_S)
    except NotOwnedError as error:
        return str(error)
    except FileNotFoundError:
        return f"{full} no longer exists"
    except TimeoutError:
        return f"{full} could not be inspected within {LOCAL_S:g} s"
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
        return "" if await read_small(store, path, len(data)) == data else "it was exchanged while it was read"
    except (NotFound, PermissionDenied, IntegrityError) as error:
        return str(error)


def why_not_lineage(chain: list[tuple[str, str, int]], user: str, depth: int) -> str:
    """Do the same for paths, owners and modes from / down to a file; `depth`: the index of the store's root.

    Directories above the store may also belong to the owner of /: the superuser can do anything anyway.
    """
    for place, (path, owner, mode) in enumerate(chain):
        if not owner or mode < 0:
            return f"HDFS does not report the owner of {path}"
        if owner != user and (place >= depth or owner != chain[0][1]):
            return f"{path} belongs to user {owner}, not to {user}"
        if mode & _OTHERS_WRITE and (place >= depth or not mode & _STICKY):
            return f"{path} can be written to by others (mode {mode & 0o7777:04o}): hdfs dfs -chmod go-w {path}"
    return ""
