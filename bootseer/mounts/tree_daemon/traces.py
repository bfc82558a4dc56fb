"""Access traces of a mounted tree: finding the one to prefetch by, and storing a recording.

Recordings of this node are in the tree's cache directory, merged; they go before those in the store. A stored
trace is trusted if a trusted key signed it or the store is this user's own. A trace that cannot be read or stored
costs a start its prefetch, never more.

A published trace is also merged into `any.json` beside it: a web server cannot be listed, and a prefetch from
there knows no workload's key. Where a store can be listed that file is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.blocks import trace as traces
from bootseer.blocks.trace import ANY_WORKLOAD, MAX_PAYLOAD_BYTES, Trace
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError, NotFound
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.storage.small_files import list_if_there
from bootseer.trust import KeyDirectory, SigningKey, Trust, seal
from bootseer.trust.owners import has_owners

_log = get_logger(__name__)

PAYLOAD_TYPE = "application/vnd.bootseer.trace.v1+json"
MAX_ENVELOPE_BYTES = 16 << 20
ALL_TRACES = "any"  # the name of the merge of all traces of a store; the others are named by workload
_STORED = re.compile(r"([0-9a-f]{16})\.json")


class FoundTrace(NamedTuple):
    trace: Trace
    where: str


class Traces:
    """The traces of one tree. `folder`: of its cache."""

    def __init__(
        self,
        folder: str,
        digest: str,
        block_count: int,
        store: Store,
        trust: Trust,
    ) -> None:
        self._directory, self._digest, self._block_count = folder, digest, block_count
        self._store, self._trust = store, trust

    async def find(self, workload: str) -> FoundTrace | None:
        """Return the trace of a workload, else one for any workload; None when there is neither."""
        for each in dict.fromkeys((workload, ANY_WORKLOAD)):
            found = await aio.run_io(self._read_own, each) or await self._read_stored(each)
            if found is not None:
                return found
        return None

    async def add(self, recorded: Trace, before: Trace | None) -> Trace:
        """Merge a recording with the known trace of its workload, and store that on this node."""
        same = before if before is not None and before.workload == recorded.workload else None
        merged = traces.prune(traces.merge([recorded] if same is None else [recorded, same]))
        await aio.run_io(self._keep, merged)
        return merged

    async def share(self, trace: Trace) -> bool:
        """Publish a trace as `share_trace` does."""
        return await share_trace(self._store, trace, self._block_count, self._trust)

    def own_path(self, workload: str) -> str:
        """Return the file with the recordings of this node."""
        return os.path.join(self._directory, _own_name(workload))

    def _read_own(self, workload: str) -> FoundTrace | None:
        path = self.own_path(workload)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb", buffering=0) as file:
                data = file.read(MAX_PAYLOAD_BYTES + 1)
            return FoundTrace(traces.decode(data, self._digest, self._block_count, path), path)
        except FileNotFoundError:
            return None
        except (OSError, BootseerError) as error:
            _log.info("a trace is not used: %s", error)
            return None

    async def _read_stored(self, workload: str) -> FoundTrace | None:
        return await read_stored(self._store, self._digest, workload, self._block_count, self._trust)

    def _keep(self, trace: Trace) -> None:
        try:
            write_whole(self._directory, _own_name(trace.workload), traces.encode(trace))
        except (OSError, BootseerError) as error:
            _log.info("%s: the recording is not stored: %s", self.own_path(trace.workload), error)


# ---- in a store ----------------------------------------------------------------------------------------------


async def list_stored(store: Store, digest: str) -> list[str]:
    """List the workloads with traces in a store. Raises: StorageError, also for a web server without lists."""
    entries = await list_if_there(store, f"traces/{digest}")
    return [matched[1] for entry in entries if (matched := _STORED.fullmatch(entry.name)) is not None]


async def read_stored(store: Store, digest: str, name: str, block_count: int, trust: Trust) -> FoundTrace | None:
    """Read a trusted trace; return None when there is none, or another one, which is logged.

    Args: name: a workload, or ALL_TRACES.
    """
    path = _stored_path(digest, name)
    where = f"{store.url.rstrip('/')}/{path}"
    try:
        found = await trust.fetch(store, path, PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE_BYTES)
        trace = traces.decode(found.payload, digest, block_count, where)
    except NotFound:
        return None
    except BootseerError as error:
        _log.info("a trace is not used: %s", error)
        return None
    if trace.workload != (ANY_WORKLOAD if name == ALL_TRACES else name):
        _log.info("a trace is not used: %s: is that of another workload, %s", where, trace.workload)
        return None
    return FoundTrace(trace, where)


async def publish_traces(
    store: Store,
    found: Sequence[Trace],
    block_count: int,
    key: SigningKey | None,
    trust: Trust,
) -> None:
    """Write traces of one tree to its store, and then the merge of all its traces.

    Raises: StorageError.
    """
    if not found:
        return
    digest = found[0].tree
    for trace in found:
        await store.publish(_stored_path(digest, trace.workload), seal(traces.encode(trace), PAYLOAD_TYPE, key))
    await renew_all(store, digest, block_count, key, trust, found)


async def share_trace(store: Store, trace: Trace, block_count: int, trust: Trust) -> bool:
    """Publish a trace if the store has none of its workload, and this user would trust it; return whether it did.

    Raises: ConfigError for an unusable key; StorageError.
    """
    key = await aio.run_io(lambda: KeyDirectory.find().read_private())
    if key is None and not has_owners(store.url):
        return False
    path = _stored_path(trace.tree, trace.workload)
    try:
        await store.stat(path)
        return False
    except NotFound:
        await publish_traces(store, [trace], block_count, key, trust)
    if await read_stored(store, trace.tree, trace.workload, block_count, trust) is not None:
        return True
    await store.delete(path)  # otherwise it would block a better one
    await renew_all(store, trace.tree, block_count, key, trust)
    return False


async def renew_all(
    store: Store,
    digest: str,
    block_count: int,
    key: SigningKey | None,
    trust: Trust,
    found: Sequence[Trace] = (),
) -> None:
    """Rewrite `any.json` from all trusted traces in the store; without any it is deleted.

    Args: found: traces that were just written, regardless of trust in their key.
    Raises: StorageError.
    """
    known = {trace.workload: trace for trace in found}
    for workload in await list_stored(store, digest):
        if workload not in known:
            there = await read_stored(store, digest, workload, block_count, trust)
            if there is not None:
                known[workload] = there.trace
    path = _stored_path(digest, ALL_TRACES)
    if known:
        data = await aio.run_io(lambda: seal(traces.encode(merge_all(known.values())), PAYLOAD_TYPE, key))
        await store.publish(path, data)
    else:
        await store.delete(path)


def merge_all(found: Iterable[Trace]) -> Trace:
    """PURE: merge the traces of all workloads of a tree into one, for any workload.

    Blocks that are hot in one of them are hot in it, regardless of the runs of others: without a workload the hot
    blocks of all are wanted, as where a store can be listed.
    """
    same = [msgspec.structs.replace(trace, workload=ANY_WORKLOAD) for trace in found]
    whole = traces.merge(same)
    hot = {number for trace in same for number in trace.hot()}
    least = (whole.runs + 1) // 2
    seen = [
        max(times, least) if number in hot else times
        for number, times in zip(whole.blocks, whole.seen, strict=True)
    ]
    return traces.prune(traces.merge([msgspec.structs.replace(whole, seen=seen)]))  # merged, it is in order


def _own_name(workload: str) -> str:
    return f"trace-{workload}.json"


def _stored_path(digest: str, name: str) -> str:
    return f"traces/{digest}/{name}.json"
