"""Hot imports of an environment: modules that ranks import before their first step, for nodes without a record.

The node that built the environment and ran ranks in it publishes the list. Nodes that restore the environment
import the modules before they fork ranks, like a node with its own record (launcher/ranks/fork/hot_imports.py).
Access traces have the same rule of trust: a trusted key has signed the list, or the store belongs to this user. If
the list cannot be read, the start is only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from bootseer import aio
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.trust import KeyDirectory, Trust, seal
from bootseer.trust.owners import has_owners

_log = get_logger(__name__)

FORMAT = "bootseer-imports/1"
PAYLOAD_TYPE = "application/vnd.bootseer.imports.v1+json"
MAX_ENVELOPE_BYTES = 8 << 20
MAX_MODULES, MAX_NAME_CHARS = 20_000, 200  # the limits of the launcher

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class HotImports(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The payload, for one tree and one workload (bootseer.blocks.trace.workload_key)."""

    format: str = FORMAT
    tree: str
    workload: str
    modules: Annotated[list[_Name], msgspec.Meta(max_length=MAX_MODULES)]  # in the order of their import


async def read(store: Store, tree: str, workload: str, trust: Trust) -> list[str]:
    """Read names of modules, of which only the length is checked; [] if there is no trusted list."""
    path = _path(tree, workload)
    try:
        found = await trust.fetch(store, path, PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE_BYTES)
        return _decode(found.payload, tree, workload, f"{store.url.rstrip('/')}/{path}").modules
    except NotFound:
        return []
    except BootseerError as error:
        _log.info("a list of imports is not used: %s", error)
        return []


async def share(store: Store, tree: str, workload: str, modules: Sequence[str], trust: Trust) -> bool:
    """Publish a list if the store has none of this workload and this user would trust it; return whether it did.

    Raises: ConfigError for a key that cannot be used; StorageError.
    """
    key = await aio.run_io(lambda: KeyDirectory.find().read_private())
    if not modules or (key is None and not has_owners(store.url)):
        return False
    path = _path(tree, workload)
    try:
        await store.stat(path)
        return False
    except NotFound:
        named = [name for name in modules if 0 < len(name) <= MAX_NAME_CHARS][:MAX_MODULES]
        data = msgspec.json.encode(HotImports(tree=tree, workload=workload, modules=named))
        try:
            await store.publish(path, seal(data, PAYLOAD_TYPE, key), if_absent=True)
        except AlreadyExists:
            return False  # another node was faster: its list is not replaced, and not deleted if untrusted
    if await read(store, tree, workload, trust):
        return True
    await store.delete(path)  # else it would prevent others from publishing a trusted one
    return False


def _decode(data: bytes, tree: str, workload: str, where: str) -> HotImports:
    """Decode a list. Raises: IntegrityError if it is invalid, or not for this tree and workload."""
    try:
        found = msgspec.json.decode(data, type=HotImports)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not a list of hot imports: {error}") from error
    if (found.format, found.tree, found.workload) != (FORMAT, tree, workload):
        raise IntegrityError(f"{where}: is for another tree, workload or format: {found.format[:80]!r}")
    return found


def _path(tree: str, workload: str) -> str:
    return f"imports/{tree}/{workload}.json"
