"""PURE: results of warming, stage by stage, as records and as lines for users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.counted import format_bytes

IMAGE, ENV, CACHES, CHECKPOINT = "image", "env", "caches", "checkpoint"
STAGES = (IMAGE, ENV, CACHES, CHECKPOINT)

CACHED = "cached"  # the blocks are on this node
UNPACKED = "unpacked"
IN_PLACE = "there"  # already in place
SEEDED = "seeded"
HELD = "held"  # in memory, for the next job that loads it
NOTHING = "nothing"  # there is nothing to fetch; `text` is the reason
FAILED = "failed"
HOWS = (CACHED, UNPACKED, IN_PLACE, SEEDED, HELD, NOTHING, FAILED)
_MAX_TEXT_CHARS = 2000
_TOO_LARGE = 1e18  # for bytes and seconds


class Warmed(NamedTuple):
    """The result of one stage of one job."""

    stage: str  # of STAGES
    how: str  # one of the words above
    what: str = ""  # digest of the tree that is available now
    size_bytes: int = 0  # stored size of the part that the start needs
    fetched_bytes: int = 0  # of these, fetched now
    took_s: float = 0.0
    text: str = ""  # for users


def line(warmed: Warmed) -> str:
    if warmed.how == FAILED:
        return f"{warmed.stage}: not warmed: {warmed.text}"
    if warmed.how == NOTHING:
        return f"{warmed.stage}: {warmed.text}"
    size = f", {format_bytes(warmed.size_bytes)}" if warmed.size_bytes else ""
    fetched = ""
    if warmed.size_bytes:
        fetched = f", {format_bytes(warmed.fetched_bytes)} of it fetched in {warmed.took_s:.1f} s"
    note = f" ({warmed.text})" if warmed.text else ""
    return f"{warmed.stage}: {warmed.how}{size}{fetched}{note}"


def described(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'this node'}: {error.strerror.lower()}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def exit_status(found: Sequence[Warmed]) -> int:
    """Return 0 if no stage failed, else 1."""
    return int(any(each.how == FAILED for each in found))


def to_record(warmed: Warmed) -> dict[str, Any]:
    return warmed._asdict()


def from_record(record: Mapping[str, Any]) -> Warmed | None:
    """Return the result in a record of another process; None if it is invalid."""
    fields = {name: record.get(name, default) for name, default in Warmed._field_defaults.items()}
    found = Warmed(record.get("stage"), record.get("how"), **fields)  # type: ignore[arg-type]
    texts = (found.stage, found.how, found.what, found.text)
    if not all(isinstance(each, str) for each in texts) or found.stage not in STAGES:
        return None
    numbers = (found.size_bytes, found.fetched_bytes, found.took_s)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        return None
    if not all(0 <= each < _TOO_LARGE for each in numbers):
        return None
    return found._replace(text=found.text[:_MAX_TEXT_CHARS], what=found.what[:200])
