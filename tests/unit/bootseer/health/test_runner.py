"""Checks in processes of their own: those that hang, die, say nonsense or too much, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.health import runner
from bootseer.health.checks import Request, make_tasks
from bootseer.health.finding import FAIL, HUNG, OK, UNKNOWN, WARN, Finding
from bootseer.health.runner import Task, run_tasks
from bootseer.health.user_check import MAX_ERROR_BYTES, MAX_OUTPUT_BYTES, _drain, name_of, run_own
from bootseer.tuning import DEFAULTS
from tests.support import wait_until
from tests.unit.bootseer.health.machines import HEALTHY, MadeHost, write_tree

pytestmark = [
    pytest.mark.leaks,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # pytest's own
]


def good(where: str = "") -> list[Finding]:
    return [Finding("good", OK, "in order", where)]


def run(*works: Callable[[], list[Finding]], limit_s: float = 20.0) -> list[Finding]:
    tasks = [Task("made", f"thing {number}", work) for number, work in enumerate(works)]
    return [found for findings in run_tasks(tasks, limit_s) for found in findings]


def hang() -> list[Finding]:
    while True:
        signal.pause()


def test_findings_come_in_order_and_carry_the_name_of_the_check() -> None:
    def late() -> list[Finding]:
        time.sleep(0.05)
        return [Finding("made", WARN, "late", "here", 1.5, 2.0, "s", "wait")]

    found = run(late, lambda: good("there"), list)
    assert found == [
        Finding("made", WARN, "late", "here", 1.5, 2.0, "s", "wait"),
        Finding("made", OK, "in order", "there"),
    ]


def test_more_checks_than_run_at_once() -> None:
    count = 2 * DEFAULTS.health.checks_at_once + 3
    assert len(run(*[good] * count)) == count


def test_a_check_that_hangs_is_a_finding_and_is_ended(tmp_path: Path, until: Callable[[int], None]) -> None:
    def hang_with_a_child() -> list[Finding]:
        (tmp_path / "pids").write_text(f"{os.getpid()} {os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')}")
        (tmp_path / "hangs").touch()
        return hang()

    def good_then() -> list[Finding]:
        wait_until((tmp_path / "hangs").exists, 60)
        return good()

    until(1)
    found = run(hang_with_a_child, good_then, limit_s=1.0)
    assert [each.level for each in found] == [HUNG, OK]
    assert found[0].what.startswith("no answer in 1 s") and found[0].where == "thing 0" and found[0].way_out
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}") or is_dead(pid), 10)


def is_dead(pid: str) -> bool:
    """A zombie whose parent has not looked."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_who_was_stopped_itself_calls_nobody_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z, or in a virtual machine that was paused: time has passed, for the checks too."""
    began, real = tmp_path / "began", time.monotonic
    leap = types.SimpleNamespace(monotonic=lambda: real() + 100 * began.exists(), sleep=time.sleep)
    monkeypatch.setattr(runner, "time", leap)

    def look() -> list[Finding]:
        began.touch()
        end_s = real() + 1.5 * runner._LOOK_S  # the leap is seen before this ends
        while real() < end_s:
            time.sleep(0.05)
        return good()

    (found,) = run(look, limit_s=30.0)
    assert found.level == OK


def test_a_check_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk: SIGKILL does nothing."""
    left: list[int] = []
    monkeypatch.setattr(runner, "waits_in_kernel", lambda _: True)
    with monkeypatch.context() as patch:
        patch.setattr(runner._Child, "_kill", lambda child: left.append(child.pid))
        began_s = time.monotonic()
        (found,) = run(hang, limit_s=0.2)
    assert found.level == HUNG and "cannot be ended" in found.what
    assert time.monotonic() - began_s < 10
    (pid,) = left
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_check_that_ends_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with too much to do runs a killed process late; only one that waits in the kernel is left."""
    kill = runner._Child._kill

    def kill_late(child: runner._Child) -> None:
        if not os.fork():
            time.sleep(3 * runner._END_S)
            kill(child)
            os._exit(0)

    monkeypatch.setattr(runner._Child, "_kill", kill_late)
    (found,) = run(hang, limit_s=0.1)
    os.wait()
    assert found.level == HUNG and "cannot be ended" not in found.what


def test_a_check_that_was_killed() -> None:
    def die() -> list[Finding]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    (found,) = run(die)
    assert found.level == UNKNOWN and "ended by signal 9" in found.what


def test_a_check_with_a_mistake() -> None:
    def raise_it() -> list[Finding]:
        raise ValueError("no\nsuch\x1b[31m thing")

    (found,) = run(raise_it)
    assert (found.level, found.what) == (UNKNOWN, "the check failed: ValueError: no such [31m thing")


def test_a_check_that_finds_too_much() -> None:
    (found,) = run(lambda: [Finding("made", OK, "x" * 100)] * 20_000)
    assert found.level == UNKNOWN and "more than can be reported" in found.what
    (found,) = run(lambda: [Finding("made", OK, "x" * (2 * runner.MAX_RESULT_BYTES))])
    assert found.level == UNKNOWN and "more than can be reported" in found.what
    (found,) = run(lambda: [Finding("made", OK, "x")] * 500)
    assert found.level == UNKNOWN


def test_a_check_that_says_what_is_no_finding() -> None:
    (found,) = run(lambda: [Finding("made", "splendid", "x")])
    assert found.level == UNKNOWN and "without a result" in found.what


def test_whoever_has_seen_enough_leaves_nothing() -> None:
    stream = run_tasks([Task("made", "", good), Task("made", "", hang), Task("made", "", hang)], 60.0)
    assert next(stream)[0].level == OK
    stream.close()  # the fixture looks for what is left


# ---- a mount that hangs, through the door --------------------------------------------------------------------


class HangingHost(MadeHost):
    def room(self, path: str):  # type: ignore[no-untyped-def]
        return hang() if "mnt" in path else super().room(path)


def test_a_mount_that_hangs_is_named_and_the_others_are_looked_at(
    tmp_path: Path, until: Callable[[int], None]
) -> None:
    write_tree(tmp_path, HEALTHY)
    until(2)
    tasks = make_tasks(HangingHost(os.fspath(tmp_path)), Request(), ["mounts", "memory"])
    found = [each for findings in run_tasks(tasks, 0.5) for each in findings]
    assert [(each.check, each.where, each.level) for each in found] == [
        ("mounts", "", OK),
        ("mounts", "/mnt/da ta", HUNG),
        ("memory", "", OK),
    ]


# ---- a user's own --------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., list[Finding]]:
    """`own(text)`: what a shell script of the user's comes to."""

    def check(text: str, limit_s: float = 20.0) -> list[Finding]:
        path = tmp_path / "fabric.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        tasks = make_tasks(MadeHost(os.fspath(tmp_path)), Request(own=(os.fspath(path),)), ["own"])
        found = [each for findings in run_tasks(tasks, limit_s) for each in findings]
        assert {each.check for each in found} == {"own:fabric.sh"} == {name_of(os.fspath(path))}
        return found

    return check


def test_own_check_says_what_it_found(own: Callable[..., list[Finding]]) -> None:
    told = {
        "level": "warn",
        "what": "slow",
        "where": "ib0",
        "measured": 80,
        "limit": 100,
        "unit": "Gbit/s",
        "way_out": "x",
    }
    (found,) = own(f"echo '{json.dumps(told)}'")
    assert found == Finding("own:fabric.sh", WARN, "slow", "ib0", 80.0, 100.0, "Gbit/s", "x")
    found = own(f"echo '{json.dumps([told, {'level': 'ok'}])}'")[1]
    assert (found.level, found.what) == (OK, "in order")


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("exit 0", OK, "in order"),
        ("echo 'the cable is out' >&2; exit 7", FAIL, "ended with status 7: the cable is out"),
        ('echo \'{"level": "ok"\'', UNKNOWN, "not a finding"),
        ("echo hello", UNKNOWN, "not a finding"),
        ("echo hello; exit 1", FAIL, "ended with status 1"),
        ("echo '[1]'", UNKNOWN, "a finding is an object"),
        ('echo \'{"level": "great"}\'', UNKNOWN, '"level" is one of'),
        ('echo \'{"level": "ok", "measured": 1e999}\'', UNKNOWN, "not finite"),
        ('echo \'{"level": "ok", "measured": "7"}\'', UNKNOWN, '"measured" is a number'),
        ("yes '[' | head -c 100000", UNKNOWN, "not a finding"),
        ("printf '\\377\\376'", UNKNOWN, "not a finding"),
        ("kill -9 $$", UNKNOWN, "ended by signal 9"),
        ("yes 0123456789", UNKNOWN, f"more than {MAX_OUTPUT_BYTES >> 10} KiB"),
        ("head -c 3000000 /dev/zero >&2; echo end >&2; exit 2", FAIL, "ended with status 2"),
    ],
)
def test_own_check_that(own: Callable[..., list[Finding]], text: str, level: str, words: str) -> None:
    (found,) = own(text)
    assert found.level == level and words in found.what, found
    assert found.what.isprintable()


def test_own_check_that_fails_says_so_once(own: Callable[..., list[Finding]]) -> None:
    (found,) = own("""echo '{"level": "fail", "what": "broken"}'; exit 1""")
    assert found.what == "broken"
    assert [each.level for each in own("""echo '{"level": "ok"}'; exit 1""")] == [OK, FAIL]


def test_own_check_that_hangs(own: Callable[..., list[Finding]]) -> None:
    (found,) = own("sleep 600 & wait", limit_s=1.0)
    assert found.level == HUNG


def test_own_check_leaves_no_process(own: Callable[..., list[Finding]], tmp_path: Path) -> None:
    (found,) = own(f"sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/pid")
    assert found.level == OK
    pid = (tmp_path / "pid").read_text().strip()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}") or is_dead(pid), 10)


def test_own_check_leaves_no_process_when_who_runs_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "stuck.sh"
    path.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pids\nwait\n"
    )
    path.chmod(0o755)
    pid = os.fork()
    if not pid:
        run(lambda: run_own(os.fspath(path)), limit_s=60.0)
        os._exit(0)
    wait_until((tmp_path / "pids").exists, 20)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for each in (tmp_path / "pids").read_text().split():
        wait_until(lambda each=each: not os.path.exists(f"/proc/{each}") or is_dead(each), 10)


def test_own_check_that_talks_much_on_stderr_is_cut(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["sh", "-c", "head -c 3000000 /dev/zero >&2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        _, said, is_cut = _drain(process)
    assert not is_cut and len(said) == MAX_ERROR_BYTES


def test_own_check_gets_no_input_and_runs_as_the_caller(own: Callable[..., list[Finding]]) -> None:
    (found,) = own("""read -r line; printf '{"level": "ok", "what": "%s%s"}' "$line" "$(id -u)" """)
    assert found.what == str(os.getuid())


def test_own_check_that_cannot_be_run(own: Callable[..., list[Finding]], tmp_path: Path) -> None:
    path = tmp_path / "no-interpreter"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    tasks = make_tasks(MadeHost(os.fspath(tmp_path)), Request(own=(os.fspath(path),)), ["own"])
    (found,) = next(run_tasks(tasks, 20.0))
    assert found.level == UNKNOWN and "cannot be run" in found.what


def test_what_still_waits_from_an_earlier_look_is_not_joined_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._Child, "_kill", lambda _: None)  # as one that waits in the kernel
    monkeypatch.setattr(runner, "waits_in_kernel", lambda _: True)
    left: dict[tuple[str, str], int] = {}
    (hung,) = next(run_tasks([Task("made", "there", hang)], 0.1, left))
    assert hung.level == HUNG and "its process cannot be ended" in hung.what
    ((place, pid),) = left.items()
    assert place == ("made", "there")
    again = list(run_tasks([Task("made", "there", good), Task("made", "here", good)], 20.0, left))
    assert again == [
        [Finding("made", HUNG, "it still does not answer", "there")],
        [Finding("made", OK, "in order")],
    ]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert list(run_tasks([Task("made", "there", good)], 20.0, left)) == [[Finding("made", OK, "in order")]]
    assert left == {}
