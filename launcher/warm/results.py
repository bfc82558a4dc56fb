"""PURE: what warming came to, stage by stage, as records and as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

IMAGE, ENV, CACHES, CHECKPOINT = "image", "env", "caches", "checkpoint"
STAGES = (IMAGE, ENV, CACHES, CHECKPOINT)

CACHED = "cached"  # its blocks are on this node
UNPACKED = "unpacked"
THERE = "there"  # in its place already
SEEDED = "seeded"
HELD = "held"  # in memory, for the next job that loads it
NOTHING = "nothing"  # there is nothing to be had beforehand; `text` says why
FAILED = "failed"
_MOST_TEXT_CHARS = 2000


class Warmed(NamedTuple):
    """One stage of one job."""

    stage: str  # of STAGES
    how: str  # one of the words above
    what: str = ""  # digest of the tree that is at hand now
    size_bytes: int = 0  # of what the start needs of it, as stored
    fetched_bytes: int = 0  # of these, those that were not here
    took_s: float = 0.0
    text: str = ""  # for people


def line(warmed: Warmed) -> str:
    """For people."""
    if warmed.how == FAILED:
        return f"{warmed.stage}: not warmed: {warmed.text}"
    if warmed.how == NOTHING:
        return f"{warmed.stage}: {warmed.text}"
    size = f", {_size(warmed.size_bytes)}" if warmed.size_bytes else ""
    fetched = (
        f", {_size(warmed.fetched_bytes)} of it fetched in {warmed.took_s:.1f} s" if warmed.size_bytes else ""
    )
    note = f" ({warmed.text})" if warmed.text else ""
    return f"{warmed.stage}: {warmed.how}{size}{fetched}{note}"


def described(error: BaseException) -> str:
    """One line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'this node'}: {error.strerror.lower()}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def exit_status(found: Sequence[Warmed]) -> int:
    """0 if nothing failed."""
    return int(any(each.how == FAILED for each in found))


def to_record(warmed: Warmed) -> dict[str, Any]:
    """For JSON."""
    return warmed._asdict()


def from_record(record: Mapping[str, Any]) -> Warmed | None:
    """Of what another process says; None for anything else."""
    fields = {name: record.get(name, default) for name, default in Warmed._field_defaults.items()}
    found = Warmed(record.get("stage"), record.get("how"), **fields)  # type: ignore[arg-type]
    texts = (found.stage, found.how, found.what, found.text)
    if not all(isinstance(each, str) for each in texts) or found.stage not in STAGES:
        return None
    numbers = (found.size_bytes, found.fetched_bytes, found.took_s)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and each >= 0 for each in numbers):
        return None
    return found._replace(text=found.text[:_MOST_TEXT_CHARS], what=found.what[:200])


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
