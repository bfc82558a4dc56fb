"""Real ranks of a real bootrun, looked at from outside: steps, stacks, what /proc says. Nothing may harm them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.base import children
from launcher.base.facts import RankFacts
from launcher.base.loop import Loop
from launcher.monitor.hang.places import describe_place
from launcher.monitor.samples import stack_collector as collecting
from launcher.monitor.samples import stack_collector as collector_module
from launcher.monitor.samples.sampler import Sampler
from launcher.monitor.samples.stack_collector import StackCollector
from launcher.monitor.samples.stacks import (
    RankStacks,
    Source,
    child_frames,
    find_odd,
    format_groups,
    group_stacks,
    is_installed,
)
from launcher.monitor.watch import pack_stacks, unpack_stacks
from tests.integration.watched_ranks import Logs, SeenRank, collect, find_ranks
from tests.support import BOOTRUN, Program, Programs, is_running, tune, wait_until

TOOLS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
heartbeat = sys.modules["_bootseer_rank"].heartbeat if "_bootseer_rank" in sys.modules else None
def ready():
    open("ready-%d" % rank, "w").close()
def wait():
    while True:
        signal.pause()  # never runs by itself: /proc shows where it waits at any time
"""
FORKED = pytest.mark.parametrize("fork", ["on", "off"])


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def sample() -> Iterator[Callable[[list[SeenRank]], Sampler]]:
    """Makes samplers that are closed at the end."""
    made: list[Sampler] = []

    def make(ranks: list[SeenRank]) -> Sampler:
        made.append(Sampler(ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


Sample = Callable[[list[SeenRank]], Sampler]


def start(
    program: Programs,
    tmp_path: Path,
    text: str,
    nproc: int,
    *options: str,
    env: dict[str, str | None] | None = None,
) -> Program:
    path = tmp_path / "train.py"
    path.write_text(TOOLS + text)
    words = ["--standalone", "--nproc-per-node", str(nproc), "--log-dir", tmp_path / "logs", *options]
    environ = {"BOOTSEER_CACHE_DIR": str(tmp_path / "cache"), **(env or {})}
    return program.start(BOOTRUN, *words, path, env=environ, cwd=os.fspath(tmp_path))


# ---- steps ---------------------------------------------------------------------------------------------------

STEPS = """
import torch
model = torch.nn.Linear(2, 2)
one, two = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())
def make_step():
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    two.step()
compiled = torch.compile(make_step, backend="eager")
for step in range(4):
    make_step()
for step in range(3):
    compiled()
if os.fork() == 0:
    make_step()
    os._exit(0)
os.wait()
ready()
wait()
"""


@pytest.mark.slow
@FORKED
def test_steps_of_real_optimizers_are_counted(program: Programs, tmp_path: Path, fork: str) -> None:
    job = start(program, tmp_path, STEPS, 2, "--fork-ranks", fork, "--preload", "torch")
    ranks = find_ranks(job, 2)
    before_ns = time.monotonic_ns()
    for rank in ranks:
        page = rank.page()
        assert page is not None
        assert (page.pid, page.steps, page.step, page.counts) == (rank.pid, 14, None, True)
        assert before_ns - 60e9 < page.step_ns < before_ns
    assert ranks[0].page_file != ranks[1].page_file
    job.signal(signal.SIGTERM)
    job.wait()


HEARTBEATS = """
for step in range(rank * 10 + 1):
    heartbeat(100 + step, {"loss": 0.5})
ready()
wait()
"""


@FORKED
@pytest.mark.parametrize("options", [[], ["--events-dir", "/dev/null"], ["--log-dir", "/dev/null"]])
def test_heartbeats_are_counted(program: Programs, tmp_path: Path, fork: str, options: list[str]) -> None:
    job = start(program, tmp_path, HEARTBEATS, 2, "--fork-ranks", fork, *options)
    pages = [rank.page() for rank in find_ranks(job, 2)]
    assert [(page.steps, page.step) for page in pages if page is not None] == [(1, 100), (11, 110)]
    job.signal(signal.SIGTERM)
    job.wait()


def test_without_hooks_nothing_is_known_and_nothing_is_sent(
    program: Programs, tmp_path: Path, loop: Loop, sample: Sample
) -> None:
    job = start(program, tmp_path, "ready()\nwait()", 1, "--rank-hooks", "off")
    (rank,) = find_ranks(job, 1)
    assert rank.page_file == ""
    found = collect(StackCollector(loop, [rank], py_spy=""), loop)[0]
    assert found.source is Source.KERNEL and found.note == "has no handler for its stacks"
    (facts,) = look(sample([rank]))
    assert (facts.steps, facts.step_at_s) == (-1, -1.0)
    assert is_running(rank.pid)
    job.signal(signal.SIGTERM)
    job.wait()


def test_each_attempt_has_pages_of_its_own(program: Programs, tmp_path: Path) -> None:
    text = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for _ in range(5 if attempt == 0 else 2): heartbeat(7, {})
if attempt == 0: sys.exit(1)
ready()
wait()
"""
    job = start(program, tmp_path, text, 1, "--max-restarts", "1", "--restart-backoff", "0")
    (rank,) = find_ranks(job, 1)
    page = rank.page()
    assert page is not None and page.steps == 2
    links = [os.readlink(f"/proc/{job.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{job.pid}/fd")]
    assert len([each for each in links if "bootseer-page" in each]) == 1
    job.signal(signal.SIGTERM)
    job.wait()


# ---- stacks --------------------------------------------------------------------------------------------------

DOINGS = """
import ctypes, threading
def sleeps():
    time.sleep(1000)
def is_busy():
    ready()
    while True:
        pass
def is_blocked():
    while True:
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock; a signal ends it
def has_no_handler():
    signal.signal(59, signal.SIG_DFL)
    ready()
    wait()
def has_a_blocked_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [59])
    ready()
    wait()
def has_closed_all():
    os.closerange(3, 4000)
    file = os.open("precious", os.O_RDWR | os.O_CREAT)
    for number in range(900, 1024):
        os.dup2(file, number)
    ready()
    wait()
def is_stopped():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()
def waits_beside_a_thread():
    thread = threading.Thread(target=sleeps)
    thread.start()
    ready()
    thread.join()
def some():
    return sum(range(20000))
def others():
    return sum(range(20000))
def computes():
    ready()
    while True:
        some()
        others()
doings = [sleeps, is_busy, is_blocked, has_no_handler, has_a_blocked_signal, has_closed_all, is_stopped,
          waits_beside_a_thread, computes]
if rank in (0, 2):
    ready()
doings[rank]()
"""


def wait_until_there(collector: StackCollector, loop: Loop) -> int:
    """Until no rank is still on its way back from `ready`. Returns: how many times they were asked."""
    asked = 0

    def are_there() -> bool:
        nonlocal asked
        asked += 1
        found = collect(collector, loop).values()
        return not any(frame.function == "ready" for each in found for frame in each.main)

    wait_until(are_there)
    return asked


@FORKED
def test_stacks_of_ranks_that_hang(program: Programs, tmp_path: Path, loop: Loop, fork: str) -> None:
    job = start(program, tmp_path, DOINGS, 9, "--fork-ranks", fork)
    ranks = find_ranks(job, 9)
    assert len(ranks) == 9
    wait_until(lambda: state_of(ranks[6].pid) == "T")
    wait_until(lambda: state_of(ranks[0].pid) == state_of(ranks[2].pid) == "S")
    collector = StackCollector(loop, ranks, py_spy="")
    wait_until_there(collector, loop)
    for _ in range(2):
        found = collect(collector, loop)
        assert not collector.is_busy
        for rank, names in ((0, ["sleeps"]), (1, ["is_busy"]), (2, ["is_blocked"])):
            assert (found[rank].source, found[rank].note) == (Source.HANDLER, ""), found[rank]
            assert [frame.function for frame in found[rank].main][:2] == [*names, "<module>"]
            assert found[rank].main[0].file == str(tmp_path / "train.py")
        beside = found[7]
        assert [frame.function for frame in beside.main if "train.py" in frame.file] == [
            "waits_beside_a_thread",
            "<module>",
        ]
        assert len(beside.threads) == 2
        assert [found[rank].note for rank in (3, 4, 5, 6)] == [
            "has no handler for its stacks",
            "blocks the signal for its stacks",
            "has closed the file for its stacks",
            "is stopped: SIGSTOP, or a debugger",
        ]
        assert all(found[rank].source is Source.KERNEL and found[rank].kernel for rank in (3, 4, 5, 6))
        assert all(state_of(rank.pid) in "RST" for rank in ranks)
        groups = group_stacks(found)
        assert len(groups) == 9 and find_odd(groups) == ()
        assert [rank for rank, each in found.items() if each.comes_along] == [8], "is_busy never does"
    assert (tmp_path / "precious").read_bytes() == b""
    os.kill(ranks[6].pid, signal.SIGCONT)
    wait_until(lambda: state_of(ranks[6].pid) == "S")
    assert collect(collector, loop)[6].main
    job.signal(signal.SIGTERM)
    job.wait()


RUNNING = """
def spin():
    ready()
    while True:
        pass
if rank == 0:
    signal.signal(58, signal.SIG_DFL)
elif rank == 1:
    signal.pthread_sigmask(signal.SIG_BLOCK, [58])
elif rank == 2:
    signal.signal(58, lambda *_: open("mine", "a").write("x"))
spin()
"""


def test_looks_at_the_main_thread_end_nobody(program: Programs, tmp_path: Path, loop: Loop) -> None:
    job = start(program, tmp_path, RUNNING, 4)
    ranks = find_ranks(job, 4)
    collector = StackCollector(loop, ranks, py_spy="")
    looks = 0

    asked = 3 + wait_until_there(collector, loop)
    for _ in range(3):
        found = collect(collector, loop)
        assert [found[rank].main[0].function for rank in range(4)] == ["spin"] * 4
        assert not any(each.comes_along for each in found.values())
        assert [found[rank].looks for rank in range(3)] in ([1, 1, 1], [1, 1, 2])
        looks += found[3].looks
    assert looks > 3, "it ran when it was asked"
    assert all(is_running(rank.pid) for rank in ranks)
    mine = tmp_path / "mine"
    assert len(mine.read_text() if mine.exists() else "") <= asked, "a handler of the script's gets one a question"


def test_an_agent_that_had_no_time_has_the_stacks_all_the_same(
    program: Programs, tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "ANSWER_S", 0.0)
    job = start(program, tmp_path, "def spin():\n    ready()\n    while True:\n        pass\nspin()", 1)
    [rank] = find_ranks(job, 1)
    before = os.stat(rank.page_file).st_size
    found: list[dict[int, RankStacks]] = []
    collector = StackCollector(loop, [rank], py_spy="")
    collector.collect(found.append)
    wait_until(lambda: os.stat(rank.page_file).st_size > before + 50)
    while not found:
        loop.run_once(0.2)
    assert found[0][0].source is Source.HANDLER and "spin" in [frame.function for frame in found[0][0].main]


def test_ranks_that_do_the_same_are_one_group(
    program: Programs, tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def sleeps():\n    ready()\n    time.sleep(1000)\ndef other():\n    ready()\n    time.sleep(1000)\n"
    job = start(program, tmp_path, text + "other() if rank == 2 else sleeps()", 4)
    ranks = find_ranks(job, 4)
    for rank in ranks:
        wait_until(lambda rank=rank: state_of(rank.pid) == "S")  # type: ignore[misc]
    collector = StackCollector(loop, ranks, py_spy="")
    for max_bytes in (collector_module.KEEP_BYTES, 100, 100):  # the second time its old answers are thrown away
        monkeypatch.setattr(collector_module, "KEEP_BYTES", max_bytes)
        found = collect(collector, loop)
        assert all(each.source is Source.HANDLER for each in found.values())
        groups = group_stacks(found)
        assert [group.ranks for group in groups] == [(0, 1, 3), (2,)]
        assert find_odd(groups) == (2,)
    job.signal(signal.SIGTERM)
    job.wait()


def test_ended_ranks_and_those_not_started_are_named(program: Programs, tmp_path: Path, loop: Loop) -> None:
    job = start(program, tmp_path, "ready()\nwait()", 1)
    (rank,) = find_ranks(job, 1)
    job.signal(signal.SIGTERM)
    job.wait()
    found = collect(StackCollector(loop, [rank, SeenRank(1, 0, "")]), loop)
    assert [(found[n].source, found[n].note) for n in (0, 1)] == [
        (Source.NOTHING, "has ended"),
        (Source.NOTHING, "has not started"),
    ]


def test_a_handler_of_the_scripts_wins(program: Programs, tmp_path: Path, loop: Loop) -> None:
    text = "signal.signal(59, lambda *_: open('mine', 'w').close())\nready()\nwait()"
    job = start(program, tmp_path, text, 1)
    ranks = find_ranks(job, 1)
    found = collect(StackCollector(loop, ranks, py_spy=""), loop)[0]
    assert (found.source, found.note) == (Source.KERNEL, "has not answered for 2 s")
    assert (tmp_path / "mine").exists() and is_running(ranks[0].pid)
    job.signal(signal.SIGTERM)
    job.wait()


def test_a_rank_that_ends_while_it_is_asked(program: Programs, tmp_path: Path, loop: Loop) -> None:
    job = start(program, tmp_path, "signal.signal(59, lambda *_: os._exit(0))\nready()\nwait()", 1)
    ranks = find_ranks(job, 1)
    collector = StackCollector(loop, ranks)
    began_s = loop.time()
    found = collect(collector, loop)
    assert (found[0].source, found[0].threads, found[0].note) == (Source.KERNEL, (), "has ended")
    assert loop.time() - began_s < collecting.ANSWER_S
    assert job.wait().status == 0
    collector.collect(lambda _: pytest.fail("closed"))
    collector.close()
    loop.run_once(0.1)


PY_SPY = """#!/bin/sh
[ "$1 $2 $3 $4" = "dump --nonblocking --json --pid" ] || exit 1
cat <<END
[{"thread_id": 1, "thread_name": "MainThread", "active": true,
  "frames": [{"name": "f", "filename": "/a.py", "line": 3}]}]
END
"""


@pytest.mark.parametrize(
    "script", [PY_SPY, "#!/bin/sh\nexec sleep 1000\n", "#!/bin/sh\necho nonsense\nexit 1\n", "gone"]
)
def test_py_spy_is_asked_where_there_is_no_handler(
    program: Programs, tmp_path: Path, loop: Loop, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, launcher__py_spy_s=0.5)
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/py-spy"
    if script != "gone":
        tool.write_text(script)
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    job = start(program, tmp_path, "signal.signal(59, signal.SIG_DFL)\nready()\nwait()", 2)
    collector = StackCollector(loop, find_ranks(job, 2))
    found = collect(collector, loop)
    if script == PY_SPY:
        assert [(each.source, each.main[0].function) for each in found.values()] == [(Source.PY_SPY, "f")] * 2
    else:
        assert [each.source for each in found.values()] == [Source.KERNEL] * 2
    job.signal(signal.SIGTERM)
    job.wait()
    wait_until(children.reap_left)


WAITS_FOR_CHILD = """
import multiprocessing, subprocess, threading
def stuck():
    threading.Event().wait()
child = multiprocessing.get_context("fork").Process(target=stuck)
child.start()
other = subprocess.Popen(["sleep", "1000"])
ready()
child.join()
"""


@FORKED
def test_children_of_a_rank_that_waits_for_one(program: Programs, tmp_path: Path, loop: Loop, fork: str) -> None:
    job = start(program, tmp_path, WAITS_FOR_CHILD, 1, "--fork-ranks", fork)
    (rank,) = find_ranks(job, 1)

    def look_once() -> RankStacks | None:
        found = collect(StackCollector(loop, [rank], py_spy=""), loop)[0]
        return found if any(child.main for child in found.children) else None  # old enough for a signal

    found = wait_until(look_once, 30.0)
    assert found.source is Source.HANDLER
    forked, other = found.children
    frames = child_frames(forked)
    assert [frame.function for frame in frames if not is_installed(frame)] == ["stuck"]
    assert (other.name, other.main) == ("sleep", ()), "it has no handler, so it gets no signal"
    text = "\n".join(format_groups(group_stacks({0: found})))
    assert f"rank 0 (pid {rank.pid}) waits for a child process:" in text
    assert f"py-spy dump --pid {other.pid}" in text and f"py-spy dump --pid {forked.pid}" not in text
    assert f"waits for its child process {forked.pid} in " in describe_place(found)
    assert unpack_stacks(pack_stacks({0: found}, 60_000))[0].children == found.children
    for pid in (forked.pid, other.pid, rank.pid):
        assert is_running(pid)
    again = collect(StackCollector(loop, [rank], py_spy=""), loop)[0].children
    assert [(child.pid, child.main) for child in again] == [(child.pid, child.main) for child in found.children]
    job.signal(signal.SIGTERM)
    job.wait()


def test_children_are_listed_without_signals_where_the_rank_has_no_handler(
    program: Programs, tmp_path: Path, loop: Loop
) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/py-spy"
    tool.write_text(PY_SPY.replace("/a.py", "/usr/lib/python3.11/multiprocessing/popen_fork.py"))
    tool.chmod(0o755)
    job = start(program, tmp_path, "signal.signal(59, signal.SIG_DFL)\n" + WAITS_FOR_CHILD, 1)
    (rank,) = find_ranks(job, 1)
    found = collect(StackCollector(loop, [rank], py_spy=str(tool)), loop)[0]
    assert found.source is Source.PY_SPY
    assert [child.main for child in found.children] == [(), ()]
    assert all(is_running(child.pid) for child in found.children)
    job.signal(signal.SIGTERM)
    job.wait()


# ---- what /proc says -----------------------------------------------------------------------------------------

WORK = """
import subprocess
if rank == 0:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    open("child", "w").write(str(child.pid))
    ready()
    wait()
if rank == 1:
    print("x" * 1000, flush=True)
    sys.stderr.write("y" * 500)
    with open("/dev/zero", "rb") as zero:
        zero.read(1 << 20)
    ready()
    wait()
if rank == 2:
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@FORKED
def test_what_is_seen_of_ranks(program: Programs, tmp_path: Path, sample: Sample, fork: str) -> None:
    job = start(program, tmp_path, WORK, 3, "--fork-ranks", fork, "--redirects", "3")
    ranks = [
        rank._replace(logs=Logs(*(log(tmp_path, rank.rank, stream) for stream in ("stdout", "stderr"))))
        for rank in find_ranks(job, 3)
    ]
    wait_until(lambda: state_of(ranks[2].pid) == "T")
    wait_until((tmp_path / "child").read_text)
    sampler = sample([*ranks, SeenRank(9, 0, "")])
    first = look(sampler)
    assert [facts.rank for facts in first] == [0, 1, 2, 9]
    assert (first[1].output_bytes, first[2].output_bytes) == (1501, 0)
    assert 1 << 20 <= first[1].io_bytes < 1 << 24
    assert first[2].state == "T" and first[2].steps <= 0 and first[2].step_at_s == -1.0
    assert first[3]._replace(at_s=0.0) == RankFacts(9, 0.0, -1, -1.0, -1, -1.0, -1, "", "")
    wait_until(lambda: look(sampler)[0].cpu_s > first[0].cpu_s + 0.1, what="the child's time")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    cpu_s = look(sampler)[0].cpu_s
    assert cpu_s >= first[0].cpu_s
    wait_until(lambda: look(sampler)[1].wait, what="where it sleeps")
    before = len(os.listdir("/proc/self/fd"))
    os.kill(ranks[2].pid, signal.SIGCONT)
    os.kill(ranks[0].pid, signal.SIGKILL)
    job.wait()
    last = look(sampler)
    assert [facts.state for facts in last] == ["X", "X", "X", ""], "ended, and one that never was"
    assert last[0].cpu_s >= cpu_s and last[1].output_bytes == 1501
    assert len(os.listdir("/proc/self/fd")) < before


def test_an_interpreter_that_is_a_child_is_looked_at(
    program: Programs, tmp_path: Path, loop: Loop, sample: Sample
) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    text = "heartbeat(1, {})\nopen('inner', 'w').write(str(os.getpid()))\nready()\n"
    text += "os.kill(os.getpid(), signal.SIGSTOP)"
    job = start(program, tmp_path, text, 1, env={"PYTHON_EXEC": str(wrapper)})
    (rank,) = find_ranks(job, 1)
    inner = int((tmp_path / "inner").read_text())
    assert inner != rank.pid
    wait_until(lambda: state_of(inner) == "T")
    sampler = sample([rank])
    (facts,) = look(sampler)
    assert (facts.state, facts.steps) == ("T", 1)
    assert collect(StackCollector(loop, [rank], py_spy=""), loop)[0].note.startswith("is stopped")
    os.kill(inner, signal.SIGCONT)
    job.wait()


def test_another_process_with_its_number_is_not_looked_at(sample: Sample) -> None:
    other = SeenRank(0, os.getpid(), "", started_ns=1)  # this process has begun long after that rank
    (facts,) = look(sample([other]))
    assert (facts.state, facts.cpu_s) == ("X", 0.0), "it has ended, for all that is known"


def look(sampler: Sampler) -> list[RankFacts]:
    return sampler.look(time.monotonic())


def state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def log(tmp_path: Path, rank: int, stream: str) -> str:
    (path,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/{stream}.log")
    return os.fspath(path)
