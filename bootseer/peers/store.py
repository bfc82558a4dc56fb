"""A store through which a reader queries the nodes of its job before the store itself.

In: the store, and the file of the job's peers. Out: the read-only part of `Store`, so that any reader of a store
can use peers. Errors always come from the store itself; failures of peers are not reported. A read with `attempt`
> 0 uses the store, so that wrong bytes are replaced from there. `distrust` reports wrong bytes, and their sender
is excluded. Use it only with readers that verify data, and only for objects that never change or that are read by
etag.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bootseer import aio, crc
from bootseer.errors import BootseerError, DigestMismatch, StorageError
from bootseer.peers.auth import origin_id
from bootseer.peers.helpers import PeerSet
from bootseer.peers.membership import JobPeers, PeersFile, may_share
from bootseer.peers.spans import SPAN_BYTES, ObjectName, Part, cut
from bootseer.storage import Store, open_store
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.extents import Extents
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnlyStore

PARTS_AT_ONCE = 8  # of one read
PEER_WAIT_S, PEER_POLL_S = 2.0, 0.02
PEER_WAIT_BYTES_PER_S = 32 << 20  # a small object is read without waiting for nodes
MAX_GIVEN = 8192  # ranges whose sender is recorded
_STORE = ""  # the sender is the store


class SpanChecksums(NamedTuple):
    """The checksums of an object, for verification of each whole span."""

    size: int  # bytes
    digests: tuple[bytes, ...]  # SHA-256 of each span, in order


class _ReceivedRange(NamedTuple):
    path: str
    start: int
    end: int
    by: str  # id of the peer, or _STORE
    crc: int = 0  # of data from a peer


class PeerStore(ReadOnlyStore):
    """A store with peers. Implements `Store` and `SecondHand`.

    Args:
        origin: the store; closed with this one.
        url: its name in the job's file.
        sums: by path, of objects whose spans' digests are known.
    """

    why_read_only = ": it is read-only through peers; write to the store itself"
    # A hedged read would fetch the same bytes from the store again.
    features = Features(creates_if_absent=False, concatenates=False, has_replicas=False)

    def __init__(
        self, origin: Store, url: str, file: PeersFile, *, sums: Mapping[str, SpanChecksums] | None = None
    ) -> None:
        self.url = origin.url
        self._origin, self._named = origin, url
        self._file, self._helpers = file, PeerSet(file)
        self._sums = sums or {}
        self._counts = StoreCounters("store_bytes", "peer_bytes")
        self._given: deque[_ReceivedRange] = deque(maxlen=MAX_GIVEN)
        self._suspect: deque[_ReceivedRange] = deque(
            maxlen=MAX_GIVEN
        )  # one of them was wrong; which one is unknown
        self._sum = _find_sum()
        self._id: tuple[JobPeers, str] | None = None  # of the store, for the last job

    async def meet(self, size_bytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait briefly before a large read until other nodes know this store; else each would read all from it.

        The peer server starts at the same time as the readers. Args: is_over: returns whether the read was
        cancelled.
        """
        end_s = time.monotonic() + min(PEER_WAIT_S, size_bytes / PEER_WAIT_BYTES_PER_S)
        while self._file.path and time.monotonic() < end_s and not is_over():
            job = self._file.current(is_urgent=True)
            if job is not None and job.find_origin(self._named) is not None:
                return
            await asyncio.sleep(PEER_POLL_S)

    async def stat(self, path: str) -> Stat:
        check_path(self.url, path)
        self._counts.add("requests")
        return await self._origin.stat(path)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        check_path(self.url, path)
        check_offset(self.url, path, offset)
        self._counts.add("requests")
        name = self._name(path, etag) if target and not attempt else None
        if name is None:
            await self._from_store(path, offset, target, etag, attempt)
        else:
            await self._from_all(name, offset, target)
        self._counts.add("read_bytes", len(target))

    async def list(self, directory: str) -> list[Entry]:
        check_path(self.url, directory, is_folder=True)
        self._counts.add("requests")
        return await self._origin.list(directory)

    async def aclose(self) -> None:
        self._helpers.close()
        await self._origin.aclose()

    def distrust(self, path: str, offset: int, length: int) -> None:
        """Report that the bytes of the last read are wrong.

        If one peer sent all of them, it is excluded. If several did, the faulty one is found once the store has
        returned the same bytes. If the store sent them, peers that sent the same before are readmitted.
        """
        last: list[_ReceivedRange] = []
        before: set[str] = set()
        unknown = Extents()
        unknown.add(offset, offset + length)
        for given in reversed(list(self._given)):
            start, end = max(offset, given.start), min(offset + length, given.end)
            if given.path != path or start >= end:
                continue
            if any(first < end and start < stop for first, stop in unknown):
                last.append(given)
            else:
                before.add(given.by)
            unknown.remove(start, end)
        givers = {given.by for given in last}
        if givers == {_STORE}:
            for peer in before - {_STORE}:
                self._helpers.acquit(peer)
        elif len(givers) == 1 and not unknown:
            self._helpers.strike(givers.pop())
        else:
            self._suspect.extend(given for given in last if given.by != _STORE)

    def statistics(self) -> dict[str, int]:
        """Return counters; `store_bytes` and `peer_bytes`: by source. For the others see `PeerSet.statistics`."""
        retries = self._origin.statistics()["retries"]
        return {**self._counts.to_dict(), **self._helpers.statistics(), "retries": retries}

    # ---- one read ------------------------------------------------------------------------------------------

    def _name(self, path: str, etag: str) -> ObjectName | None:
        """Return the name for peers; None if they are not used."""
        job = self._helpers.current()
        if job is None:
            return None
        if self._id is None or self._id[0] is not job:
            self._id = job, origin_id(job.key_bytes(), self._named)
        origin = job.find_origin(self._named)
        return ObjectName(self._id[1], path, etag) if origin is not None and may_share(origin, path) else None

    async def _from_all(self, name: ObjectName, offset: int, target: memoryview) -> None:
        """Read span by span. Raises: the first error, with the number of bytes before it."""
        parts = cut(offset, len(target))
        if len(parts) == 1:
            await self._part(name, parts[0], target)
            return
        errors: dict[int, BootseerError] = {}

        async def one(part: Part) -> None:
            if errors:
                return  # the read has failed already
            try:
                await self._part(name, part, target[part.offset - offset : part.end - offset])
            except BootseerError as error:
                errors[part.offset - offset] = error

        await aio.map_bounded(one, parts, width=PARTS_AT_ONCE)
        if errors:
            first = min(errors)
            error = errors.pop(first)
            if isinstance(error, StorageError):
                error.read_bytes += first
            try:
                raise error
            finally:
                del error  # it holds this frame
                errors.clear()

    async def _part(self, name: ObjectName, part: Part, view: memoryview) -> None:
        def gave(peer: str, start: int, end: int) -> None:
            sum_of = self._sum(view[start - part.offset : end - part.offset])
            self._given.append(_ReceivedRange(name.path, start, end, peer, sum_of))

        have = await self._helpers.read(name, part, view, gave)
        self._counts.add("peer_bytes", have)
        if have < part.length:
            try:
                await self._from_store(name.path, part.offset + have, view[have:], name.etag, 0)
            except StorageError as error:
                error.read_bytes += have
                raise
        if name.path in self._sums:
            await self._verify(name, part, view, self._sums[name.path])

    async def _from_store(self, path: str, offset: int, target: memoryview, etag: str, attempt: int) -> None:
        await self._origin.read_into(path, offset, target, etag=etag, attempt=attempt)
        self._counts.add("store_bytes", len(target))
        if target:
            self._given.append(_ReceivedRange(path, offset, offset + len(target), _STORE))
            self._judge(path, offset, target)

    def _judge(self, path: str, offset: int, target: memoryview) -> None:
        """Exclude peers whose bytes differ from those of the store."""
        for _ in range(len(self._suspect)):
            given = self._suspect.popleft()
            start, end = given.start - offset, given.end - offset
            if given.path != path or start < 0 or end > len(target):
                self._suspect.append(given)
            elif self._sum(target[start:end]) != given.crc:
                self._helpers.strike(given.by)

    async def _verify(self, name: ObjectName, part: Part, view: memoryview, sums: SpanChecksums) -> None:
        """Verify a whole span, and read it once more from the store if it is wrong. Raises: DigestMismatch."""
        if part.offset % SPAN_BYTES or part.end not in ((part.span + 1) * SPAN_BYTES, sums.size):
            return
        for attempt in range(2):
            if await aio.run_io(_sha256, view) == sums.digests[part.span]:
                return
            self.distrust(name.path, part.offset, part.length)
            if not attempt:
                await self._from_store(name.path, part.offset, view, name.etag, 0)
        raise DigestMismatch(
            f"{self.url}/{name.path}: bytes {part.offset} to {part.end} do not match their digest"
        )


def open_peer_store(
    url: str,
    peers_path: str,
    *,
    options: Mapping[str, object] | None = None,
    timeout_s: float = 30.0,
    sums: Mapping[str, SpanChecksums] | None = None,
    log: Callable[[str], object] | None = None,
) -> Store:
    """Open the store at `url` through the job's peers; without a path, the store alone.

    The file at `peers_path` may be created, changed and removed at any time. Args: log: receives why it cannot be
    used (default: it is logged). Raises: ConfigError.
    """
    store = open_store(url, timeout_s=timeout_s, options=options or {})
    return PeerStore(store, url, PeersFile(peers_path, log=log), sums=sums) if peers_path else store


def _find_sum() -> Callable[[memoryview], int]:
    """Return a fast checksum that distinguishes data of peers; digests decide which data are right."""
    try:
        return crc.load()
    except ImportError:
        return zlib.crc32


def _sha256(view: memoryview) -> bytes:
    return hashlib.sha256(view).digest()
