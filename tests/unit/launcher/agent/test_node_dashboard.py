"""How bootrun starts `bootseer serve`: once, on the coordinator's node, and what it says of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.agent import node_dashboard
from launcher.agent.node_dashboard import NodeDashboard
from launcher.base import children
from launcher.base.loop import Loop
from tests.support import wait_until

pytestmark = pytest.mark.leaks
SERVES = 'print("bootseer serve: http://127.0.0.1:8484/", file=sys.stderr, flush=True); time.sleep(60)'
GROUP: Any = None


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Started:
    """A dashboard whose process is a script."""

    def __init__(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch, code: str, is_coordinator: bool = True
    ) -> None:
        self.loop, self.said = loop, list[str]()
        self.argv: list[tuple[str, ...]] = []
        monkeypatch.setattr(node_dashboard, "LOOK_S", 0.02)

        def command_of(*words: str) -> list[str]:
            self.argv.append(words)
            return [sys.executable, "-c", f"import os, sys, time\n{code}"]

        monkeypatch.setattr(node_dashboard, "command_of", command_of)
        self.made = NodeDashboard(loop, ("127.0.0.1:8484",), lambda: is_coordinator, self.said.append)
        self.made.feature.started(GROUP)

    def run(self) -> list[str]:
        wait_until(lambda: self.loop.run_once(0.05) or self.said, 30)
        return self.said

    def end(self) -> None:
        """Close it, and end the process that it leaves."""
        pid = self.made._pid
        self.made.feature.close()
        if pid:
            os.kill(pid, signal.SIGKILL)
            wait_until(children.reap_left, 20)


def test_it_says_where_it_is(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(loop, monkeypatch, SERVES)
    started.made.feature.started(GROUP)  # another attempt
    assert started.run() == ["dashboard: http://127.0.0.1:8484/"]
    assert started.argv == [("launcher.serve.process", "127.0.0.1:8484", "--share", "--until-idle", "60")]
    started.end()


def test_secrets_are_not_passed_on(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_SECRET", "a-secret-of-the-job")
    started = Started(loop, monkeypatch, 'sys.exit("secret" if "BOOTSEER_SECRET" in os.environ else "none")')
    assert started.run() == ["warning: --dashboard: none"]
    started.end()


def test_other_nodes_start_none(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(loop, monkeypatch, SERVES, is_coordinator=False)
    assert (started.argv, started.made._pid) == ([], 0)
    started.end()


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("sys.exit('bootseer serve: error: a:1: cannot listen')", "warning: --dashboard: a:1: cannot listen"),
        ("sys.exit(3)", "warning: --dashboard: it has ended without a word"),
        (
            "print('bootseer serve: http://a/ (shared with other jobs)', file=sys.stderr)",
            "dashboard: http://a/ (shared with other jobs)",
        ),
    ],
)
def test_how_it_ends_is_said(loop: Loop, monkeypatch: pytest.MonkeyPatch, code: str, line: str) -> None:
    started = Started(loop, monkeypatch, code)
    assert started.run() == [line]
    started.end()


def test_one_that_says_nothing_is_not_looked_at_for_ever(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_dashboard, "MAX_LOOKS", 3)
    started = Started(loop, monkeypatch, "time.sleep(60)")
    wait_until(lambda: loop.run_once(0.05) or started.made._looks >= 3, 30)
    assert (started.said, started.made._output) == ([], -1)
    started.end()


def test_the_job_may_end_at_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(loop, monkeypatch, SERVES)
    started.end()
    assert (started.said, started.made._pid) == ([], 0)


def test_a_program_that_cannot_be_started_is_named(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(node_dashboard, "command_of", lambda *_words: ["/nowhere/python"])
    made = NodeDashboard(loop, (), lambda: True, said.append)
    made.feature.started(GROUP)
    assert said == ["warning: --dashboard: No such file or directory"]
    made.feature.close()
