"""The agent's interface to the coordinator: the same for one node and for many."""

from __future__ import annotations

from bootseer.light_typing import Protocol
from launcher.rendezvous.messages import FromMember


class Link(Protocol):
    """A link to the coordinator, in this process (coordinator/host.py) or over TCP (agent/member.py)."""

    def send(self, message: FromMember) -> None:
        """Queue a message; never block, and never raise for a lost connection (`on_lost` reports that)."""

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """Map this node's `time.monotonic_ns()` to the coordinator's, with the bound of its error, both ns."""

    @property
    def is_local(self) -> bool:
        """Whether the coordinator is in this process."""

    @property
    def is_closed(self) -> bool:
        """After `close`: whether all messages have been sent."""

    def rejoin(self, master_port: int) -> None:
        """Rejoin after a DroppedFromJob, with a fresh port for the node's next attempt as rank 0."""

    def close(self) -> None:
        """Send queued messages within a time limit, then end the connection."""
