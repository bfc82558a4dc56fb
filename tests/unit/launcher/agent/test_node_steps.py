"""Commands of the restart ladder on a node: their flags, their ends, what a replay says, and checks that hang."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.health.finding import BAD, HUNG, UNKNOWN, Finding
from bootseer.job_file import parse
from launcher.agent import user_command as hook
from launcher.agent.node_steps import MAX_SUSPECTS, NodeSteps, StepEvents, find_suspects
from launcher.agent.user_command import CommandResult, UserCommand
from launcher.base.loop import Loop
from launcher.cli.config_file import fill
from launcher.cli.parser import get_args_parser
from launcher.coordinator.restart_policy import StepLimits
from launcher.health.stop_checks import StopChecks
from launcher.ranks.start_recorder import HelperSpan
from launcher.rendezvous.messages import Examine, Examined, RecoveryResult, RecoveryStep
from launcher.spec import LaunchSpec, build_spec
from tests.support import is_running, wait_until


def spec_of(*argv: str, settings: str = "") -> LaunchSpec:
    args = get_args_parser({}).parse_args(["--max-restarts", "1", *argv, __file__])
    fill(args, parse(settings.encode(), "bootseer.toml"), {})
    return build_spec(args, {"OMP_NUM_THREADS": "1"})


# ---- flags ---------------------------------------------------------------------------------------------------


def test_nothing_is_asked_for_by_default() -> None:
    spec = spec_of()
    assert spec.steps is None
    assert spec.job_rules().steps == StepLimits()


def test_what_is_asked_for_has_its_default_limit() -> None:
    argv = ("--post-mortem", "a", "--stop-checks", "auto", "--rollback-command", "b", "--replay-command", "c")
    spec = spec_of(*argv)
    assert spec.job_rules().steps == StepLimits(60.0, 60.0, False, 300.0, 7200.0)
    assert spec.steps is not None and spec.steps[1:] == ("a", "b", "c")
    assert not spec.warnings


def test_the_file_says_it_as_well_and_the_command_line_wins() -> None:
    settings = """
    [restart]
    post_mortem = "a"
    post_mortem_timeout_s = 5
    checks = "always"
    checks_timeout_s = 6
    rollback_command = "b"
    rollback_timeout_s = 7
    replay_command = "c"
    replay_timeout_s = 8.5
    """
    spec = spec_of("--stop-checks", "off", settings=settings)
    assert spec.job_rules().steps == StepLimits(5.0, 0.0, False, 7.0, 8.5)
    spec = spec_of("--post-mortem", "mine", settings=settings)
    assert spec.job_rules().steps == StepLimits(5.0, 6.0, True, 7.0, 8.5)
    assert spec.steps is not None and spec.steps[1:] == ("mine", "b", "c")


def test_without_restarts_most_of_it_does_nothing() -> None:
    spec = spec_of("--max-restarts", "0", "--rollback-command", "b")
    assert "--rollback-command and --replay-command do nothing without --max-restarts" in spec.warnings[0]
    assert not spec_of("--max-restarts", "0", "--post-mortem", "b").warnings


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--post-mortem", " "), "--post-mortem ' ': give a command for /bin/sh"),
        (("--rollback-command", "a\0b"), "give a command for /bin/sh"),
        (("--rollback-timeout", "5"), "--rollback-timeout 5 is without effect: give --rollback-command as well"),
        (("--stop-checks-timeout", "5"), "--stop-checks-timeout 5 is without effect: give --stop-checks as well"),
        (("--replay-command", "a", "--replay-timeout", "0"), "--replay-timeout 0: give 0.1 to 86400 seconds"),
        (("--post-mortem", "a", "--post-mortem-timeout", "nan"), "give 0.1 to 86400 seconds"),
    ],
)
def test_what_cannot_be(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as error:
        spec_of(*argv)
    assert words in str(error.value)


# ---- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def run(loop: Loop, command: str, log_path: str = "", limit_s: float = 20.0, **environ: str) -> CommandResult:
    found: list[CommandResult] = []
    UserCommand(loop, command, {"PATH": os.environ["PATH"], **environ}, log_path, limit_s, found.append)
    end_s = time.monotonic() + 30
    while not found:
        assert time.monotonic() < end_s
        loop.run_once(0.1)
    return found[0]


@pytest.mark.leaks
def test_a_command_with_its_variables_and_its_output(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "hook.log"
    path.write_text("before\n")
    outcome = run(loop, "echo $WHAT; echo and this >&2", str(path), WHAT="sa\udcffid")
    assert outcome.is_well and outcome.log_path == str(path)
    assert path.read_bytes() == b"before\nsa\xffid\nand this\n"
    assert outcome.tail == "sa\ufffdid\nand this\n"
    assert outcome.describe(20.0).startswith("it succeeded after ")


@pytest.mark.leaks
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo why; exit 3", "exit status 3 after 0.{}: why"),
        ("false; true", "exit status 1 after 0."),
        ("no-such-program", "exit status 127 after 0."),
        ("kill -9 $$", "ended by signal 9 after 0."),
        ("printf 'a\\033[2Jb\\n'; exit 1", "a [2Jb"),
    ],
)
def test_how_a_command_fails(loop: Loop, command: str, words: str) -> None:
    outcome = run(loop, command)
    assert not outcome.is_well and not outcome.is_late
    first, _, last = words.partition("{}")
    assert first in outcome.describe(20.0) and outcome.describe(20.0).endswith(last)


@pytest.mark.leaks
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_has_started(loop: Loop, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"trap '' TERM; setsid sleep 600 & echo $! $$ > {pids}; sleep 600"
    for limit_s in (0.3, 1.0, 5.0, 20.0):  # the shell has to come as far as that
        outcome = run(loop, command, limit_s=limit_s)
        assert outcome.is_late and outcome.status is None
        assert f"it was stopped, as it took longer than {limit_s:g} s" in outcome.describe(limit_s)
        if pids.exists() and pids.read_text().endswith("\n"):
            break
    assert not [pid for pid in map(int, pids.read_text().split()) if is_running(pid)]


@pytest.mark.leaks
@pytest.mark.parametrize("has_log", [True, False])
def test_a_command_that_writes_too_much_is_ended(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_log: bool
) -> None:
    monkeypatch.setattr(hook, "MAX_LOG_BYTES" if has_log else "MAX_MEMORY_BYTES", 1 << 20)
    path = tmp_path / "hook.log"
    path.write_bytes(b"x" * (1 << 20))  # what was there before is not its own
    log_path = str(path) if has_log else ""
    much = f"head -c 3000000 /dev/zero > {tmp_path}/other; echo small"
    assert run(loop, much, log_path).is_well, "other files are its own matter"
    outcome = run(loop, f"rm {tmp_path}/other; head -c 1100000 /dev/zero; sleep 600", log_path)
    assert outcome.is_large and outcome.status is None and not (tmp_path / "other").exists()
    assert outcome.describe(20.0).startswith("it was stopped, as it wrote more than 1 MiB to its output after ")


class Undying(UserCommand):
    """Its supervisor never ends, as far as anybody sees."""

    def _has_ended(self) -> bool:
        return False


@pytest.mark.leaks
def test_a_supervisor_that_does_not_go_is_not_waited_for_without_end(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "END_S", 0.1)
    found: list[CommandResult] = []
    pid = Undying(loop, "true", dict(os.environ), "", 60.0, found.append)._pid
    wait_until(lambda: loop.run_once(0.05) or found)
    assert found[0].is_well
    os.waitpid(pid, 0)


@pytest.mark.leaks
def test_a_supervisor_that_cannot_be_killed_is_left(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "END_S", 0.1)
    found: list[CommandResult] = []
    command = f"kill -STOP $PPID; touch {tmp_path}/stopped"
    undying = UserCommand(loop, command, dict(os.environ), "", 60.0, found.append)
    wait_until(lambda: loop.run_once(0.01) or (tmp_path / "stopped").exists())
    pid, sent = undying._pid, []
    with monkeypatch.context() as patch:
        patch.setattr(hook.os, "kill", lambda *each: sent.append(each))
        undying.end()
        wait_until(lambda: loop.run_once(0.05) or found)
    assert found[0].status is None and sent == [(pid, signal.SIGKILL)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.leaks
def test_closing_ends_a_command_and_nothing_is_reported(loop: Loop, tmp_path: Path) -> None:
    found: list[CommandResult] = []
    hook = UserCommand(loop, f"touch {tmp_path}/began; sleep 600", dict(os.environ), "", 60.0, found.append)
    wait_until(lambda: loop.run_once(0.01) or (tmp_path / "began").exists())
    hook.close()
    hook.close()
    loop.run_once(0.0)
    assert not found


def test_a_log_that_cannot_be_written_is_an_error(loop: Loop) -> None:
    with pytest.raises(OSError, match="No such file"):
        UserCommand(loop, "true", {}, "/no/such/folder/log", 1.0, lambda _: None)


class NoRanks:
    failures = ranks = ()

    def hold(self) -> None:
        pass


class Bed:
    """The steps of a node, and what they have told."""

    def __init__(self, loop: Loop, run_dir: str, *argv: str) -> None:
        self.loop = loop
        self.answers: list[Examined | RecoveryResult] = []
        self.spans: list[HelperSpan] = []
        events = StepEvents(self.answers.append, lambda _: None, self.spans.append, lambda _: None)
        self.steps = NodeSteps(loop, spec_of(*argv), run_dir, [], ("SECRET",), events)

    def recover(self, step: str) -> RecoveryResult:
        self.steps.recover(
            RecoveryStep(3, step, 20.0, "numeric", 0, b"", ("n1", "n2", "n3", "n4")), "/page.json", 0
        )
        wait_until(lambda: self.answers or self.loop.run_once(0.05), 30)
        answer = self.answers.pop()
        assert isinstance(answer, RecoveryResult) and (answer.attempt, answer.step) == (3, step)
        assert self.steps.doing == ""
        return answer


@pytest.mark.leaks
def test_a_replay_finds_its_machines_and_names_one(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    found = """echo '{"found": "one", "suspects": ["n3"]}'"""
    command = f"cat $BOOTSEER_HOSTS; echo $BOOTSEER_GROUP_SIZE $BOOTSEER_FAILURE_PAGE ${{SECRET-none}}; {found}"
    bed = Bed(loop, str(tmp_path), "--replay-command", command)
    answer = bed.recover("replay")
    assert answer.is_well and answer.suspects == ("n3",) and answer.text.endswith("; it names n3")
    assert (tmp_path / "replay-3.log").read_text().splitlines()[:5] == [
        *("n1", "n2", "n3", "n4"),
        "2 /page.json none",
    ]
    (span,) = bed.spans
    assert (span.name, span.error, span.facts) == ("replay", "", {"status": 0, "is_late": False})


@pytest.mark.leaks
def test_a_step_begins_when_the_one_before_has_ended_and_nothing_waits(loop: Loop, tmp_path: Path) -> None:
    command = f"trap '' TERM; echo $$ > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/began; sleep 600"
    alive = f"read pid < {tmp_path}/began; ! kill -0 $pid 2> /dev/null"
    bed = Bed(loop, str(tmp_path), "--post-mortem", command, "--rollback-command", alive)
    bed.steps.examine(Examine(3, 60.0, True), NoRanks())  # type: ignore[arg-type]
    wait_until(lambda: bed.loop.run_once(0.01) or (tmp_path / "began").exists())
    bed.steps.end_examination()
    bed.steps.recover(RecoveryStep(3, "rollback", 20.0, "numeric", 0, b"", ()), "", 0)
    assert bed.steps.doing == "post-mortem" and not bed.answers
    wait_until(lambda: bed.loop.run_once(0.05) or len(bed.answers) == 2, 30)
    first, second = bed.answers
    assert isinstance(first, Examined) and "it was stopped after" in first.text
    assert isinstance(second, RecoveryResult) and second.is_well


@pytest.mark.leaks
def test_without_logs_the_machines_are_a_list(loop: Loop) -> None:
    command = """test $BOOTSEER_HOSTS = n1,n2,n3,n4 && test -z "$BOOTSEER_RUN_DIR" && echo nobody"""
    answer = Bed(loop, "", "--replay-command", command).recover("replay")
    assert answer.is_well and answer.suspects == () and answer.text.endswith("; it names no machine")


def test_a_node_that_does_not_know_the_command_says_so(loop: Loop, tmp_path: Path) -> None:
    answer = Bed(loop, str(tmp_path)).recover("rollback")
    assert not answer.is_well and answer.text == "this node was started without that command: give it to all nodes"


def test_a_command_that_cannot_be_run_says_so(loop: Loop, tmp_path: Path) -> None:
    answer = Bed(loop, f"{tmp_path}/gone", "--rollback-command", "true").recover("rollback")
    assert not answer.is_well and answer.text == "it cannot be run: No such file or directory"


# ---- what a replay says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "suspects"),
    [
        ("", ()),
        ("group 1: well\n", ()),
        ('{"found": "one", "suspects": ["n3"]}\nbye', ("n3",)),
        ('{"found": "several", "suspects": ["n3", "n4"]}', ()),
        ('{"found": "one", "suspects": "n3"}', ()),
        ('{"found": "one", "suspects": ["", 3, null, "n3"]}', ("n3",)),
        ('{"found": "one", "suspects": ["n1"]}\n{"found": "one", "suspects": ["n2"]}', ("n2",)),
        ('{"found": "one", "suspects": ["n1"]}\n{"torn', ("n1",)),
        ("{" * 100_000, ()),
    ],
)
def test_suspects(text: str, suspects: tuple[str, ...]) -> None:
    assert find_suspects(text) == suspects


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=200)
    | st.fixed_dictionaries(
        {}, optional={"found": st.none() | st.just("one") | st.text(), "suspects": st.lists(st.none() | st.text())}
    ).map(json.dumps)
)
def test_any_text_is_read(text: str) -> None:
    found = find_suspects(text)
    assert len(found) <= MAX_SUSPECTS and all(isinstance(each, str) for each in found)


# ---- checks --------------------------------------------------------------------------------------------------


def look(loop: Loop, directories: list[str], limit_s: float, **environ: str) -> tuple[list[Finding], bool]:
    found: list[tuple[list[Finding], bool]] = []
    StopChecks(loop, directories, {**os.environ, **environ}, 0.1, limit_s, lambda *each: found.append(each))
    wait_until(lambda: loop.run_once(0.05) or found, 60)
    return found[0]


@pytest.mark.leaks
def test_checks_that_find_something(loop: Loop) -> None:
    found, is_whole = look(loop, ["/no/such/folder"], 50.0)
    bad = [each for each in found if each.level in BAD]
    assert is_whole
    assert "/no/such/folder" in [found.where for found in bad]


@pytest.mark.leaks
def test_checks_that_do_not_end_are_a_finding(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    found, is_whole = look(loop, [], 0.01, PYTHONPATH=str(tmp_path))
    assert is_whole  # that they hang is what was found
    assert [(each.check, each.level) for each in found][-1] == ("checks", HUNG)
    assert "no end within 0.01 s" in found[-1].line()


@pytest.mark.leaks
def test_checks_that_are_cut_off_say_nothing_of_the_node(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)\n")
    found, is_whole = look(loop, [], 50.0, PYTHONPATH=str(tmp_path))
    assert not is_whole
    assert [(each.check, each.level) for each in found] == [("checks", UNKNOWN)]
