"""Asking jobs: all at once, none is waited for, and whatever answers there."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from launcher.serve import jobs as asking
from launcher.serve.jobs import Jobs, JobView
from launcher.status import places
from tests.unit.launcher.serve.made_jobs import made_job, make_columns, make_status

T = TypeVar("T")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rt").mkdir(mode=0o700)
    return {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}


def look(environ: dict[str, str]) -> list[JobView]:
    async def main() -> list[JobView]:
        jobs = Jobs(environ)
        try:
            return await jobs.look()
        finally:
            await jobs.close()

    return asyncio.run(main())


def test_nothing_runs(environ: dict[str, str]) -> None:
    assert look(environ) == []


def test_jobs_and_their_nodes(environ: dict[str, str]) -> None:
    with ExitStack() as stack:
        for pid, run_id, columns in ((1, "a", None), (2, "b", make_columns(4)), (3, "b", None)):
            status = make_status(run_id, pid=pid, coordinator={"nodes": 2} if columns or run_id == "a" else None)
            stack.enter_context(made_job(environ, status, columns))
        views = {view.run_id: view for view in look(environ)}
    assert [agent.status["pid"] for agent in views["b"].agents] == [2, 3]
    assert views["b"].ranks == make_columns(4)
    assert (views["a"].agents[0].why, views["a"].ranks) == ("", None), "an older bootrun does not know them"


def test_one_that_hangs_keeps_no_other_waiting(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 600.0)  # the test does not last so long
    monkeypatch.setattr(asking, "LOOK_S", 0.1)
    monkeypatch.setattr(asking, "MIN_AGE_S", 0.0)
    directory = places.prepare(environ)
    answers = {"silent": None, "closes": b"", "cut": b'{"ok": {"run', "no-json": b"\xff{\n", "other": b"[1]\n"}
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in answers]
        for server, name in zip(servers, answers, strict=True):
            server.bind(os.path.join(directory, name))
            server.listen()
        stack.enter_context(made_job(environ, make_status(), make_columns(2)))

        async def main() -> list[JobView]:
            jobs = Jobs(environ)
            loop = asyncio.get_running_loop()
            asked = asyncio.create_task(jobs.look())
            for server, answer in zip(servers, answers.values(), strict=True):
                server.setblocking(False)
                connection, _ = await loop.sock_accept(server)
                stack.enter_context(connection)
                if answer is not None:
                    await loop.sock_sendall(connection, answer)
                    connection.shutdown(socket.SHUT_RDWR)
            views = await asked
            async with asyncio.timeout(30):
                while len(views) < len(answers):  # all but the silent one
                    views = await jobs.look(0.0)
            await jobs.close()
            return views

        views = asyncio.run(main())
    found = {os.path.basename(view.path): view.agents[0].why for view in views}
    assert "silent" not in found, "it has neither answered nor been given up"
    assert "closed the connection" in found["closes"]
    assert "cut off" in found["cut"]
    assert "not JSON" in found["no-json"]
    assert "another form" in found["other"]
    assert sum(not why for why in found.values()) == 1


def test_one_that_is_stopped_is_named(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.2)
    monkeypatch.setattr(asking, "LOOK_S", 30.0)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(places.prepare(environ), "9-stopped"))
        server.listen()
        (view,) = look(environ)
    assert "has not answered within 0.2 s; it may be stopped" in view.agents[0].why


def test_a_path_that_is_no_utf8(environ: dict[str, str]) -> None:
    with made_job(environ, make_status(script="tr\udce4in.py", logs="/\udce4")):
        (view,) = look(environ)
    assert (view.agents[0].why, view.status["script"]) == ("", "tr\ufffdin.py")


def test_a_name_stays_with_its_job(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an older one of the same id ends; and a later one may have a name that is free again."""
    monkeypatch.setattr(asking, "MIN_AGE_S", 0.0)

    def names(views: list[JobView]) -> dict[Any, tuple[str, bool]]:
        return {view.status["pid"]: (view.name, view.ended_s is None) for view in views}

    async def main() -> None:
        jobs = Jobs(environ)
        first = make_status("none", pid=1, runs_s=99.0)
        with made_job(environ, make_status("none", pid=2, runs_s=9.0)):
            with made_job(environ, first):
                assert names(await jobs.look(0.0)) == {1: ("none", True), 2: ("none~2", True)}
            assert names(await jobs.look(0.0)) == {1: ("none", False), 2: ("none~2", True)}
            with made_job(environ, make_status("none", pid=3)):
                assert names(await jobs.look(0.0)) == {2: ("none~2", True), 3: ("none", True)}
        await jobs.close()

    asyncio.run(main())


def test_many_ranks_are_asked_for_less_often(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MIN_AGE_S", 0.0)

    async def main() -> None:
        jobs = Jobs(environ)
        status = make_status(world_size=10**6)
        with made_job(environ, status, make_columns(2)) as job:
            for _ in range(5):
                (view,) = await jobs.look(0.0)
            assert job.asked == 6, "five times for the status, once for the ranks"
            job.status = {**status, "attempt": 1}
            await jobs.look(0.0)
            assert job.asked == 8, "a new attempt has other ranks"
            assert view.ranks == make_columns(2)
        await jobs.close()

    asyncio.run(main())


def test_one_that_accepts_nothing(environ: dict[str, str]) -> None:
    directory = places.prepare(environ)
    path = os.path.join(directory, "9-full")
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen(0)
        for _ in range(8):  # until its queue is full
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(path)
        (view,) = look(environ)
    assert "accepts no connection" in view.agents[0].why


def test_answers_are_shared_and_the_last_one_is_kept(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        jobs = Jobs(environ)
        with made_job(environ, make_status(), make_columns(2)) as job:
            await asyncio.gather(*(jobs.look(0.0) for _ in range(50)))
            assert job.asked == 2, "once for the status, once for the ranks"
            await jobs.look(60.0)
            assert job.asked == 2
        monkeypatch.setattr(asking, "MIN_AGE_S", 0.0)
        (view,) = await jobs.look(0.0)
        assert (view.ended_s is not None, view.status["run_id"]) == (True, "run7")
        assert not jobs.has_running
        with made_job(environ, make_status()):
            (view,) = await jobs.look(0.0)
            assert view.ended_s is None, "it runs again, under the same id"
        monkeypatch.setattr(asking, "ENDED_S", 0.0)
        assert await jobs.look(0.0) == []
        await jobs.close()

    run(main())


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def test_a_job_is_found_by_id_or_pid(environ: dict[str, str]) -> None:
    async def main() -> None:
        jobs = Jobs(environ)
        with made_job(environ, make_status("77", pid=5)), made_job(environ, make_status("b", pid=77)):
            found = [await jobs.find(name) for name in ("77", "5", "b", "")]
        assert [view and view.run_id for view in found] == ["77", "77", "b", None]
        await jobs.close()

    run(main())
