"""Two programs that stay, measured in turns: what a machine does beside them is then in both.

Each is told by a pipe how much to do, and answers with numbers. In pairs, alternately one or the other first; a
figure of the differences has the interval of their median (record.py).
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.record import BenchError

ANSWER_S = 120.0
END_S = 30.0
# What a program does with the two paths that are its last arguments.
IN_TURN = """
import sys, time
def asked():
    with open(sys.argv[-2]) as asks:
        for line in asks:
            yield int(line)
def answer(*values):
    with open(sys.argv[-1], "w") as answers:
        print(*values, file=answers)
"""
# A job that trains: a small model under DDP, an all_reduce of the loss and a heartbeat. Seconds a step, and CPU
# seconds of rank 0.
STEPS = (
    IN_TURN
    + """
import torch
import torch.distributed as dist
import bootseer
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
batch, order = torch.randn(64, 256), torch.zeros(1, dtype=torch.int64)
orders = asked() if dist.get_rank() == 0 else None
step = 0
while True:
    if orders is not None:
        order[0] = next(orders, 0)
    dist.broadcast(order, 0)
    if not int(order):
        break
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(int(order)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        step += 1
        bootseer.heartbeat(step, loss=1.0)
    if orders is not None:
        took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        answer(took_s / int(order), took_cpu_s / int(order))
dist.destroy_process_group()
"""
)


class Pair(NamedTuple):
    """What two programs answered, one right after the other."""

    plain: tuple[float, ...]
    other: tuple[float, ...]

    def added(self, place: int = 0) -> float:
        """By how much the other's is more."""
        return self.other[place] - self.plain[place]


class _Program:
    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], folder: str, name: str) -> None:
        paths = [f"{folder}/{name}.ask", f"{folder}/{name}.answer"]
        for path in paths:
            os.mkfifo(path)
        # Both ends here: nothing waits for the other side to open, and nothing ends when it closes.
        self._ask, self._answer = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
        self._output = f"{folder}/{name}.out"
        with open(self._output, "wb") as out:
            self._process = subprocess.Popen([*argv, *paths], stdout=out, stderr=out, env=dict(environ))

    def measure(self, count: int) -> tuple[float, ...]:
        os.write(self._ask, b"%d\n" % count)
        end_s = time.monotonic() + ANSWER_S
        data = b""
        while not data.endswith(b"\n"):
            if not select.select([self._answer], [], [], 1.0)[0]:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise BenchError(f"no answer:\n{self._text()}")
                continue
            data += os.read(self._answer, 64)
        return tuple(map(float, data.split()))

    def _text(self) -> str:
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return file.read()[-4000:]

    def end(self) -> None:
        os.write(self._ask, b"0\n")
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._ask)
        os.close(self._answer)


def measure_pairs(
    commands: tuple[Sequence[str], Sequence[str]],
    environ: Mapping[str, str],
    directory: str,
    pairs: int,
    count: int,
) -> list[Pair]:
    """Runs both commands, the plain one first, and measures them in turns, the first turn for nothing.

    Args: count: what each is asked for. Raises: BenchError.
    """
    programs: list[_Program] = []
    try:
        for name, argv in zip(("plain", "other"), commands, strict=True):
            programs.append(_Program(argv, environ, directory, name))
        found = []
        for number in range(pairs + 1):
            order = programs if number % 2 else programs[::-1]
            values = {id(each): each.measure(count) for each in order}
            found.append(Pair(*(values[id(each)] for each in programs)))
        return found[1:]
    finally:
        for each in programs:
            each.end()


def measure_steps(plain: Sequence[str], other: Sequence[str], jobs: int, turns: int, count: int) -> list[Pair]:
    """Seconds a step of a job of two ranks, and CPU seconds: of each pair of jobs the medians over its turns.

    Several pairs of jobs, as two processes that do the same differ by more than what is measured.
    Args: plain, other: flags of bootrun.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    bootrun = [sys.executable, "-m", "launcher", "--standalone", "--nproc-per-node", "2", "--fork-ranks", "off"]
    found = []
    for _ in range(jobs):
        with tempfile.TemporaryDirectory(prefix="bench-steps-") as directory:
            path = f"{directory}/steps.py"
            with open(path, "w") as file:
                file.write(STEPS)
            commands = (
                [*bootrun, "--log-dir", f"{directory}/plain", *plain, path],
                [*bootrun, "--log-dir", f"{directory}/other", *other, path],
            )
            pairs = measure_pairs(commands, environ, directory, turns, count)
        found.append(Pair(_medians(each.plain for each in pairs), _medians(each.other for each in pairs)))
    return found


def _medians(answers: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(values) for values in zip(*answers, strict=True))
