"""Detection of ranks whose main thread is stopped, or does not return from the kernel. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.base.facts import HangKind
from launcher.monitor.hang.activity import ObservedRank, ranks_in_words

STOPPED = ("T", "t", "D")  # states of a main thread
WORDS = {
    HangKind.FROZEN: "stopped (SIGSTOP, or a debugger)",
    HangKind.STUCK_IN_KERNEL: "in the kernel (state D), without reading or writing,",
}


class StoppedFinding(NamedTuple):
    """Ranks that do not run."""

    kind: HangKind
    ranks: tuple[int, ...]
    since_s: float
    why: str


class StoppedRanks:
    """The ranks that do not run, and those already reported."""

    def __init__(self, frozen_s: float) -> None:
        self._frozen_s = frozen_s
        self._suspects: set[int] = set()  # in such a state when last sampled, however briefly
        self._found: dict[HangKind, frozenset[int]] = {}
        self._reported: dict[HangKind, frozenset[int]] = {}

    def suspect(self, rank: int) -> None:
        """Note that a rank was seen in such a state."""
        self._suspects.add(rank)

    def any_found(self) -> bool:
        """Return whether some ranks do not run now, reported already or not."""
        return bool(self._found)

    def find(self, ranks: Sequence[ObservedRank], stuck_s: float | None) -> StoppedFinding | None:
        """Find ranks not reported yet. `stuck_s`: how long a rank may be in the kernel; None: for ever."""
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
        self._reported = {kind: told & self._found.get(kind, frozenset()) for kind, told in self._reported.items()}
        for kind in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            found = by_kind.get(kind, [])
            if not self._found.get(kind, frozenset()) <= self._reported.get(kind, frozenset()):
                self._reported[kind] = self._found[kind]
                held = [ranks[rank] for rank in found]
                why = f"{ranks_in_words(found)} {'was' if len(found) == 1 else 'were'} {WORDS[kind]}"
                why += f" for {max(seen.held_s() for seen in held):.0f} s"
                waits = sorted({seen.wait() for seen in held} - {""})
                if waits and kind is HangKind.STUCK_IN_KERNEL:
                    why += f", waiting in {', '.join(waits[:3])}"
                return StoppedFinding(kind, tuple(found), min(seen.held_from_s() for seen in held), why)
        return None
