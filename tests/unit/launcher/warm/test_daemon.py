"""The warm daemon with workers that answer as a test says: none stops it, blocks it or reaches its terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.warm import answers, daemon
from launcher.warm.daemon import Daemon, SignalReceivedError
from launcher.warm.jobs import JobFile
from launcher.warm.options import Options
from launcher.warm.results import STAGES

# Runs the [job] command of its file as Python, with `send`.
WORKER = """
import json, sys, time, tomllib
order = json.loads(sys.stdin.readline())
def send(did, **fields):
    print(json.dumps({"did": did, **fields}), flush=True)
exec(tomllib.loads(order["text"])["job"]["command"][0])
"""
DONE = "send('done', stages=[], holds=False)"

Run = Callable[..., int]


class Said(list[str]):
    """Lines for users, and progress."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, int, int]] = []


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def run(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one round over files with these workers."""

    def run(**workers: str) -> int:
        jobs = tmp_path / "jobs"
        jobs.mkdir(exist_ok=True)
        for name, worker in workers.items():
            (jobs / f"{name}.toml").write_text(f"[job]\ncommand = ['''{worker}''']\n")
            (jobs / f"{name}.toml").chmod(0o644)
        monkeypatch.setenv("BOOTSEER_RUNTIME", str(tmp_path / "run"))
        monkeypatch.setattr(daemon, "command_of", lambda _module: [sys.executable, "-c", WORKER])
        options = Options(str(jobs), 300.0, True, STAGES, None, None, 0.0, False, False)
        return Daemon(options, said.append, lambda *shown: said.shown.append(shown)).run()

    return run


def test_a_file_is_warmed(run: Run, said: Said) -> None:
    assert run(a=f"send('said', text='a line'); send('progress', stage='image', done=1, total=2); {DONE}") == 0
    assert (said, said.shown) == (["a.toml: a line"], [("image", 1, 2)])


@pytest.mark.parametrize(
    "worker",
    [
        "send('done', stages=None, holds=True)",
        "send('done', stages=3)",
        "send('done')",
        "print('nonsense', flush=True)",
        "print('[]', flush=True)",
        "print('{', flush=True)",
        "",
    ],
)
def test_an_invalid_result_costs_one_file(worker: str, run: Run, said: Said) -> None:
    assert run(a=worker, b=f"send('said', text='b'); {DONE}") == 1
    assert said == ["a.toml: its worker process has ended without a result", "b.toml: b"]


def test_invalid_progress_is_not_shown(run: Run, said: Said) -> None:
    bad: list[tuple[Any, Any, Any]] = [
        ("image", -1, -1),
        ("\x1b[2J", 1, 2),
        (None, None, None),
        ("image", 10**400, 1),
    ]
    sent = "; ".join(f"send('progress', stage={each[0]!r}, done={each[1]}, total={each[2]})" for each in bad)
    assert run(a=f"{sent}; {DONE}") == 0
    assert (said, said.shown) == ([], [])


def test_a_signal_ends_it_also_where_exceptions_are_ignored(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ignoring:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):
                pass

    work, ignored = Daemon._work, list[object]()

    def work_on(self: Daemon, file: JobFile) -> object:
        Ignoring()
        return work(self, file)

    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_type))
    monkeypatch.setattr(Daemon, "_work", work_on)
    told = f"send('said', text='a line'); {DONE}"
    assert run(a=told, b=told) == 0
    assert (said, ignored) == (["a.toml: a line"], [SignalReceivedError])


def test_control_characters_do_not_reach_the_terminal(run: Run, said: Said) -> None:
    evil = "\\x1b]0;root\\x07"
    assert run(a=f"send('said', text='{evil}'); send('failed', why='{evil}')") == 1
    assert said == ["a.toml: ]0;root", "a.toml: ]0;root"]


def test_messages_without_progress_do_not_hold_the_turn(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SILENCE_S", 0.3)
    flood = "while True:\n    send('progress', stage='image', done=1, total=2); send('said', text='x'); send('hm')"
    assert run(a=flood, b=DONE) == 1
    assert said.count("a.toml: x") <= answers.MAX_SAID
    assert said[-1] == "a.toml: its worker process has made no progress for 0.3 s"


def test_a_worker_that_cannot_be_started_costs_one_file(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(daemon.subprocess, "Popen", refuse)
    assert run(a=DONE) == 1
    assert said == ["a.toml: its worker process cannot be started: resource temporarily unavailable"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The first group of processes that a signal is sent to; none reaches it before the end of the test."""
    killpg, stuck = os.killpg, list[int]()

    def send(group: int, signum: int) -> None:
        if not stuck:
            stuck.append(group)
        if group not in stuck:
            killpg(group, signum)

    monkeypatch.setattr(os, "killpg", send)
    monkeypatch.setattr(daemon, "END_S", 0.05)
    yield stuck
    for group in stuck:
        killpg(group, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:subprocess [0-9]+ is still running:ResourceWarning")
def test_a_worker_in_the_kernel_is_left_and_the_next_file_follows(run: Run, said: Said, stuck: list[int]) -> None:
    assert run(a="send('failed', why='no'); time.sleep(1000)", b=f"send('said', text='b'); {DONE}") == 1
    [pid] = stuck
    warning = f"warning: a.toml: worker process {pid} does not end: it waits in the kernel;"
    assert said == [f"{warning} does a file server of its user hang?", "a.toml: no", "b.toml: b"]


def test_no_second_worker_starts_beside_a_stuck_one(
    tmp_path: Path, run: Run, said: Said, stuck: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Daemon] = []
    begin = Daemon._run

    def twice(self: Daemon) -> int:
        made.append(self)
        begin(self)
        (tmp_path / "jobs" / "a.toml").write_text("[job]\ncommand = ['''send('failed', why='again')''']\n")
        return begin(self)

    monkeypatch.setattr(Daemon, "_run", twice)
    assert run(a="send('failed', why='no'); time.sleep(1000)") == 1
    [pid] = stuck
    assert said[-1] == f"a.toml: its last worker process, {pid}, still waits in the kernel"
    [(_, worker)] = made[0]._stuck
    os.kill(pid, signal.SIGKILL)
    assert worker.wait(20) == -signal.SIGKILL
    assert made[0]._stuck_worker("a.toml") == 0
    stuck.clear()
