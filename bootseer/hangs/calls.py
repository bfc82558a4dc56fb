"""Calls of torch.distributed as ranks have recorded them: plain values, and what follows from them. Pure.

Times are nanoseconds of one clock for all ranks; 0: not yet. Ranks are global ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

MESSAGES = ("send", "recv", "recv_any_source")
MAX_NAMED = 12


class Group(NamedTuple):
    """A process group, the same on all its ranks."""

    name: str  # torch's
    label: str  # its description: pp, dp; "" or "undefined" if none was given
    generation: int  # from 1: counts the groups of this name
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        label = "world" if self.label == "default_pg" else self.label
        what = f"group {label}" if label and label != "undefined" else f"process group {self.name}"
        return f"{what} ({name_ranks(self.ranks)})"


NEWEST = 8  # calls of a rank in which a break of the order is searched
CallKey = tuple[str, Group, int, int]  # operation, group, peer, tag


class Call(NamedTuple):
    serial: int  # of the rank, from 1
    group: Group
    op: str
    seq: int  # from 1: of the group's collectives; of sends or receives with this peer and tag
    peer: int  # root of a collective, other end of a message; -1: none, or any
    tag: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]  # of the first tensor, four dimensions at most
    tensors: int
    entered_ns: int
    left_ns: int
    waited_for: bool  # the rank waits for its end, or has waited
    failed: bool = False
    lost: bool = False  # its end can no longer be observed
    in_order: bool = False  # on an accelerator: later calls are queued behind it
    on_device: bool = False  # an accelerator

    def is_open(self) -> bool:
        """Return whether it has begun and its end was not observed."""
        return not self.left_ns and not self.failed and not self.lost

    def is_message(self) -> bool:
        return self.op in MESSAGES

    def kind(self) -> CallKey:
        """Return the key by which the order of a program's calls is compared."""
        return self.op, self.group, self.peer, self.tag

    def alike(self) -> tuple[object, ...]:
        """Return the values that must be equal on all ranks of a collective, besides the operation."""
        return self.size_bytes, self.dtype, self.tensors, self.peer

    def __str__(self) -> str:
        if self.op == "send":
            return f"send #{self.seq} to rank {self.peer} in {self.group}"
        if self.is_message():
            return (
                f"receive #{self.seq} from {f'rank {self.peer}' if self.peer >= 0 else 'any rank'} in {self.group}"
            )
        return f"{self.op} #{self.seq} of {self.group}"

    def amount(self) -> str:
        """Return a description of its tensor, for users."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        more = f" and {self.tensors - 1} more" if self.tensors > 1 else ""
        return f"{self.dtype} {shape}{more}, {self.size_bytes} bytes" if self.tensors else "no tensor"


class RankTrace(NamedTuple):
    """The newest calls of one rank, in order; the newest of each group among them."""

    rank: int
    calls: tuple[Call, ...]
    ended: bool = False
    stopped: bool = False  # SIGSTOP, a debugger


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7`; long lists are cut."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    text = ", ".join(named[:MAX_NAMED]) + (", ..." if len(named) > MAX_NAMED else "")
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def find_order_break(calls: Iterable[Call]) -> Call | None:
    """Return the first of the newest calls that breaks the order which this rank always followed before.

    A program repeats itself: a call of one kind was always followed by the same kind, at least twice.
    """
    ordered = list(calls)
    followers: dict[CallKey, list[CallKey]] = {}
    for place, (before, after) in enumerate(pairwise(ordered), 1):
        known = followers.setdefault(before.kind(), [])
        if (
            place >= len(ordered) - NEWEST
            and len(known) >= 2
            and len(set(known)) == 1
            and after.kind() != known[0]
        ):
            return after
        known.append(after.kind())
    return None
