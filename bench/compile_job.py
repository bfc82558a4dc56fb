"""Nodes of `bench compile`, and the jobs that run on them.

A node has a folder: its cache, its temporary files, a user of its own. Its compile caches are seeded before a
job and captured after it, as a launcher does it. Stores are folders, what is in them is signed by a key of this
bench.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.ckpt_run import BOUND, make_environ
from bench.record import BenchError
from bootseer.env.compile_cache.caches import FirstStepCaches
from bootseer.env.compile_cache.key import KeyedCaches, make_key
from bootseer.trust import Trust

RANKS = 2
JOB_S = 600.0
HERE = os.path.dirname(os.path.abspath(__file__))
BOOTRUN = os.path.join(sysconfig.get_path("scripts"), "bootrun")
_POLL_S = 0.05
_FRAMEWORKS = ("TORCH", "TRITON", "CUDA_CACHE", "JAX_", "NUMBA_", "PYTHONWARNINGS", "XDG_CACHE_HOME")


class Model(NamedTuple):
    """What is trained; 0 layers: a model that compiles in seconds."""

    layers: int
    width: int
    how: str = "ddp"  # or fsdp, as compile_rank.py says


class Steps(NamedTuple):
    """What a job's ranks found."""

    first_s: float  # of the first step, the slowest rank
    later_s: float  # of the last one
    losses: list[list[str]]  # by rank
    hits: int  # of all ranks
    misses: int


class Node:
    """One machine. `close` before another one has the same folder."""

    def __init__(self, folder: str, store: str, keys: str, *, key: str = "", limit_bytes: int = 0) -> None:
        """`key`: of the caches, by default this machine's; `limit_bytes`: 0 for the ordinary one."""
        self.folder = folder
        for name in ("tmp", "jobs"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        self.environ = node_environ(folder, keys)
        self.keyed: KeyedCaches = make_key(sys.executable, self.environ)
        self.caches = FirstStepCaches(
            key or self.keyed.key,
            self.environ,
            url=store,
            trust=Trust.load(self.environ),
            limit_bytes=limit_bytes or None,
        )
        self._jobs = len(os.listdir(os.path.join(folder, "jobs")))  # of a node that was here before

    def seed(self) -> float:
        """Fills the caches; seconds."""
        return self.caches.seed().took_s

    def capture(self) -> int:
        """Publishes what is new; the generation. Raises: BenchError when there is nothing."""
        done = self.caches.capture()
        if not done.generation:
            raise BenchError(f"nothing was kept: {done.line}; {self.caches.notes}")
        return done.generation

    def train(self, model: Model, *, kill: Callable[[], bool] | None = None, keeps: bool = True) -> Steps | None:
        """A job of RANKS ranks. With `kill` rank 0 is killed when it says so, and there is no result.

        Args: keeps: with compile caches; else torch has its own in the node's temporary folder.
        """
        words = [BOOTRUN, "--standalone", "--nproc-per-node", str(RANKS)]
        out, job = self._start([*words, os.path.join(HERE, "compile_rank.py")], model, keeps)
        try:
            if kill is None:
                _wait(job)
                return read_steps(out, RANKS)
            _kill_when(job, kill, os.path.join(out, "pid-0"))
            return None
        finally:
            end(job)

    def train_alone(self, model: Model) -> Steps:
        """One rank, and no launcher."""
        out, job = self._start([sys.executable, os.path.join(HERE, "compile_rank.py")], model)
        try:
            _wait(job)
        finally:
            end(job)
        return read_steps(out, 1)

    def build_extension(self) -> dict[str, Any]:
        """What compile_extension.py says."""
        out, job = self._start([sys.executable, os.path.join(HERE, "compile_extension.py")], None)
        try:
            _wait(job)
        finally:
            end(job)
        return read(os.path.join(out, "rank-0.json"))

    def close(self) -> None:
        self.caches.close()

    def _start(
        self, words: Sequence[str], model: Model | None, keeps: bool = True
    ) -> tuple[str, subprocess.Popen[bytes]]:
        out = os.path.join(self.folder, "jobs", str(self._jobs))
        self._jobs += 1
        os.makedirs(out)
        sizes = [] if model is None else [str(model.layers), str(model.width), model.how]
        with open(os.path.join(out, "log"), "wb") as log:
            job = subprocess.Popen(
                [*BOUND, *words, out, *sizes],
                cwd=self.folder,
                env=self.environ | (self.caches.variables if keeps else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return out, job


def node_environ(directory: str, keys: str) -> dict[str, str]:
    """Of a user who has nothing but this node's folder."""
    kept = {name: value for name, value in make_environ().items() if not name.startswith(_FRAMEWORKS)}
    name = os.path.basename(directory)
    return {
        **kept,
        "BOOTSEER_CACHE": os.path.join(directory, "cache"),
        "BOOTSEER_KEYS": keys,
        "PYTHONSAFEPATH": "1",  # scripts lie beside modules of the bench, which are not theirs
        "TMPDIR": os.path.join(directory, "tmp"),
        "HOME": directory,
        "LOGNAME": name,
        "USER": name,
        # Where ninja is that extensions are built with.
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
    }


def read_steps(directory: str, ranks: int) -> Steps:
    """What the ranks of a job wrote. Raises: BenchError."""
    found = [read(os.path.join(directory, f"rank-{rank}.json")) for rank in range(ranks)]
    return Steps(
        max(each["first_step_s"] for each in found),
        max(each["later_step_s"] for each in found),
        [each["losses"] for each in found],
        sum(each["hits"] for each in found),
        sum(each["misses"] for each in found),
    )


def read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="ascii") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        raise BenchError(f"a rank wrote nothing: {_log(path)}") from None


def end(job: subprocess.Popen[bytes]) -> None:
    """Ends a job that still runs, and what is in its session."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _wait(job: subprocess.Popen[bytes]) -> None:
    try:
        status = job.wait(JOB_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"a job still runs after {JOB_S:g} s: {_said(job)}") from None
    if status:
        raise BenchError(f"a job ended with status {status}: {_said(job)}")


def _kill_when(job: subprocess.Popen[bytes], kill: Callable[[], bool], pid_path: str) -> None:
    end_s = time.monotonic() + JOB_S
    while not kill():
        if job.poll() is not None or time.monotonic() > end_s:
            raise BenchError(f"the job was not killed in time: {_said(job)}")
        time.sleep(_POLL_S)
    with open(pid_path, encoding="ascii") as file:
        os.kill(int(file.read()), signal.SIGKILL)
    try:
        if job.wait(JOB_S) == 0:
            raise BenchError("a job whose rank was killed ended well")
    except subprocess.TimeoutExpired:
        raise BenchError(f"a job whose rank was killed still runs: {_said(job)}") from None


def _said(job: subprocess.Popen[bytes]) -> str:
    words: Sequence[Any] | Any = job.args
    out = next(str(word) for word in words if f"{os.sep}jobs{os.sep}" in str(word))
    return _log(os.path.join(out, "log"))


def _log(path: str) -> str:
    try:
        with open(os.path.join(os.path.dirname(path), "log"), encoding="utf-8", errors="replace") as file:
            return file.read()[-3000:]
    except OSError:
        return "it has no log"


def files_of(directory: str) -> dict[str, int]:
    """Regular files below a folder, by path in it, and their bytes."""
    found = {}
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            found[os.path.relpath(path, directory)] = os.lstat(path).st_size
    return found
