"""A rank that ends early with 0 makes others fail that wait for it: it is the likely cause, not the network."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from pathlib import Path

from tests import support

JOB = """
import os, sys
if os.environ["RANK"] == "1": sys.exit(0)
import time
while not os.path.exists(sys.argv[1]): time.sleep(0.005)
raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3421")
"""


def test_it_is_the_likely_cause_on_console_and_page(
    bootrun: support.Programs, script: Callable[..., str], tmp_path: Path
) -> None:
    logs, mark = tmp_path / "logs", tmp_path / "ended"
    program = bootrun.start("--standalone", "--nproc-per-node", 2, "--log-dir", logs, script(JOB), mark)

    def has_ended() -> bool:
        return any('"rank_exited"' in Path(path).read_text() for path in glob.glob(f"{logs}/*/events/agent-*"))

    support.wait_until(has_ended, 15)
    mark.touch()
    run = program.wait()
    assert run.status == 1
    said = "rank 1 had ended before, with status 0"
    [line] = [line for line in run.stderr.splitlines() if line.startswith("  class ")]
    assert "user, likely" in line
    assert said in line
    [page] = glob.glob(f"{logs}/*/failure-0.json")
    record = json.loads(Path(page).read_text())
    assert (record["class"], record["class_sure"], record["culprit_sure"]) == ("user", "likely", "likely")
    assert said in record["culprit_sure_why"]
