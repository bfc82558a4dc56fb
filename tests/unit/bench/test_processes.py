"""Runs of a bench: what is not as expected is an error, and the CPU time of everything is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import python

# In a process of its own: becoming a subreaper cannot be taken back.
RUN = """
import json, os, sys
from bench.processes import become_subreaper, run_all
from bench.record import BenchError
become_subreaper()
commands = json.loads(sys.argv[1])
try:
    ended = run_all(commands, os.environ, sys.argv[2], float(sys.argv[3]))
except BenchError as error:
    sys.exit(f"BenchError: {error}")
print(json.dumps([end._asdict() for end in ended]))
"""
BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
LEAVES_A_BURNER = f"import os\nif os.fork() == 0:\n  os.setsid()\n  exec({BURN!r})\n"


def run(commands: list[list[str]], directory: object, deadline_s: float = 20) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python("-c", RUN, json.dumps(commands), str(directory), str(deadline_s)), capture_output=True, text=True
    )


@pytest.mark.leaks
def test_cpu_time_of_orphans_is_counted(tmp_path) -> None:
    done = run([python("-c", LEAVES_A_BURNER)], tmp_path)
    assert done.returncode == 0, done.stderr
    (ended,) = json.loads(done.stdout)
    assert ended["cpu_s"] > 0.2
    assert ended["wall_s"] < 10


@pytest.mark.leaks
@pytest.mark.parametrize(
    ("program", "deadline_s", "says"),
    [
        ("import sys; sys.exit(3)", 20, "exit status 3 instead of 0"),
        ("import os; print('last words', flush=True); os.kill(os.getpid(), 9)", 20, "last words"),
        ("import time; time.sleep(60)", 0.2, "still running after 0.2 s"),
    ],
)
def test_unexpected_end_is_an_error(tmp_path, program: str, deadline_s: float, says: str) -> None:
    done = run([python("-c", "pass"), python("-c", program)], tmp_path, deadline_s)
    assert done.returncode == 1
    assert "BenchError" in done.stderr and says in done.stderr


def test_command_line(tmp_path) -> None:
    def bench(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bench", *map(str, args)],
            capture_output=True,
            text=True,
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))),
        )

    assert bench().returncode == 2
    assert "launch" in bench("--help").stdout
    assert bench("nothing").returncode == 2
    assert bench("launch", "--rounds", "0").returncode == 2
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert bench("check", path).returncode == 1
    path.write_text("{")
    assert "cannot be read" in bench("check", path).stdout


@pytest.mark.slow
@pytest.mark.leaks
def test_launch_bench_measures_and_checks(tmp_path) -> None:
    top = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    path = str(tmp_path / "launch.json")
    subprocess.run(
        [sys.executable, "-m", "bench", "launch", "--rounds", "1", "--json", path, "--cases", "first", "restart"],
        cwd=top,
        check=True,
    )
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    assert document["figures"]["launch.restart_ratio"]["n"] == 1
    assert document["figures"]["launch.first_bootrun_own_cpu_s"]["value"] > 0
    checked = subprocess.run(
        [sys.executable, "-m", "bench", "check", path], cwd=top, capture_output=True, text=True
    )
    assert checked.returncode == 1, "one round is not enough, and cases are missing"
    assert "follows from 1 samples" in checked.stdout
