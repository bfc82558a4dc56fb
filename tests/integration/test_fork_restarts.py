"""Forked ranks over restarts and signals: what is loaded when, what is remembered, what grows, what ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import restarts
from bench.fork_fallbacks import PREFIX, read_events, started_by
from bench.record import Figures
from bootseer.events import read_events as events_of
from launcher.ranks.rank0_ready import HEAD_START_S
from tests import support

Script = Callable[..., str]

# `attempt` and `rank`; then the first attempt fails when it is told to.
HEAD = """
import os, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
def say(text):  # in one piece, which print does not do
    os.write(1, (text + "\\n").encode())
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.002)
"""
FAILS_ONCE = """
open("at-%s-%s" % (attempt, rank), "w").close()
if attempt == "0":
    wait_for("go")
    sys.exit(3)
"""
STEP = "import bootseer; bootseer.heartbeat(1)\n"
RESTARTS = ("--max-restarts", "1", "--restart-backoff", "0", "--shutdown-timeout", "5")


class Job:
    """bootrun in a folder of its own, with what can be seen of it."""

    def __init__(self, bootrun: support.Programs) -> None:
        self.programs = bootrun
        self.dir = bootrun.dir
        self.program: support.Program | None = None

    def start(self, *args: str | int, env: Mapping[str, str] | None = None) -> support.Program:
        modules, cache = os.path.join(self.dir, "modules"), os.path.join(self.dir, "cache")
        environ = {"PYTHONPATH": modules, "BOOTSEER_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", **(env or {})}
        words = ("--standalone", "--nproc-per-node", 2, "--log-dir", "logs", *args)
        self.program = self.programs.start(*words, env=environ)
        return self.program

    def __call__(self, *args: str | int) -> support.Run:
        return self.start(*args).wait()

    def module(self, name: str, text: str) -> None:
        os.makedirs(os.path.join(self.dir, "modules"), exist_ok=True)
        self.write(f"modules/{name}.py", text)

    def write(self, name: str, text: str = "") -> None:
        with open(os.path.join(self.dir, name), "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name: str) -> str:
        with open(os.path.join(self.dir, name), encoding="utf-8") as file:
            return file.read()

    def has(self, *names: str) -> bool:
        return all(os.path.exists(os.path.join(self.dir, name)) for name in names)

    def find(self, comm: str) -> list[int]:
        """Processes below bootrun of this name in ps."""
        assert self.program is not None
        return [process.pid for process in support.descendants(self.program.pid) if comm_of(process.pid) == comm]

    def how(self, attempt: int) -> str:
        return started_by(self.dir, attempt, 2)

    def preloads(self) -> list[dict[str, Any]]:
        """Preloads that have ended, in order."""
        events = read_events(self.dir)
        return [event for event in events if event["name"] == "preload" and event["kind"] == "end"]

    def await_standby(self, count: int = 2) -> list[int]:
        """Until processes wait for the next attempt, and the one that forked them is gone."""
        support.wait_until(
            lambda: len(self.find("bootrun-parked")) == count and len(self.find("bootrun-preload")) == 1,
            what="parked processes",
        )
        return self.find("bootrun-parked")


def comm_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


@pytest.fixture
def job(bootrun: support.Programs) -> Job:
    return Job(bootrun)


# ---- what is loaded when -------------------------------------------------------------------------------------


def test_what_failed_is_left_out_of_the_next_process_of_the_job(job: Job, script: Script) -> None:
    job.module("noisy", "print('noise')")
    job.module("quiet", "")
    job.start(
        *("--fork-ranks", "on", "--preload", "none,quiet,noisy", *RESTARTS), script(HEAD + STEP + FAILS_ONCE)
    )
    support.wait_until(lambda: len(job.preloads()) == 2, what="the second process is ready")
    job.write("go")
    assert job.program is not None
    run = job.program.wait()
    assert run.status == 0, run.stderr
    assert (job.how(0), job.how(1)) == ("exec", "fork")
    assert run.stderr.count(PREFIX) == 1
    assert [preload.get("error") for preload in job.preloads()] == [
        "noisy prints when it is imported: noise",
        None,
    ]


def test_what_the_user_names_is_tried_by_the_next_bootrun(job: Job, script: Script) -> None:
    job.module("noisy", "print('noise')")
    words = ("--fork-ranks", "on", "--preload", "none,noisy", script(HEAD))
    assert PREFIX in job(*words).stderr
    job.module("noisy", "mended = True")
    assert PREFIX not in job(*words).stderr


def test_restarts_execs_first_and_forks_then(job: Job, script: Script) -> None:
    text = HEAD + STEP + "say(str('json' in sys.modules))" + FAILS_ONCE
    program = job.start("--fork-ranks", "restarts", "--preload", "none,json", *RESTARTS, script(text))
    support.wait_until(job.preloads, what="loaded after the first step")
    job.write("go")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert (job.how(0), job.how(1)) == ("exec", "fork")
    assert PREFIX not in run.stderr
    assert sorted(run.stdout.split()) == ["False", "False", "True", "True"]


def test_restarts_before_the_process_is_loaded_are_exec(job: Job, script: Script) -> None:
    job.write("go")
    run = job("--fork-ranks", "restarts", "--preload", "none,json", *RESTARTS, script(HEAD + FAILS_ONCE))
    assert run.status == 0, run.stderr
    assert (job.how(0), job.how(1)) == ("exec", "exec")
    assert PREFIX not in run.stderr


def test_auto_leaves_a_script_without_torch_alone(job: Job, script: Script) -> None:
    program = job.start(*RESTARTS, script(HEAD + STEP + FAILS_ONCE))
    support.wait_until(lambda: job.has("at-0-0", "at-0-1"))
    assert job.find("bootrun-preload") == []
    job.write("go")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert (job.how(0), job.how(1)) == ("exec", "exec")
    assert job.preloads() == [] and PREFIX not in run.stderr


def test_auto_forks_a_script_that_mentions_torch(job: Job, script: Script) -> None:
    run = job(script(HEAD + "print('json' in sys.modules)  # no torch"), "--preload")
    assert run.status == 0, run.stderr
    assert job.how(0) == "fork"
    assert PREFIX not in run.stderr


@pytest.mark.slow
def test_what_the_first_step_needed_is_there_at_the_next_start(job: Job, script: Script) -> None:
    """The first optimizer pulls in 800 modules; none of them is imported by the script itself."""
    text = (
        HEAD
        + """
before = " ".join(sys.modules)
import torch
open("%s-%s" % (sys.argv[1], rank), "w").write(before)
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
torch.optim.AdamW([weight]).step()
"""
    )
    path = script(text)
    for number in ("first", "second"):
        run = job(path, number)
        assert run.status == 0, run.stderr
        assert PREFIX not in run.stderr
    first, second = (set(job.read(f"{number}-1").split()) for number in ("first", "second"))
    assert "torch" in first and "torch._dynamo" not in first
    assert "torch._dynamo" in second


def test_a_changed_file_is_loaded_again_for_the_restart_after_next(job: Job, script: Script) -> None:
    job.module("part", "value = 1")
    text = (
        HEAD
        + STEP
        + """
import part
say("part %s %s" % (attempt, part.value))
open("at-%s-%s" % (attempt, rank), "w").close()
if attempt == "2": sys.exit(0)
wait_for("go-" + attempt)
sys.exit(3)
"""
    )
    words = ("--fork-ranks", "on", "--preload", "none,part", "--max-restarts", 2, "--restart-backoff", 0)
    program = job.start(*words, "--shutdown-timeout", 5, script(text))
    job.await_standby()
    job.module("part", "value = 22")
    job.write("go-0")
    support.wait_until(lambda: job.has("at-1-0", "at-1-1"))
    support.wait_until(lambda: len(job.preloads()) == 2, what="loaded anew")
    job.write("go-1")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert [job.how(attempt) for attempt in range(3)] == ["fork", "exec", "fork"]
    assert sorted(set(run.stdout.splitlines())) == ["part 0 1", "part 1 22", "part 2 22"]
    assert run.stderr.count(PREFIX) == 1


WARNED = "invalid escape sequence"


@pytest.mark.parametrize("is_changed", [False, True], ids=["same", "changed"])
def test_a_script_that_was_compiled_ahead_counts_only_if_it_is_the_same(
    job: Job, script: Script, is_changed: bool
) -> None:
    text = HEAD + FAILS_ONCE + 'say("%s %s" % (attempt, "first"))\n'
    path = script(text)
    program = job.start("--fork-ranks", "on", "--preload", "none,json", *RESTARTS, path)
    job.await_standby()
    if is_changed:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("first", "other"))
    job.write("go")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert job.how(1) == "fork"
    assert run.stdout.splitlines() == ["1 other" if is_changed else "1 first"] * 2


def test_what_the_compiler_warns_of_is_reported_in_each_attempt(job: Job, script: Script) -> None:
    path = script(HEAD + "import warnings\nSTRANGE = '\\d'\n" + FAILS_ONCE)
    words = ("--fork-ranks", "on", "--preload", "none,json,warnings", *RESTARTS, path)
    program = job.start(*words, env={"PYTHONWARNINGS": "default"})
    job.await_standby()
    job.write("go")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert job.how(1) == "fork"
    assert run.stderr.count(WARNED) == 4, run.stderr


# ---- what grows ----------------------------------------------------------------------------------------------


def test_nothing_grows_with_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small run of `python -m bench restarts`."""
    moments = restarts.run_job("bare", 24, 6, os.fspath(tmp_path))
    figures = Figures()
    restarts.add_case(figures, "bare", 24, moments, 6)
    for name, figure in figures:
        target = restarts.TARGETS.get(name)
        if target is not None and not name.endswith("_restarts"):
            assert target.is_met(figure.value), (name, figure.value, capsys.readouterr().out)


# ---- what ends -----------------------------------------------------------------------------------------------

# Also a daemon in a session of its own, with nothing but the test's mark in its environment.
FAMILY = (
    HEAD
    + f"""
import signal, subprocess
mark = {{"{support.MARK}": os.environ["{support.MARK}"], "PATH": os.environ["PATH"]}}
subprocess.Popen(["sleep", "300"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 300 & exit 0"], env=mark)
open("at-%s-%s" % (attempt, rank), "w").close()
signal.pause()
"""
)
FORKED = ("--fork-ranks", "on", "--preload", "none,json", "--max-restarts", "1", "--shutdown-timeout", "2")


def start_family(job: Job, script: Script) -> tuple[support.Program, int, int]:
    """A job at work, with processes parked for its next attempt; the pids of sentinel and guard."""
    program = job.start(*FORKED, script(FAMILY))
    support.wait_until(lambda: job.has("at-0-0", "at-0-1"))
    job.await_standby()
    assert job.how(0) == "fork"
    [watchdog] = [process.pid for process in support.processes() if process.ppid == program.pid]
    [guard] = [process.pid for process in support.processes() if process.ppid == watchdog]
    return program, watchdog, guard


def gone(program: support.Program) -> Callable[[], bool]:
    """Whether nothing that carries the test's mark is there any more."""
    return lambda: not support.marked_processes(os.environ[support.MARK])


@pytest.mark.parametrize("victims", ["bootrun", "guard", "bootrun guard", "watchdog guard", "fork_server guard"])
def test_kill_leaves_nothing(job: Job, script: Script, victims: str) -> None:
    program, watchdog, guard = start_family(job, script)
    pids = {
        "bootrun": program.pid,
        "watchdog": watchdog,
        "guard": guard,
        "fork_server": job.find("bootrun-preload")[0],
    }
    for victim in victims.split():
        os.kill(pids[victim], signal.SIGKILL)
    if victims == "watchdog guard":
        # Nobody is left to end daemons of ranks: as with exec'd ranks they survive, and only they.
        support.wait_until(lambda: {p.command for p in marked()} <= {"sleep 300"}, 5.0)
        program.wait(20)
        for process in marked():
            os.kill(process.pid, signal.SIGKILL)
    else:
        program.wait(20)
    support.wait_until(gone(program), 10.0, "nothing is left")


def marked() -> list[support.Process]:
    return [p for p in support.marked_processes(os.environ[support.MARK]) if p.state != "Z"]


@pytest.mark.parametrize("fork_ranks", ["on", "off"])
def test_sigterm_to_all_processes_at_once(job: Job, script: Script, fork_ranks: str) -> None:
    """As a scheduler ends a job: also the parked and the preloaded process get it."""
    words = [*FORKED]
    words[1] = fork_ranks
    program = job.start(*words, script(HEAD + 'open("at-" + rank, "w").close(); import signal; signal.pause()'))
    support.wait_until(lambda: job.has("at-0", "at-1"))
    if fork_ranks == "on":
        job.await_standby()
    for process in [*support.descendants(program.pid)][::-1]:
        os.kill(process.pid, signal.SIGTERM)
    program.signal(signal.SIGTERM)
    run = program.wait(10)
    assert run.status == 143
    assert "FAILED" not in run.stderr and "restart 1" not in run.stderr and PREFIX not in run.stderr


def test_what_a_forked_rank_has_started_ends_with_its_attempt(job: Job, script: Script) -> None:
    text = FAMILY.replace("signal.pause()", "wait_for('at-0-0'); wait_for('at-0-1'); sys.exit(3)")
    run = job(*FORKED[:4], "--shutdown-timeout", 2, script(text))
    assert run.status == 1
    assert job.how(0) == "fork"
    assert marked() == []
    assert run.seconds < 10


def test_leftovers_of_a_forked_rank_that_succeeded_are_named_then_killed(job: Job, script: Script) -> None:
    text = FAMILY.replace("signal.pause()", "")
    run = job(*FORKED[:4], "--shutdown-timeout", 1, script(text))
    assert run.status == 0
    assert "has ended but left sleep" in run.stderr
    assert marked() == []


def test_standby_processes_and_the_fork_server_one_are_no_leftovers(job: Job, script: Script) -> None:
    """A job that succeeds does not wait for them, nor are they named."""
    program = job.start(*FORKED, script(HEAD + 'open("at-" + rank, "w").close(); wait_for("go")'))
    support.wait_until(lambda: job.has("at-0", "at-1"))
    job.await_standby()
    job.write("go")
    run = program.wait(10)
    assert run.status == 0
    assert "left" not in run.stderr and "SIGKILL" not in run.stderr
    assert support.marked_processes(os.environ[support.MARK]) == []


def test_ranks_that_ignore_sigterm_are_killed_in_time(job: Job, script: Script) -> None:
    text = HEAD + "import signal; signal.signal(15, signal.SIG_IGN)" + FAILS_ONCE.replace("sys.exit(3)", "")
    text += "if rank == '1': sys.exit(3)\nsignal.pause()"
    job.write("go")
    run = job("--fork-ranks", "on", "--preload", "none", "--shutdown-timeout", 1, script(text))
    assert run.status == 1
    assert job.how(0) == "fork"
    assert 1.0 <= run.seconds < 8


def test_a_rank_that_is_reported_but_never_let_go_is_a_failure(job: Job, script: Script) -> None:
    """The preloaded process is killed in between: this rank must not be taken for one that has succeeded."""
    job.module(
        "culprit",
        """
import os
write = os.write
def die_at_rank_1(fd, data):
    if fd != 4 and b"\\0RANK=1\\0" in data:
        os.kill(os.getpid(), 9)
    return write(fd, data)
os.write = die_at_rank_1
""",
    )
    text = HEAD + "open('ran-%s-%s' % (attempt, rank), 'w').close()"
    words = ("--fork-ranks", "on", "--preload", "none,culprit", *RESTARTS)
    run = job(*words, script(text))
    assert run.status == 0, run.stderr
    assert job.has("ran-1-0", "ran-1-1"), run.stderr
    assert "restart 1 of 1" in run.stderr


def test_ranks_of_other_nodes_come_when_rank_0_listens(
    bootrun: support.Programs, tmp_path: Path, free_port: int, script: Script
) -> None:
    """Or after a tenth of a second; both attempts."""
    text = """
import socket
port = int(os.environ["MASTER_PORT"])
if rank == "0":
    with socket.create_server(("", port)) as server:
        at = time.monotonic_ns()
        server.accept()[0].recv(1)
else:
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 20)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)  # between tries, which end with the test
    at = 0
open(os.path.join(sys.argv[1], "listens-%s-%s" % (attempt, rank)), "w").write(str(at))
sys.exit(3 if attempt == "0" else 0)
"""
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    words += ["--rdzv-id", "job", "--fork-ranks", "on", "--preload", "none,json", "--record-start", "off"]
    path = script(HEAD + text)
    nodes = [
        bootrun.start(
            *(*words, "--rdzv-conf", f"is_host={int(number == 0)}", "--node-rank", number),
            *("--max-restarts", "1", "--restart-backoff", "0", "--events-dir", tmp_path / f"of-{number}"),
            *(path, tmp_path),
        )
        for number in (0, 1)
    ]
    runs = [node.wait(60.0) for node in nodes]
    assert [run.status for run in runs] == [0, 0], runs
    (agent,) = (tmp_path / "of-1").glob("agent-*.jsonl")
    events = list(events_of(os.fspath(agent)))
    for attempt in (0, 1):
        of_attempt = [event for event in events if event.attempt == attempt]
        (started,) = [event for event in of_attempt if event.name == "rank_started"]
        (spawn,) = [event for event in of_attempt if event.name == "spawn" and event.kind == "begin"]
        assert started.attrs["how"] == "fork"
        listened_ns = int((tmp_path / f"listens-{attempt}-0").read_text())
        assert started.mono_ns >= listened_ns or started.mono_ns - spawn.mono_ns >= HEAD_START_S * 1e9
