"""bootrun's side of a start's access trace: prefetched when bootrun begins, recorded after the first step.

In: the launch specification, the first steps of ranks, answers of the supervisor's helpers. Out: requests to the
supervisor, events. Two helpers do the work, one after the other: prefetch.py and observe.py. They can
fail, hang and be killed: no process waits for them.
"""

from __future__ import annotations

import os
import time

from bootseer.light_stdlib import suppress
from bootseer.light_typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple
from launcher.ranks.group import Rank
from launcher.ranks.start_trace import files as record_files
from launcher.ranks.start_trace.files import START_DIRECTORY, START_SUFFIX, JobKey
from launcher.supervisor.client import SupervisorClient

if TYPE_CHECKING:
    from launcher.ranks.environ import RankOptions

PREFETCH, RECORD = 1, 2  # numbers of the helpers
EVENTS_SUFFIX = ".jsonl"
STALE_SHARE = 0.02  # of the files


class HelperSpan(NamedTuple):
    """The work of a helper, for events."""

    name: str  # prefetch, start_recorded
    began_ns: int
    ended_ns: int
    facts: Mapping[str, Any]
    error: str


class StartTrace:
    """bootrun's side of a start's access trace."""

    def __init__(
        self,
        guard: SupervisorClient,
        spec: RankOptions,
        note: Callable[[HelperSpan], object],
        recorded: Callable[[], object],
    ) -> None:
        """Args: recorded: called when `files` can return what the start has read."""
        self._supervisor = guard
        self._spec = spec
        self._note = note
        self._recorded = recorded
        self._directory = ""  # of traces, "" while none are kept
        self._own_directory = ""  # the same if only this run uses it
        self._key: JobKey | None = None
        self._began_ns = {PREFETCH: 0, RECORD: 0}
        self._is_prefetching = False
        self._is_stale = False  # files in the trace have changed
        self._listing_path = ""
        self._is_whole = False  # there was no trace when this start began: list all files

    def begin(self, environ: Mapping[str, str], events_dir: str) -> str:
        """Begin to prefetch the files of the last start, at time zero.

        Args: events_dir: "" for no events, without which no start is recorded.
        Returns: the file to which the fork server writes what its imports have accessed, "" for none.
        """
        # An image has its own recorder and prefetch worker.
        if not self._is_wanted() or self._spec.image is not None:
            return ""
        self._directory = record_files.records_dir(environ, START_DIRECTORY)
        if not self._directory:
            return ""
        self._key = self._make_key()
        if record_files.exists(self._directory, self._key, START_SUFFIX):
            self._is_prefetching = True
            self._ask(PREFETCH, "prefetch", "prefetch", self._directory, *self._key)
        elif events_dir:
            self._list_all(events_dir)
        return self._listing_path

    def begin_whole(self, events_dir: str) -> str:
        """Begin a new trace after `begin`, before any part of the ranks is started.

        In an image the trace is kept only for this run, since the image's recorder sees only the image's files.
        Returns: as `begin`.
        """
        if not self._is_whole and events_dir and self._is_wanted():
            if self._key is None:
                self._directory = self._own_directory = f"{events_dir}/start-{os.getpid()}-{time.time_ns()}"
                self._key = self._make_key()
            self._list_all(events_dir)
        return self._listing_path

    def _is_wanted(self) -> bool:
        """Return whether to record: without the rank bootstrap no first step is detected."""
        return self._spec.record_start and self._spec.rank_hooks and self._spec.entry.mode != "program"

    def _make_key(self) -> JobKey:
        spec = self._spec
        return record_files.make_start_key(spec.python, spec.entry.mode, spec.entry.target)

    def _list_all(self, events_dir: str) -> None:
        """Have the ranks and the fork server list all files that they open."""
        self._is_whole = True
        self._listing_path = f"{events_dir}/preload-{os.getpid()}-{time.time_ns()}.imports"

    def prepare(self, rank: Rank) -> None:
        """Request, before ranks are started, that `rank` (local rank 0) lists all files that it opens."""
        if self._is_whole and not self._began_ns[RECORD] and rank.events_file.endswith(EVENTS_SUFFIX):
            with suppress(OSError):
                os.close(os.open(listing_of(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def first_step_seen(self, rank: Rank) -> None:
        """Begin to record: all ranks of this node have made their first step. `rank` is local rank 0."""
        if self._key is None:
            return
        if self._is_prefetching:
            self._supervisor.end_help(PREFETCH)
        if rank.events_file.endswith(EVENTS_SUFFIX) and not self._began_ns[RECORD]:
            preload = self._listing_path if rank.is_forked else ""
            flags = ("1" if self._is_whole else "", "1" if self._is_stale else "")
            texts = (self._directory, str(rank.pid), listing_of(rank), preload, *flags)
            self._ask(RECORD, "record", "observe", *texts, *self._key)

    def on_helper_ended(self, number: int, cpu_s: float, answer: Mapping[str, Any]) -> None:
        """Handle the end of a helper of the supervisor."""
        facts = {name: value for name, value in answer.items() if name != "error"}
        if number == PREFETCH:
            self._is_prefetching = False
            self._is_stale = is_stale(answer)
        name = "prefetch" if number == PREFETCH else "start_recorded"
        facts["cpu_s"] = round(cpu_s, 4)
        error = str(answer.get("error", ""))
        self._note(HelperSpan(name, self._began_ns[number], time.monotonic_ns(), facts, error))
        if number == RECORD:
            if not error and not answer.get("why"):
                self._recorded()
            self._clear()

    def _clear(self) -> None:
        """Remove a trace that only this run has used."""
        if self._own_directory:
            import shutil

            shutil.rmtree(self._own_directory, ignore_errors=True)

    def files(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return what the start has read, by first use: path and ranges (offset, bytes); none: the whole file."""
        from launcher.ranks.start_trace.plan import FILE, SMALL, UNIT_BYTES
        from launcher.ranks.start_trace.record import read_record

        record = None if self._key is None else read_record(self._directory, self._key)
        try:
            entries = [] if record is None else list(record.entries())
        except ValueError:  # another program has written it
            return []
        return [
            (each.path, [(first * UNIT_BYTES, count * UNIT_BYTES) for first, count in each.ranges])
            for each in entries
            if each.kind in (FILE, SMALL)
        ]

    def _ask(self, number: int, name: str, module: str, *texts: str) -> None:
        self._began_ns[number] = time.monotonic_ns()
        self._supervisor.help(number, name, f"launcher.ranks.start_trace.{module}", texts)


def listing_of(rank: Rank) -> str:
    """Return the path of the file in which a rank lists its imports."""
    return rank.events_file.removesuffix(EVENTS_SUFFIX) + ".imports"


def is_stale(answer: Mapping[str, Any]) -> bool:
    """PURE: return whether so many files differ from the trace that it must be recorded again."""
    wrong = answer.get("changed", 0) + answer.get("missing", 0)
    return bool(wrong > STALE_SHARE * (answer.get("files", 0) + wrong))
