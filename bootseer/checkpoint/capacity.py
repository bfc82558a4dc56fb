"""How much memory a node's arena may take, and whether a checkpoint goes through it at all.

Pure functions of what the machine and the cgroups say (storage/memory_limits.py asks them). The memory of an
arena is a memfd's: it counts for the cgroup as any other memory does and is not bounded by the size of /dev/shm,
which is 64 MiB in most containers.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.storage.memory_limits import Memory

ARENA = "arena"
DIRECT = "direct"

SHARE = 4  # by default the arena takes at most one part in so many of what there is
RESERVE = 8  # of what is free, one part in so many is left alone
SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Capacity(NamedTuple):
    """What an arena may hold, in bytes, and the sentence that says why."""

    bytes: int
    reason: str


class Mode(NamedTuple):
    """How ranks get the bytes: `arena` or `direct`, and the sentence that says why."""

    name: str
    reason: str


def allowed(memory: Memory, asked: str = "", held_bytes: int = 0) -> Capacity:
    """What `--checkpoint-memory` (`asked`, "": default) comes to; `held_bytes`: what the arena has already."""
    free = memory.free_bytes + held_bytes
    free -= free // RESERVE
    wanted = parse_bytes(asked) if asked else memory.total_bytes // SHARE
    if wanted <= free:
        why = "as --checkpoint-memory says" if asked else f"a quarter of what {memory.limited_by} has"
        return Capacity(wanted, f"{format_bytes(wanted)}, {why}")
    return Capacity(max(0, free), f"{format_bytes(max(0, free))}, what {memory.limited_by} has free now")


def decide(size_bytes: int, whole: bool, capacity: Capacity) -> Mode:
    """`whole`: nothing can be used before all of it is there.

    What is read by parts gets an arena of any size: what does not fit is read by each rank for itself.
    """
    if not capacity.bytes:
        return Mode(DIRECT, f"the arena may take no memory ({capacity.reason})")
    if size_bytes <= capacity.bytes:
        return Mode(ARENA, f"{format_bytes(size_bytes)} fit in the arena ({capacity.reason})")
    if whole:
        return Mode(
            DIRECT,
            f"{format_bytes(size_bytes)} do not fit in the arena ({capacity.reason}); --checkpoint-memory helps",
        )
    return Mode(ARENA, f"of {format_bytes(size_bytes)} only a part fits in the arena ({capacity.reason})")


def parse_bytes(text: str) -> int:
    """'4096', '512M', '16GiB', '16gb': suffixes count in powers of two."""
    bare = text.strip().lower().removesuffix("ib").removesuffix("b")
    number, suffix = (bare[:-1], bare[-1]) if bare and bare[-1] in SUFFIXES else (bare, "")
    try:
        value = float(number)
        if not 0 <= value < 1 << 60:
            raise ValueError
    except ValueError as error:
        raise UsageError(
            f"not a size: {text!r}; write bytes, or a number with K, M, G or T such as 16G"
        ) from error
    return int(value * SUFFIXES[suffix])


def format_bytes(count: int) -> str:
    for suffix, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {suffix}"
    return f"{count} bytes"
