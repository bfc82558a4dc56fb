"""PURE: which ranks the others wait for, by stacks: those that have not reached a call of torch.distributed.

The activity of the others decides how soon that is reported. A rank that sleeps on purpose, or waits for a lock,
makes no progress; one that waits for a socket, a pipe or a file may be served late: a download, a queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from launcher.monitor.samples.stacks import RankStacks, Source, is_installed, own_frames

# Wrappers of torch.distributed (FSDP's forward, pipelines) are below all computations of a rank: only if the
# innermost calls are torch's, the rank is in a collective.
_PEERS = re.compile(
    r"/torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives|rendezvous|device_mesh)\.py$"
)
_SLEEPS = ("nanosleep",)  # in the names of the kernel's functions
MAX_ABSENT_PART = 0.5


class AwaitedRanks(NamedTuple):
    ranks: tuple[int, ...]
    by: tuple[int, ...]
    sleeps: bool  # all of them sleep on purpose


def is_in_collective(stacks: RankStacks) -> bool:
    """Return whether the rank is in a call of torch.distributed: with the others, or waiting for them."""
    return any(_PEERS.search(frame.file) for frame in takewhile(is_installed, own_frames(stacks.main)))


def find_awaited(
    stacks: Mapping[int, RankStacks], waits: Mapping[int, str], world_size: int
) -> AwaitedRanks | None:
    """Find awaited ranks; None if the stacks do not show it. Args: waits: kernel function in which each waits."""
    if len(stacks) < world_size or any(
        not each.main or each.source not in (Source.HANDLER, Source.PY_SPY) for each in stacks.values()
    ):
        return None
    by = tuple(sorted(rank for rank, each in stacks.items() if is_in_collective(each)))
    ranks = tuple(sorted(set(stacks) - set(by)))
    if not by or not ranks or len(ranks) > MAX_ABSENT_PART * len(stacks):
        return None
    return AwaitedRanks(ranks, by, all_sleep(ranks, waits))


def all_sleep(ranks: Iterable[int], waits: Mapping[int, str]) -> bool:
    """Return whether all of these sleep on purpose."""
    return all(any(name in waits.get(rank, "") for name in _SLEEPS) for rank in ranks)
