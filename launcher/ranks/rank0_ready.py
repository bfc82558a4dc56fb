"""The rank-0 readiness wait: forked ranks of other nodes wait briefly until rank 0's store listens.

A client of torch's store that cannot connect sleeps for 0.3 to 0.7 s before it retries, and forked ranks connect
within milliseconds of each other. Rank 0's node checks whether the master port is listening; the coordinator
forwards that to the other nodes. Ranks of rank 0's node wait in fork_server.py. Only for jobs with several nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.port import is_served
from launcher.rendezvous.messages import World

HEAD_START_S = 0.1  # maximum wait of ranks
SOON_S, LOOK_S, LATER_LOOK_S = 0.5, 0.002, 0.05
GIVE_UP_S = 60.0  # the script does not listen at all


class ReadinessWait:
    """See the module's docstring."""

    def __init__(self, loop: EventLoop, tell: Callable[[int], object]) -> None:
        """Args: tell: reports to the coordinator that rank 0 of an attempt listens."""
        self._loop = loop
        self._tell = tell
        self._received = -1  # the newest attempt whose rank 0 is known to listen
        self._waiting: tuple[int, Callable[[], object]] | None = None
        self._limit = Alarm(loop)
        self._next_look = Alarm(loop)

    def follow(self, world: World, then: Callable[[], object]) -> None:
        """Call `then` when the ranks of a node without rank 0 should be forked."""
        if self._received >= world.attempt:
            then()
            return
        self._waiting = world.attempt, then
        self._limit.set(HEAD_START_S, self._go)

    def heard(self, attempt: int) -> None:
        """Handle the coordinator's message that rank 0 of this attempt listens."""
        self._received = max(self._received, attempt)
        if self._waiting is not None and self._waiting[0] <= attempt:
            self._go()

    def watch_port(self, world: World) -> None:
        """Check the master port: rank 0 is being forked on this node."""
        self._look(world, self._loop.time())

    def over(self) -> None:
        """Cancel the wait at the end of the attempt."""
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
