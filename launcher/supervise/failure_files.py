"""Keeps the pages of failures in the run's log folder, as text and as JSON: failure-0.txt, failure-0.json, ...

On the node with rank 0, after the next attempt has begun or the job has ended. A page is whole or not there: it
comes under another name first. What is full or gone costs the page and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.loop import Alarm, EventLoop
from launcher.ranks.failure_class import CERTAIN
from launcher.rendezvous.messages import FailurePage
from launcher.supervise.failure_page import format_page, unpack

if TYPE_CHECKING:
    from bootseer.diagnose.stuck import Cause
    from launcher.supervise.flight import Left, LeftReader

Rings = tuple[int, Mapping[int, bytes]]  # an attempt, and what this node's ranks had called when it was over
END_S = 1.0  # for what torch has left, at the job's end
MOST_KEPT = 16  # pages that may come again


class _Kept(NamedTuple):
    """A page as it was written last, and the causes that are known for it."""

    record: dict[str, Any]
    causes: list[Cause]


class FailureFiles:
    """Of one run. `say` takes a line for people, at most one."""

    def __init__(
        self,
        loop: EventLoop,
        folder: str,
        job_clock_s: Callable[[], float],
        say: Callable[[str], object],
        began_wall_s: float,
    ) -> None:
        """Args: began_wall_s: dumps of torch's flight recorder that are older are of other jobs."""
        self._loop = loop
        self._folder, self._job_clock_s, self._say = folder, job_clock_s, say
        self._after_wall_s = began_wall_s
        self._has_complained = False
        self._last: dict[str, Any] | None = None  # its next attempt has not made its first step
        self._kept: dict[int, _Kept] = {}  # the newest, by number
        self._reader: LeftReader | None = None  # of dumps
        self._finished: Callable[[], object] | None = None  # who waits for them
        self._end_alarm = Alarm(loop)
        self._last_number = -1  # of the newest page
        self.last_path = ""  # of its text
        self._last_attempt: object = None  # that it is about

    def keep(self, page: FailurePage, attempt: int, first_step_s: float | None, rings: Rings = (-1, {})) -> None:
        """Writes it, and once more when it is known what torch has left of the ranks' calls.

        Args: attempt: at work now; first_step_s: what it took to its first step; None: none yet; rings: of the
        attempt that was over last, where calls are traced.
        """
        record = unpack(page.data)
        if record is None:
            self._complain("it cannot be understood")
            return
        record["number"] = page.number
        since_s = record.get("since_s")
        if record.get("since_wall_s") is None and isinstance(since_s, int | float):
            record["since_wall_s"] = time.time() - max(0.0, self._job_clock_s() - since_s)
        before = self._kept.pop(page.number, None)
        if before is not None:
            causes = before.causes
        else:
            causes = _find_mismatches(rings[1]) if record.get("attempt") == rings[0] else []
        _add_causes(record, causes)
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[page.number] = _Kept(record, causes)
        self._last = record if record.get("next_attempt") == attempt else None
        if first_step_s is not None and self._last is not None:
            self.first_step(first_step_s)
        else:
            self._write(record)
        if before is None and not causes:
            self._read_dumps(page.number, record)

    def _read_dumps(self, number: int, record: Mapping[str, Any]) -> None:
        """Looks for dumps left by torch since the last page: who waited for whom."""
        if (record.get("class"), record.get("class_sure")) == ("user", CERTAIN):
            return  # of an error of the program torch tells nothing
        from launcher.supervise.flight import MOST_RANKS, LeftReader

        if self._reader is None:
            self._reader = LeftReader(self._loop)
        if self._reader.is_busy:
            return  # pages that come together: the first one gets what there is
        after_wall_s, self._after_wall_s = self._after_wall_s, time.time()
        self._reader.read(lambda left: self._on_dumps(number, left), range(MOST_RANKS), after_wall_s)

    def _on_dumps(self, number: int, left: Left) -> None:
        from launcher.supervise.watch import find_causes_in

        causes = find_causes_in([left.traces], {}) if left.traces else []
        kept = self._kept.get(number)
        if causes and kept is not None:
            kept.causes.extend(causes)
            _add_causes(kept.record, causes)
            self._write(kept.record)
        self._end()

    def finish(self, then: Callable[[], object]) -> None:
        """Calls `then` when nothing more comes to the newest page: at once, or after END_S at the latest."""
        self._finished = then
        if self._reader is None or not self._reader.is_busy:
            self._end()
        else:
            self._end_alarm.set(END_S, self.hasten)

    def hasten(self) -> None:
        """Goes without what has not come."""
        if self._reader is not None:
            self._reader.close()
        self._end()

    def close(self) -> None:
        """Nobody is called any more."""
        self._finished = None
        self.hasten()

    def _end(self) -> None:
        self._end_alarm.cancel()
        then, self._finished = self._finished, None
        if then is not None:
            then()

    def first_step(self, took_s: float) -> None:
        """The attempt after the newest page has made its first step."""
        record, self._last = self._last, None
        if record is not None and isinstance(record.get("stages"), dict):
            record["stages"]["first_step_s"] = took_s
            self._write(record)

    def page_of(self, attempt: int) -> str:
        """The path of the newest page if it is about this attempt; "" if that one was not kept."""
        return self.last_path if self._last_attempt == attempt else ""

    def attempt_over(self) -> None:
        """What comes later is of another attempt."""
        self._last = None

    def _write(self, record: dict[str, Any]) -> None:
        path = os.path.join(self._folder, f"failure-{record['number']}")
        try:
            text = json.dumps(record, indent=1) + "\n"
        except RecursionError:
            self._complain("it cannot be understood")
            return
        try:
            for end, content in ((".txt", format_page(record)), (".json", text)):
                replace_file(path + end, content.encode(errors="replace"))
        except OSError as error:
            self._complain(error.strerror or str(error))
            return
        if record["number"] >= self._last_number:
            self._last_number = record["number"]
            self.last_path, self._last_attempt = path + ".txt", record.get("attempt")

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"warning: a failure's page cannot be kept in {self._folder}: {why}")


def _find_mismatches(rings: Mapping[int, bytes]) -> list[Cause]:
    """Calls that did not fit together."""
    if not rings:
        return []
    from bootseer.diagnose.stuck import find_mismatches
    from launcher.supervise.ring import traces_of

    return find_mismatches(traces_of(rings))


def _add_causes(record: dict[str, Any], causes: list[Cause]) -> None:
    if not causes:
        return
    from bootseer.diagnose.stuck import as_record, describe
    from launcher.supervise.watch import MOST_CAUSES

    told = record.get("collectives")  # by the coordinator, who knows the calls of all nodes
    if not told or any(each.line == told for each in causes):
        record["collectives"] = "\n".join(describe(causes))
    record["causes"] = [as_record(each) for each in causes[:MOST_CAUSES]]


def replace_file(path: str, data: bytes) -> None:
    """Puts a file in place, whole: it is written under another name first. Raises: OSError."""
    temporary = f"{path}.new"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it was not made
        raise
