"""PURE: the activity of accelerators while no rank makes a step, and whether they wait for each other.

A rank that waits for its accelerator spins like one that computes, so its CPU use does not distinguish them. A
collective that waits for others is a kernel that runs and uses no memory: on an H100 with NCCL 2.28, hung, a
kernel runs 100 % of the time, memory is used 0 % of it, 123 W; a matrix product: 100 %, 33 %, 700 W; an addition:
98 %, 100 %, 510 W; idle: 0 %, 0 %, 72 W. The limits are Bootseer's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

BUSY, IDLE, NO_MEMORY = 95, 5, 1  # percent: at least, at most, at most
MAX_DEVICES = 64  # of a node
MAX_RANKS = 64  # of a device
MAX_SHOWN = 16
MAX_PACKED_BYTES = 16 << 10


class DeviceUse(NamedTuple):
    """One device, over some samples within a second."""

    number: int  # on its node
    busy: int  # percent of the time in which a kernel ran: the lowest sample
    memory: int  # percent of the time in which memory was read or written: the highest sample
    power_w: float  # the last sample
    ranks: tuple[int, ...]  # that have processes on it; () if unknown

    @property
    def computes(self) -> bool:
        """Whether it certainly does more than to wait."""
        return self.memory > NO_MEMORY and self.busy > IDLE


def find_awaited_ranks(uses: Iterable[DeviceUse]) -> tuple[int, ...] | None:
    """Return ranks whose devices are idle while the others wait; () if all wait, or the ranks are unknown.

    Args: uses: all devices of the job. Returns: None if some compute, or none waits.
    """
    known = list(uses)
    waiting = [use for use in known if use.busy >= BUSY]
    idle = [use for use in known if use.busy <= IDLE]
    if not waiting or len(waiting) + len(idle) < len(known) or any(use.memory > NO_MEMORY for use in known):
        return None
    return tuple(sorted({rank for use in idle for rank in use.ranks}))


def used_by_ranks(uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Return the devices of a node that ranks use; all if that is unknown, as inside a container."""
    return [use for use in uses if use.ranks] or list(uses)


def describe_uses(uses: Sequence[DeviceUse]) -> list[str]:
    """Return lines for users."""
    lines = []
    for use in uses[:MAX_SHOWN]:
        ranks = f" (rank {', '.join(map(str, use.ranks))})" if use.ranks else ""
        lines.append(
            f"accelerator {use.number}{ranks}: busy {use.busy} %, its memory {use.memory} %, {use.power_w:.0f} W"
        )
    left = len(uses) - len(lines)
    return [*lines, *([f"... and {left} more"] if left > 0 else [])]


def pack_uses(uses: Sequence[DeviceUse]) -> str:
    """Serialize for the coordinator; "" for none."""
    text = json.dumps([[*use[:4], use.ranks[:MAX_RANKS]] for use in uses[:MAX_DEVICES]], separators=(",", ":"))
    return text if uses and len(text) <= MAX_PACKED_BYTES else ""


def unpack_uses(text: str, own: Iterable[int]) -> list[DeviceUse]:
    """Parse the same; ignore invalid data. Args: own: ranks of the node that has sent it."""
    if not text:
        return []
    ranks_there = set(own)
    try:
        found = [
            DeviceUse(
                int(number),
                int(busy),
                int(memory),
                float(power_w),
                tuple(int(rank) for rank in ranks if int(rank) in ranks_there),
            )
            for number, busy, memory, power_w, ranks in json.loads(text)[:MAX_DEVICES]
        ]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []
    return found if all(math.isfinite(use.power_w) for use in found) else []
