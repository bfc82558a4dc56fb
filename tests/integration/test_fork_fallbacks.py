"""Each cause for which ranks are exec'd instead of forked, in a real job: the cases of `bench fork_fallbacks`.

What must hold: the job runs, within seconds, and one line names the culprit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bench import fork_fallbacks
from bench.fork_fallbacks import CASES, Case
from tests import support

SLOW_S = 10.0  # cases that may take so long and more


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.max_s > SLOW_S else []) for case in CASES],
)
def test_the_job_runs_and_one_line_names_the_culprit(case: Case, tmp_path: Path) -> None:
    reason = case.why_not()
    if reason:
        pytest.skip(reason)
    outcome = fork_fallbacks.run_case(case, os.fspath(tmp_path), support.clean_environ())
    assert not outcome.problem, f"{outcome.problem}\n{outcome.output}"


def test_what_is_not_forked_by_plan_is_not_talked_about(tmp_path: Path) -> None:
    """`auto` and `off` say nothing of a command that can only be exec'd."""
    [command] = [case for case in CASES if case.name == "--no-python"]
    for mode in ("auto", "off"):
        directory = tmp_path / mode
        directory.mkdir()
        case = command._replace(says="", options=(*command.options, "--fork-ranks", mode))
        outcome = fork_fallbacks.run_case(case, os.fspath(directory), support.clean_environ())
        assert not outcome.problem, f"{outcome.problem}\n{outcome.output}"


@pytest.mark.parametrize("mode", ["on", "restarts"])
def test_quiet_leaves_the_line_out(mode: str, tmp_path: Path) -> None:
    [command] = [case for case in CASES if case.name == "--rank-hooks off"]
    case = command._replace(says="", options=(*command.options, "--fork-ranks", mode, "--quiet"))
    outcome = fork_fallbacks.run_case(case, os.fspath(tmp_path), support.clean_environ())
    assert not outcome.problem, f"{outcome.problem}\n{outcome.output}"


def test_the_reason_is_an_event(tmp_path: Path) -> None:
    [prints] = [case for case in CASES if case.name == "prints"]
    outcome = fork_fallbacks.run_case(prints, os.fspath(tmp_path), support.clean_environ())
    events = fork_fallbacks.read_events(os.fspath(tmp_path))
    [instead] = [event for event in events if event["name"] == "exec_instead"]
    [ended] = [event for event in events if event["name"] == "preload" and event["kind"] == "end"]
    assert [instead["error"]] == [ended["error"]] == outcome.said


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert not [case.name for case in CASES if re.search(r"[|\n]", case.name)]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_closed_stdin_is_closed_in_ranks(mode: str, program: support.Programs, tmp_path: Path) -> None:
    """It was once the pipe on which bootrun asks its guard: a rank read the request to stop, the job hung."""
    script = tmp_path / "reads.py"
    text = "f'stdin {sys.stdin} {os.path.exists(\"/proc/self/fd/0\")}\\n'"
    script.write_text(f"import os, sys\nos.write(1, {text}.encode())")
    command = [support.BOOTRUN, "--nproc-per-node", "2", "--fork-ranks", mode, "--preload", "none", str(script)]
    run = program("sh", "-c", 'exec "$@" <&-', "sh", *command)
    assert run.status == 0, run.stderr
    assert run.stdout.count("stdin None False\n") == 2
    assert ("ranks are exec'd, not forked: stdin is closed" in run.stderr) == (mode == "on")
