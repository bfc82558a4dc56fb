"""The daemon of a mounted tree: its life. It uses parts.py, serves the kernel, and answers at a socket.

It has an event loop for the store and the socket, threads that answer the kernel (device/server.py), and threads
for slow work. It ends at `stop`, at a signal, or by itself when the tree is no longer used, and leaves nothing
behind. It never reads from its own mount.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from bootseer import aio
from bootseer.blocks.device import open_device
from bootseer.errors import BootseerError, StorageError
from bootseer.ipc.replies import from_error
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon.faults import TreeFaults
from bootseer.mounts.tree_daemon.hot import HotBlocks
from bootseer.mounts.tree_daemon.listener import Answer, Listener
from bootseer.mounts.tree_daemon.parts import DaemonParts, open_parts
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.mounts.tree_daemon.stack import TreeMounts
from bootseer.mounts.tree_daemon.validation import SuppliedIndex
from bootseer.storage import redact

_log = get_logger(__name__)

CHECK_S = 1.0  # between checks whether it is in use
ANSWERS_S = 2.0  # at the end, for pending answers


class DaemonState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    ENDING = "ending"
    ENDED = "ended"


class Daemon:
    """One tree, from the start to the end."""

    def __init__(
        self,
        place: TreeDirectory,
        settings: Settings,
        tell: Callable[[Mapping[str, Any]], None],
        started_s: float,
        vetted: SuppliedIndex | None = None,
    ) -> None:
        self.state = DaemonState.STARTING
        self.place, self.settings = place, settings
        self.started_s = started_s
        self.ready_s = 0.0  # how long the start took
        self.failure: BootseerError | None = None
        self.idle_s = settings.idle_s
        self.parts: DaemonParts | None = None
        self.hot: HotBlocks | None = None
        self.faults: TreeFaults | None = None
        self.stack = TreeMounts(place)
        self.listener: Listener
        self.is_decided = asyncio.Event()  # no longer STARTING
        self.wants_end = asyncio.Event()
        self.is_unmounted = asyncio.Event()
        self.mounting = asyncio.Lock()  # held to mount, to unmount, or to prevent both
        self._tell = tell
        self._vetted = vetted
        self._opening: asyncio.Timeout | None = None
        self._used_s = time.monotonic()
        self._reads = 0
        self._group: asyncio.TaskGroup

    async def run(self, signals: Sequence[signal.Signals], answer: Answer) -> int:
        """Run until the end; return the exit status. Args: signals: end it; answer: to requests at its socket."""
        try:
            self.listener = Listener(self.place.control_path, answer, on_change=self.record_use)
        except OSError as error:
            self._tell(from_error(StorageError(f"{self.place.control_path}: {error.strerror}")))
            return 1
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.request_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        async with asyncio.TaskGroup() as group:
            self._group = group
            accepting = group.create_task(self.listener.accept(group))
            try:
                await self._live()
            finally:
                if self.state is not DaemonState.FAILED:
                    self.state = DaemonState.ENDED
                self.is_unmounted.set()
                self.is_decided.set()
                accepting.cancel()
                await self.listener.finish(ANSWERS_S)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
        return 0 if self.failure is None else self.failure.exit_status

    def request_end(self) -> None:
        """End as soon as possible."""
        is_first = not self.wants_end.is_set()
        self.wants_end.set()
        if is_first and self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    def follow_peers(self, path: str) -> None:
        """Use the peers of another job from now on."""
        if self.parts is not None:
            self.parts.follow_peers(path)

    def record_end(self, why: str) -> None:
        """Record in the journal why reads fail from now on."""
        if self.faults is not None:
            self.faults.journal.note(why)

    def record_use(self) -> None:
        """Record the time of use, as a lease has begun or ended."""
        self._used_s = time.monotonic()

    # ---- from the start to the end -----------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                await self._open_unless_ended(stack)
                self._become_ready()
                await self._until_end()
        except Exception as raised:
            error = _single(raised)
            is_ours = isinstance(error, BootseerError)
            if self.state is DaemonState.STARTING:
                self._fail(
                    error
                    if isinstance(error, BootseerError)
                    else StorageError(
                        f"internal error: {type(error).__name__}: {error}; the log is {self.place.log_path}"
                    )
                )
            if not (is_ours and self.state is DaemonState.FAILED):
                raise

    def _fail(self, error: BootseerError) -> None:
        self.state = DaemonState.FAILED
        self.failure = error
        _log.info("%s: %s", self.place.folder, error)
        self._tell(from_error(error))

    def _become_ready(self) -> None:
        self.state = DaemonState.READY
        self.record_use()
        self.ready_s = self._used_s - self.started_s
        self.is_decided.set()
        self._tell({"ok": self.shown()})
        gc.freeze()
        gc.enable()

    def shown(self) -> dict[str, Any]:
        """Return the data that clients need to use it."""
        return {
            "digest": self.place.digest,
            "state": self.state.value,
            "root": self.place.root,
            "connection": self.stack.connection,
            "pid": os.getpid(),
            "namespace": os.readlink("/proc/self/ns/mnt"),
            "log": self.place.log_path,
            "unreadable": [] if self.faults is None else self.faults.lines,
            "is_damaged": self.faults is not None and self.faults.is_damaged,
        }

    async def _open_unless_ended(self, stack: AsyncExitStack) -> None:
        """Open all parts; a request to end it does not wait for a slow store."""
        try:
            async with asyncio.timeout(None) as self._opening:
                await self._open(stack)
        except TimeoutError as error:
            raise StorageError(f"{self.place.root}: was ended while it was starting") from error
        finally:
            self._opening = None

    async def _open(self, stack: AsyncExitStack) -> None:
        """Open parts and mount; slow steps, and the mount that every tree needs, begin early."""
        async with AsyncExitStack() as begun:  # undone on an error before the tree is up
            begun.push_async_callback(self._unmount)
            mounting = asyncio.create_task(aio.run_io(self.stack.mount))
            begun.push_async_callback(_settle, mounting)
            parts, hot = await self._open_device(stack, mounting)
            begun.pop_all()
        await parts.check()
        await self._recheck(parts)
        hot.run_later(parts.finish())
        await aio.run_io(self.stack.show)
        hot.begin()  # prefetching would compete with the mount for the processor
        hot.note_shown()
        hot.run_later(parts.keep())

    async def _recheck(self, parts: DaemonParts) -> None:
        """Request again the blocks that earlier mounts could not read."""
        if self.faults is not None:
            await aio.run_io(self.faults.load)
            await self.faults.recheck(parts.fetcher)

    async def _open_device(
        self, stack: AsyncExitStack, mounting: asyncio.Task[None]
    ) -> tuple[DaemonParts, HotBlocks]:
        """Open and serve device and metadata. `mounting`: the mount of their directory."""
        parts = self.parts = await open_parts(stack, self.settings, self.place.digest, self._vetted)
        hot = self.hot = HotBlocks(
            self._group, parts, self.settings, self.place.digest, self.place.root, self.place.runtime
        )
        stack.push_async_callback(hot.end)
        metadata = await parts.metadata()
        hot.begin_recording()
        faults = self.faults = TreeFaults(
            self.place.faults_path,
            parts.folder,
            parts.index.block_count,
            redact(self.settings.url),
        )
        opened = open_device(
            parts.fetcher,
            recorder=hot.recorder,
            failed=faults.failed,
            waits=faults.waits,
            missed=hot.note_demand,
        )
        device = await stack.enter_async_context(opened)
        await mounting
        stack.push_async_callback(self._unmount)
        await aio.run_io(self.stack.serve, device, metadata, self.settings.deadline_s, faults.failed_again)
        return parts, hot

    async def _unmount(self) -> None:
        """Unmount; reads fail from now on. Then the place is free for another daemon, while this one cleans up."""
        if self.state is DaemonState.READY:
            self.state = DaemonState.ENDING
        async with self.mounting:
            await aio.run_io(self.stack.unmount)
        self.listener.drop_leases()
        self.is_unmounted.set()

    # ---- while it is used --------------------------------------------------------------------------------------

    async def _until_end(self) -> None:
        assert self.hot is not None
        while not self.wants_end.is_set():
            try:
                async with asyncio.timeout(min(CHECK_S, self.idle_s / 4) if self.idle_s else CHECK_S):
                    await self.wants_end.wait()
            except TimeoutError:
                try:
                    if await self._is_unused():
                        break
                except BootseerError as error:
                    _log.info("%s: %s", self.place.folder, error)
        await self.hot.end_recording(is_started=False)

    async def _is_unused(self) -> bool:
        """Return whether the tree is unused; if so it is unmounted already, as only a trial shows it."""
        if not await aio.run_io(self.stack.is_shown):
            _log.info("%s: was unmounted by another process", self.place.folder)
            self.record_end("it was unmounted by another process")
            return True
        reads = self.stack.statistics().requests
        if reads != self._reads or self.listener.leases:
            self._reads = reads
            self.record_use()
        if not self._is_idle():
            return False
        async with self.mounting:
            if not self._is_idle():
                return False
            if await aio.run_io(self.stack.try_unmount):
                self.state = DaemonState.ENDING
                _log.info("%s: unused for %g s", self.place.folder, self.idle_s)
                return True
            self.record_use()
            return False

    def _is_idle(self) -> bool:
        is_free = not self.listener.leases and time.monotonic() - self._used_s >= self.idle_s
        return is_free and self.idle_s > 0


async def _settle(task: asyncio.Task[None]) -> None:
    """Wait for a task's end, even with an error."""
    await asyncio.gather(task, return_exceptions=True)


def _single(error: Exception) -> Exception:
    """Return the only error of an exception group, or the error itself."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
