"""All peers of a job from a reader's view: which to query for a range, in which order, and which are excluded.

In: the file of the job's peers, ranges with their memory. Out: the received part of a range, and its senders; the
store supplies the rest. Each reader measures health itself, at a bounded cost in time. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bootseer.peers.health import MAX_PEERS, Health, State, late_s
from bootseer.peers.link import ReadOutcome
from bootseer.peers.membership import JobPeers, PeersFile
from bootseer.peers.peer import Peer, ReadResult
from bootseer.peers.spans import ObjectName, Part, group_of, owners
from bootseer.storage.engine.hedge import ReadDurations

LOOKED_AT = 4  # nodes in a span's order; paused ones are skipped
MAX_REMEMBERED = 8192  # orders
COUNTS = ("asked", "bypasses", "late", "lost", "foreign", "no_room", "lies")

OnReceived = Callable[[str, int, int], None]  # receives a peer, and the range of the object: start, end


class PeerSet:
    """The peers of the job in `file`, which is followed."""

    def __init__(self, file: PeersFile) -> None:
        self.health = Health()
        self._file = file
        self._job: JobPeers | None = None
        self._group: list[str] = []
        self._peers: dict[str, Peer] = {}
        self._orders: dict[tuple[ObjectName, int], list[str]] = {}
        self._patience = ReadDurations()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._bytes: dict[str, int] = {}  # by peer

    def current(self) -> JobPeers | None:
        """Return the job; None if no peer is available."""
        job = self._file.current()
        if job is not self._job:
            self._take(job)
        return job if job is not None and len(job.nodes) > 1 else None

    async def read(self, name: ObjectName, part: Part, view: memoryview, gave: OnReceived) -> int:
        """Query the owners of a span in turn. Return the number of valid bytes from the start.

        After a return or cancellation, nothing writes to `view` any more. `gave` receives the sender of each
        range.
        """

        def limit_s() -> float:
            return late_s(self._patience.p95_s(part.length))

        have = asked = 0
        loop = asyncio.get_running_loop()
        for peer in self._order(name, part.span):
            if asked == MAX_PEERS or have == part.length:
                break
            began_s = loop.time()
            if peer not in self._peers or not self.health.may_ask(peer, began_s):
                continue
            asked += 1
            self._counts["asked"] += 1
            try:
                came = await self._peers[peer].read(name, part.offset + have, view[have:], limit_s)
            except BaseException:
                self.health.left(peer, loop.time())
                raise
            if came.have:
                gave(peer, part.offset + have, part.offset + have + came.have)
                self._bytes[peer] = self._bytes.get(peer, 0) + came.have
            have += came.have
            self._judge(peer, came, part.length, began_s, loop.time())
            if came.ending is ReadOutcome.HAS_NOT:
                break  # it has queried the store, as the next one would
        if have < part.length:
            self._counts["bypasses"] += 1
        return have

    def strike(self, peer: str) -> None:
        """Exclude a peer that sent wrong bytes."""
        if self.health.state(peer) is not State.STRUCK:
            self._counts["lies"] += 1
            self.health.strike(peer)

    def acquit(self, peer: str) -> None:
        """Readmit a peer, as the store returned the same bytes."""
        if self.health.state(peer) is State.STRUCK:
            self._counts["lies"] -= 1
            self.health.acquit(peer)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def statistics(self) -> dict[str, int]:
        """Return counters.

        `asked`: reads from peers. `bypasses`: ranges of which the store supplied all or the rest; reasons: `late`,
        `lost` (no connection), `foreign` (another key), `no_room`. `lies`: excluded peers.
        """
        return {**self._counts, **{f"from_{peer}_bytes": count for peer, count in self._bytes.items()}}

    # ---- private methods -----------------------------------------------------------------------------------

    def _judge(self, peer: str, came: ReadResult, length: int, began_s: float, now_s: float) -> None:
        if came.ending in (ReadOutcome.DONE, ReadOutcome.HAS_NOT):
            self.health.record_success(peer)
            if came.ending is ReadOutcome.DONE and came.have == length:
                self._patience.took(length, now_s - began_s)
        elif came.ending is ReadOutcome.NO_ROOM:
            self.health.record_success(peer)
            self._counts["no_room"] += 1
        else:
            self.health.failed(peer, now_s)
            self._counts[came.ending.value] += 1

    def _order(self, name: ObjectName, span: int) -> list[str]:
        found = self._orders.get((name, span))
        if found is None:
            if len(self._orders) >= MAX_REMEMBERED:
                self._orders.clear()
            found = self._orders[name, span] = owners(self._group, name, span, LOOKED_AT)
        return found

    def _take(self, job: JobPeers | None) -> None:
        """Replace the nodes; connections to remaining ones are kept."""
        before, self._peers, self._job = self._peers, {}, job
        self._orders.clear()
        if job is not None:
            key, nodes = job.key_bytes(), {node.id: node for node in job.nodes}
            self._group = group_of(list(nodes), job.own)
            for each in self._group:
                old = before.pop(each, None)
                if old is not None and old.is_for(nodes[each], job.own, key):
                    self._peers[each] = old
                else:
                    self._peers[each] = Peer(nodes[each], job.own, key)
                    self.health.renew(each)
                    if old is not None:
                        old.close()
        for old in before.values():
            old.close()
