"""PURE: the answers of a worker (worker.py), checked: it is another user's process, and the daemon may be root's.

In: decoded messages, and times. Out: typed answers without control characters; when a worker's turn is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.health.finding import one_line
from launcher.warm.results import HOWS, STAGES, Warmed, from_record

SILENCE_S = 600.0  # without progress: retries of a store take minutes
TURN_S = 6 * 3600.0  # of one file: others wait meanwhile, and the next round continues
MAX_SAID = 100  # lines of one turn
_MAX_DIGEST_CHARS = 200


class Said(NamedTuple):
    """A line for users."""

    text: str


class Progress(NamedTuple):
    """Progress of a stage, in bytes."""

    stage: str
    done: int
    total: int


class WillHold(NamedTuple):
    """The worker is about to take memory for this checkpoint, and waits for `go`."""

    digest: str


class Failed(NamedTuple):
    why: str


class Done(NamedTuple):
    """The results by stage. `holds`: the worker runs on, with the checkpoint in memory."""

    stages: tuple[Warmed, ...]
    holds: bool


Answer = Said | Progress | WillHold | Failed | Done


def parse(answer: Mapping[str, Any]) -> Answer | None:
    """Return the answer in a message; None if it is unknown or invalid."""
    match answer.get("did"):
        case "said":
            return Said(one_line(str(answer.get("text"))))
        case "progress":
            stage, done, total = answer.get("stage"), _size(answer.get("done")), _size(answer.get("total"))
            if stage in STAGES and done >= 0 and total >= 0:
                return Progress(str(stage), done, total)
        case "will-hold":
            return WillHold(str(answer.get("digest"))[:_MAX_DIGEST_CHARS])
        case "failed":
            return Failed(one_line(str(answer.get("why"))))
        case "done":
            records = answer.get("stages")
            if isinstance(records, list):
                found = tuple(each for each in map(_warmed, records[: len(STAGES)]) if each is not None)
                return Done(found, answer.get("holds") is True)
    return None


class Turn:
    """When the turn of a worker is over. Only progress extends it: messages alone could hold it for ever."""

    def __init__(self, now_s: float) -> None:
        self._end_s = now_s + TURN_S
        self._quiet_s = now_s + SILENCE_S
        self._done: dict[str, int] = {}  # most bytes, by stage
        self._will_hold = False
        self.said = 0  # lines

    def note(self, answer: Answer | None, now_s: float) -> None:
        match answer:
            case Progress(stage, done, _) if done > self._done.get(stage, -1):
                self._done[stage] = done
            case Said():
                self.said += 1
                if self.said > MAX_SAID:
                    return
            case WillHold() if not self._will_hold:
                self._will_hold = True
            case _:
                return
        self._quiet_s = now_s + SILENCE_S

    def left_s(self, now_s: float) -> float:
        """Return the time until the turn is over; 0 or less: it is."""
        return min(self._end_s, self._quiet_s) - now_s

    @property
    def why(self) -> str:
        if self._end_s <= self._quiet_s:
            return f"its worker process was ended after {TURN_S / 3600:g} h; the next round continues"
        return f"its worker process has made no progress for {SILENCE_S:g} s"


def _warmed(record: object) -> Warmed | None:
    found = from_record(record) if isinstance(record, dict) else None
    if found is None or found.how not in HOWS:
        return None
    return found._replace(what=one_line(found.what), text=one_line(found.text))


def _size(value: object) -> int:
    """Return a number of bytes; -1 for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    return -1
