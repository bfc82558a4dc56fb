"""Failure records in the run's log directory, as text and as JSON: failure-0.txt, failure-0.json, ...

On the node with rank 0, after the next attempt has begun or the job has ended. A file is complete or absent: it is
written under another name first. A full or missing disk costs the record and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.linux.files import replace_file
from launcher.base.loop import Alarm, EventLoop
from launcher.monitor.failure.record import format_record, unpack
from launcher.ranks.failure_class import CERTAIN
from launcher.rendezvous.messages import FailureRecordMessage

if TYPE_CHECKING:
    from bootseer.hangs.stuck import Cause
    from launcher.monitor.collectives.flight_recorder import RankFiles, RankFilesReader

Rings = tuple[int, Mapping[int, bytes]]  # an attempt, and the calls of this node's ranks at its end
END_S = 1.0  # for dumps of torch, at the job's end
MAX_KEPT = 16  # records that may come again


class _WrittenRecord(NamedTuple):
    """A record as it was written last, and its known causes."""

    record: dict[str, Any]
    causes: list[Cause]


class FailureFiles:
    """The failure records of one run. `say` logs a line for users, at most one."""

    def __init__(
        self,
        loop: EventLoop,
        folder: str,
        job_clock_s: Callable[[], float],
        say: Callable[[str], object],
        began_wall_s: float,
    ) -> None:
        """Args: began_wall_s: older dumps of torch's flight recorder belong to other jobs."""
        self._loop = loop
        self._directory, self._job_clock_s, self._say = folder, job_clock_s, say
        self._after_wall_s = began_wall_s
        self._has_complained = False
        self._last: dict[str, Any] | None = None  # the record whose next attempt has not made its first step
        self._kept: dict[int, _WrittenRecord] = {}  # the newest, by number
        self._reader: RankFilesReader | None = None  # of dumps
        self._finished: Callable[[], object] | None = None  # called after them
        self._end_alarm = Alarm(loop)
        self._last_number = -1  # of the newest record
        self.last_path = ""  # of its text
        self._last_attempt: object = None  # that the newest record is about

    def keep(
        self, page: FailureRecordMessage, attempt: int, first_step_s: float | None, rings: Rings = (-1, {})
    ) -> None:
        """Write a record, and again when torch's dumps of the ranks' calls are read.

        Args: attempt: that runs now; first_step_s: its time to the first step; None: none yet; rings: of the
        attempt that ended last, if calls are traced.
        """
        record = unpack(page.data)
        if record is None:
            self._complain("it is not a valid record")
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
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[page.number] = _WrittenRecord(record, causes)
        self._last = record if record.get("next_attempt") == attempt else None
        if first_step_s is not None and self._last is not None:
            self.first_step(first_step_s)
        else:
            self._write(record)
        if before is None and not causes:
            self._read_dumps(page.number, record)

    def _read_dumps(self, number: int, record: Mapping[str, Any]) -> None:
        """Read dumps of torch since the last record: which rank waited for which."""
        if (record.get("class"), record.get("class_sure")) == ("user", CERTAIN):
            return  # torch leaves no dumps after an error of the program
        from launcher.monitor.collectives.flight_recorder import MAX_RANKS, RankFilesReader

        if self._reader is None:
            self._reader = RankFilesReader(self._loop)
        if self._reader.is_busy:
            return  # of records that come together, the first one gets the dumps
        after_wall_s, self._after_wall_s = self._after_wall_s, time.time()
        self._reader.read(lambda left: self._on_dumps(number, left), range(MAX_RANKS), after_wall_s)

    def _on_dumps(self, number: int, left: RankFiles) -> None:
        from launcher.monitor.watch import find_causes_in

        causes = find_causes_in([left.traces], {}) if left.traces else []
        kept = self._kept.get(number)
        if causes and kept is not None:
            kept.causes.extend(causes)
            _add_causes(kept.record, causes)
            self._write(kept.record)
        self._end()

    def finish(self, then: Callable[[], object]) -> None:
        """Call `then` when the newest record is complete: at once, or after END_S at the latest."""
        self._finished = then
        if self._reader is None or not self._reader.is_busy:
            self._end()
        else:
            self._end_alarm.set(END_S, self.hasten)

    def hasten(self) -> None:
        """Stop waiting for dumps."""
        if self._reader is not None:
            self._reader.close()
        self._end()

    def close(self) -> None:
        """Close, without further callbacks."""
        self._finished = None
        self.hasten()

    def _end(self) -> None:
        self._end_alarm.cancel()
        then, self._finished = self._finished, None
        if then is not None:
            then()

    def first_step(self, took_s: float) -> None:
        """Add the first step of the attempt after the newest record."""
        record, self._last = self._last, None
        if record is not None and isinstance(record.get("stages"), dict):
            record["stages"]["first_step_s"] = took_s
            self._write(record)

    def page_of(self, attempt: int) -> str:
        """Return the path of the newest record if it is about this attempt; else ""."""
        return self.last_path if self._last_attempt == attempt else ""

    def attempt_over(self) -> None:
        """Note that later steps belong to another attempt."""
        self._last = None

    def _write(self, record: dict[str, Any]) -> None:
        path = os.path.join(self._directory, f"failure-{record['number']}")
        try:
            text = json.dumps(record, indent=1) + "\n"
        except RecursionError:
            self._complain("it is nested too deeply")
            return
        try:
            for end, content in ((".txt", format_record(record)), (".json", text)):
                replace_file(path + end, content.encode(errors="replace"), 0o666)
        except OSError as error:
            self._complain(error.strerror or str(error))
            return
        if record["number"] >= self._last_number:
            self._last_number = record["number"]
            self.last_path, self._last_attempt = path + ".txt", record.get("attempt")

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"warning: the failure record cannot be written to {self._directory}: {why}")


def _find_mismatches(rings: Mapping[int, bytes]) -> list[Cause]:
    """Find calls that did not match."""
    if not rings:
        return []
    from bootseer.hangs.stuck import find_mismatches
    from launcher.monitor.collectives.ring import traces_of

    return find_mismatches(traces_of(rings))


def _add_causes(record: dict[str, Any], causes: list[Cause]) -> None:
    if not causes:
        return
    from bootseer.hangs.stuck import as_record, describe
    from launcher.monitor.watch import MAX_CAUSES

    told = record.get("collectives")  # from the coordinator, which knows the calls of all nodes
    if not told or any(each.line == told for each in causes):
        record["collectives"] = "\n".join(describe(causes))
    record["causes"] = [as_record(each) for each in causes[:MAX_CAUSES]]
