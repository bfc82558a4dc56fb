"""PURE: which peers are asked, how long they get, and who is not asked again.

A peer that failed or was too slow rests; then one read is tried with it, and it is as good as any other if that
goes well, else it rests twice as long. A peer that gave wrong bytes is struck out for good: only the store itself
giving the same wrong bytes acquits it. Times are seconds of any one clock.
"""

from __future__ import annotations

from enum import Enum

BEGIN_S = 3.0  # to connect and give a sign of life
STALL_S = 5.0  # without another one, or more bytes
LEAST_LATE_S = 5.0  # a read by a peer may take as long in any case
FIRST_LATE_S = 15.0  # until it is known how long they take: a link that all reads share is no slow peer
MOST_LATE_S = 15.0
LATE_P95 = 4.0  # times
MOST_PEERS = 2  # that are asked for the same bytes, one after the other
FIRST_REST_S, MOST_REST_S = 5.0, 60.0


def late_s(p95_s: float | None) -> float:
    """After how long the rest of a read is asked of somebody else. `p95_s`: of reads of that length by peers."""
    return FIRST_LATE_S if p95_s is None else min(MOST_LATE_S, max(LEAST_LATE_S, LATE_P95 * p95_s))


def most_added_s() -> float:
    """By so much peers can make a read longer than the store alone would."""
    return MOST_PEERS * MOST_LATE_S


class State(Enum):
    WELL = "well"
    RESTING = "resting"
    TRIED = "tried"  # after a rest, one read is under way
    STRUCK = "struck"  # it gave wrong bytes


class _Peer:
    def __init__(self) -> None:
        self.state = State.WELL
        self.until_s = 0.0
        self.rest_s = FIRST_REST_S


class Health:
    """Of all peers of a job, by their ids. Each `may_ask` that says yes is followed by one of the next three."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def may_ask(self, peer: str, now_s: float) -> bool:
        """Whether a read may be tried with it."""
        found = self._peers.get(peer)
        if found is None or found.state is State.WELL:
            return True
        if found.state is State.RESTING and now_s >= found.until_s:
            found.state = State.TRIED
            return True
        return False

    def went_well(self, peer: str) -> None:
        """It gave what it was asked for, or told at once that it has not got it."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.TRIED:
            found.state, found.rest_s = State.WELL, FIRST_REST_S

    def failed(self, peer: str, now_s: float) -> None:
        """It is gone, hangs, or is too slow. Reads that fail together count as one failure."""
        found = self._peers.setdefault(peer, _Peer())
        if found.state is State.WELL:
            found.rest_s = FIRST_REST_S
        elif found.state is State.TRIED:
            found.rest_s = min(MOST_REST_S, 2 * found.rest_s)
        else:
            return
        found.state, found.until_s = State.RESTING, now_s + found.rest_s

    def left(self, peer: str, now_s: float) -> None:
        """The read was given up for reasons that say nothing about it."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.TRIED:
            found.state, found.until_s = State.RESTING, now_s

    def strike(self, peer: str) -> None:
        """It gave wrong bytes."""
        self._peers.setdefault(peer, _Peer()).state = State.STRUCK

    def acquit(self, peer: str) -> None:
        """The store has the same wrong bytes."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.STRUCK:
            found.state, found.rest_s = State.WELL, FIRST_REST_S

    def state(self, peer: str) -> State:
        found = self._peers.get(peer)
        return State.WELL if found is None else found.state

    def renew(self, peer: str) -> None:
        """Its process is another one. Who was struck out stays so."""
        if self.state(peer) is not State.STRUCK:
            self._peers.pop(peer, None)
