"""Starts loaders in processes of their own, lets them go at the same moment, and takes what they say.

Everything that is started here, or by what is started here, ends with this process, also when it is killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from bench.ckpt_model import FILES
from bench.record import BenchError, note

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BOOTSEER = os.path.join(sysconfig.get_path("scripts"), "bootseer")
DEADLINE_S = 300.0
# The kernel ends it when the thread that started it is gone.
BOUND = ("setpriv", "--pdeathsig", "KILL")
TAKEN_OUT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")

Name = TypeVar("Name")


class Load(NamedTuple):
    """One load by one process."""

    seconds: float
    cpu_s: float
    size_bytes: int  # of the tensors
    began_ns: int
    ended_ns: int
    digests: dict[str, str]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.size_bytes * 1e9


def make_environ(**more: str) -> dict[str, str]:
    """The environment of everything that is measured."""
    foreign = ("BOOTSEER_", "RUNAI_", "FASTSAFETENSORS_")
    kept = {
        name: value
        for name, value in os.environ.items()
        # Where records of jobs are kept stays as it is: a test run has a folder of its own for them.
        if name == "BOOTSEER_CACHE_DIR" or (name not in TAKEN_OUT and not name.startswith(foreign))
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def python(module: str, *args: str) -> list[str]:
    """The command that runs a module of the bench."""
    return [*BOUND, sys.executable, "-m", module, *args]


class Program:
    """A program that is spoken to line by line; what it writes to stderr is shown when it fails."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.argv = list(argv)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the program)
        self._process = subprocess.Popen(
            self.argv,
            env=dict(environ),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> None:
        """Sends it a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("is gone") from None

    def listen(self, is_meant: Callable[[str], bool], deadline_s: float = DEADLINE_S) -> str:
        """The next line that is meant; others are passed over."""
        assert self._process.stdout is not None
        ended = threading.Event()

        def end() -> None:
            ended.set()
            self._process.kill()

        timer = threading.Timer(deadline_s, end)
        timer.start()
        try:
            for line in self._process.stdout:
                if is_meant(line):
                    return line
        finally:
            timer.cancel()
        raise self.failure(
            f"said nothing for {deadline_s:g} s" if ended.is_set() else "has ended without an answer"
        )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self, what: str) -> BenchError:
        """The error that tells what it last said."""
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-4000:]
        return BenchError(f"{' '.join(self.argv)}: {what} (status {status})\n{said}")

    def close_input(self) -> None:
        """No more lines will come."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, deadline_s: float = DEADLINE_S) -> None:
        """Until it has ended well."""
        try:
            status = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"still running after {deadline_s:g} s") from None
        if status:
            raise self.failure("failed")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # a line that nobody will read


@contextmanager
def programs(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[list[Program]]:
    """Starts them all; at the end none is left."""
    started: list[Program] = []
    try:
        for argv, environ in commands:
            started.append(Program(argv, environ))
        yield started
    finally:
        for program in started:
            program.close()


def load_together(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    before: Callable[[], Mapping[str, str]] = dict,
) -> list[Load]:
    """Runs loaders (see `loader`) that begin at the same moment.

    `before` is called when all are ready; what it gives are further variables of their environment.
    """
    with programs(commands) as loaders:
        for loader in loaders:
            loader.listen(lambda line: line == "ready\n")
        go = json.dumps(dict(before()))
        for loader in loaders:
            loader.say(go)
        answers = [json.loads(loader.listen(lambda line: line.startswith("{"))) for loader in loaders]
        for loader in loaders:
            loader.wait()
    return [to_load(answer) for answer in answers]


def to_load(answer: Mapping[str, Any]) -> Load:
    """What a loader printed."""
    if not answer["bytes"]:
        raise BenchError("a loader loaded nothing")
    return Load(
        answer["seconds"],
        answer["cpu_s"],
        answer["bytes"],
        answer["began_ns"],
        answer["ended_ns"],
        answer["digests"],
    )


def loader(name: str, path: str, prefix: Sequence[str] = (), **environ: str) -> tuple[list[str], dict[str, str]]:
    """The command of one loader, and its environment. `prefix` stands before it, as nsenter would."""
    return [*prefix, *python("bench.ckpt_loader", name, path)], make_environ(**environ)


def load(name: str, path: str, **environ: str) -> Load:
    """Runs one loader."""
    (made,) = load_together([loader(name, path, **environ)])
    return made


class Sums:
    """All loaders have to come to the same tensors; the first one's are the measure."""

    def __init__(self) -> None:
        self._first: tuple[str, dict[str, str]] | None = None

    def check(self, who: str, digests: dict[str, str]) -> None:
        """Compares with those of the first loader."""
        if self._first is None:
            self._first = who, digests
        first, right = self._first
        if digests != right:
            wrong = sorted(name for name in right.keys() | digests.keys() if right.get(name) != digests.get(name))
            raise BenchError(f"{who} and {first} have not the same tensors; {len(wrong)} differ, as {wrong[0]}")


def span_s(loads: Sequence[Load], began_ns: int | None = None) -> float:
    """From the first one's begin, or a moment before, to the last one's end."""
    begin = min(each.began_ns for each in loads) if began_ns is None else began_ns
    return (max(each.ended_ns for each in loads) - begin) / 1e9


def order(names: Sequence[Name], number: int) -> list[Name]:
    """The order of a round: shuffled, each round another way, and the same in each run.

    Whoever comes after another finds the memory that it gave back, so nobody may always follow the same one.
    """
    shuffled = list(names)
    random.Random(number).shuffle(shuffled)
    return shuffled


def make_model(directory: str, size: str, kinds: Iterable[str]) -> dict[str, str]:
    """Writes a model's state; the paths by format."""
    argv = python("bench.ckpt_model", size, directory, *kinds)
    made = subprocess.run(
        argv, cwd=ROOT, env=make_environ(), capture_output=True, text=True, timeout=2 * DEADLINE_S
    )
    if made.returncode:
        raise BenchError(f"the model's state could not be made:\n{made.stderr[-4000:]}")
    paths = {kind: os.path.join(directory, FILES[kind]) for kind in kinds}
    sizes = ", ".join(f"{os.path.basename(path)}" for path in paths.values())
    note(f"made the state of a model: {sizes}")
    return paths
