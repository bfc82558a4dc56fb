"""What watchers of a job get: each event once, also after a break; and what a slow one costs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer import aio
from launcher.serve import feed as feeds
from launcher.serve.feed import Feed, Frame, TooManyError, Watcher
from launcher.serve.jobs import Jobs
from tests.unit.launcher.serve.made_jobs import made_job, make_status
from tests.unit.launcher.serve.test_event_log import append, line

DEADLINE_S = 20.0


class Told(NamedTuple):
    """One message of a stream."""

    kind: str
    id: str
    data: Any


def parse(data: bytes) -> list[Told]:
    found = []
    for block in filter(None, data.decode().split("\n\n")):
        fields = dict(re.findall(r"^(\w+): (.*)$", block, re.MULTILINE))
        found.append(Told(fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


async def take(watcher: Watcher, until: Callable[[list[Told]], bool]) -> list[Told]:
    """What comes until there is enough."""
    found: list[Told] = []
    async with asyncio.timeout(DEADLINE_S):
        while not until(found):
            found += parse(await watcher.take())
    return found


def named(found: list[Told]) -> list[str]:
    return [each.data["name"] for each in found if each.kind == "event"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rt").mkdir(mode=0o700)
    (tmp_path / "events").mkdir()
    return {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}


@pytest.fixture
def run(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Feed, Path], Coroutine[Any, Any, None]]], None]:
    """Runs a test with the feed of a job that runs, and the file of its events."""
    monkeypatch.setattr(feeds, "STATE_S", 0.05)

    def go(test: Callable[[Feed, Path], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            jobs = Jobs(environ)
            (view,) = await jobs.look()
            feed = Feed(jobs, view)
            try:
                await test(feed, tmp_path / "events/run.jsonl")
            finally:
                await feed.close()
                await jobs.close()

        with made_job(environ, make_status(events=os.fspath(tmp_path / "events"), runs_s=time.time())):
            asyncio.run(main())
        aio.close()

    return go


def test_events_come_once_and_go_on_after_a_break(run: Any) -> None:
    async def test(feed: Feed, file: Path) -> None:
        append(file, line("first") + b"\n")
        watcher = await feed.watch("", lambda: None)
        found = await take(watcher, lambda found: len(found) >= 2)
        assert [each.kind for each in found] == ["event", "state"]
        assert found[1].data["run_id"] == "run7"
        append(file, line("second") + b"\n" + line("third") + b"\n")
        found += await take(watcher, lambda found: len(named(found)) >= 2)
        feed.leave(watcher)
        append(file, line("fourth") + b"\n")
        ids = [each.id for each in found if each.kind == "event"]
        again = await feed.watch(ids[1], lambda: None)
        rest = await take(again, lambda found: len(named(found)) >= 2)
        assert named(found) == ["first", "second", "third"]
        assert named(rest) == ["third", "fourth"]
        assert "reset" not in {each.kind for each in rest}
        feed.leave(again)
        assert feed.is_idle

    run(test)


@pytest.mark.parametrize("last", ["0-1", "-", "x", "00000000-1", "-5", "{epoch}-x", "{epoch}-" + "9" * 50])
def test_an_unknown_place_begins_anew(run: Any, last: str) -> None:
    async def test(feed: Feed, file: Path) -> None:
        append(file, line("first") + b"\n")
        await feed.counts()
        assert feed.log is not None
        watcher = await feed.watch(last.format(epoch=feed.log.epoch), lambda: None)
        found = await take(watcher, lambda found: len(found) >= 3)
        assert [each.kind for each in found] == ["reset", "event", "state"]
        feed.leave(watcher)

    run(test)


def test_what_is_no_longer_kept_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.serve.event_log.MAX_KEPT_LINES", 3)

    async def test(feed: Feed, file: Path) -> None:
        append(file, b"".join(line(f"n{number}") + b"\n" for number in range(8)))
        await feed.counts()
        assert feed.log is not None
        for have, kinds in ((2, ["reset", "event"]), (5, ["event", "event"])):
            watcher = await feed.watch(f"{feed.log.epoch}-{have}", lambda: None)
            found = await take(watcher, lambda found: len(found) >= 2)
            assert [each.kind for each in found][:2] == kinds
            assert named(found) == ["n5", "n6", "n7"]
            feed.leave(watcher)

    run(test)


def test_the_files_of_nodes_are_replaced_by_that_of_the_run(run: Any) -> None:
    async def test(feed: Feed, file: Path) -> None:
        append(file.parent / "agent-a.jsonl", line("first") + b"\n")
        watcher = await feed.watch("", lambda: None)
        await take(watcher, lambda found: len(found) >= 2)
        append(file, line("first") + b"\n" + line("second") + b"\n")
        found = await take(watcher, lambda found: len(named(found)) >= 2)
        assert next(each.kind for each in found if each.kind != "state") == "reset"
        assert named(found) == ["first", "second"]
        feed.leave(watcher)

    run(test)


def test_a_slow_watcher_is_cut_off_and_others_go_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_QUEUED_BYTES", 2000)
    cut: list[str] = []

    async def test(feed: Feed, file: Path) -> None:
        append(file, line("first") + b"\n")
        await feed.watch("", lambda: cut.append("slow"))
        watcher = await feed.watch("", lambda: cut.append("fast"))
        found: list[Told] = []
        for number in range(30):
            append(file, line(f"n{number}") + b"\n")
            found += await take(watcher, lambda found: bool(named(found)))
        assert set(cut) == {"slow"}
        assert named(found)[-1] == "n29"

    run(test)


def test_only_the_newest_state_waits() -> None:
    async def test() -> None:
        watcher = Watcher(lambda: pytest.fail("it is not cut off"))
        for number in range(1000):
            watcher.put(Frame(b"event: state\ndata: %d\n\n" % number, True))
        watcher.put(Frame(b'id: a-1\nevent: event\ndata: {"name": "x"}\n\n', False))
        assert [(each.kind, each.data) for each in parse(await watcher.take())] == [
            ("state", 999),
            ("event", {"name": "x"}),
        ]
        watcher.end()
        assert await watcher.take() == b""

    asyncio.run(test())


def test_there_is_a_limit_of_watchers(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_WATCHERS", 2)

    async def test(feed: Feed, _: Path) -> None:
        for _number in range(2):
            await feed.watch("", lambda: None)
        with pytest.raises(TooManyError):
            await feed.watch("", lambda: None)

    run(test)


def test_a_directory_that_goes_away_ends_nothing(run: Any) -> None:
    async def test(feed: Feed, file: Path) -> None:
        watcher = await feed.watch("", lambda: None)
        file.parent.rmdir()
        await feed.counts()
        found = await take(watcher, lambda found: len(found) >= 1)
        assert found[0].kind == "state"

    run(test)
