"""PURE: how long a node tries to reach its coordinator, and when an obstacle shows that this is hopeless.

In: failed attempts, the time. Out: the pause before the next round, and reasons for users.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from launcher.rendezvous.endpoint import HostVerdict
from launcher.rendezvous.wire import Trouble

if TYPE_CHECKING:
    from launcher.rendezvous.connection import Ended

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5
MAX_REASONS = 3
# How long a program that is no coordinator may use the endpoint before that is the error.
FOREIGN_PATIENCE_S = 3.0
SILENT_PATIENCE_S = 60.0  # rank 0 of a static job has the port while ranks run
OWN_PORT_PATIENCE_S = 10.0  # ... but not of a job that finds its host by binding, on this node
TRYING_S = 3.0  # until the warning that no coordinator is reachable
# For a node that had joined: if nothing listens any more, the coordinator has ended.
GONE_PATIENCE_S = 1.0
_NOBODY = "connection refused"


class Retries:
    """The attempts of one node to reach its coordinator; all times are seconds of the loop."""

    def __init__(self, *, is_static: bool, max_silence_s: float) -> None:
        """Args: is_static: rank 0 has the port while ranks run; max_silence_s: silence that heartbeats allow."""
        self._is_static = is_static
        self._max_silence_s = max_silence_s
        self._give_up_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._reasons: list[str] = []  # why attempts failed, the last ones last
        self._since_s: dict[Trouble | HostVerdict, float] = {}  # first time of each obstacle
        self._attempt_s = 0.0  # when the present attempt began
        self._gone_since_s: float | None = None  # nothing listens at the endpoint
        self._trying_since_s: float | None = None  # and not warned about yet; infinite after the warning

    def begin(self, patience_s: float, now_s: float) -> None:
        """Begin anew, for so long."""
        self._give_up_s = now_s + patience_s
        self._pause_s = FIRST_PAUSE_S
        self._reasons.clear()
        self._since_s.clear()
        self._gone_since_s = None

    def attempt_began(self, now_s: float) -> None:
        """Note the beginning of an attempt."""
        self._attempt_s = now_s

    def left_s(self, now_s: float) -> float:
        """Return how much time remains, negative after it."""
        return self._give_up_s - now_s

    def next_pause_s(self, seed: tuple[str, int], now_s: float) -> float | None:
        """Return the pause before the next round, None if the time is over.

        Args: seed: of this node, as nodes that were started together must not retry together.
        """
        pause_s = self._pause_s
        if now_s + pause_s >= self._give_up_s:
            return None
        self._pause_s = min(MAX_PAUSE_S, pause_s * 2)
        return pause_s * (0.5 + (hash((*seed, pause_s)) % 1000) / 1000)

    # ---- reasons ---------------------------------------------------------------------------------------------

    def remember(self, reason: str) -> None:
        """Note why an attempt has failed."""
        if reason in self._reasons:
            self._reasons.remove(reason)
        self._reasons.append(reason)
        del self._reasons[:-MAX_REASONS]

    def describe(self) -> str:
        """Return why the last attempts have failed."""
        return "; ".join(self._reasons)

    def warns_now(self, now_s: float) -> bool:
        """Return whether to warn that no coordinator is reachable: once, before the time is over."""
        if self._trying_since_s is None:
            self._trying_since_s = now_s
        if now_s - self._trying_since_s < TRYING_S:
            return False
        self._trying_since_s = math.inf
        return True

    # ---- obstacles -------------------------------------------------------------------------------------------

    def lasts(self, obstacle: Trouble | HostVerdict, patience_s: float, now_s: float) -> bool:
        """Return whether this obstacle has lasted longer than that, the attempt's time included."""
        return now_s - self._since_s.setdefault(obstacle, self._attempt_s) >= patience_s

    def is_over(self, obstacle: Trouble | HostVerdict) -> None:
        """Note that an obstacle is not there any more."""
        self._since_s.pop(obstacle, None)

    def is_hopeless(self, trouble: Trouble, now_s: float) -> bool:
        """Return whether the program at the endpoint is no coordinator."""
        if trouble is Trouble.FOREIGN:
            return self.lasts(trouble, FOREIGN_PATIENCE_S, now_s)
        is_own = HostVerdict.TAKEN in self._since_s and not self._is_static
        return self.lasts(trouble, OWN_PORT_PATIENCE_S if is_own else SILENT_PATIENCE_S, now_s)

    def is_gone(self, ended: Ended, now_s: float) -> bool:
        """Return whether a failed reconnection shows that the coordinator has ended."""
        if ended.trouble is None and ended.reason != _NOBODY:
            self._gone_since_s = None
            return False
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        # While ranks of a static job run, it does not listen; rank 0 does, at the same port.
        return now_s - self._gone_since_s >= (self._max_silence_s if self._is_static else GONE_PATIENCE_S)
