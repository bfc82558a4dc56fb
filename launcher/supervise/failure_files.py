"""Keeps the pages of failures in the run's log folder, as text and as JSON: failure-0.txt, failure-0.json, ...

On the node with rank 0, after the next attempt has begun or the job has ended. A page is whole or not there: it
comes under another name first. What is full or gone costs the page and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.rendezvous.messages import FailurePage
from launcher.supervise.failure_page import format_page, unpack


class FailureFiles:
    """Of one run. `say` takes a line for people, at most one."""

    def __init__(
        self, folder: str, job_clock_s: Callable[[], float], say: Callable[[str], object], began_wall_s: float
    ) -> None:
        """Args: began_wall_s: dumps of torch's flight recorder that are older are of other jobs."""
        self._folder, self._job_clock_s, self._say = folder, job_clock_s, say
        self._after_wall_s = began_wall_s
        self._has_complained = False
        self._last: dict[str, Any] | None = None  # its next attempt has not made its first step
        self.last_path = ""  # of the newest page's text
        self._last_attempt: object = None  # that it is about

    def keep(
        self, page: FailurePage, attempt: int, first_step_s: float | None, rings: Mapping[int, bytes] | None = None
    ) -> None:
        """Writes it.

        Args: attempt: at work now; first_step_s: what it took to its first step; None: none yet; rings: what this
        node's ranks had called when they failed, where that is traced.
        """
        record = unpack(page.data)
        if record is None:
            self._complain("it cannot be understood")
            return
        record["number"] = page.number
        since_s = record.get("since_s")
        if record.get("since_wall_s") is None and isinstance(since_s, int | float):
            record["since_wall_s"] = time.time() - max(0.0, self._job_clock_s() - since_s)
        self._add_causes(record, rings or {})
        self._last = record if record.get("next_attempt") == attempt else None
        if first_step_s is not None and self._last is not None:
            self.first_step(first_step_s)
        else:
            self._write(record)

    def _add_causes(self, record: dict[str, Any], rings: Mapping[int, bytes]) -> None:
        """Calls that did not fit together; who waited for whom, by dumps left by torch since the last page."""
        from launcher.supervise.flight import MOST_RANKS, find_dumps, read_dumps

        dumps = find_dumps(range(MOST_RANKS), os.environ, self._after_wall_s)
        self._after_wall_s = time.time()
        if not dumps and not rings:
            return
        from bootseer.diagnose.stuck import as_record, describe, find_mismatches
        from launcher.supervise.ring import traces_of
        from launcher.supervise.watch import MOST_CAUSES, find_causes_in

        causes = find_mismatches(traces_of(rings))
        if not causes and dumps:
            causes = find_causes_in([read_dumps(dumps)], {})
        if causes:
            record["collectives"] = "\n".join(describe(causes))
            record["causes"] = [as_record(each) for each in causes[:MOST_CAUSES]]

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
                _replace(path + end, content.encode(errors="replace"))
        except OSError as error:
            self._complain(error.strerror or str(error))
            return
        self.last_path, self._last_attempt = path + ".txt", record.get("attempt")

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"a failure's page cannot be kept in {self._folder}: {why}")


def _replace(path: str, data: bytes) -> None:
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
