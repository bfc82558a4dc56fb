"""PURE: the messages that one side of a node's link has sent and received, so that a new connection resumes it.

In: messages as they are sent and received, and the number that the other side has received. Out: the missing ones.
A connection can break, or be silent for long, while both sides live; the session ensures that no message is lost
or arrives twice. Messages about the connection itself, such as heartbeats, are not counted.
"""

from __future__ import annotations

from launcher.rendezvous.messages import (
    DroppedFromJob,
    FromCoordinator,
    FromMember,
    Join,
    LivenessProbe,
    Ping,
    Pong,
    Resume,
    Resumed,
)

Message = FromMember | FromCoordinator
UNCOUNTED = (Ping, Pong, Join, Resume, Resumed, LivenessProbe, DroppedFromJob)
# Unconfirmed messages of one side; a node that is further behind is dropped.
MAX_UNCONFIRMED = 4096


class MessageSession:
    """One side of a session. Slots, because a coordinator holds thousands of them."""

    __slots__ = ("_sent", "_unheard", "received")

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._unheard: list[Message] = []  # the last messages sent

    def sends(self, message: Message) -> None:
        """Record a message that is sent now, or on the next connection."""
        if not isinstance(message, UNCOUNTED):
            self._sent += 1
            self._unheard.append(message)

    def receives(self, message: Message) -> None:
        self.received += not isinstance(message, UNCOUNTED)

    def heard(self, count: int) -> None:
        """Record that the other side has received `count` messages."""
        known = self._sent - len(self._unheard)
        if known < count <= self._sent:
            del self._unheard[: count - known]

    def missing(self) -> list[Message]:
        """Return the messages that the other side lacks, oldest first."""
        return list(self._unheard)

    def begin(self) -> list[Message]:
        """Restart the counts for a coordinator that does not know this node yet.

        Returns: the messages that were sent before it was there.
        """
        self.received, self._sent = 0, len(self._unheard)
        return self.missing()

    @property
    def is_far_behind(self) -> bool:
        """Whether more messages are unconfirmed than are kept."""
        return len(self._unheard) > MAX_UNCONFIRMED
