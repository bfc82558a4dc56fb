"""PURE: which ranks the others wait for, by stacks: those that have not reached a call of torch.distributed.

The activity of the others decides how soon that is reported. A rank that sleeps on purpose, or waits for a lock,
makes no progress; one that waits for a socket, a pipe or a file may be served late: a download, a queue.
Backward is such a call at times: DDP and FSDP communicate below it, in C++, which its stack does not show.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from launcher.monitor.samples.stacks import Frame, RankStacks, Source, is_installed, own_frames

# Wrappers of torch.distributed (FSDP's forward, pipelines) are below all computations of a rank: only if the
# innermost calls are torch's, the rank is in a collective.
_PEERS = re.compile(
    r"/torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives|rendezvous|device_mesh)\.py$"
)
_BACKWARD = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$")
_BACKWARD_CALLS = ("_engine_run_backward", "backward", "grad")  # the last two in older torch
_DECORATORS = ("wrapper",)
_SLEEPS = ("nanosleep",)  # in the names of the kernel's functions
MAX_ABSENT_PART = 0.5


class AwaitedRanks(NamedTuple):
    ranks: tuple[int, ...]
    by: tuple[int, ...]
    sleeps: bool  # all of them sleep on purpose


class AbsentRanks(NamedTuple):
    """Ranks that are elsewhere in the code while all others wait, or may wait."""

    ranks: tuple[int, ...]
    by: tuple[int, ...]
    is_guess: bool  # some of the others are in backward, which is no proof


def find_collective(stacks: RankStacks) -> str:
    """Return the function of torch.distributed that the rank has called; "" if it is in none."""
    found = ""
    for frame in takewhile(is_installed, own_frames(stacks.main)):
        if _PEERS.search(frame.file):
            found = frame.function if frame.function not in _DECORATORS else found or frame.function
        elif found:
            break
    return found


def is_in_collective(stacks: RankStacks) -> bool:
    """Return whether the rank is in a call of torch.distributed: with the others, or waiting for them."""
    return bool(find_collective(stacks))


def is_in_backward(stacks: RankStacks) -> bool:
    """Return whether torch computes gradients in the rank, or waits below that for other ranks."""
    return any(map(_is_backward, takewhile(is_installed, own_frames(stacks.main))))


def _is_backward(frame: Frame) -> bool:
    return frame.function in _BACKWARD_CALLS and _BACKWARD.search(frame.file) is not None


def find_awaited(
    stacks: Mapping[int, RankStacks], waits: Mapping[int, str], world_size: int
) -> AwaitedRanks | None:
    """Find awaited ranks; None if the stacks do not show it. Args: waits: kernel function in which each waits."""
    if not _are_all_known(stacks, world_size):
        return None
    by = tuple(sorted(rank for rank, each in stacks.items() if is_in_collective(each)))
    ranks = _find_rest(stacks, by)
    return AwaitedRanks(ranks, by, all_sleep(ranks, waits)) if ranks else None


def find_absent(stacks: Mapping[int, RankStacks], world_size: int) -> AbsentRanks | None:
    """Find the ranks that are not where all others wait, or may wait; None if the stacks do not show any."""
    if not _are_all_known(stacks, world_size):
        return None
    surely = {rank for rank, each in stacks.items() if is_in_collective(each)}
    maybe = {rank for rank, each in stacks.items() if rank not in surely and is_in_backward(each)}
    by = tuple(sorted(surely | maybe))
    ranks = _find_rest(stacks, by)
    return AbsentRanks(ranks, by, bool(maybe)) if ranks else None


def _are_all_known(stacks: Mapping[int, RankStacks], world_size: int) -> bool:
    has_python = (Source.HANDLER, Source.PY_SPY)
    return len(stacks) >= world_size and all(each.main and each.source in has_python for each in stacks.values())


def _find_rest(stacks: Mapping[int, RankStacks], by: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that are not in `by`; none if there are too many of them, or no others."""
    ranks = tuple(sorted(set(stacks) - set(by)))
    return ranks if by and len(ranks) <= MAX_ABSENT_PART * len(stacks) else ()


def all_sleep(ranks: Iterable[int], waits: Mapping[int, str]) -> bool:
    """Return whether all of these sleep on purpose."""
    return all(any(name in waits.get(rank, "") for name in _SLEEPS) for rank in ranks)
