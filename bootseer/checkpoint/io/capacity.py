"""How much memory a node's arena may take, and whether a checkpoint goes through it at all.

Pure functions of the limits of the machine and the cgroups (bootseer/linux/cgroups.py reads them). An arena's
memory belongs to memfds: it counts for the cgroup as any other memory does. The size of /dev/shm, 64 MiB in most
containers, does not bound it.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.linux.cgroups import Memory

ARENA = "arena"
DIRECT = "direct"

SHARE = 4  # by default the arena takes at most one part in so many of the total
RESERVE = 8  # one part in so many of the free memory stays unused
SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Capacity(NamedTuple):
    """The maximum size of an arena, in bytes, and a phrase that gives the reason."""

    bytes: int
    reason: str


class Mode(NamedTuple):
    """How ranks get the bytes: `arena` or `direct`, and a phrase that gives the reason."""

    name: str
    reason: str


def allowed(memory: Memory, asked: str = "", held_bytes: int = 0) -> Capacity:
    """Evaluate `--checkpoint-memory` (`asked`, "": default); `held_bytes`: the arena's present size."""
    free = memory.free_bytes + held_bytes
    free -= free // RESERVE
    wanted = parse_bytes(asked) if asked else memory.total_bytes // SHARE
    if wanted <= free:
        why = "as set by --checkpoint-memory" if asked else f"a quarter of the memory of {memory.limited_by}"
        return Capacity(wanted, f"{format_bytes(wanted)}, {why}")
    return Capacity(max(0, free), f"{format_bytes(max(0, free))}, the free memory of {memory.limited_by}")


def decide(size_bytes: int, whole: bool, capacity: Capacity) -> Mode:
    """Choose the mode. `whole`: nothing can be used before all of it is loaded.

    A checkpoint that is read in parts gets an arena of any size: each rank reads the parts that do not fit.
    """
    if not capacity.bytes:
        return Mode(DIRECT, f"the arena may take no memory ({capacity.reason})")
    if size_bytes <= capacity.bytes:
        return Mode(ARENA, f"{format_bytes(size_bytes)} fit in the arena ({capacity.reason})")
    if whole:
        return Mode(
            DIRECT,
            f"{format_bytes(size_bytes)} do not fit in the arena ({capacity.reason}); raise --checkpoint-memory",
        )
    return Mode(ARENA, f"of {format_bytes(size_bytes)} only a part fits in the arena ({capacity.reason})")


def parse_bytes(text: str) -> int:
    """Parse a size, such as '4096', '512M', '16GiB' or '16gb': suffixes are powers of two."""
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
