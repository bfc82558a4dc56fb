"""A store through which a reader asks the nodes of its job before it asks the store itself.

In: the store, and the file of the job's peers. Out: the read-only part of `Store`, so whoever reads a store can
read through peers. Errors are always the store's own: what a peer says of failures is no news. `attempt` > 0 goes
to the store, so bytes that turned out wrong are had from there; `distrust` names them, and who gave them is asked
no more. Give it only to readers that verify what they get, and only for objects that never change or that are read
by etag.
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
from bootseer.peers.helpers import Helpers
from bootseer.peers.membership import JobPeers, PeersFile, may_share
from bootseer.peers.spans import SPAN_BYTES, ObjectName, Part, cut
from bootseer.storage import Store, open_store
from bootseer.storage.counts import Counts
from bootseer.storage.extents import Extents
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnly

PARTS_AT_ONCE = 8  # of one read
MEET_S, MEET_LOOK_S = 2.0, 0.02
MEET_BYTES_PER_S = 32 << 20  # what is little is read before anybody is met
MOST_GIVEN = 8192  # ranges of which it is remembered who gave them
_STORE = ""  # gave it, not a peer


class SpanSums(NamedTuple):
    """What is known of an object: each whole span of it is verified here."""

    size: int  # bytes
    digests: tuple[bytes, ...]  # SHA-256 of each span, in order


class _Given(NamedTuple):
    path: str
    start: int
    end: int
    by: str  # id of the peer, or _STORE
    crc: int = 0  # of what a peer gave


class PeerStore(ReadOnly):
    """Implements `Store` and `SecondHand`.

    Args:
        origin: the store; closed with this one.
        url: by which the job's file names it.
        sums: by path, of objects whose spans' digests are known.
    """

    why_read_only = ": through peers it is only read, write to the store itself"
    # Another way there is, but a second read on suspicion would take the same bytes out of the store again.
    features = Features(creates_if_absent=False, concatenates=False, has_replicas=False)

    def __init__(
        self, origin: Store, url: str, file: PeersFile, *, sums: Mapping[str, SpanSums] | None = None
    ) -> None:
        self.url = origin.url
        self._origin, self._named = origin, url
        self._file, self._helpers = file, Helpers(file)
        self._sums = sums or {}
        self._counts = Counts("store_bytes", "peer_bytes")
        self._given: deque[_Given] = deque(maxlen=MOST_GIVEN)
        self._doubted: deque[_Given] = deque(maxlen=MOST_GIVEN)  # one of them was wrong, it is not known which
        self._sum = _find_sum()
        self._id: tuple[JobPeers, str] | None = None  # of the store, for the job as it was last

    async def meet(self, size_bytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Before so much is read: waits a moment until other nodes know of this store, else each asks it for all.

        The process that serves starts at the same time as those that read. `is_over`: nobody wants it any more.
        """
        end_s = time.monotonic() + min(MEET_S, size_bytes / MEET_BYTES_PER_S)
        while self._file.path and time.monotonic() < end_s and not is_over():
            job = self._file.current(is_urgent=True)
            if job is not None and job.find_origin(self._named) is not None:
                return
            await asyncio.sleep(MEET_LOOK_S)

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

    async def list(self, folder: str) -> list[Entry]:
        check_path(self.url, folder, is_folder=True)
        self._counts.add("requests")
        return await self._origin.list(folder)

    async def aclose(self) -> None:
        self._helpers.close()
        await self._origin.aclose()

    def distrust(self, path: str, offset: int, length: int) -> None:
        """These bytes of the last read of them are not what they should be.

        If one peer gave all of them, it is asked no more. Of several, the liar is found when the store has given
        the same bytes. If the store gave them, those who gave the same before are acquitted.
        """
        last: list[_Given] = []
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
            self._doubted.extend(given for given in last if given.by != _STORE)

    def statistics(self) -> dict[str, int]:
        """`store_bytes` and `peer_bytes`: from where they came. The rest: `Helpers.statistics`."""
        retries = self._origin.statistics()["retries"]
        return {**self._counts.to_dict(), **self._helpers.statistics(), "retries": retries}

    # ---- one read ------------------------------------------------------------------------------------------

    def _name(self, path: str, etag: str) -> ObjectName | None:
        """What peers call it; None when they are not asked."""
        job = self._helpers.current()
        if job is None:
            return None
        if self._id is None or self._id[0] is not job:
            self._id = job, origin_id(job.key_bytes(), self._named)
        origin = job.find_origin(self._named)
        return ObjectName(self._id[1], path, etag) if origin is not None and may_share(origin, path) else None

    async def _from_all(self, name: ObjectName, offset: int, target: memoryview) -> None:
        """Span by span. Raises the first error, with what had come before it."""
        parts = cut(offset, len(target))
        if len(parts) == 1:
            await self._part(name, parts[0], target)
            return
        errors: dict[int, BootseerError] = {}

        async def one(part: Part) -> None:
            if errors:
                return  # nobody wants it any more
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
            self._given.append(_Given(name.path, start, end, peer, sum_of))

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
            self._given.append(_Given(path, offset, offset + len(target), _STORE))
            self._judge(path, offset, target)

    def _judge(self, path: str, offset: int, target: memoryview) -> None:
        """The store has given what was in doubt: who gave something else?"""
        for _ in range(len(self._doubted)):
            given = self._doubted.popleft()
            start, end = given.start - offset, given.end - offset
            if given.path != path or start < 0 or end > len(target):
                self._doubted.append(given)
            elif self._sum(target[start:end]) != given.crc:
                self._helpers.strike(given.by)

    async def _verify(self, name: ObjectName, part: Part, view: memoryview, sums: SpanSums) -> None:
        """A whole span; what is wrong is had from the store once more. Raises: DigestMismatch."""
        if part.offset % SPAN_BYTES or part.end not in ((part.span + 1) * SPAN_BYTES, sums.size):
            return
        for attempt in range(2):
            if await aio.run_io(_sha256, view) == sums.digests[part.span]:
                return
            self.distrust(name.path, part.offset, part.length)
            if not attempt:
                await self._from_store(name.path, part.offset, view, name.etag, 0)
        raise DigestMismatch(
            f"{self.url}/{name.path}: bytes {part.offset} to {part.end} have not the digest that they should have"
        )


def open_peer_store(
    url: str,
    peers_path: str,
    *,
    options: Mapping[str, object] | None = None,
    timeout_s: float = 30.0,
    sums: Mapping[str, SpanSums] | None = None,
    log: Callable[[str], object] = lambda _: None,
) -> Store:
    """The store at `url`, as `open_store` gives it, read through the job's peers; without a path, the store alone.

    The file at `peers_path` may come, change and go at any time. Raises: ConfigError.
    """
    store = open_store(url, timeout_s=timeout_s, options=options or {})
    return PeerStore(store, url, PeersFile(peers_path, log=log), sums=sums) if peers_path else store


def _find_sum() -> Callable[[memoryview], int]:
    """Fast sums that tell apart what peers gave; digests decide what is right."""
    try:
        return crc.load()
    except ImportError:
        return zlib.crc32


def _sha256(view: memoryview) -> bytes:
    return hashlib.sha256(view).digest()
