"""The first reads of a start: prefetched by the trace of earlier starts, and recorded for later ones.

One recording a mount, of the workload that it was mounted for: later jobs on it find in the kernel's page cache
the blocks that the first one has read. It ends when the job reports that it has started, or when it is full.
Without that report it counts only if no other recording is known.

Most starts read hot files ahead through the mount. So their recording has no information on blocks that were hot
before, only on further ones. A random share of starts therefore reads nothing ahead and records all accesses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from bootseer import aio
from bootseer.blocks.prefetch import Phase, Prefetcher
from bootseer.blocks.recorder import Recorder
from bootseer.blocks.trace import Trace, with_known
from bootseer.errors import BootseerError
from bootseer.jitter import jitter
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon import io_priority as hot_first
from bootseer.mounts.tree_daemon.parts import DaemonParts
from bootseer.mounts.tree_daemon.prefetch import PrefetchWorker, end_spare_worker
from bootseer.mounts.tree_daemon.prefetch_worker import PrefetchOrder
from bootseer.mounts.tree_daemon.settings import Settings

_log = get_logger(__name__)

APART_BLOCKS = 256  # from so many on another process pays off
SHARE_WITHIN_S = 10.0  # all nodes of a job end their recordings at about the same time: the delays order them
WHOLE = "whole"  # the prefetch of everything; others are named after their workload


class HotBlocks:
    """Prefetches and the access trace of one mount. For one event loop."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        parts: DaemonParts,
        settings: Settings,
        digest: str,
        root: str,
        runtime: str,
    ) -> None:
        """Args: group: of its tasks; root: where the tree will be mounted; runtime: directory of this user."""
        self._group = group
        self.recorder = Recorder(0)
        self.recording = "off"  # on, full, done
        self.trace_where = ""  # place of the trace that was found
        self._parts, self._settings, self._digest, self._root = parts, settings, digest, root
        self._runtime = runtime
        self._reads_ahead = jitter() < settings.read_ahead_share
        self._is_shown = False
        self._prefetchers: dict[str, Prefetcher] = {}
        self._workers: dict[str, PrefetchWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: Trace | None = None
        self._trace_searched = asyncio.Event()  # the trace of the own workload was searched for

    def begin(self) -> None:
        """Begin with the own workload."""
        self._spawn(self._begin_own())

    def begin_recording(self) -> None:
        """Begin to record, as the tree is about to be mounted."""
        if self._settings.records:
            self.recorder = Recorder(self._parts.index.block_count)
            self.recording = "on"

    def note_shown(self) -> None:
        """Notify the workers that the tree can be read through its mount."""
        self._is_shown = True
        for worker in self._workers.values():
            worker.note_shown()

    def note_demand(self, numbers: range) -> None:
        """Record that a reader waits for these blocks."""
        for name, prefetcher in self._prefetchers.items():
            if prefetcher.is_guess:
                prefetcher.note_demand(numbers[-1])
                if name in self._workers:
                    self._workers[name].note_demand(numbers[-1])

    def prefetch(self, workload: str) -> None:
        """Prefetch in the background, if there is a trace; each workload once."""
        if workload not in self._prefetchers:
            self._spawn(self._prefetch(workload))

    def stream(self, after_s: float = 0.0) -> None:
        """Fetch all missing blocks while no reader waits."""
        self._spawn(self._stream(after_s))

    def run_later(self, work: Awaitable[None]) -> None:
        """Run other work in the background."""
        self._spawn(work)

    async def end_recording(self, *, is_started: bool) -> bool:
        """Store the recording; return whether there was one."""
        if self.recording != "on":
            return False
        self.recording = "done"
        self.recorder.finish()
        await self._trace_searched.wait()
        recorded = self.recorder.trace(self._digest, self._settings.workload)
        is_known = self._known is not None and self._known.workload == self._settings.workload
        if recorded is not None and is_known and self._has_read_ahead(self._settings.workload):
            assert self._known is not None
            recorded = with_known(recorded, self._known)
        if recorded is None or (is_known and not is_started):
            return False
        merged = await self._parts.traces.add(recorded, self._known if is_known else None)
        if self._settings.shares and is_started and not is_known:
            self._spawn(self._share(merged))
        return True

    async def end(self) -> None:
        """Cancel background work, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._trace_searched.set()

    def statistics(self) -> dict[str, Any]:
        recorder = self.recorder
        is_full = self.recording == "on" and not recorder.is_on
        return {
            "prefetch": {name: self._progress(name) for name in self._prefetchers},
            "recording": "full" if is_full else self.recording,
            "touched_blocks": len(recorder.seen) - recorder.seen.count(0),
            "trace": self.trace_where,
            "read_ahead": sum(each.fetched.read_ahead for each in self._workers.values()),
        }

    def block_statistics(self) -> dict[str, float]:
        """Return the sum of `BlockFetcher.statistics` of all fetchers of this mount."""
        found = self._parts.block_statistics()
        for worker in self._workers.values():
            for name, value in worker.fetched.blocks.items():
                found[name] = found.get(name, 0.0) + value
        return found

    def _progress(self, name: str) -> dict[str, float | str]:
        own = self._prefetchers[name].statistics()
        worker = self._workers.get(name)
        if worker is None or not worker.fetched.prefetch:
            return own
        if own["phase"] == Phase.NEW.value:
            return worker.fetched.prefetch
        return {**own, "hot_s": float(own["hot_s"]) + float(worker.fetched.prefetch["hot_s"])}

    async def _share(self, recorded: Trace) -> None:
        if self._parts.peers_path:
            await asyncio.sleep(jitter() * SHARE_WITHIN_S)
        if await self._parts.traces.share(recorded):
            _log.info("the trace is published, as the store had none of this workload")

    async def _begin_own(self) -> None:
        try:
            try:
                found = await self._parts.traces.find(self._settings.workload)
                if found is not None:
                    self._known, self.trace_where = found.trace, found.where
            finally:
                self._trace_searched.set()
            if not self._settings.prefetches:
                return
            await self._parts.connect_peers()
            if found is not None:
                await self._run_hot(self._settings.workload, found.trace.hot(), self._may_read_ahead(found.trace))
            elif self._parts.index.stored_bytes <= self._settings.whole_bytes:
                every = range(self._parts.index.block_count)
                await self._run_hot(self._settings.workload, every, False, is_guess=True)
        finally:
            await aio.run_io(end_spare_worker)

    async def _prefetch(self, workload: str) -> None:
        found = await self._parts.traces.find(workload)
        if found is not None and workload not in self._prefetchers:
            await self._run_hot(workload, found.trace.hot(), self._may_read_ahead(found.trace))

    async def _run_hot(
        self, name: str, hot: Sequence[int], may_read_ahead: bool, *, is_guess: bool = False
    ) -> None:
        """Fetch many blocks in another process; few, or the remaining ones, in this one."""
        prefetcher = self._prefetchers[name] = Prefetcher(self._parts.fetcher, hot, is_guess=is_guess)
        with hot_first.fetching_hot(self._runtime):
            await self._run_apart(name, hot, may_read_ahead, is_guess)
            await prefetcher.run()

    async def _run_apart(self, name: str, hot: Sequence[int], may_read_ahead: bool, is_guess: bool) -> None:
        """Fetch blocks in another process, if they are many."""
        parts = self._parts
        root = self._root if len(hot) >= APART_BLOCKS and may_read_ahead else ""
        missing = await aio.run_io(parts.tree_cache.missing, hot)
        if (root or len(missing) >= APART_BLOCKS) and not parts.tree_cache.full_reason:
            worker = self._workers[name] = PrefetchWorker()
            if self._is_shown:
                worker.note_shown()
            settings = msgspec.structs.replace(self._settings, peers=parts.peers_path)
            order = PrefetchOrder(
                settings=settings,
                digest=self._digest,
                hot=list(hot),
                index=parts.index_bytes,
                root=root,
                is_guess=is_guess,
            )
            await worker.run(order)

    def _may_read_ahead(self, trace: Trace) -> bool:
        """Return whether read-ahead is allowed: it must not enter a recording of another program."""
        is_own = trace.workload == self._settings.workload
        is_recorded = self._settings.records and self.recording != "done"
        return self._reads_ahead and (is_own or not is_recorded)

    def _has_read_ahead(self, workload: str) -> bool:
        worker = self._workers.get(workload)
        return worker is not None and worker.fetched.read_ahead > 0

    async def _stream(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if WHOLE not in self._prefetchers:
            rate = self._settings.cold_bytes_per_s
            whole = Prefetcher(self._parts.fetcher, is_whole=True, max_bytes_per_s=rate)
            self._prefetchers[WHOLE] = whole
            await whole.run()

    def _spawn(self, work: Awaitable[None]) -> None:
        """Run work in the background; its errors are only logged."""

        async def run() -> None:
            try:
                await work
            except BootseerError as error:
                _log.info("%s", error)
            except Exception as error:
                _log.info("internal error in the background: %s: %s", type(error).__name__, error)

        task = self._group.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
