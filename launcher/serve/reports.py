"""Reports of the starts of running jobs, made from their event files: in a thread, shared, of bounded size."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from bootseer import aio
from bootseer.errors import BootseerError, UsageError
from bootseer.events import Event
from bootseer.report.analysis import analyse_job
from bootseer.report.finding import list_event_files
from bootseer.report.reading import EventReader
from bootseer.report.report import Report, make_report
from bootseer.report.starts import list_attempts, split_runs
from launcher.serve.event_log import EventLog

READ_S = 30.0
MAX_EVENTS = 400_000
MAX_FILE_BYTES = 256 << 20
MAX_RANK_BYTES = 4 << 20
MAX_KEPT = 32


class _Made(NamedTuple):
    report: Report
    epoch: str  # of the log, and its last event, before the files were read
    last: int


class Reports:
    """The newest reports of jobs. One is made anew only after new events, for all who ask."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int | None], _Made] = {}
        self._lock = asyncio.Lock()  # one at a time: it is work for the processor

    async def get(self, log: EventLog, run_id: str, attempt: int | None = None) -> Report:
        """Return the report of a job's attempt. Args: log: up to date; attempt: None: the newest one.

        Raises: UsageError if its events have no start or not this attempt; BootseerError.
        """
        key = log.directory, run_id, attempt
        async with self._lock:
            known = self._made.get(key)
            if known is not None and (known.epoch, known.last) == (log.epoch, log.last):
                return known.report
            epoch, last = log.epoch, log.last
            try:
                report = await aio.run_abandonable(_make, *key, timeout_s=READ_S)
            except TimeoutError:
                raise BootseerError(
                    f"{log.directory}: its event files could not be read in {READ_S:g} s"
                ) from None
            self._made.pop(key, None)
            self._made[key] = _Made(report, epoch, last)
            while len(self._made) > MAX_KEPT:
                del self._made[next(iter(self._made))]
            return report


def _make(directory: str, run_id: str, attempt: int | None) -> Report:
    reader = EventReader(MAX_EVENTS, MAX_FILE_BYTES, MAX_RANK_BYTES)
    for file in list_event_files(directory):
        reader.read(file)
    read = reader.finish()
    runs = split_runs(read.events)
    none: list[Event] = []
    events = next((events for events in reversed(list(runs.values())) if events[0].run_id == run_id), none)
    known = list_attempts(events)
    if not known:
        raise UsageError(f"job {run_id[:80]}: its events hold no start yet")
    wanted = known[-1] if attempt is None else attempt
    if wanted not in known:
        raise UsageError(f"attempt {wanted}: no such attempt; the attempts are {known[0]} to {known[-1]}")
    return make_report(analyse_job(events, read.notes), wanted)
