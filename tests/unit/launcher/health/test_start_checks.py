"""What bootrun makes of findings: what is told, how often, what makes a node leave, and nonsense."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.health.finding import FAIL, HUNG, OK, UNKNOWN, WARN, Finding
from launcher.base import children, helper_process
from launcher.base.loop import Loop
from launcher.health.run_checks import MAX_KNOWN, HealthWatch
from launcher.health.start_checks import MAX_LINES, MAX_REPORTED, NodeHealth, worst_finding_lines
from launcher.health.stop_checks import StopChecks
from tests.support import wait_until
from tests.unit.launcher.ranks.looping import run_until


class Reported:
    """A NodeHealth without a process, and what it has done."""

    def __init__(self, may_fail: bool = True) -> None:
        self.loop = Loop()
        self.lines: list[str] = []
        self.noted: list[Finding] = []
        self.failed: list[str] = []
        self.health = NodeHealth(
            self.loop, [], (), self.lines.append, self.noted.append, self.failed.append if may_fail else None
        )

    def take(self, **fields: object) -> None:
        self.health._take({"check": "disks", "what": "broken", "way_out": "mend it", **fields})


def test_lines_and_events_by_level() -> None:
    told = Reported()
    for level in (OK, UNKNOWN, WARN):
        told.take(level=level)
    assert [found.level for found in told.noted] == [UNKNOWN, WARN]
    assert told.lines == ["check: warn    disks: broken; mend it"]
    assert told.failed == []


@pytest.mark.parametrize("level", [FAIL, HUNG])
def test_the_first_failure_counts_once(level: str) -> None:
    told = Reported()
    told.take(level=level, where="sda")
    told.take(level=level, where="sdb")
    assert [line.split(":")[0] for line in told.failed] == ["this node is not fit for the job"]
    assert "sda" in told.failed[0] and len(told.lines) == 2


def test_what_is_only_reported_fails_nothing() -> None:
    told = Reported(may_fail=False)
    told.take(level=FAIL)
    assert len(told.lines) == 1


def test_figures_that_change_are_reported_once() -> None:
    told = Reported()
    for measured in range(5):
        told.take(level=WARN, measured=measured)
    assert len(told.lines) == 1 and len(told.noted) == 5


def test_a_flood_is_cut() -> None:
    told = Reported()
    for number in range(2 * MAX_REPORTED):
        told.take(level=WARN, where=str(number))
    assert len(told.lines) == MAX_REPORTED


def test_nonsense_costs_a_line() -> None:
    told = Reported()
    told.take(level="great\n")
    told.health._take({})
    assert len(told.lines) == 2 and all("invalid output" in line for line in told.lines)
    assert told.noted == told.failed == []


Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Replaces the process of the checks by one that writes these lines, and ends with this status."""

    def install(*answers: dict[str, object], status: int = 0, first: str = "") -> None:
        path = tmp_path / "checks"
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
        path.write_text(f"#!{executable}\nimport sys\n{first}\nsys.stdout.write({lines!r})\nsys.exit({status})\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", os.fspath(path))

    executable = sys.executable
    return install


CUT_OFF = (
    "warning: health checks of this start disabled: their process has failed: it closed its connection; "
    "run `bootseer check` on this node"
)


def test_checks_that_end_before_all_were_made_are_reported(play: Play) -> None:
    play({"check": "disks", "what": "broken", "way_out": "mend it", "level": WARN}, status=1)
    told = Reported()
    told.health.begin()
    run_until(told.loop, lambda: told.health._process is None)
    assert told.lines == ["check: warn    disks: broken; mend it", CUT_OFF] and told.failed == []


def test_the_end_of_checks_that_were_all_made_is_not_reported(play: Play) -> None:
    told = Reported()
    play({"done": True})
    told.health.begin()
    run_until(told.loop, lambda: told.health._process is None)
    assert told.lines == []
    play(status=1)  # of the next attempt
    told.health.begin()
    run_until(told.loop, lambda: told.health._process is None)
    assert told.lines == [CUT_OFF]


def begin_at_start(loop: Loop) -> Callable[[], object]:
    health = NodeHealth(loop, [], (), ignore, ignore, None)
    health.begin()
    return health.close


def begin_while_ranks_run(loop: Loop) -> Callable[[], object]:
    watch = HealthWatch(loop, [], (), None, ignore, ignore, ignore)
    watch.begin()
    return watch.close


def begin_between_attempts(loop: Loop) -> Callable[[], object]:
    return StopChecks(loop, [], os.environ, 0.1, 60.0, lambda _found, _is_done: None).close


def begin_between_attempts_too_late(loop: Loop) -> Callable[[], object]:
    return StopChecks(loop, [], os.environ, 0.1, 60.0, lambda _found, _is_done: None)._on_late


def ignore(_: object) -> None:
    pass


@pytest.mark.parametrize(
    "begin",
    [begin_at_start, begin_while_ranks_run, begin_between_attempts, begin_between_attempts_too_late],
)
def test_checks_that_wait_in_the_kernel_block_nothing(
    begin: Callable[[Loop], Callable[[], object]], play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(first="import time; time.sleep(60)")
    end = begin(Loop())
    killed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, _signum: killed.append(pid))  # no signal reaches it
        began_s = time.monotonic()
        end()
        assert time.monotonic() - began_s < helper_process.END_S
    (pid,) = killed
    os.kill(pid, signal.SIGKILL)
    wait_until(children.reap_left)
    assert not os.path.exists(f"/proc/{pid}")


class Watched:
    """A HealthWatch without a process, behind a NodeHealth."""

    def __init__(self) -> None:
        self.told = Reported()
        self.over: list[Finding] = []
        self.watch = HealthWatch(
            Loop(), [], (), None, self.told.lines.append, self.told.health.tell, self._tell_over
        )

    def _tell_over(self, found: Finding) -> None:
        self.over.append(found)
        self.told.health.report_over(found)

    def lines(self) -> tuple[str, ...]:
        return worst_finding_lines(self.watch.found.values())

    def take(self, **fields: object) -> None:
        self.watch._take({"check": "space", "what": "free", "way_out": "delete", "where": "/data", **fields})


def test_what_was_wrong_is_not_said_for_ever_when_nobody_looks_any_more() -> None:
    watched = Watched()
    watched.take(level=WARN)
    watched.watch._on_end("it closed its connection")
    assert watched.lines() == ()


def test_what_comes_and_goes_while_ranks_run() -> None:
    watched = Watched()
    watched.take(level=WARN, measured=9)
    watched.take(level=FAIL, measured=1)
    assert watched.lines() == ("fail    space /data: free (1); delete",)
    watched.take(level=FAIL, is_over=True)
    watched.take(level=FAIL, is_over=True)
    assert watched.lines() == () and len(watched.over) == 1
    watched.take(level=FAIL, measured=2)
    assert watched.told.lines == [
        "check: warn    space /data: free (9); delete",
        "check: fail    space /data: free (1); delete",
        "check: over    space /data: free",
        "check: fail    space /data: free (2); delete",
    ]
    assert watched.told.failed == [], "only at a start a node leaves for it"


def test_what_was_reported_beside_the_start_is_not_reported_again() -> None:
    watched = Watched()
    watched.told.take(level=WARN)
    watched.take(check="disks", what="broken", where="", way_out="mend it", level=WARN)
    assert len(watched.told.lines) == 1
    assert watched.lines() == ("warn    disks: broken; mend it",)


def test_pages_have_the_worst_of_what_is_wrong() -> None:
    watched = Watched()
    for number in range(2 * MAX_KNOWN):
        watched.take(level=WARN, where=str(number))
    watched.take(level=HUNG, where="3")
    lines = watched.lines()
    assert len(lines) == MAX_LINES and lines[0].startswith("hung    space 3")
    watched.take(level="great")
    assert "invalid output" in watched.told.lines[-1]
