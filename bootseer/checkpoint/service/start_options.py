"""PURE: the options of bootrun's order `start`, which hold for the life of the checkpoint service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# After all ranks have reported that they have their part, and none has reconnected. If first steps are observed,
# they come first; otherwise a program may build its optimizer before it loads that one's state.
QUIET_S = 60.0


class StartOptions(NamedTuple):
    """See the order `start` in service.py."""

    url: str = ""
    memory_bytes: int | None = None  # None: a share of the node's memory
    arena_bytes: int = 0  # for units that savers leave; 0: none
    disk_bytes: int = 0
    max_bytes_per_s: float | None = None
    peers: str = ""  # the file of the job's peers
    nodes: int = 1
    local_world_size: int = 0
    quiet_s: float = QUIET_S  # after which memory is released
    keeps: bool = False  # the memory, also when all ranks have their parts
    holds: bool = False
    is_eager: bool = True
    must_be_whole: bool = False
    shows_url: bool = False


def to_options(order: Mapping[str, Any]) -> StartOptions:
    """Return the options of an order. Raises: KeyError, TypeError, ValueError."""
    memory_bytes = order.get("memory_bytes")
    return StartOptions(
        url=str(order["url"]),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        arena_bytes=int(order.get("arena_bytes") or 0),
        disk_bytes=int(order.get("disk_bytes") or 0),
        max_bytes_per_s=order.get("max_bytes_per_s"),
        peers=str(order.get("peers") or ""),
        nodes=int(order.get("nodes") or 1),
        local_world_size=int(order.get("local_world_size") or 0),
        quiet_s=float(order.get("quiet_s", QUIET_S)),
        keeps=bool(order.get("keep")),
        holds=bool(order.get("holds")),
        is_eager=bool(order.get("is_eager", True)),
        must_be_whole=bool(order.get("whole")),
        shows_url=bool(order.get("shows_url")),
    )
