"""One test for each wart of torchrun 2.13 (W1-W19 in the notes on its contract): bootrun does the right thing.

The ranks use parity/tell.py: marks and what they tell are files, so each test waits for what it needs to have
happened and never for a time to pass.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.parity.runner import TELL
from tests.support import Program, Programs, Run
from tests.unit.launcher.jobsim import Sim, make_rules

pytestmark = pytest.mark.slow

WAIT_FOR_EVER = 'mark("ready")\nwait_for("never", 60)\n'


class Warts:
    """Starts bootrun with a program that can tell and wait; reads what its ranks told."""

    def __init__(self, bootrun: Programs, folder: Path) -> None:
        self._bootrun = bootrun
        self.out = folder / "out"
        self.out.mkdir()
        self.logs = folder / "logs"
        self.script = folder / "script.py"
        shutil.copy(TELL, folder)

    def write(self, text: str) -> None:
        """The program of the ranks."""
        self.script.write_text("from tell import *\n" + text, encoding="utf-8")

    def environ(self, **more: str) -> dict[str, str]:
        return {"PROBE_OUT": os.fspath(self.out), "PROBE_AGENT": "0", **more}

    def start(self, *args: str, **environ: str) -> Program:
        return self._bootrun.start(*args, self.script, env=self.environ(**environ))

    def run(self, *args: str, **environ: str) -> Run:
        return self.start(*args, **environ).wait(30.0)

    def mark(self, name: str) -> None:
        (self.out / f"{name}.mark").touch()

    def wait_for(self, name: str) -> None:
        """A mark of the ranks."""
        support.wait_until((self.out / f"{name}.mark").exists, 20.0, f"mark {name}")

    def told(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("r*.json"))}

    def pids(self) -> list[int]:
        """All that ranks told under `pids`."""
        return [pid for facts in self.told().values() for pid in facts["pids"]]

    def log_files(self, name: str) -> dict[str, str]:
        """Paths below the run's directory, and their contents."""
        return {
            "/".join(path.relative_to(self.logs).parts[1:]): path.read_text()
            for path in sorted(self.logs.glob(f"*/**/{name}"))
        }


@pytest.fixture
def warts(bootrun: Programs, tmp_path: Path) -> Warts:
    return Warts(bootrun, tmp_path)


def two_nodes(port: int) -> tuple[str, ...]:
    return ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job")


def test_w01_shutdown_timeout_holds_after_a_failure(warts: Warts) -> None:
    warts.write("""
if RANK == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark("up")
    wait_for("never", 60)
wait_for("up")
sys.exit(3)
""")
    done = warts.run("--standalone", "--nproc-per-node=2", "--shutdown-timeout=1")
    assert done.status == 1
    assert done.seconds < 10


def test_w02_children_of_a_crashed_rank_end_and_readers_of_the_output_see_its_end(warts: Warts) -> None:
    warts.write("""
if RANK == "0":
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=new)
                for new in (False, True)]
    tell(pids=[child.pid for child in children])
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("never", 60)
""")
    command = [support.BOOTRUN, "--standalone", "--nproc-per-node=2", os.fspath(warts.script)]
    environ = {**support.clean_environ(), **warts.environ()}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.communicate(timeout=20)  # hangs for as long as anybody holds the pipes
    assert process.returncode == 1
    assert not [pid for pid in warts.pids() if support.is_running(pid)]


def test_w03_a_killed_launcher_leaves_nothing(warts: Warts) -> None:
    warts.write("""
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)]
tell(pids=[os.getpid(), children[0].pid])
meet("up", 2)
""" + WAIT_FOR_EVER)  # fmt: skip
    program = warts.start("--standalone", "--nproc-per-node=2", "--shutdown-timeout=2")
    warts.wait_for("ready")
    pids = warts.pids()
    assert len(pids) == 4
    program.signal(signal.SIGKILL)
    support.wait_until(lambda: not any(map(support.is_running, pids)), 20.0, "the ranks and their children end")


def test_w04_a_truncated_error_file_keeps_nobody_from_reporting(warts: Warts) -> None:
    warts.write("""write_error_file('{"message": {"message": "E: te')\nsys.exit(7)\n""")
    done = warts.run("--standalone", "--log-dir", os.fspath(warts.logs))
    assert done.status == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"rank +: 0 .*\n +exitcode +: 7", done.stderr)


def test_w05_a_node_that_was_not_needed_ends_well(warts: Warts, free_port: int) -> None:
    warts.write('tell(ran=True)\nmark("up")\nwait_for("enough")\n')
    first = warts.start(*two_nodes(free_port), "--nnodes=1")
    warts.wait_for("up")
    second = warts.start(*two_nodes(free_port), "--nnodes=1")
    support.wait_until(lambda: "spare" in second.stderr, 10.0, "the second node knows that it is a spare")
    warts.mark("enough")
    assert (first.wait().status, second.wait().status) == (0, 0)
    assert list(warts.told()) == ["r0.0"]


def test_w06_a_late_node_joins_and_no_log_is_lost(warts: Warts, free_port: int) -> None:
    warts.write("""
size = os.environ["WORLD_SIZE"]
print("world of", size)
tell(size=size, count=RESTART)
if size == "1":
    mark("up")
    wait_for("never", 60)
""")
    args = (*two_nodes(free_port), "--nnodes=1:2", "--rdzv-conf=last_call_timeout=1")
    first = warts.start(*args, "--log-dir", os.fspath(warts.logs), "--redirects=1")
    warts.wait_for("up")
    second = warts.start(*args)
    assert (first.wait().status, second.wait().status) == (0, 0)
    assert {name: facts["size"] for name, facts in warts.told().items()} == {"r0.0": "1", "r0.1": "2", "r1.0": "2"}
    assert {facts["count"] for facts in warts.told().values()} == {0}, "joining is no failure"
    assert warts.log_files("stdout.log") == {
        "attempt_0/0/stdout.log": "world of 1\n",
        "attempt_1/0/stdout.log": "world of 2\n",
    }


def test_w07_masks_for_many_ranks_and_one_line_for_wrong_use(warts: Warts) -> None:
    warts.write('print("say", RANK)\n')
    log_dir = ("--log-dir", os.fspath(warts.logs))
    done = warts.run("--standalone", "--nproc-per-node=11", *log_dir, "--redirects=10:3,2:1")
    assert done.status == 0
    assert warts.log_files("stdout.log") == {
        "attempt_0/10/stdout.log": "say 10\n",
        "attempt_0/2/stdout.log": "say 2\n",
    }
    for args, culprit in (
        (("--nproc-per-node=0",), "nproc-per-node"),
        (("--event-log-handler=none-such",), "none-such"),
    ):
        done = warts.run("--standalone", *args)
        assert done.status in (1, 2)
        assert len(done.stderr.strip().splitlines()) == 1
        assert culprit in done.stderr


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_w08_a_signal_gives_its_own_status(warts: Warts, free_port: int, name: str, status: int) -> None:
    warts.write('catch("SIGTERM", "SIGINT")\n' + WAIT_FOR_EVER)
    number = signal.Signals[name]
    program = warts.start("--standalone")
    warts.wait_for("ready")
    program.signal(number)
    done = program.wait()
    assert done.status == status
    assert "Traceback" not in done.stderr
    assert "FAILED" not in done.stderr, "a signal is no failure"

    waiting = warts.start(*two_nodes(free_port), "--nnodes=2")
    support.wait_until(lambda: waiting.stderr, 10.0, "it is in the rendezvous")
    waiting.signal(number)
    done = waiting.wait()
    assert done.status == status
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_w09_the_report_has_the_end_of_standard_error(warts: Warts) -> None:
    warts.write("def load():\n    raise ValueError('wrong number')\nload()\n")
    done = warts.run("--standalone", "--log-dir", os.fspath(warts.logs), "--redirects=3")
    assert done.status == 1
    _, _, report = done.stderr.partition("Root Cause")
    assert "ValueError: wrong number" in report
    assert "in load" in report
    (page,) = re.findall(r"^  record    : (.+)$", report, re.MULTILINE)
    assert Path(page).read_text().startswith("failure 0 of job ")


def test_w10_early_failures_are_retried_with_growing_pauses(warts: Warts) -> None:
    warts.write("tell(at=time.monotonic())\nsys.exit(RESTART < 3)\n")
    done = warts.run("--standalone", "--max-restarts=3", "--restart-backoff=0.3")
    assert done.status == 0
    moments = [facts["at"] for facts in warts.told().values()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert len(pauses) == 3
    assert pauses[1] >= 0.3, "the second failure in a row waits"
    assert pauses[2] >= 0.6, "the next one twice as long"


def test_w11_ranks_that_outlive_the_others_have_no_limit() -> None:
    sim = Sim(make_rules(min_nodes=2, max_nodes=2))
    sim.join(1)
    sim.join(2)
    sim.succeed(1)
    sim.advance(30 * 24 * 3600.0)
    assert sim.finish() is None
    sim.succeed(2)
    finish = sim.finish()
    assert finish is not None
    assert finish.status == 0


def test_w12_a_rank_that_hangs_when_it_is_stopped_is_named(warts: Warts) -> None:
    # Its stack belongs to a later part of Bootseer; who it was is told already.
    warts.write("""
tell(pids=[os.getpid()])
if RANK == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet("up", 2)
""" + WAIT_FOR_EVER)  # fmt: skip
    program = warts.start("--standalone", "--nproc-per-node=2", "--shutdown-timeout=1")
    warts.wait_for("ready")
    hung = warts.told()["r1.0"]["pids"][0]
    program.signal(signal.SIGTERM)
    done = program.wait()
    assert done.status == 143
    told = [line for line in done.stderr.splitlines() if str(hung) in line]
    assert told, done.stderr
    assert "rank 1" in told[0]


def test_w13_the_endpoint_may_be_any_address_of_the_host(warts: Warts, free_port: int) -> None:
    warts.write('tell(address=os.environ["MASTER_ADDR"])\nmeet("up", 2)\n')
    args = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.2:{free_port}", "--rdzv-id=job")
    agents = [warts.start(*args), warts.start(*args)]
    assert [agent.wait().status for agent in agents] == [0, 0]


def test_w14_prefixes_can_name_the_node_and_have_a_space(warts: Warts) -> None:
    warts.write('print("say", RANK)\n')
    template = "[${node} ${role_name}${local_rank} of ${rank}] "
    done = warts.run(
        "--standalone", "--nproc-per-node=2", "--tee=1", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template
    )
    assert done.status == 0
    host = os.uname().nodename
    assert sorted(done.stdout.splitlines()) == [f"[{host} default{n} of {n}] say {n}" for n in range(2)]


def test_w15_node_rank_holds_for_c10d(warts: Warts, free_port: int) -> None:
    warts.write('tell(place=os.environ["PLACE"])\nmeet("up", 2)\n')
    args = (*two_nodes(free_port), "--nnodes=2")
    first = warts.start(*args, "--node-rank=1", PLACE="1")
    second = warts.start(*args, "--node-rank=0", PLACE="0")
    assert (first.wait().status, second.wait().status) == (0, 0)
    assert {name: facts["place"] for name, facts in warts.told().items()} == {"r0.0": "0", "r1.0": "1"}


def test_w16_some_signals_only_pass_and_the_job_goes_on(warts: Warts) -> None:
    warts.write("""
catch("SIGUSR1", status=None)
meet("up", 2)
mark("ready")
wait_for(f"caught-{RANK}-SIGUSR1")
wait_for("go-on")
""")
    program = warts.start("--standalone", "--nproc-per-node=2")
    warts.wait_for("ready")
    program.signal(signal.SIGUSR1)
    for rank in range(2):
        warts.wait_for(f"caught-{rank}-SIGUSR1")
    warts.mark("go-on")
    assert program.wait().status == 0
    assert [facts["signals"] for facts in warts.told().values()] == [["SIGUSR1"], ["SIGUSR1"]]


def test_w17_nohup_keeps_a_job_from_hanging_up(warts: Warts, program: Programs) -> None:
    warts.write("""
tell(ignored=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
mark("ready")
wait_for("go-on")
""")
    started = program.start(
        "/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", support.BOOTRUN, "--standalone", warts.script,
        env=warts.environ(),
    )  # fmt: skip
    warts.wait_for("ready")
    started.signal(signal.SIGHUP)
    warts.mark("go-on")
    assert started.wait().status == 0
    assert warts.told()["r0.0"]["ignored"]


@pytest.mark.timeout(180)
def test_w18_a_gloo_job_restarts_with_the_defaults_three_times_of_three(warts: Warts) -> None:
    warts.write("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
tell(sum=int(value), count=RESTART)
if RESTART < 3:
    if RANK == "1":
        sys.exit(1)
    wait_for("never", 60)
dist.destroy_process_group()
""")
    program = warts.start("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--restart-backoff=0")
    assert program.wait(120.0).status == 0
    assert [facts["count"] for name, facts in warts.told().items() if name.startswith("r1")] == [0, 1, 2, 3]
    assert {facts["sum"] for facts in warts.told().values()} == {3}


@pytest.mark.system
def test_w19_a_full_log_disk_costs_output_and_no_rank(warts: Warts) -> None:
    warts.logs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "bootseer", warts.logs], check=True)
    try:
        warts.write("for _ in range(100): print('x' * 9999)\ntell(done=True)\n")
        done = warts.run("--standalone", "--log-dir", os.fspath(warts.logs), "--redirects=3")
        assert done.status == 0
        assert warts.told()["r0.0"] == {"done": True}
        assert re.search(r"warning: \d+ bytes of output of rank 0 were lost", done.stderr)
    finally:
        subprocess.run(["umount", warts.logs], check=True)
