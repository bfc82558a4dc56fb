"""A helper process of bootrun's: orders, answers, and every way in which it may end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.base import children
from launcher.base import helper_process as service
from launcher.base.helper_process import END_S, ServiceProcess
from launcher.base.loop import Loop
from tests.support import wait_until

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"did": "echo", "order": json.loads(line)}), flush=True)
"""
# Closes its connection, is deaf to SIGTERM, and goes on.
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.close(0)
os.close(1)
time.sleep(60)
"""
SLOW = DEAF.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "")
QUICK = "import os\nos.close(0)\nos.close(1)\n"


class Desk:
    """A service with what it has said."""

    def __init__(self, loop: Loop, program: str) -> None:
        self.loop = loop
        self.answers: list[dict[str, Any]] = []
        self.ends: list[str] = []
        argv = [sys.executable, "-S", "-c", program]
        self.process = ServiceProcess(loop, argv, dict(os.environ), self.answers.append, self.ends.append)
        self.pid = self.process.pid

    def run_until(self, condition: Any) -> float:
        """Runs the loop; the longest that one round took, in seconds, beside what it waited."""
        longest_s, end_s = 0.0, time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end_s
            began_s = time.monotonic()
            self.loop.run_once(0.01)
            longest_s = max(longest_s, time.monotonic() - began_s)
        return longest_s

    @property
    def is_there(self) -> bool:
        return os.path.exists(f"/proc/{self.pid}")


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()
    assert service._ending == []


def test_orders_and_answers(loop: Loop) -> None:
    desk = Desk(loop, ECHO)
    desk.process.ask("start", url="/a")
    desk.run_until(lambda: desk.answers)
    assert desk.answers == [{"did": "echo", "order": {"do": "start", "url": "/a"}}]
    desk.process.close()
    assert not desk.is_there and desk.ends == []


@pytest.mark.parametrize("program", [QUICK, SLOW, DEAF], ids=["ends", "ends by SIGTERM", "is deaf"])
def test_one_that_closes_its_connection_holds_nobody(loop: Loop, program: str) -> None:
    """The agent's loop goes on, whatever the helper does: ranks may end meanwhile."""
    desk = Desk(loop, program)
    longest_s = desk.run_until(lambda: desk.ends)
    assert desk.ends == ["it closed its connection"]
    assert not desk.is_there, "its successor may need what it held"
    assert desk.process.pid == 0 and longest_s < END_S
    desk.process.kill()  # nothing is left to be ended
    assert desk.ends == ["it closed its connection"]


def test_its_end_is_not_reported_after_close(loop: Loop) -> None:
    desk = Desk(loop, DEAF)
    desk.run_until(lambda: service._ending)
    desk.process.close()
    desk.run_until(lambda: not service._ending)
    assert desk.ends == []


def test_its_end_is_reported_without_a_descriptor_for_it(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    desk = Desk(loop, SLOW)
    desk.run_until(lambda: desk.ends)
    assert desk.ends == ["it closed its connection"] and not desk.is_there


def test_at_the_end_of_bootrun_it_is_killed(loop: Loop) -> None:
    desk = Desk(loop, DEAF)
    desk.run_until(lambda: service._ending)
    assert desk.is_there
    service.kill_ending_processes()
    desk.run_until(lambda: not desk.is_there)


def test_it_is_reaped_by_somebody_else(loop: Loop) -> None:
    """By the handler for orphans of a container's first process."""
    desk = Desk(loop, DEAF)
    desk.run_until(lambda: service._ending)
    os.kill(desk.pid, signal.SIGKILL)
    assert os.waitpid(desk.pid, 0)[0] == desk.pid
    desk.run_until(lambda: desk.ends)


def test_one_that_hangs_is_killed(loop: Loop) -> None:
    desk = Desk(loop, "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n")
    desk.process.kill()
    assert not desk.is_there and desk.ends == []


def test_one_that_cannot_be_killed_is_reaped_later(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(loop, "import time\ntime.sleep(60)\n")
    with monkeypatch.context() as patch:
        patch.setattr(service, "END_S", 0.01)
        patch.setattr(os, "kill", lambda *_: None)  # no signal reaches it
        desk.process.kill()
    assert desk.is_there and desk.process.pid == 0
    os.kill(desk.pid, signal.SIGKILL)
    wait_until(children.reap_left)
    assert not desk.is_there and desk.ends == []


def test_one_that_is_left_goes_on(loop: Loop) -> None:
    desk = Desk(loop, "import sys\nsys.stdin.read()\n")
    desk.process.leave()
    assert service.has_detached()
    service._left.remove(desk.pid)
    wait_until(lambda: os.waitpid(desk.pid, os.WNOHANG)[0] == desk.pid)
    assert desk.ends == []
