"""bootrun's side of what a start touches: has it read ahead when bootrun begins, recorded after the first step.

In: the launch specification, the first steps of ranks, what helpers of the guard say. Out: requests to the guard,
events. Two helpers do the work, one after the other: start_prefetch.py and start_observe.py. They can fail, hang
and be killed: nobody waits for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from bootseer.light_typing import Any, NamedTuple
from launcher.guard_client import GuardClient
from launcher.ranks import record_files
from launcher.ranks.group import Rank
from launcher.ranks.record_files import START_FOLDER, START_SUFFIX, JobKey
from launcher.spec import LaunchSpec

PREFETCH, RECORD = 1, 2  # numbers of the helpers
EVENTS_SUFFIX = ".jsonl"
STALE_SHARE = 0.02  # of the files


class HelperSpan(NamedTuple):
    """What a helper has done, for the events."""

    name: str  # prefetch, start_recorded
    began_ns: int
    ended_ns: int
    facts: Mapping[str, Any]
    error: str


class RecordedStart:
    """See the module's docstring."""

    def __init__(
        self,
        guard: GuardClient,
        spec: LaunchSpec,
        note: Callable[[HelperSpan], object],
        recorded: Callable[[], object],
    ) -> None:
        """Args: recorded: from now on `files` knows what the start has read."""
        self._guard = guard
        self._spec = spec
        self._note = note
        self._recorded = recorded
        self._folder = ""  # of records, "" while none are kept
        self._own_folder = ""  # the same if it is this run's alone
        self._key: JobKey | None = None
        self._began_ns = {PREFETCH: 0, RECORD: 0}
        self._is_prefetching = False
        self._is_stale = False  # files of the record have changed
        self._listing_path = ""
        self._is_whole = False  # there was no record when this start began: all is listed

    def begin(self, environ: Mapping[str, str], events_dir: str) -> str:
        """Time zero: what is known of the last start is read ahead from here on.

        Args: events_dir: "" for no events, without which no start is recorded.
        Returns: where the preloaded process is to tell what its imports have touched, "" for nowhere.
        """
        # An image has a recorder and a prefetcher of its own.
        if not self._is_wanted() or self._spec.image is not None:
            return ""
        self._folder = record_files.records_dir(environ, START_FOLDER)
        if not self._folder:
            return ""
        self._key = self._make_key()
        if record_files.exists(self._folder, self._key, START_SUFFIX):
            self._is_prefetching = True
            self._ask(PREFETCH, "prefetch", self._folder, *self._key)
        elif events_dir:
            self._list_all(events_dir)
        return self._listing_path

    def begin_whole(self, events_dir: str) -> str:
        """After `begin`, before anything of the ranks is started: the record begins from nothing.

        In an image, whose recorder sees its own files alone, it is kept for this run alone.
        Returns: as `begin`.
        """
        if not self._is_whole and events_dir and self._is_wanted():
            if self._key is None:
                self._folder = self._own_folder = f"{events_dir}/start-{os.getpid()}-{time.time_ns()}"
                self._key = self._make_key()
            self._list_all(events_dir)
        return self._listing_path

    def _is_wanted(self) -> bool:
        """Without our file in ranks there is no first step."""
        return self._spec.record_start and self._spec.rank_hooks and self._spec.entry.mode != "program"

    def _make_key(self) -> JobKey:
        spec = self._spec
        return record_files.make_start_key(spec.python, spec.entry.mode, spec.entry.target)

    def _list_all(self, events_dir: str) -> None:
        """By ranks, and by the process that they are forked from."""
        self._is_whole = True
        self._listing_path = f"{events_dir}/preload-{os.getpid()}-{time.time_ns()}.imports"

    def prepare(self, rank: Rank) -> None:
        """The ranks of an attempt are about to be started; asks `rank`, local rank 0, to list all it opens."""
        if self._is_whole and not self._began_ns[RECORD] and rank.events_file.endswith(EVENTS_SUFFIX):
            with suppress(OSError):
                os.close(os.open(listing_of(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def first_step_seen(self, rank: Rank) -> None:
        """All ranks of this node have made theirs; `rank` is local rank 0."""
        if self._key is None:
            return
        if self._is_prefetching:
            self._guard.end_help(PREFETCH)
        if rank.events_file.endswith(EVENTS_SUFFIX) and not self._began_ns[RECORD]:
            preload = self._listing_path if rank.is_forked else ""
            flags = ("1" if self._is_whole else "", "1" if self._is_stale else "")
            texts = (self._folder, str(rank.pid), listing_of(rank), preload, *flags)
            self._ask(RECORD, "record", *texts, *self._key)

    def on_helper_ended(self, number: int, cpu_s: float, answer: Mapping[str, Any]) -> None:
        """A helper of the guard's is gone, by itself or not."""
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
        """Nobody needs a record that is this run's alone any more."""
        if self._own_folder:
            import shutil

            shutil.rmtree(self._own_folder, ignore_errors=True)

    def files(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """What the start has read, in the order of first use: path and ranges (offset, bytes), none: all of it."""
        from launcher.ranks.start_plan import FILE, SMALL, UNIT_BYTES
        from launcher.ranks.start_record import read_record

        record = None if self._key is None else read_record(self._folder, self._key)
        try:
            entries = [] if record is None else list(record.entries())
        except ValueError:  # somebody else has written it
            return []
        return [
            (each.path, [(first * UNIT_BYTES, count * UNIT_BYTES) for first, count in each.ranges])
            for each in entries
            if each.kind in (FILE, SMALL)
        ]

    def _ask(self, number: int, name: str, *texts: str) -> None:
        self._began_ns[number] = time.monotonic_ns()
        self._guard.help(number, name, texts)


def listing_of(rank: Rank) -> str:
    """Where a rank lists what it has imported."""
    return rank.events_file.removesuffix(EVENTS_SUFFIX) + ".imports"


def is_stale(answer: Mapping[str, Any]) -> bool:
    """PURE: whether so much was not as recorded that it has to be recorded anew; a few files come and go."""
    wrong = answer.get("changed", 0) + answer.get("missing", 0)
    return bool(wrong > STALE_SHARE * (answer.get("files", 0) + wrong))
