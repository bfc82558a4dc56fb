"""Rules over what ranks print, on real jobs: what is told, what is done about it, what may not harm the job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import support

Script = Callable[..., str]

# Ranks that say what the test wants, and live until the launcher ends them or the test lets them go.
RANK = """
import os, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(text):
    print(text, flush=True)
def wait(path, max_s=40):
    end = time.monotonic() + max_s
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(0.02)
"""
LOSS = """
[[rule]]
name = "loss"
pattern = 'loss=(?P<loss>\\S+)'
metric = "loss"
must_be_finite = true
must_be_below = 100
"""


def job(bootrun: support.Programs, rules: str) -> tuple[Any, ...]:
    """Flags of a job with these rules."""
    path = Path(bootrun.dir, "job.toml")
    path.write_text(rules)
    return ("--standalone", "--nproc-per-node", 2, "--config", path, "--log-dir", "logs", "--shutdown-timeout", 2)


def events(directory: str, name: str) -> list[dict[str, Any]]:
    files = [file for file in Path(directory).glob("logs*/*/events/*.jsonl") if file.name != "run.jsonl"]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [event for event in found if event["name"] == name]


def test_a_metric_restarts_the_job_and_goes_into_the_report(
    bootrun: support.Programs, program: support.Programs, script: Script
) -> None:
    path = script(
        RANK + "say(f'step 1 loss={2.5 if attempt or not rank else 1e9}')\n"
        "if not attempt: wait('/nonexistent')\nsay('done')\n"
    )
    words = job(bootrun, LOSS + "action = 'restart'\n")
    run = bootrun(*words, "--redirects", 3, "--max-restarts", 1, path)
    assert run.status == 0, run.stderr
    told = "rule 'loss': rank 1: loss is 1e+09, and must be below 100: 'step 1 loss=1000000000.0'"
    assert run.stderr.count(f"error: {told}") == 1
    assert f"stopping attempt 0: {told}" in run.stderr
    assert "restart 1 of 1" in run.stderr
    (event,) = events(bootrun.dir, "rule_broken")
    assert event["error"] == told
    assert event["attrs"] == {"rule": "loss", "class": "", "action": "restart", "of_rank": 1}
    values = {(each["attempt"], each["rank"]): each["value"] for each in events(bootrun.dir, "rule_metric")}
    assert values[0, 1] == 1e9 and values[0, 0] == 2.5
    (directory,) = Path(bootrun.dir).glob("logs/*/events")
    report = program(support.SCRIPTS + "/bootseer", "report", directory, "--attempt", 0)
    assert report.status == 0, report.stderr
    assert f"{told} (restart)" in report.stdout


def test_not_a_number_with_the_last_words_of_a_rank_ends_the_job(
    bootrun: support.Programs, script: Script
) -> None:
    """The rank is gone at once: the rule still counts, and the job does not start again."""
    path = script(RANK + "if rank == 0: wait('/nonexistent')\nsys.stderr.write('loss=nan')\nsys.exit(3)\n")
    words = job(bootrun, LOSS + "action = 'give-up'\n")
    run = bootrun(*words, "--tee", 3, "--max-restarts", 5, "--give-up-status", 93, path)
    assert run.status == 93, run.stderr
    assert "error: rule 'loss': rank 1: loss is nan: 'loss=nan'" in run.stderr
    assert "attempt 1 starts" not in run.stderr
    assert "exitcode" in run.stderr or "status 3" in run.stderr, "the failure is reported, too"


def test_what_comes_no_more_what_fits_all_and_what_never_ends(bootrun: support.Programs, script: Script) -> None:
    """A rule fires, and broken ones beside it are switched off with a line each; known errors are told."""
    path = script(
        RANK + "for step in range(40): say(f'step {step} ' + 'a' * 50 + '!')\n"
        "sys.stderr.write('OSError: [Errno 28] No space left on device\\n')\n"
        "sys.stderr.flush()\n"
        "wait('go')\n"
    )
    rules = """
[[rule]]
name = "steps"
pattern = "^step"
ranks = "first"
must_recur_within_s = 1

[[rule]]
name = "everything"
pattern = "[!]"
action = "give-up"
ranks = "last"

[[rule]]
name = "endless"
pattern = '(a+)+$'
action = "restart"
"""
    flags = job(bootrun, rules)
    running = bootrun.start(*flags, "-r", "1", "--tee", 2, path)
    told = (
        "rule 'steps': rank 0: no further matching line within 1 s of the last",
        "rule 'everything' disabled for this attempt: it matches 40 of the 41 lines of rank 1",
        "rule 'endless' disabled for this attempt: it takes too long on the output of rank ",
        "rule 'disk-full' (resource): rank ",
    )
    support.wait_until(lambda: all(line in running.stderr for line in told), 20, repr(told))
    assert running.process.poll() is None, "it goes on"
    Path(bootrun.dir, "go").touch()
    run = running.wait(20)
    assert run.status == 0, run.stderr
    for line in told[1:3]:
        assert run.stderr.count(line) == 1


@pytest.mark.parametrize(
    ("rules", "status", "told"),
    [
        ("[[rule]]\nname = 'a'\npattern = '('\n", 1, "[[rule]] 1 (a) pattern: is no regular expression"),
        ("[[rule]]\nname = 'a'\npattern = 'x'\n", 0, "rules cannot read output on stdout and stderr"),
    ],
)
def test_what_is_reported_before(
    bootrun: support.Programs, script: Script, rules: str, status: int, told: str
) -> None:
    Path(bootrun.dir, "go").touch()
    seen = os.path.join(bootrun.dir, "started")
    path = script(RANK + f"open({seen!r}, 'w')\ntime.sleep(1.5)\n")
    run = bootrun(*job(bootrun, rules), path)
    assert (run.status, told in run.stderr) == (status, True), run.stderr
    assert os.path.exists(seen) == (status == 0)


@pytest.mark.slow
def test_two_nodes(bootrun: support.Programs, script: Script, free_port: int) -> None:
    """Any rank will do: one prints, on the other node than the coordinator's; and both stop when it stops."""
    path = script(
        RANK + "for step in range(6 if not attempt else 1):\n"
        "    if rank == 1: say(f'step {step}')\n"
        "    time.sleep(0.25)\n"
        "if not attempt: wait('/nonexistent')\n"
    )
    rules = "[[rule]]\nname='steps'\npattern='step'\nranks='any'\nmust_start_within_s=20\nmust_recur_within_s=1\n"
    toml = Path(bootrun.dir, "job.toml")
    toml.write_text(rules + "action='restart'\n")
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"localhost:{free_port}", "--rdzv-id", "x")
    words += ("--rdzv-backend", "c10d", "--max-restarts", 1, "--config", toml, "-r", "3", "--shutdown-timeout", 2)
    programs = [bootrun.start(*words, "--log-dir", f"logs{node}", path) for node in range(2)]
    runs = [program.wait(60) for program in programs]
    assert [run.status for run in runs] == [0, 0], runs
    for run in runs:
        assert run.stderr.count("error: rule 'steps': no further matching line within 1 s of the last") == 1
    (event,) = events(bootrun.dir, "rule_broken")
    assert event["attrs"] == {"rule": "steps", "class": "", "action": "restart"}
