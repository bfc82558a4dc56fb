"""`bootrun --check`: findings beside the start of each attempt, as lines and events; an unfit node leaves."""

from __future__ import annotations

import json
from pathlib import Path

# Each attempt waits until something was found in it, as nothing else waits for checks.
WAITS = """
import os, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
end_s = time.monotonic() + 60
def found():
    for name in os.listdir(sys.argv[1]):
        for line in open(os.path.join(sys.argv[1], name)):
            if '"name":"check"' in line and f'"attempt":{attempt},' in line and '"space"' in line:
                return True
while not found():
    assert time.monotonic() < end_s
    time.sleep(0.02)
sys.exit(attempt == "0")
"""
NOWHERE = "/no/such/folder"


def test_findings_are_reported_once_and_written_for_each_attempt(bootrun, script, tmp_path: Path) -> None:
    events = tmp_path / "events"
    run = bootrun(
        *(
            "--standalone",
            "--max-restarts",
            1,
            "--restart-backoff",
            0,
            "--check",
            "report",
            "--events-dir",
            events,
        ),
        *(script(WAITS), events),
        env={"TMPDIR": NOWHERE},
    )
    assert run.status == 0, run.stderr
    told = [line for line in run.stderr.splitlines() if NOWHERE in line]
    assert len(told) == 1 and "check: fail    space /no/such/folder: No such file or directory" in told[0]
    found = [
        json.loads(line)
        for path in events.glob("agent-*")
        for line in path.read_text().splitlines()
        if '"name":"check"' in line
    ]
    space = [event for event in found if event["attrs"]["where"] == NOWHERE]
    assert [(event["attempt"], event["attrs"]["level"]) for event in space] == [(0, "fail"), (1, "fail")]
    assert not [event for event in found if event["attrs"]["level"] == "ok"]


# Takes nearly all descriptors that it may have, until that was seen; then fails.
FILLS = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(116)]
end_s = time.monotonic() + 60
def read(name):
    with open(os.path.join(sys.argv[1], name)) as file:
        return file.read()
while not any('"descriptors of the process' in read(name) for name in os.listdir(sys.argv[1])):
    assert time.monotonic() < end_s
    time.sleep(0.05)
sys.exit(1)
"""


def test_what_is_found_while_ranks_run_is_reported_and_is_on_the_page_of_a_failure(
    bootrun, script, tmp_path: Path
) -> None:
    events, logs = tmp_path / "events", tmp_path / "logs"
    run = bootrun(
        *("--standalone", "--check", "report", "--check-every", 1, "--events-dir", events, "--log-dir", logs),
        *(script(FILLS), events),
    )
    assert run.status == 1
    told = [line for line in run.stderr.splitlines() if "descriptors of the process" in line]
    assert len(told) == 1 and "check: warn    files " in told[0], run.stderr
    (page,) = logs.rglob("failure-*.txt")
    assert "check      warn    files" in page.read_text()


def test_a_node_that_is_not_fit_leaves_when_that_is_asked_for(bootrun, script) -> None:
    run = bootrun(
        *("--standalone", "--check", "fail", "--max-restarts", 3, script("import time\ntime.sleep(600)")),
        env={"TMPDIR": NOWHERE},
    )
    assert run.status == 1
    assert "error: this node is not fit for the job: fail    space /no/such/folder" in run.stderr
