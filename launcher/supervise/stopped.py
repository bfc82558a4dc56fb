"""Ranks whose main thread is stopped, or does not come back from the kernel, whatever the others do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.supervise.doing import SeenRank, ranks_in_words
from launcher.supervise.facts import HangKind

STOPPED = ("T", "t", "D")  # states of a main thread
WORDS = {
    HangKind.FROZEN: "stopped (SIGSTOP, or a debugger)",
    HangKind.STUCK_IN_KERNEL: "in the kernel (state D), without reading or writing,",
}


class Stopped(NamedTuple):
    """Ranks that do not run."""

    kind: HangKind
    ranks: tuple[int, ...]
    since_s: float
    why: str


class StoppedRanks:
    """Who does not run, and of whom that was told already."""

    def __init__(self, frozen_s: float) -> None:
        self._frozen_s = frozen_s
        self._suspects: set[int] = set()  # in such a state when last seen, for however short
        self._found: dict[HangKind, frozenset[int]] = {}
        self._told: dict[HangKind, frozenset[int]] = {}

    def suspect(self, rank: int) -> None:
        """A rank was seen in such a state."""
        self._suspects.add(rank)

    def any_found(self) -> bool:
        """Whether some do not run at the moment, told already or not."""
        return bool(self._found)

    def find(self, ranks: Sequence[SeenRank], stuck_s: float | None) -> Stopped | None:
        """Those of whom it was not told yet. `stuck_s`: how long one may be in the kernel; None: for ever."""
        by_kind: dict[HangKind, list[int]] = {}
        for rank in sorted(self._suspects):
            seen = ranks[rank]
            if seen.facts is None or not seen.is_here() or seen.facts.state not in STOPPED:
                self._suspects.discard(rank)
            elif seen.facts.state != "D":
                if seen.held_s() >= self._frozen_s:
                    by_kind.setdefault(HangKind.FROZEN, []).append(rank)
            elif stuck_s is not None and seen.held_s() >= stuck_s:
                by_kind.setdefault(HangKind.STUCK_IN_KERNEL, []).append(rank)
        self._found = {kind: frozenset(found) for kind, found in by_kind.items()}
        self._told = {kind: told & self._found.get(kind, frozenset()) for kind, told in self._told.items()}
        for kind in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            found = by_kind.get(kind, [])
            if not self._found.get(kind, frozenset()) <= self._told.get(kind, frozenset()):
                self._told[kind] = self._found[kind]
                held = [ranks[rank] for rank in found]
                why = f"{ranks_in_words(found)} {'was' if len(found) == 1 else 'were'} {WORDS[kind]}"
                why += f" for {max(seen.held_s() for seen in held):.0f} s"
                waits = sorted({seen.wait() for seen in held} - {""})
                if waits and kind is HangKind.STUCK_IN_KERNEL:
                    why += f", waiting in {', '.join(waits[:3])}"
                return Stopped(kind, tuple(found), min(seen.held_from_s() for seen in held), why)
        return None
