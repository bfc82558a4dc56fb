"""When a start is recorded and read ahead, as seen from bootrun: what it asks the guard for, what it notes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest

from launcher.cli.parser import parse
from launcher.ranks.group import Rank
from launcher.ranks.output.logs import RankLogs
from launcher.ranks.start_recorder import PREFETCH, RECORD, HelperSpan, StartTrace, is_stale
from launcher.ranks.start_trace.files import START_DIRECTORY, make_start_key, records_dir
from launcher.ranks.start_trace.plan import DIRECTORY, FILE, NAME, SMALL, PrefetchEntry
from launcher.ranks.start_trace.record import write_record
from launcher.spec import build_spec
from launcher.supervisor.client import SupervisorClient


class Supervisor:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, tuple[str, ...]]] = []
        self.ended: list[int] = []

    def help(self, number: int, name: str, module: str, texts: Iterable[str]) -> None:
        self.asked.append((number, name, tuple(texts)))

    def end_help(self, number: int) -> None:
        self.ended.append(number)


class Start:
    """A bootrun up to the guard."""

    def __init__(self, folder: Path, *flags: str, is_kept: bool = False, events: bool = True) -> None:
        script = folder / "train.py"
        script.write_text("")
        environ = {"BOOTSEER_CACHE_DIR": os.fspath(folder / "cache"), "OMP_NUM_THREADS": "1"}
        spec = build_spec(parse([*flags, os.fspath(script)], environ), environ)
        self.key = make_start_key(spec.python, "script", os.fspath(script))
        self.folder = records_dir(environ, START_DIRECTORY)
        if is_kept:
            assert write_record(self.folder, self.key, [PrefetchEntry(NAME, "/a")], []) == ""
        self.guard, self.spans = Supervisor(), list[HelperSpan]()
        self.told = 0  # that something was recorded
        self.recorded = StartTrace(cast(SupervisorClient, self.guard), spec, self.spans.append, self.on_recorded)
        self.listing = self.recorded.begin(environ, "/logs/events" if events else "")

    def on_recorded(self) -> None:
        self.told += 1

    def first_step(self, *, forked: bool = False, events: str = "/logs/events/rank-0.jsonl") -> None:
        rank = Rank(0, 0, cast(RankLogs, None), events)
        rank.pid, rank.is_forked = 77, forked
        self.recorded.first_step_seen(rank)


def test_an_unknown_start_is_recorded(tmp_path: Path) -> None:
    start = Start(tmp_path)
    assert start.guard.asked == []
    assert start.listing.startswith("/logs/events/preload-")
    start.first_step(forked=True)
    start.first_step(forked=True)  # of a restart
    texts = (start.folder, "77", "/logs/events/rank-0.imports", start.listing, "1", "", *start.key)
    assert start.guard.asked == [(RECORD, "record", texts)]
    assert start.guard.ended == []
    start.recorded.on_helper_ended(RECORD, 0.5, {"files": 3})
    (span,) = start.spans
    assert (span.name, span.error, span.facts) == ("start_recorded", "", {"files": 3, "cpu_s": 0.5})
    assert start.told == 1


def test_what_was_recorded_is_reported_as_files_and_bytes(tmp_path: Path) -> None:
    start = Start(tmp_path)
    assert start.recorded.files() == []
    entries = [
        PrefetchEntry(DIRECTORY, "/a"),
        PrefetchEntry(NAME, "/a/x"),
        PrefetchEntry(SMALL, "/a/b.py"),
        PrefetchEntry(FILE, "/a/c.so", 9, 9),
    ]
    entries.append(PrefetchEntry(FILE, "/a/d.so", 1 << 20, 9, ((1, 2), (8, 1))))
    assert write_record(start.folder, start.key, entries, []) == ""
    found = [("/a/b.py", []), ("/a/c.so", []), ("/a/d.so", [(4096, 8192), (32768, 4096)])]
    assert start.recorded.files() == found
    start.recorded.on_helper_ended(RECORD, 0.1, {"error": "it was killed"})
    assert start.told == 0


def test_what_was_made_in_an_image_is_recorded_for_this_run(tmp_path: Path) -> None:
    start = Start(tmp_path, "--image", "/trees/x")
    assert start.listing == ""
    events = os.fspath(tmp_path / "events")
    listing = start.recorded.begin_whole(events)
    assert listing.startswith(f"{events}/preload-") and start.recorded.begin_whole(events) == listing
    start.first_step(forked=True)
    ((number, name, texts),) = start.guard.asked
    assert (number, name, *texts[1:]) == (
        RECORD, "record", "77", "/logs/events/rank-0.imports", listing, "1", "", *start.key
    )  # fmt: skip
    assert texts[0].startswith(f"{events}/start-")
    assert write_record(texts[0], start.key, [PrefetchEntry(SMALL, "/a/b.py")], []) == ""
    assert start.recorded.files() == [("/a/b.py", [])]
    start.recorded.on_helper_ended(RECORD, 0.1, {"why": "", "files": 1})
    assert start.told == 1 and not os.path.exists(texts[0])
    assert Start(tmp_path, "--image", "/trees/x", "--record-start", "off").recorded.begin_whole(events) == ""


def test_what_was_made_here_is_recorded_from_nothing(tmp_path: Path) -> None:
    """Also where an earlier start is known, of which most has changed by now."""
    start = Start(tmp_path, is_kept=True)
    assert start.listing == ""
    listing = start.recorded.begin_whole("/logs/events")
    assert listing.startswith("/logs/events/preload-")
    start.first_step(forked=True)
    texts = (start.folder, "77", "/logs/events/rank-0.imports", listing, "1", "", *start.key)
    assert start.guard.asked[-1] == (RECORD, "record", texts)
    start.recorded.on_helper_ended(RECORD, 0.1, {"why": "the rank has listed nothing"})
    assert start.told == 0 and os.path.exists(start.folder)


def test_a_known_start_is_read_ahead_at_once_until_the_first_step(tmp_path: Path) -> None:
    start = Start(tmp_path, is_kept=True)
    assert start.listing == ""  # what is known need not be told again
    assert start.guard.asked == [(PREFETCH, "prefetch", (start.folder, *start.key))]
    start.first_step()
    assert start.guard.ended == [PREFETCH]
    start.recorded.on_helper_ended(PREFETCH, 0.0, {"error": "no memory"})
    assert [(span.name, span.error) for span in start.spans] == [("prefetch", "no memory")]


@pytest.mark.parametrize(("changed", "stale"), [(0, ""), (1, ""), (50, "1")])
def test_what_has_changed_is_recorded_again(tmp_path: Path, changed: int, stale: str) -> None:
    start = Start(tmp_path, is_kept=True)
    start.recorded.on_helper_ended(PREFETCH, 0.0, {"files": 100, "changed": changed})
    start.first_step()
    assert start.guard.ended == []  # it has ended before
    assert start.guard.asked[1][2][:6] == (start.folder, "77", "/logs/events/rank-0.imports", "", "", stale)


@pytest.mark.parametrize(
    "flags",
    [("--record-start", "off"), ("--rank-hooks", "off"), ("--no-python",), ("--image", "rootfs:/srv/root")],
    ids=lambda flags: flags[0],
)
def test_nothing_is_asked_where_it_is_off(tmp_path: Path, flags: tuple[str, ...]) -> None:
    start = Start(tmp_path, *flags, is_kept=True)
    start.first_step()
    assert (start.listing, start.guard.asked, start.guard.ended) == ("", [], [])


def test_without_events_a_known_start_is_still_read_ahead(tmp_path: Path) -> None:
    start = Start(tmp_path, is_kept=True, events=False)
    start.first_step(events="")
    assert [number for number, _, _ in start.guard.asked] == [PREFETCH]


def test_a_few_files_may_come_and_go() -> None:
    assert not is_stale({})
    assert not is_stale({"files": 100, "changed": 1, "missing": 1})
    assert is_stale({"files": 10, "missing": 1})
    assert is_stale({"changed": 1})
