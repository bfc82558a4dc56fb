"""PURE: what one side of a node's way to the coordinator has sent and received, so that a new connection goes on.

In: messages as they are sent and come in, and how many of them the other side has. Out: those that it lacks. A
connection can break, or hear nothing for long, while both sides live; by this no message is lost or comes twice.
Not counted is what belongs to the connection itself, as heartbeats do.
"""

from __future__ import annotations

from launcher.rendezvous.messages import (
    FromCoordinator,
    FromMember,
    GaveUp,
    Join,
    Nudge,
    Ping,
    Pong,
    Resume,
    Resumed,
)

Message = FromMember | FromCoordinator
UNCOUNTED = (Ping, Pong, Join, Resume, Resumed, Nudge, GaveUp)
# Of one side, while nothing says that they came; a node that is further behind is given up.
MOST_UNHEARD = 4096


class Session:
    """One side. Slots, because a coordinator holds thousands of them."""

    __slots__ = ("_sent", "_unheard", "received")

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._unheard: list[Message] = []  # the last ones that were sent

    def sends(self, message: Message) -> None:
        """It is sent now, or will be on the next connection."""
        if not isinstance(message, UNCOUNTED):
            self._sent += 1
            self._unheard.append(message)

    def receives(self, message: Message) -> None:
        """It came in."""
        self.received += not isinstance(message, UNCOUNTED)

    def heard(self, count: int) -> None:
        """The other side has received so many."""
        known = self._sent - len(self._unheard)
        if known < count <= self._sent:
            del self._unheard[: count - known]

    def missing(self) -> list[Message]:
        """What it lacks, oldest first."""
        return list(self._unheard)

    def begin(self) -> list[Message]:
        """Another coordinator, or the same one without a memory of this node: counts begin anew.

        Returns: what was said before it was there.
        """
        self.received, self._sent = 0, len(self._unheard)
        return self.missing()

    @property
    def is_far_behind(self) -> bool:
        """More is unheard than is kept."""
        return len(self._unheard) > MOST_UNHEARD
