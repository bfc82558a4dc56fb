"""Waiting for the first steps of all ranks, with and without the kernel's help."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from launcher.base.loop import Loop
from launcher.ranks import spans as start_watch
from launcher.ranks.output import inotify
from launcher.ranks.spans import StartWatch
from tests.unit.launcher.ranks.looping import run_for, run_until

STEP = b'{"stage": "first_step"}\n'


@pytest.mark.parametrize("has_inotify", [True, False])
def test_the_last_first_step_is_reported_once(
    has_inotify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_watch, "POLL_S", 0.01)
    monkeypatch.setattr(start_watch, "CLOSE_AFTER_S", 0.0)
    if not has_inotify:

        def fail(_self: object) -> None:
            raise OSError(errno.EMFILE, "no instances left")

        monkeypatch.setattr(inotify.Inotify, "__init__", fail)
    loop = Loop()
    files = [tmp_path / str(rank) for rank in range(2)]
    told: list[bool] = []
    watch = StartWatch(loop, {rank: str(path) for rank, path in enumerate(files)}, told.append, 0.0)
    files[0].write_bytes(STEP)
    run_for(loop, 0.05)
    assert told == []
    files[1].write_bytes(STEP)
    run_until(loop, lambda: bool(told))
    watch.finish()
    run_for(loop, 0.05)
    assert told == [True]
    loop.close()


def test_an_attempt_that_ends_before_is_looked_at_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_watch, "POLL_S", 0.01)
    monkeypatch.setattr(start_watch, "CLOSE_AFTER_S", 0.0)
    loop = Loop()
    told: list[bool] = []
    watch = StartWatch(loop, {0: str(tmp_path / "no folder" / "0")}, told.append, 0.0)
    watch.stop()
    assert told == []
    watch.finish()
    run_for(loop, 0.05)
    assert told == [False]
    loop.close()


@pytest.mark.parametrize("begins_s", [60.0, 0.01])
def test_a_watch_that_begins_late_sees_what_was_before(begins_s: float, tmp_path: Path) -> None:
    loop = Loop()
    (tmp_path / "0").write_bytes(STEP)
    told: list[bool] = []
    StartWatch(loop, {0: str(tmp_path / "0")}, told.append, begins_s)
    assert told == [True]
    run_for(loop, 0.05)
    assert told == [True]
    loop.close()


def test_a_rank_that_has_ended_is_looked_at_at_once(tmp_path: Path) -> None:
    loop = Loop()
    told: list[bool] = []
    watch = StartWatch(loop, {0: str(tmp_path / "0")}, told.append, 60.0)
    (tmp_path / "0").write_bytes(STEP)
    watch.rank_ended(0)
    assert told == [True]
    watch.finish()
    assert told == [True]
    loop.close()


@pytest.mark.parametrize("after_s", [0.0, 60.0])
def test_a_step_that_was_not_seen_before_the_stop_counts_for_no_later_attempt(
    after_s: float, tmp_path: Path
) -> None:
    loop = Loop()
    told: list[bool] = []
    watch = StartWatch(loop, {0: str(tmp_path / "0")}, told.append, after_s)
    watch.stop()
    (tmp_path / "0").write_bytes(STEP)
    watch.finish()
    assert told == [False]
    loop.close()
