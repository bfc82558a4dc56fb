"""PURE: for whom ranks wait, by their stacks: some are in a call of torch.distributed, others never came to it.

What those others do decides how soon that is told. One that sleeps by its own will, or waits for a lock, does
nothing for anybody; one that waits for a socket, a pipe or a file may be served late: a download, a queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from launcher.supervise.stacks import RankStacks, Source, is_installed, own_frames

# Wrappers of torch.distributed (FSDP's forward, pipelines) are below all that a rank computes: only the innermost
# calls that are torch's say that it is in a collective.
_PEERS = re.compile(
    r"/torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives|rendezvous|device_mesh)\.py$"
)
_SLEEPS = ("nanosleep",)  # in the names of the kernel's functions
MOST_ABSENT_PART = 0.5


class Awaited(NamedTuple):
    """Who is waited for."""

    ranks: tuple[int, ...]
    by: tuple[int, ...]
    sleeps: bool  # all of them, by their own will


def is_with_peers(stacks: RankStacks) -> bool:
    """Whether the rank is in a call of torch.distributed: with the others, or waiting for them."""
    return any(_PEERS.search(frame.file) for frame in takewhile(is_installed, own_frames(stacks.main)))


def find_awaited(stacks: Mapping[int, RankStacks], waits: Mapping[int, str], world_size: int) -> Awaited | None:
    """None where the stacks do not tell. Args: waits: the kernel's function in which each rank waits."""
    if len(stacks) < world_size or any(
        not each.main or each.source not in (Source.HANDLER, Source.PY_SPY) for each in stacks.values()
    ):
        return None
    by = tuple(sorted(rank for rank, each in stacks.items() if is_with_peers(each)))
    ranks = tuple(sorted(set(stacks) - set(by)))
    if not by or not ranks or len(ranks) > MOST_ABSENT_PART * len(stacks):
        return None
    return Awaited(ranks, by, do_sleep(ranks, waits))


def do_sleep(ranks: Iterable[int], waits: Mapping[int, str]) -> bool:
    """Whether all of these sleep by their own will."""
    return all(any(name in waits.get(rank, "") for name in _SLEEPS) for rank in ranks)
