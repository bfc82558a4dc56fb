"""PURE: selection of peers for reads, their time limits, and their exclusion.

A peer that failed or was too slow is paused; then one read tests it. After a success it is used normally, else its
pause doubles. A peer that sent wrong bytes is excluded for good, unless the store itself returns the same bytes.
Times are seconds of any one clock.
"""

from __future__ import annotations

from enum import Enum

MIN_LATE_S = 5.0  # minimum time limit of a read from a peer
FIRST_LATE_S = 15.0  # until durations are known: a link that all reads share does not mean a slow peer
MAX_LATE_S = 15.0
LATE_P95 = 4.0  # a factor
MAX_PEERS = 2  # queried for the same bytes, one after the other
FIRST_REST_S, MAX_REST_S = 5.0, 60.0


def late_s(p95_s: float | None) -> float:
    """Return the time limit of a read before another source is used. Args: p95_s: of such reads from peers."""
    return FIRST_LATE_S if p95_s is None else min(MAX_LATE_S, max(MIN_LATE_S, LATE_P95 * p95_s))


class State(Enum):
    WELL = "well"
    RESTING = "resting"
    TRIED = "tried"  # after a pause, one read is in progress
    STRUCK = "struck"  # it sent wrong bytes


class _Peer:
    def __init__(self) -> None:
        self.state = State.WELL
        self.until_s = 0.0
        self.rest_s = FIRST_REST_S


class Health:
    """The health of all peers of a job, by id. After a true `may_ask`, call one of the next three methods."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def may_ask(self, peer: str, now_s: float) -> bool:
        """Return whether a read may use the peer."""
        found = self._peers.get(peer)
        if found is None or found.state is State.WELL:
            return True
        if found.state is State.RESTING and now_s >= found.until_s:
            found.state = State.TRIED
            return True
        return False

    def record_success(self, peer: str) -> None:
        """Record that it sent the data, or reported at once that it lacks them."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.TRIED:
            found.state, found.rest_s = State.WELL, FIRST_REST_S

    def failed(self, peer: str, now_s: float) -> None:
        """Record that it is gone, hangs, or is too slow. Concurrent failures count as one."""
        found = self._peers.setdefault(peer, _Peer())
        if found.state is State.WELL:
            found.rest_s = FIRST_REST_S
        elif found.state is State.TRIED:
            found.rest_s = min(MAX_REST_S, 2 * found.rest_s)
        else:
            return
        found.state, found.until_s = State.RESTING, now_s + found.rest_s

    def left(self, peer: str, now_s: float) -> None:
        """Record that the read was cancelled for reasons unrelated to the peer."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.TRIED:
            found.state, found.until_s = State.RESTING, now_s

    def strike(self, peer: str) -> None:
        """Exclude a peer that sent wrong bytes."""
        self._peers.setdefault(peer, _Peer()).state = State.STRUCK

    def acquit(self, peer: str) -> None:
        """Readmit a peer, as the store returned the same wrong bytes."""
        found = self._peers.get(peer)
        if found is not None and found.state is State.STRUCK:
            found.state, found.rest_s = State.WELL, FIRST_REST_S

    def state(self, peer: str) -> State:
        found = self._peers.get(peer)
        return State.WELL if found is None else found.state

    def renew(self, peer: str) -> None:
        """Reset a peer whose process was replaced; an exclusion stays."""
        if self.state(peer) is not State.STRUCK:
            self._peers.pop(peer, None)
