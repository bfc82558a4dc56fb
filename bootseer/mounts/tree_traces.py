"""Hot traces of a mounted tree: the one to prefetch by, and what becomes of a recording.

Recordings of this node are in the tree's cache folder, merged; they go before what the store has, which is
believed if a trusted key signed it or the store is this user's own. A trace that cannot be read or kept costs a
start its prefetch, never more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks import trace as traces
from bootseer.blocks.trace import ANY_WORKLOAD, MOST_PAYLOAD_BYTES, Trace
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError, NotFound
from bootseer.storage import Store
from bootseer.trust import KeyFolder, Trust, seal

PAYLOAD_TYPE = "application/vnd.bootseer.trace.v1+json"
MOST_ENVELOPE_BYTES = 16 << 20


class FoundTrace(NamedTuple):
    """A trace, and where it is from."""

    trace: Trace
    where: str


class Traces:
    """Those of one tree. `folder`: of its cache."""

    def __init__(
        self,
        folder: str,
        digest: str,
        block_count: int,
        store: Store,
        trust: Trust,
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._digest, self._block_count = folder, digest, block_count
        self._store, self._trust, self._log = store, trust, log

    async def find(self, workload: str) -> FoundTrace | None:
        """The trace of a workload, else one for anything; None when there is neither."""
        for each in dict.fromkeys((workload, ANY_WORKLOAD)):
            found = await aio.run_io(self._read_own, each) or await self._read_stored(each)
            if found is not None:
                return found
        return None

    async def add(self, recorded: Trace, before: Trace | None) -> Trace:
        """Merges a recording with what was known of its workload, and keeps that on this node."""
        same = before if before is not None and before.workload == recorded.workload else None
        merged = traces.prune(traces.merge([recorded] if same is None else [recorded, same]))
        await aio.run_io(self._keep, merged)
        return merged

    async def publish(self, trace: Trace) -> None:
        """Puts a trace into the store, signed if this user has a key.

        Raises: ConfigError for a key that cannot be used; StorageError.
        """
        key = await aio.run_io(lambda: KeyFolder.find().read_private())
        data = seal(traces.encode(trace), PAYLOAD_TYPE, key)
        await self._store.publish(_stored_path(self._digest, trace.workload), data)

    def own_path(self, workload: str) -> str:
        """The file with the recordings of this node."""
        return os.path.join(self._folder, _own_name(workload))

    def _read_own(self, workload: str) -> FoundTrace | None:
        path = self.own_path(workload)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb", buffering=0) as file:
                data = file.read(MOST_PAYLOAD_BYTES + 1)
            return FoundTrace(traces.decode(data, self._digest, self._block_count, path), path)
        except FileNotFoundError:
            return None
        except (OSError, BootseerError) as error:
            self._log(f"a trace is not used: {error}")
            return None

    async def _read_stored(self, workload: str) -> FoundTrace | None:
        path = _stored_path(self._digest, workload)
        where = f"{self._store.url.rstrip('/')}/{path}"
        try:
            found = await self._trust.fetch(self._store, path, PAYLOAD_TYPE, most_bytes=MOST_ENVELOPE_BYTES)
            trace = traces.decode(found.payload, self._digest, self._block_count, where)
            if trace.workload != workload:
                self._log(f"{where}: is the trace of another workload")
                return None
            return FoundTrace(trace, where)
        except NotFound:
            return None
        except BootseerError as error:
            self._log(f"a trace is not used: {error}")
            return None

    def _keep(self, trace: Trace) -> None:
        try:
            write_whole(self._folder, _own_name(trace.workload), traces.encode(trace))
        except (OSError, BootseerError) as error:
            self._log(f"{self.own_path(trace.workload)}: the recording is not kept: {error}")


def _own_name(workload: str) -> str:
    return f"trace-{workload}.json"


def _stored_path(digest: str, workload: str) -> str:
    return f"traces/{digest}/{workload}.json"
