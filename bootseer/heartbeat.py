"""`bootseer.heartbeat(step, loss=...)`: a training script says that it is alive and where it is.

Goes to the rank-side file of the launcher when the script was started with hooks, and nowhere otherwise. The first
call counts as the first step where no torch optimizer was seen; later ones become at most one event a second.
"""

from __future__ import annotations

import sys

Metric = float | str


def heartbeat(step: int, **metrics: Metric) -> None:
    """Says that `step` is done; `metrics` are plain numbers or short texts (tensors are not read)."""
    rank = sys.modules.get("_bootseer_rank")
    if rank is not None:
        beat = rank.heartbeat
        if beat is not None:
            beat(step, metrics)
