"""`bootseer.heartbeat(step, loss=...)`: report of a training script that it is alive, with its step.

It goes to the rank bootstrap if the script was started with hooks, and otherwise nowhere. The first call counts as
the first step if no torch optimizer was found. Later calls become at most one event a second.
"""

from __future__ import annotations

import sys

Metric = float | str


def heartbeat(step: int, **metrics: Metric) -> None:
    """Report that `step` is done. Args: metrics: plain numbers or short texts (tensors are not read)."""
    rank = sys.modules.get("_bootseer_rank")
    if rank is not None:
        beat = rank.heartbeat
        if beat is not None:
            beat(step, metrics)
