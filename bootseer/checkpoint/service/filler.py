"""The process that the checkpoint service forks for its reads: it fills the arena that it has inherited.

In a process of its own, the service stays free of threads and can fork another one when this one dies: ready units
stay ready. Requests and news are JSON lines over a socket. Ranks' demand goes before prefetch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import deque
from typing import Any

from bootseer import aio, cache_folder
from bootseer.checkpoint.io.arena import EMPTY, FAILED, READY, TAKEN, Arena
from bootseer.checkpoint.io.direct import StoredFile, describe_damage
from bootseer.checkpoint.opening import local_path, store_at, store_url_of
from bootseer.checkpoint.service.disk_copy import DiskCopy, can_keep
from bootseer.checkpoint.service.process import run_child
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.crc import crc32c
from bootseer.errors import BootseerError, IntegrityError, NotFound, SourceChanged
from bootseer.ipc.channel import MAX_MESSAGE_BYTES
from bootseer.ipc.framing import LineBuffer, decode, encode
from bootseer.linux.cgroups import usable_cores
from bootseer.linux.page_cache import is_remote
from bootseer.mounts.tree_daemon import io_priority as hot_first
from bootseer.mounts.tree_daemon.places import locate as locate_runtime
from bootseer.storage import HasPeers, SecondHand, Store
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.engine.rate_limit import RateLimiter
from bootseer.storage.local.reading import read_range

# Kinds of failure of a unit: its bytes are wrong, for good; the store is unavailable; any other reason.
DAMAGED, AWAY, REFUSED = "damaged", "away", "refused"
MOVE_REPORT_S = 2.0
HOT_POLL_S = 0.05
MAX_PAUSE_S = 20.0  # maximum pause for hot blocks, whose store may not answer; then one worker reads on
AT_ONCE = 8  # reads; the reader splits them and decides how many pieces are in flight
READ_BYTES = 16 << 20  # neighbouring units are read together up to this size


def kind_of(error: BootseerError) -> str:
    """Return the kind of an error of reading: DAMAGED, AWAY or REFUSED."""
    if isinstance(error, IntegrityError | NotFound) and not isinstance(error, SourceChanged):
        return DAMAGED
    return AWAY if error.retryable else REFUSED


def open_store_for(url: str, pinned: Pinned, peers_path: str) -> Store:
    """Open the store, through the job's peers if each unit has a checksum to verify it with."""
    store, _ = store_at(url)
    if not peers_path or not pinned.striped_version:
        return store
    from bootseer.peers import PeerStore
    from bootseer.peers.membership import PeersFile

    return PeerStore(store, store_url_of(url), PeersFile(peers_path))


def run_filler(filler: Filler) -> None:
    """Fill the arena until the connection ends; then end the process."""

    async def fill() -> dict[str, Any]:
        await filler.run()
        return {"ended": True}

    run_child(filler.connection, fill)


class Filler:
    """Reads units into the arena, in a process of its own."""

    def __init__(
        self,
        connection: socket.socket,
        url: str,
        pinned: Pinned,
        arena: Arena,
        max_bytes_per_s: float | None = None,
        peers_path: str = "",
        has_disk: bool = False,
    ) -> None:
        """Args: connection: to the service; peers_path: of the file of the job's peers, "" for none; has_disk:
        this node's disk may have a copy."""
        self.connection = connection
        self._peers_path = peers_path
        self._turns = RateLimiter(max_bytes_per_s)
        self._paused_since_s = 0.0  # start of the pause for hot blocks
        self._url = url
        self._pinned = pinned
        self._arena = arena
        self._demand: deque[tuple[int, int]] = deque()
        self._prefetch: deque[tuple[int, int]] = deque()
        self._to_check: deque[tuple[int, int]] = deque()  # units that savers have left in the arena
        self._wake = asyncio.Event()
        self._send_lock = asyncio.Lock()
        self._is_over = False
        self._populating = threading.Event()
        self._directory = disk_directory(url)
        self._refused: set[int] = set()  # devices without O_DIRECT
        self._runtime = _runtime()
        self._beside = hot_first.reads_beside(usable_cores())
        self._has_disk = has_disk
        self._copy: DiskCopy | None = None
        self._bad: set[tuple[int, int]] = set()  # units whose copy is damaged
        self._has_progress = False  # since the last report to the service

    async def run(self) -> None:
        connection = self.connection
        connection.setblocking(False)
        store = open_store_for(self._url, self._pinned, self._peers_path)
        self._reader = RangeReader(store)
        self._copy = await aio.run_io(self._find_copy)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                if isinstance(store, HasPeers) and not (self._copy is not None and self._copy.is_whole):
                    await store.meet(self._pinned.size, lambda: self._is_over)
                for number in range(AT_ONCE):
                    group.create_task(self._work(number))
                group.create_task(self._report_progress())
        finally:
            self._populating.set()
            await store.aclose()

    def _find_copy(self) -> DiskCopy | None:
        """Open this node's copy of it; not of a checkpoint that is on that disk anyway."""
        if not self._has_disk or self._directory is not None or not can_keep(self._pinned.files):
            return None
        try:
            cache = cache_folder.prepare(cache_folder.locate(os.environ, os.geteuid()))
        except BootseerError:
            return None  # the copier reports the error
        return DiskCopy.find(cache, self._pinned.digest, self._pinned.files)

    async def _listen(self) -> None:
        loop, orders = asyncio.get_running_loop(), LineBuffer(MAX_MESSAGE_BYTES)
        while data := await loop.sock_recv(self.connection, 1 << 18):
            for line in orders.feed(data):
                self._take(decode(line))
        self._is_over = True
        self._wake.set()

    def _take(self, order: dict[str, Any]) -> None:
        if "want" in order:
            self._demand.extend((file, unit) for file, unit in order["want"])
        if "prefetch" in order:
            self._prefetch.extend((file, unit) for file, unit in order["prefetch"])
        if "check" in order:
            self._to_check.extend((file, unit) for file, unit in order["check"])
        if "populate" in order:
            threading.Thread(target=self._populate, args=(order["populate"],), daemon=True).start()
        self._wake.set()

    def _populate(self, files: list[int]) -> None:
        """Allocate pages before they are needed; stop at the first request for bytes."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        for file in files:
            for unit in self._arena.units_of(file):
                if self._populating.is_set():
                    return
                self._arena.populate(file, *self._arena.extent(file, unit))

    async def _work(self, number: int) -> None:
        """Run one of AT_ONCE workers. While hot blocks are prefetched to this node, few or none read ahead."""
        while not self._is_over:
            while self._to_check:  # before reads of units that may be present
                await self._check(*self._to_check.popleft())
            queue = self._demand or self._prefetch
            if not queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            is_demand = queue is self._demand
            if not is_demand and self._pauses_for_hot(number):
                await asyncio.sleep(HOT_POLL_S)
                continue
            units = self._take_units(queue)
            if not units:
                continue
            file = units[0][0]
            self._populating.set()
            for each in units:
                self._arena.set_state(*each, TAKEN)
            kind = DAMAGED
            try:
                failed = await self._fill(file, [unit for _, unit in units], is_demand)
            except BootseerError as error:
                failed, kind = {unit: str(error) for _, unit in units}, kind_of(error)
            except BaseException:
                for each in units:
                    self._arena.set_state(*each, EMPTY)
                raise
            for _, unit in units:
                self._arena.set_state(file, unit, FAILED if unit in failed else READY)
            if ready := [[file, unit] for _, unit in units if unit not in failed]:
                await self._tell({"ready": ready})
            for unit, why in failed.items():
                await self._tell({"failed_units": [[file, unit]], "why": why, "kind": kind})

    def _pauses_for_hot(self, number: int) -> bool:
        if number >= self._beside and hot_first.is_fetching_hot(self._runtime):
            self._paused_since_s = self._paused_since_s or time.monotonic()
            return number > 0 or time.monotonic() - self._paused_since_s < MAX_PAUSE_S
        return False

    def _take_units(self, queue: deque[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the next unit that is not taken, with units that follow it in its file and in the queue."""
        taken: list[tuple[int, int]] = []
        size = 0
        while queue:
            file, unit = queue[0]
            if self._arena.state(file, unit) in (TAKEN, READY):
                queue.popleft()
                continue
            start, end = self._arena.extent(file, unit)
            if taken and (taken[-1] != (file, unit - 1) or size + end - start > READ_BYTES):
                break
            if taken and self._has_copy(*taken[0]) != self._has_copy(file, unit):
                break
            taken.append(queue.popleft())
            size += end - start
        return taken

    async def _fill(self, number: int, units: list[int], is_demand: bool) -> dict[int, str]:
        """Fill neighbouring units; return those with wrong checksums, and why."""
        if not self._has_copy(number, units[0]):
            return await self._fill_from_store(number, units, is_demand)
        failed: dict[int, str] = {}
        for unit in await self._fill_from_copy(number, units):
            failed |= await self._fill_from_store(number, [unit], is_demand)
        return failed

    def _has_copy(self, file: int, unit: int) -> bool:
        return self._copy is not None and (file, unit) not in self._bad and self._copy.has(file, unit)

    async def _fill_from_copy(self, number: int, units: list[int]) -> list[int]:
        """Fill units from this node's disk; return those that are damaged there."""
        copy, sums, arena = self._copy, self._pinned.files[number].sums, self._arena
        assert copy is not None
        start, end = arena.extent(number, units[0])[0], arena.extent(number, units[-1])[1]
        await aio.run_io(copy.read, number, start, arena.view(number, start, end))
        bad, size = [], 0
        for unit in units:
            view = arena.view(number, *arena.extent(number, unit))
            if await aio.run_io(crc32c, view) == sums[unit]:
                size += len(view)
            else:
                bad.append(unit)
                self._bad.add((number, unit))
        await self._tell({"from_disk": size, "bad": [[number, unit] for unit in bad]})
        return bad

    async def _fill_from_store(self, number: int, units: list[int], is_demand: bool) -> dict[int, str]:
        """Fill units from the store, as `_fill`."""
        file = self._pinned.files[number]
        start, end = self._arena.extent(number, units[0])[0], self._arena.extent(number, units[-1])[1]
        piece = end - start if is_demand else self._turns.piece_bytes(end - start)
        for begin in range(start, end, max(1, piece)):
            until = min(begin + piece, end)
            if not is_demand:
                await asyncio.sleep(self._turns.wait_s(until - begin, time.monotonic()))
            await self._read(file, number, begin, until, is_demand, 0)
        failed: dict[int, str] = {}
        for unit in units if file.sums else ():
            start, end = self._arena.extent(number, unit)
            view = self._arena.view(number, start, end)
            found = await aio.run_io(crc32c, view)
            if found != file.sums[unit]:  # another replica, or the store itself, may have the right bytes
                self._distrust(file, start, end)
                await self._read(file, number, start, end, is_demand, 1)
                found = await aio.run_io(crc32c, view)
            if found != file.sums[unit]:
                failed[unit] = describe_damage(self._reader.store.url, file, unit, found)
        return failed

    def _distrust(self, file: StoredFile, start: int, end: int) -> None:
        """Report the peer that sent these bytes of a file, which are wrong."""
        store = self._reader.store
        if isinstance(store, SecondHand):
            for piece in file.layout.pieces(start, end - start):
                store.distrust(file.stripes[piece.stripe], piece.stripe_offset, piece.length)

    async def _read(
        self, file: StoredFile, number: int, start: int, end: int, is_demand: bool, attempt: int
    ) -> None:
        view = self._arena.view(number, start, end)
        if self._directory is not None and len(file.stripes) == 1:
            full = os.path.join(self._directory, file.stripes[0])
            await aio.run_io(read_range, full, start, view, file.etag, self._refused)
            return
        requests = [
            RangeRequest(
                file.stripes[piece.stripe],
                piece.stripe_offset,
                view[piece.offset - start : piece.offset - start + piece.length],
                file.etag,
            )
            for piece in file.layout.pieces(start, end - start)
        ]
        await self._reader.read(requests, is_demand=is_demand, attempt=attempt, on_piece=self._note_move)

    def _note_move(self, _request: int, _offset: int, _length: int) -> None:
        self._has_progress = True

    async def _report_progress(self) -> None:
        """Report progress: a unit of a slow store takes long, and the service waits as long as bytes arrive."""
        while not self._is_over:
            await asyncio.sleep(MOVE_REPORT_S)
            if self._has_progress:
                self._has_progress = False
                await self._tell({"moved": True})

    async def _check(self, number: int, unit: int) -> None:
        """Verify a unit that a saver left in memory; if its checksum is wrong, read it like others."""
        self._arena.set_state(number, unit, TAKEN)
        found = await aio.run_io(crc32c, self._arena.view(number, *self._arena.extent(number, unit)))
        if found == self._pinned.files[number].sums[unit]:
            self._arena.set_state(number, unit, READY)
            await self._tell({"ready": [[number, unit]]})
        else:
            self._arena.set_state(number, unit, EMPTY)
            self._demand.append((number, unit))

    async def _tell(self, news: dict[str, Any]) -> None:
        async with self._send_lock:
            await asyncio.get_running_loop().sock_sendall(self.connection, encode(news))


def _runtime() -> str:
    """Return this user's runtime directory, "" for none."""
    try:
        return locate_runtime(os.environ)
    except BootseerError:
        return ""


def disk_directory(url: str) -> str | None:
    """Return the directory above a checkpoint on a local disk, where threads alone are the fastest."""
    path = local_path(url)
    directory = None if path is None else os.path.dirname(os.path.abspath(path))
    return None if directory is None or is_remote(directory) else directory
