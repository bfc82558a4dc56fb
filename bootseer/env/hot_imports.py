"""Hot imports of an environment: what ranks had imported up to their first step, for nodes that have not run it.

Who built the environment and ran ranks in it shares the list; who has it from the store imports that before ranks
are forked, as a node does that has a record of its own (launcher/ranks/hot_imports.py). Believed like hot traces:
a trusted key signed it or the store is this user's own. Costs a start nothing but time where it cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from bootseer import aio
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound
from bootseer.storage import Store
from bootseer.trust import KeyFolder, Trust, seal
from bootseer.trust.owners import has_owners

FORMAT = "bootseer-imports/1"
PAYLOAD_TYPE = "application/vnd.bootseer.imports.v1+json"
MOST_ENVELOPE_BYTES = 8 << 20
MOST_MODULES, MOST_NAME_CHARS = 20_000, 200  # as the launcher takes them

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME_CHARS)]


class HotImports(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The payload: of one tree and one workload (bootseer.blocks.trace.workload_key)."""

    format: str = FORMAT
    tree: str
    workload: str
    modules: Annotated[list[_Name], msgspec.Meta(max_length=MOST_MODULES)]  # in the order of their import


async def read(store: Store, tree: str, workload: str, trust: Trust, log: Callable[[str], object]) -> list[str]:
    """Names of modules, which are not checked for more than their length; [] if there are none to be believed."""
    path = _path(tree, workload)
    try:
        found = await trust.fetch(store, path, PAYLOAD_TYPE, most_bytes=MOST_ENVELOPE_BYTES)
        return _decode(found.payload, tree, workload, f"{store.url.rstrip('/')}/{path}").modules
    except NotFound:
        return []
    except BootseerError as error:
        log(f"a list of imports is not used: {error}")
        return []


async def share(
    store: Store, tree: str, workload: str, modules: Sequence[str], trust: Trust, log: Callable[[str], object]
) -> bool:
    """Publishes them if the store has none of this workload, and this user would believe them; whether it did.

    Raises: ConfigError for a key that cannot be used; StorageError.
    """
    key = await aio.run_io(lambda: KeyFolder.find().read_private())
    if not modules or (key is None and not has_owners(store.url)):
        return False
    path = _path(tree, workload)
    try:
        await store.stat(path)
        return False
    except NotFound:
        named = [name for name in modules if 0 < len(name) <= MOST_NAME_CHARS][:MOST_MODULES]
        data = msgspec.json.encode(HotImports(tree=tree, workload=workload, modules=named))
        try:
            await store.publish(path, seal(data, PAYLOAD_TYPE, key), if_absent=True)
        except AlreadyExists:
            return False  # another node was faster: neither replaced nor, where we do not believe it, deleted
    if await read(store, tree, workload, trust, log):
        return True
    await store.delete(path)  # else it would keep others from doing better
    return False


def _decode(data: bytes, tree: str, workload: str, where: str) -> HotImports:
    """Raises: IntegrityError for anything that is none, or not of this tree and workload."""
    try:
        found = msgspec.json.decode(data, type=HotImports)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is no list of hot imports: {error}") from error
    if (found.format, found.tree, found.workload) != (FORMAT, tree, workload):
        raise IntegrityError(f"{where}: is of another tree, workload or format: {found.format[:80]!r}")
    return found


def _path(tree: str, workload: str) -> str:
    return f"imports/{tree}/{workload}.json"
