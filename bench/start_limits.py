"""PURE: how near a start of `bench start` is to what could be at best, and whether a stage of it has waited.

Spans are those of bootrun's events: name, begin and end in seconds from the launch. A node that waits has nothing
to do although what the next stage needs is there; a limit is what no start of these stages can be faster than.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[str, float, float]

LAUNCH = "launch"  # the first part of the rendezvous: then bootrun knows what it is to do
RESOLVED = "image_resolved"  # the first part of opening an image: then it is known what it is
PARTS = {"launch_s": LAUNCH, "resolved_s": RESOLVED}  # by the attributes that tell of them
NEEDS = {
    "image": (LAUNCH,),
    "setup": (RESOLVED,),  # which environment is the job's depends on its image
    "checkpoint": ("rendezvous",),  # which version is loaded is the job's affair
    "show": ("image", "setup"),
    "preload": ("image", "setup", "show"),
    "spawn": ("image", "setup", "show", "preload", "rendezvous", "checkpoint", "caches"),
}


class Wait(NamedTuple):
    """A stage that could have begun earlier."""

    seconds: float
    stage: str


class Limits(NamedTuple):
    """Seconds that a start takes in any case."""

    chain: float  # of the stages that need each other, each timed alone
    cpu: float  # what its processors worked, by all of them at once
    link: float  # what the busiest node received, at its link's rate
    store: float  # what left the store, at its rate

    def binding(self) -> tuple[str, float]:
        """The largest, with its name."""
        name = max(self._fields, key=lambda each: float(getattr(self, each)))
        return name, float(getattr(self, name))


def longest_wait(spans: Sequence[Span]) -> Wait:
    """Of one node, of the stages of its first attempt."""
    first: dict[str, tuple[float, float]] = {}
    for name, begin_s, end_s in sorted(spans, key=lambda each: each[1]):
        first.setdefault(name, (begin_s, end_s))
    launch_s = min((begin_s for begin_s, _ in first.values()), default=0.0)
    found = Wait(0.0, "")
    for name, (begin_s, _) in first.items():
        if name in NEEDS and begin_s <= first.get("spawn", (begin_s, 0.0))[0]:  # later: for the next attempt
            # What came after it was not needed for it.
            ends = [first[each][1] for each in NEEDS[name] if each in first and first[each][0] <= begin_s]
            ready_s = max(ends, default=launch_s)
        else:
            continue
        found = max(found, Wait(begin_s - ready_s, name))
    return found


def chain_s(*, image_s: float, env_s: float, checkpoint_s: float, preload_s: float, rest_s: float) -> float:
    """Seconds of the longest chain. Image and environment come side by side, the framework is in the latter.

    Args: rest_s: from the start of the ranks to the first step.
    """
    return max(max(image_s, env_s) + preload_s, checkpoint_s) + rest_s
