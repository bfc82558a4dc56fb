"""What the agent of a node sees of the coordinator: the same for one node and for many."""

from __future__ import annotations

from bootseer.light_typing import Protocol
from launcher.rendezvous.messages import FromMember


class Link(Protocol):
    """A way to the coordinator, in this process (host.py) or over TCP (member.py)."""

    def send(self, message: FromMember) -> None:
        """Queues a message; never blocks, never raises for a lost connection (that is told by `on_lost`)."""

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """This node's `time.monotonic_ns()` as the coordinator's, with the bound of its error, both ns."""

    @property
    def is_local(self) -> bool:
        """Whether the coordinator is in this process."""

    @property
    def is_closed(self) -> bool:
        """After `close`: whether nothing is left to be sent."""

    def rejoin(self, master_port: int) -> None:
        """Joins anew, after a GaveUp, with a fresh port for the node's next attempt as rank 0."""

    def close(self) -> None:
        """Sends what is queued within a bound, then ends the connection."""
