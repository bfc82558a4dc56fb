"""PURE: what a launcher has said of a fault: lines of its console in, `Word`s out.

In: lines of one node, with the moment at which they were there. Lines of ranks, of starts and of what is about no
fault are none. The names of classes are those of faults.toml; a standstill is a hang, a lost node one of the node.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

OURS = "bootrun: "


class Word(NamedTuple):
    """Something that was said."""

    at_s: float  # by the bench's monotonic clock
    class_: str  # "": none was named
    ranks: tuple[int, ...]  # that are named as culprits
    nodes: tuple[str, ...]  # the same; host names
    text: str  # the line


_HANG = re.compile(r"the job hangs \(([a-z-]+)\): ")
_SLOW = re.compile(r"the job has become slow: ")
_LOST = re.compile(r"lost node (\S+) \(pid")
_GONE = re.compile(r"the coordinator at (\S+?):\d+ ")
_RULE = re.compile(r"rule '[^']*'(?: \((\w+)\))?: (?:rank (\d+): )?")
_STOPPING = re.compile(r"stopping attempt \d+: rank (\d+) on (\S+) \(pid")
_RESTART = re.compile(r"restart \d+ of \d+(?: in .*?\))?: (.*)")
_RANKS = re.compile(r"ranks? ((?:\d+(?:-\d+)?)(?:, \d+(?:-\d+)?)*)")
_CLASS = re.compile(r"class ([a-z]+)")
_ODD = re.compile(r"apart from the rest: (.*)")
_BOX_BEGINS = "Root Cause (first observed failure):"
_FIELD = re.compile(r"^  (host|rank|class|kind) +: (.*)$")
_UNSURE = re.compile(
    r"^  (?:cannot determine (?:which of |whether ))?ranks? (.*?) "
    r"(?:was first|failed alike: all ranks of the job)$"
)
_TORCHRUN = re.compile(
    r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)|Worker group .{0,40}FAILED|Root Cause"
    r"|RendezvousConnectionError|SignalException|Sending process \d+ closing signal"
)
_NAMES = {"killed", "user", "resource", "platform", "accelerator", "network", "numeric", "slow", "hang", "node"}


def read_ranks(text: str) -> tuple[int, ...]:
    """`rank 3`, `ranks 0-2, 7`, `3 ranks (0-2)`, `0, 2-5`: those ranks."""
    found: set[int] = set()
    counted = re.fullmatch(r"\d+ ranks \((.*)\)", text)
    listed = counted[1] if counted else re.sub(r"^ranks? ", "", text)
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", listed):
        found.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


class Reader:
    """Of one node's console; `launcher` is bootrun or torchrun."""

    def __init__(self, launcher: str) -> None:
        self._is_ours = launcher == "bootrun"
        self._box: dict[str, str] | None = None
        self._box_ranks: tuple[int, ...] = ()

    def read(self, line: str, at_s: float) -> list[Word]:
        """A line without its end."""
        if not self._is_ours:
            return self._read_torchrun(line, at_s)
        if self._box is not None:
            return self._read_box(line, at_s)
        if line == _BOX_BEGINS:
            self._box, self._box_ranks = {}, ()
            return []
        if line.startswith("  apart from the rest: "):
            odd = _ODD.search(line)
            assert odd is not None
            return [Word(at_s, "hang", read_ranks(odd[1].partition(";")[0]), (), line.strip())]
        if not line.startswith(OURS):
            return []
        return self._read_ours(line.removeprefix(OURS), at_s)

    def _read_ours(self, line: str, at_s: float) -> list[Word]:
        if found := _HANG.search(line):
            return [Word(at_s, "hang", (), (), line)]
        if _SLOW.search(line):
            return [Word(at_s, "slow", (), (), line)]
        if found := _RULE.search(line):
            return [Word(at_s, _known(found[1] or ""), (int(found[2]),) if found[2] else (), (), line)]
        if found := _LOST.search(line):
            return [Word(at_s, "node", (), (found[1],), line)]
        if found := _STOPPING.match(line):
            return [Word(at_s, "", (int(found[1]),), (), line)]
        if found := _RESTART.match(line):
            class_ = _CLASS.search(found[1])
            ranks = _RANKS.match(found[1])
            named = read_ranks(ranks[1]) if ranks else ()
            return [Word(at_s, _known(class_[1] if class_ else ""), named, (), line)]
        if not line.startswith("error: "):
            return []
        if found := _GONE.search(line):
            return [Word(at_s, "node", (), (found[1],), line)]
        return [Word(at_s, "", (), (), line)]

    def _read_box(self, line: str, at_s: float) -> list[Word]:
        assert self._box is not None
        if line.startswith("===="):
            box, self._box = self._box, None
            class_ = box.get("class", "").partition(" ")[0].rstrip(",")
            own = read_ranks(box.get("rank", "").partition(" ")[0])
            return [Word(at_s, _known(class_), self._box_ranks or own, (), f"{_BOX_BEGINS} {box}")]
        if found := _UNSURE.match(line):
            self._box_ranks = read_ranks(found[1])
        elif found := _FIELD.match(line):
            self._box.setdefault(found[1], found[2])
        return []

    def _read_torchrun(self, line: str, at_s: float) -> list[Word]:
        if self._box is not None:
            if found := _FIELD.match(line):
                self._box.setdefault(found[1], found[2])
            if line.startswith("===="):
                box, self._box = self._box, None
                return [Word(at_s, "", read_ranks(box.get("rank", "").partition(" ")[0]), (), str(box))]
            return []
        if line == _BOX_BEGINS:
            self._box = {}
            return []
        return [Word(at_s, "", (), (), line[:300])] if _TORCHRUN.search(line) else []


def kept_report(line: str) -> str:
    """The path of the report of a standstill, for programs; "" where the line names none."""
    found = re.search(r"\((/\S+/standstill-\d+)\.txt\)$", line)
    return f"{found[1]}.json" if found else ""


def ranks_of_report(text: str | bytes) -> tuple[int, ...]:
    """The ranks that it names: those of the first cause where calls were traced. Raises: ValueError."""
    try:
        record = json.loads(text)
        causes = record.get("causes")
        return tuple(sorted(int(rank) for rank in (causes[0] if causes else record)["ranks"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no report of a standstill: {error}") from error


def _known(name: str) -> str:
    return name if name in _NAMES else ""
