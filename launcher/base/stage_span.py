"""A timed part of a start, reported to the node, which writes it as an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class StageSpan(NamedTuple):
    """A timed part of a start. Times are of CLOCK_MONOTONIC."""

    began_ns: int
    ended_ns: int
    facts: Mapping[str, object]
    error: str  # "" if it went well
