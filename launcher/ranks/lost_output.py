"""Rank output that was lost because the disk of the log files was full: logged while ranks run, and at the end.

Ranks continue without it and count it in their stats pages (launcher/in_rank/bootstrap.py); this module reads
these and makes a line. Separate from node_features.py, which decides when to log.
"""

from __future__ import annotations

import os

from bootseer.light_typing import Callable, Mapping, Sequence
from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.group import Rank
from launcher.ranks.stats_page import read_lost_output_bytes

POLL_EVERY_S = 10.0


class LostOutput:
    """Lost output of the ranks of one attempt on this node."""

    def __init__(self, loop: EventLoop, ranks: Sequence[Rank], say: Callable[[str], object]) -> None:
        self._ranks = ranks
        self._say = say
        self._reported_bytes = 0
        self._alarm = Alarm(loop)
        self._alarm.set(POLL_EVERY_S, self._look)

    def _look(self) -> None:
        if not self._tell(" so far"):
            self._alarm.set(POLL_EVERY_S, self._look)

    def end(self) -> None:
        """Log the total, as the ranks have ended."""
        self._alarm.cancel()
        self._tell("")

    def _tell(self, when: str) -> bool:
        found = {rank.rank: lost for rank in self._ranks if (lost := read_lost_output_bytes(rank.page_file))}
        total = sum(found.values())
        if total <= self._reported_bytes:
            return False
        self._reported_bytes = total
        paths = [
            path
            for rank in self._ranks
            for path in (rank.logs.stdout_path, rank.logs.stderr_path)
            if rank.rank in found and path
        ]
        self._say(describe(found, os.path.commonpath(list(map(os.path.dirname, paths))) if paths else "", when))
        return True


def describe(lost: Mapping[int, int], where: str, when: str) -> str:
    """Return the line to log. Args: lost: bytes by rank."""
    ranks = sorted(lost)
    names = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    whose = f"rank {names} were lost{when}: the disk of its log files" if len(ranks) == 1 else ""
    whose = whose or f"ranks {names} were lost{when}: the disk of their log files"
    return f"warning: {sum(lost.values())} bytes of output of {whose} is full{' (' + where + ')' if where else ''}"
