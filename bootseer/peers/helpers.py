"""All peers of a job as a reader sees them: whom to ask for a range, in which order, and who is out.

In: the file of the job's peers, ranges with their memory. Out: how much of a range came, and from whom; the rest
is the store's. Each reader finds out for itself who is well: it costs it a bounded time once. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bootseer.peers.health import MOST_PEERS, Health, State, late_s
from bootseer.peers.membership import JobPeers, PeersFile
from bootseer.peers.peer import Came, Ending, Peer
from bootseer.peers.spans import ObjectName, Part, group_of, owners
from bootseer.storage.hedge import Patience

LOOKED_AT = 4  # nodes of a span's order: those that rest are passed over
MOST_REMEMBERED = 8192  # orders
COUNTS = ("asked", "bypasses", "late", "lost", "foreign", "no_room", "lies")

Gave = Callable[[str, int, int], None]  # peer, and the range of the object: start, end


class Helpers:
    """Follows `file`."""

    def __init__(self, file: PeersFile) -> None:
        self.health = Health()
        self._file = file
        self._job: JobPeers | None = None
        self._group: list[str] = []
        self._peers: dict[str, Peer] = {}
        self._orders: dict[tuple[ObjectName, int], list[str]] = {}
        self._patience = Patience()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._bytes: dict[str, int] = {}  # by peer

    def current(self) -> JobPeers | None:
        """The job; None when nobody can help."""
        job = self._file.current()
        if job is not self._job:
            self._take(job)
        return job if job is not None and len(job.nodes) > 1 else None

    async def read(self, name: ObjectName, part: Part, view: memoryview, gave: Gave) -> int:
        """Asks the owners of a span one after the other. Returns: how many bytes are right, from the start.

        When it has returned or was cancelled, nothing writes to `view` any more. `gave` is told who gave what.
        """

        def limit_s() -> float:
            return late_s(self._patience.p95_s(part.length))

        have = asked = 0
        loop = asyncio.get_running_loop()
        for peer in self._order(name, part.span):
            if asked == MOST_PEERS or have == part.length:
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
            if came.ending is Ending.HAS_NOT:
                break  # it asked the store, and so would the next one
        if have < part.length:
            self._counts["bypasses"] += 1
        return have

    def strike(self, peer: str) -> None:
        """It gave wrong bytes: it is not asked again."""
        if self.health.state(peer) is not State.STRUCK:
            self._counts["lies"] += 1
            self.health.strike(peer)

    def acquit(self, peer: str) -> None:
        """The store gives the same."""
        if self.health.state(peer) is State.STRUCK:
            self._counts["lies"] -= 1
            self.health.acquit(peer)

    def close(self) -> None:
        """Ends connections."""
        for peer in self._peers.values():
            peer.close()

    def statistics(self) -> dict[str, int]:
        """`asked`: reads of peers; `bypasses`: ranges that the store had to give, or the rest of them; why:
        `late`, `lost` (no connection), `foreign` (another key), `no_room`; `lies`: peers struck out."""
        return {**self._counts, **{f"from_{peer}_bytes": count for peer, count in self._bytes.items()}}

    # ---- parts ---------------------------------------------------------------------------------------------

    def _judge(self, peer: str, came: Came, length: int, began_s: float, now_s: float) -> None:
        if came.ending in (Ending.DONE, Ending.HAS_NOT):
            self.health.went_well(peer)
            if came.ending is Ending.DONE and came.have == length:
                self._patience.took(length, now_s - began_s)
        elif came.ending is Ending.NO_ROOM:
            self.health.went_well(peer)
            self._counts["no_room"] += 1
        else:
            self.health.failed(peer, now_s)
            self._counts[came.ending.value] += 1

    def _order(self, name: ObjectName, span: int) -> list[str]:
        found = self._orders.get((name, span))
        if found is None:
            if len(self._orders) >= MOST_REMEMBERED:
                self._orders.clear()
            found = self._orders[name, span] = owners(self._group, name, span, LOOKED_AT)
        return found

    def _take(self, job: JobPeers | None) -> None:
        """Other nodes; connections to those that stay are kept."""
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
