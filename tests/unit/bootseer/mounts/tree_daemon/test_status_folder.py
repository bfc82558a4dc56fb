"""When the texts of the status folder are made anew, without a mount."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from bootseer.mounts.tree_daemon import status_folder
from bootseer.mounts.tree_daemon.status_folder import StatusFolder
from tests.unit.bootseer.mounts.tree_daemon.test_status_texts import STATUS


class Daemon:
    """A daemon's event loop, in a thread of its own, and its answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def folder(self) -> StatusFolder:
        async def make() -> StatusFolder:
            return StatusFolder("/nowhere", self._answer)

        made = asyncio.run_coroutine_threadsafe(make(), self.loop).result(10)
        made._keep(STATUS)
        return made

    async def _answer(self) -> Mapping[str, Any]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {**STATUS, "uptime_s": float(self.asked)}

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    if not made.loop.is_closed():
        made.close()


def uptime_s(folder: StatusFolder) -> float:
    return float(json.loads(folder._find_texts()["status.json"])["uptime_s"])


def test_many_readers_cost_one_answer(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_folder, "FRESH_S", 3600.0)
    folder = daemon.folder()
    assert {uptime_s(folder) for _ in range(1000)} == {round(STATUS["uptime_s"], 3)}
    assert daemon.asked == 0
    monkeypatch.setattr(status_folder, "FRESH_S", 0.0)
    assert [uptime_s(folder) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_busy_daemon_is_waited_for_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_folder, "FRESH_S", 0.0)
    monkeypatch.setattr(status_folder, "PATIENCE_S", 0.05)
    folder = daemon.folder()
    assert uptime_s(folder) == 1.0
    goes_on = threading.Event()
    daemon.loop.call_soon_threadsafe(goes_on.wait, 30)
    assert uptime_s(folder) == 1.0
    monkeypatch.setattr(status_folder, "FRESH_S", 3600.0)
    begin_s = time.monotonic()
    assert {uptime_s(folder) for _ in range(100)} == {1.0}
    assert time.monotonic() - begin_s < 0.05 * 100
    goes_on.set()
    monkeypatch.setattr(status_folder, "FRESH_S", 0.0)
    monkeypatch.setattr(status_folder, "PATIENCE_S", 10.0)
    assert uptime_s(folder) > 1.0


def test_errors_and_the_end_of_the_daemon_leave_the_last_texts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_folder, "FRESH_S", 0.0)
    folder = daemon.folder()
    assert uptime_s(folder) == 1.0
    daemon.error = RuntimeError("a bug")
    assert uptime_s(folder) == 1.0
    daemon.close()
    assert uptime_s(folder) == 1.0
