"""The daemon of a mounted tree: its life. Parts below it (tree_parts.py), the kernel above, a socket beside it.

It has an event loop for the store and the socket, threads that answer the kernel (flat_server.py), and threads for
what takes long. It ends at `stop`, at a signal, or by itself when nobody uses the tree any more: then nothing of
it is left. It never reads from what it has mounted.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from bootseer import aio
from bootseer.blocks.device import open_device
from bootseer.errors import BootseerError, StorageError
from bootseer.mounts.log import Log
from bootseer.mounts.tree_answers import Answers
from bootseer.mounts.tree_control import from_error
from bootseer.mounts.tree_faults import TreeFaults
from bootseer.mounts.tree_hot import HotBlocks
from bootseer.mounts.tree_listener import Listener
from bootseer.mounts.tree_parts import Parts, open_parts
from bootseer.mounts.tree_places import Place
from bootseer.mounts.tree_settings import Settings
from bootseer.mounts.tree_stack import Stack
from bootseer.mounts.tree_vetting import Vetted
from bootseer.storage import redact

MOST_DESCRIPTORS = 1 << 14
LOOK_S = 1.0  # between looks whether somebody uses it
MOST_LOG_BYTES = 4 << 20  # then it begins anew
ANSWERS_S = 2.0  # at the end, for answers on their way
SWITCH_S = 3e-4  # a thread with an answer for the kernel waits no longer for one that unpacks; by default 5 ms


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    ENDING = "ending"
    ENDED = "ended"


def serve(
    place: Place, ready: int, told: bytes, signals: Sequence[signal.Signals], vetted: Vetted | None = None
) -> int:
    """The whole life of the daemon; its exit status.

    `ready`: a pipe for one line when it can be used, or cannot. `told`: Settings, as JSON. `signals` end it; they
    are blocked yet. `vetted`: the index, if the starter looks at it.
    """
    started_s = time.monotonic()
    gc.disable()  # an index is many objects, none of them garbage
    sys.setswitchinterval(SWITCH_S)
    tell = partial(_tell, ready)
    try:
        settings = msgspec.json.decode(told, type=Settings)
    except msgspec.MsgspecError as error:
        tell(from_error(StorageError(f"what the daemon is told cannot be understood: {error}")))
        return 1
    _allow_descriptors()
    with asyncio.Runner() as runner:
        return runner.run(Daemon(place, settings, tell, started_s, vetted).run(signals))


def _tell(ready: int, said: Mapping[str, Any]) -> None:
    try:
        os.write(ready, msgspec.json.encode(said) + b"\n")
    except OSError:
        pass  # the starter has gone; others may come
    os.close(ready)


def _allow_descriptors() -> None:
    """Each lease is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, MOST_DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST_DESCRIPTORS), hard))


class Daemon:
    """One tree, from the start to the end."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        tell: Callable[[Mapping[str, Any]], None],
        started_s: float,
        vetted: Vetted | None = None,
    ) -> None:
        self._log = Log(_to_log)
        self.state = State.STARTING
        self.place, self.settings = place, settings
        self.started_s = started_s
        self.ready_s = 0.0  # how long the start took
        self.failure: BootseerError | None = None
        self.idle_s = settings.idle_s
        self.parts: Parts | None = None
        self.hot: HotBlocks | None = None
        self.faults: TreeFaults | None = None
        self.stack = Stack(place, self._log)
        self.listener: Listener
        self.is_decided = asyncio.Event()  # no longer STARTING
        self.wants_end = asyncio.Event()
        self.is_unmounted = asyncio.Event()
        self.mounting = asyncio.Lock()  # who has it mounts, unmounts, or wants neither to happen
        self._tell = tell
        self._vetted = vetted
        self._opening: asyncio.Timeout | None = None
        self._used_s = time.monotonic()
        self._reads = 0
        self._group: asyncio.TaskGroup

    async def run(self, signals: Sequence[signal.Signals]) -> int:
        """The exit status."""
        try:
            self.listener = Listener(
                self.place.control_path, Answers(self).answer, on_change=self.note_use, log=self._log
            )
        except OSError as error:
            self._tell(from_error(StorageError(f"{self.place.control_path}: {error.strerror}")))
            return 1
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.want_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        async with asyncio.TaskGroup() as group:
            self._group = group
            accepting = group.create_task(self.listener.accept(group))
            try:
                await self._live()
            finally:
                if self.state is not State.FAILED:
                    self.state = State.ENDED
                self.is_unmounted.set()
                self.is_decided.set()
                accepting.cancel()
                await self.listener.finish(ANSWERS_S)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
        return 0 if self.failure is None else self.failure.exit_status

    def want_end(self) -> None:
        """It ends as soon as it can."""
        is_first = not self.wants_end.is_set()
        self.wants_end.set()
        if is_first and self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    def follow_peers(self, path: str) -> None:
        """Those of another job are asked from now on."""
        if self.parts is not None:
            self.parts.follow_peers(path)

    def note_end(self, why: str) -> None:
        """Whoever still reads there gets errors from now on."""
        if self.faults is not None:
            self.faults.journal.note(why)

    def note_use(self) -> None:
        """Somebody has come or gone."""
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
            if self.state is State.STARTING:
                self._fail(
                    error
                    if isinstance(error, BootseerError)
                    else StorageError(f"a bug: {type(error).__name__}: {error}; the log is {self.place.log_path}")
                )
            if not (is_ours and self.state is State.FAILED):
                raise

    def _fail(self, error: BootseerError) -> None:
        self.state = State.FAILED
        self.failure = error
        self._log(f"{self.place.folder}: {error}")
        self._tell(from_error(error))

    def _become_ready(self) -> None:
        self.state = State.READY
        self.note_use()
        self.ready_s = self._used_s - self.started_s
        self.is_decided.set()
        self._tell({"ok": self.shown()})
        gc.freeze()
        gc.enable()

    def shown(self) -> dict[str, Any]:
        """What others have to know to use it."""
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
        """A store may be slow to answer; who wants it to end does not wait for that."""
        try:
            async with asyncio.timeout(None) as self._opening:
                await self._open(stack)
        except TimeoutError as error:
            raise StorageError(f"{self.place.root}: was ended while it was starting") from error
        finally:
            self._opening = None

    async def _open(self, stack: AsyncExitStack) -> None:
        """What takes long begins early; what every tree needs mounted, too."""
        async with AsyncExitStack() as begun:  # taken back if something fails before the tree is up
            begun.push_async_callback(self._unmount)
            mounting = asyncio.create_task(aio.run_io(self.stack.mount))
            begun.push_async_callback(_settle, mounting)
            parts, hot = await self._open_device(stack, mounting)
            begun.pop_all()
        await parts.check()
        await self._recheck(parts)
        hot.keep_later(parts.finish())
        await aio.run_io(self.stack.show)
        hot.begin()  # what brings blocks would have the processor that shows the tree
        hot.note_shown()
        hot.keep_later(parts.keep())

    async def _recheck(self, parts: Parts) -> None:
        """What could not be read before it was mounted here is asked for once more."""
        if self.faults is not None:
            await aio.run_io(self.faults.load)
            await self.faults.recheck(parts.fetcher)

    async def _open_device(self, stack: AsyncExitStack, mounting: asyncio.Task[None]) -> tuple[Parts, HotBlocks]:
        """All that the tree is shown from. `mounting`: the folder in which device and metadata are seen."""
        parts = self.parts = await open_parts(stack, self.settings, self.place.digest, self._log, self._vetted)
        hot = self.hot = HotBlocks(
            self._group, parts, self.settings, self.place.digest, self.place.root, self.place.runtime, self._log
        )
        stack.push_async_callback(hot.end)
        metadata = await parts.metadata()
        hot.begin_recording()
        faults = self.faults = TreeFaults(
            self.place.faults_path,
            parts.folder,
            parts.index.block_count,
            redact(self.settings.url),
            self._log,
        )
        opened = open_device(
            parts.fetcher, recorder=hot.recorder, log=self._log, failed=faults.failed, waits=faults.waits
        )
        device = await stack.enter_async_context(opened)
        await mounting
        stack.push_async_callback(self._unmount)
        await aio.run_io(self.stack.serve, device, metadata, self.settings.deadline_s, faults.failed_again)
        return parts, hot

    async def _unmount(self) -> None:
        """Readers get errors from here on. Then the place is free for another daemon, while this one tidies up."""
        if self.state is State.READY:
            self.state = State.ENDING
        async with self.mounting:
            await aio.run_io(self.stack.unmount)
        self.listener.drop_leases()
        self.is_unmounted.set()

    # ---- while it is used --------------------------------------------------------------------------------------

    async def _until_end(self) -> None:
        assert self.hot is not None
        while not self.wants_end.is_set():
            try:
                async with asyncio.timeout(min(LOOK_S, self.idle_s / 4) if self.idle_s else LOOK_S):
                    await self.wants_end.wait()
            except TimeoutError:
                try:
                    if await self._is_unused():
                        break
                except BootseerError as error:
                    self._log(f"{self.place.folder}: {error}")
        await self.hot.end_recording(is_started=False)

    async def _is_unused(self) -> bool:
        """Then it is unmounted already: that nothing is above it is found out by trying."""
        if not await aio.run_io(self.stack.is_shown):
            self._log(f"{self.place.folder}: was unmounted by somebody else")
            self.note_end("it was unmounted by somebody else")
            return True
        reads = self.stack.statistics().requests
        if reads != self._reads or self.listener.leases:
            self._reads = reads
            self.note_use()
        if not self._is_idle():
            return False
        async with self.mounting:
            if not self._is_idle():
                return False
            if await aio.run_io(self.stack.try_unmount):
                self.state = State.ENDING
                self._log(f"{self.place.folder}: nobody has used it for {self.idle_s:g} s")
                return True
            self.note_use()
            return False

    def _is_idle(self) -> bool:
        is_free = not self.listener.leases and time.monotonic() - self._used_s >= self.idle_s
        return is_free and self.idle_s > 0


async def _settle(task: asyncio.Task[None]) -> None:
    """Waits for its end, whatever that is."""
    await asyncio.gather(task, return_exceptions=True)


def _single(error: Exception) -> Exception:
    """What a group of tasks has made a group of, if it is one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _to_log(line: str) -> None:
    try:
        if os.fstat(2).st_size > MOST_LOG_BYTES:
            os.ftruncate(2, 0)
    except OSError:
        pass  # no file
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} bootseer tree: {line}", file=sys.stderr, flush=True)
