"""Forked ranks of other nodes wait, not for long, until rank 0's store listens on the master port.

A client of torch's store that finds nobody there sleeps for 0.3 to 0.7 s before it tries again, and forked ranks
are at it within milliseconds of each other. Rank 0's node looks whether somebody listens; the coordinator
passes that on to the others. Its own ranks wait in preloaded.py. In jobs of several nodes alone.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.loop import Alarm, EventLoop
from launcher.ranks.port import is_served
from launcher.rendezvous.messages import World

HEAD_START_S = 0.1  # that ranks wait at most
SOON_S, LOOK_S, LATER_LOOK_S = 0.5, 0.002, 0.05
GIVE_UP_S = 60.0  # a script that does not listen at all


class HeadStart:
    """See the module's docstring."""

    def __init__(self, loop: EventLoop, tell: Callable[[int], object]) -> None:
        """Args: tell: the coordinator, that rank 0 of an attempt listens."""
        self._loop = loop
        self._tell = tell
        self._heard = -1  # the newest attempt whose rank 0 is known to listen
        self._waiting: tuple[int, Callable[[], object]] | None = None
        self._limit = Alarm(loop)
        self._next_look = Alarm(loop)

    def follow(self, world: World, then: Callable[[], object]) -> None:
        """Ranks of a node without rank 0 could be forked: calls `then` when they should be."""
        if self._heard >= world.attempt:
            then()
            return
        self._waiting = world.attempt, then
        self._limit.set(HEAD_START_S, self._go)

    def heard(self, attempt: int) -> None:
        """The coordinator says that rank 0 of this attempt listens."""
        self._heard = max(self._heard, attempt)
        if self._waiting is not None and self._waiting[0] <= attempt:
            self._go()

    def lead(self, world: World) -> None:
        """Rank 0 is being forked on this node."""
        self._look(world, self._loop.time())

    def over(self) -> None:
        """The attempt is: nobody is waited for any more."""
        self._waiting = None
        self._limit.cancel()
        self._next_look.cancel()

    def _go(self) -> None:
        self._limit.cancel()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1]()

    def _look(self, world: World, began_s: float) -> None:
        passed_s = self._loop.time() - began_s
        if is_served(world.master_port):
            self._tell(world.attempt)
        elif passed_s < GIVE_UP_S:
            self._next_look.set(LOOK_S if passed_s < SOON_S else LATER_LOOK_S, self._look, world, began_s)
