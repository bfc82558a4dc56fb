"""PURE: which job file the daemon handles next, and the last result of each, for `bootseer warm --status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launcher.warm.jobs import JobFile, RefusedFile
from launcher.warm.results import FAILED, Warmed, to_record

AGAIN_S = 60.0  # after a failure, or `every_s` if that is less


class FileState(NamedTuple):
    stamp: tuple[int, ...] | None  # of the file that was handled; None: never
    due_s: float  # when it is due, on the clock of `choose`
    ended_s: float = 0.0  # since the epoch
    took_s: float = 0.0
    stages: tuple[Warmed, ...] = ()
    why: str = ""  # the reason if it was refused or failed


class Rounds:
    """Schedule of job files: a new or changed file is due at once, others `every_s` after their end."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._known: dict[str, FileState] = {}

    def see(self, found: Iterable[JobFile | RefusedFile]) -> list[RefusedFile]:
        """Update the files. Returns: newly refused files, and those refused for another reason than before."""
        news: list[RefusedFile] = []
        names = set()
        for each in found:
            names.add(each.name)
            known = self._known.get(each.name)
            if isinstance(each, RefusedFile):
                if known is None or known.why != each.why:
                    news.append(each)
                self._known[each.name] = FileState(None, float("inf"), why=each.why)
            elif known is None or known.stamp != each.stamp:
                self._known[each.name] = FileState(each.stamp, 0.0)
        for name in set(self._known) - names:
            del self._known[name]
        return news

    def choose(self, now_s: float) -> str:
        """Return the name of the file that is most overdue; "" for none."""
        due = [(known.due_s, name) for name, known in self._known.items() if known.due_s <= now_s]
        return min(due)[1] if due else ""

    def ended(
        self, name: str, now_s: float, wall_s: float, took_s: float, stages: tuple[Warmed, ...], why: str
    ) -> None:
        """Record the result of a file; `why`: why it failed, else ""."""
        known = self._known.get(name)
        if known is None:
            return  # it was removed meanwhile
        is_failed = bool(why) or any(each.how == FAILED for each in stages)
        pause_s = min(AGAIN_S, self._every_s) if is_failed else self._every_s
        self._known[name] = FileState(known.stamp, now_s + pause_s, wall_s, took_s, stages, why)

    def wait_s(self, now_s: float, max_s: float) -> float:
        """Return the seconds until a file is due, at most `max_s`."""
        due_s = min((known.due_s for known in self._known.values()), default=float("inf"))
        return max(0.0, min(max_s, due_s - now_s))

    @property
    def is_all_done(self) -> bool:
        """Whether each file was handled or refused."""
        return all(known.due_s > 0.0 for known in self._known.values())

    @property
    def has_failures(self) -> bool:
        return any(known.why or any(each.how == FAILED for each in known.stages) for known in self._known.values())

    def to_record(self) -> list[dict[str, Any]]:
        """Return records for JSON, sorted by name."""
        return [
            {
                "name": name,
                "ended_s": known.ended_s,
                "took_s": round(known.took_s, 3),
                "why": known.why,
                "stages": [to_record(each) for each in known.stages],
            }
            for name, known in sorted(self._known.items())
        ]


def status_lines(record: Mapping[str, Any], now_s: float) -> list[str]:
    """PURE: return the status of a daemon as lines for users."""
    lines = [f"pid {record['pid']}, {record['jobs']}: {len(record['files'])} job files, {record['state']}"]
    for each in record["files"]:
        if each["why"]:
            lines.append(f"{each['name']}: {each['why']}")
            continue
        if not each["ended_s"]:
            lines.append(f"{each['name']}: not warmed yet")
            continue
        parts = [f"{stage['stage']} {stage['how']}" for stage in each["stages"]] or ["nothing to warm"]
        ago_s = max(0.0, now_s - each["ended_s"])
        lines.append(f"{each['name']}: {', '.join(parts)}; {ago_s:.0f} s ago, in {each['took_s']:.1f} s")
    return lines
