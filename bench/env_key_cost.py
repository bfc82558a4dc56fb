"""What watching costs a set-up: the same commands with and without it, in turns, by the clock and in CPU seconds.

Three set-ups: pip and uv install pinned requirements from local wheels, pip builds a package. Timed is what a
job waits for: what is prepared, the commands, and making the key of what they read. Where it is allowed all of it
runs before other processes of the machine (SCHED_RR), on one core: processes of that class the kernel wakes on
another core, and there a call costs four times what it costs in a job, where the watcher gets the caller's core.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bench.env_key_pip import setuptools_package
from bench.env_key_project import Layout, Project
from bench.env_key_tools import PIPS, UV, Tools
from bench.record import BenchError, Figures, note
from bootseer.env.key.keying import make_key
from bootseer.env.service.commands import run_setup, setup_environ
from bootseer.env.service.observing import VARIABLE, decide, plan

PRIORITY = 5
# What a training has beside its framework; with what they need more than 30 packages.
WANTED = (
    *("numpy==2.4.0", "requests", "rich", "flask", "tqdm", "pyyaml", "pydantic", "jinja2"),
    *("fsspec", "filelock", "huggingface-hub", "safetensors", "click", "psutil", "einops"),
)
OFFLINE = "--no-index --find-links {tools}/wheels"


class Sample(NamedTuple):
    """One set-up."""

    wall_s: float
    cpu_s: float
    calls: int  # that the watcher was told of


def measure(figures: Figures, tools: Tools, rounds: int, place: str) -> None:
    """Adds the figures. Args: place: where projects lie."""
    tools.prepare([PIPS[-1], UV])
    lock = _get_wheels(tools)
    with _first(), tempfile.TemporaryDirectory(prefix="bench-env-key-", dir=place) as directory:
        for name, layout in _layouts(lock).items():
            top = os.path.join(directory, name or "pip")
            os.mkdir(top)
            project = Project(top, layout, tools)
            project.prepare()
            taken: dict[bool, list[Sample]] = {True: [], False: []}
            _sample(project, is_watched=True)  # caches of installers, and of the disk
            for number in range(rounds):
                for is_watched in (True, False) if number % 2 else (False, True):
                    taken[is_watched].append(_sample(project, is_watched=is_watched))
                note(
                    f"{name}: round {number + 1} of {rounds}: {taken[False][-1].wall_s:.2f} s,"
                    f" watched {taken[True][-1].wall_s:.2f} s"
                )
            end = f"_{name}" if name else ""
            figures.add_ratio(f"env_key.watch_cost{end}", *([s.wall_s for s in taken[k]] for k in (True, False)))
            figures.add_ratio(
                f"env_key.watch_cost_cpu{end}", *([s.cpu_s for s in taken[k]] for k in (True, False))
            )
            figures.add(f"env_key.setup{end}_s", "s", [s.wall_s for s in taken[False]])
            figures.add(f"env_key.watched_calls{end}", "calls", [float(s.calls) for s in taken[True]])
    figures.facts["packages"] = lock


def _layouts(lock: Sequence[str]) -> Mapping[str, Layout]:
    """By the end of the figures' names."""
    files = {"requirements.txt": "".join(f"{each}\n" for each in lock), "train.py": ""}
    local = f"pip install {OFFLINE} --find-links {{backends}} -r requirements.txt ./liby"
    return {
        "": Layout("pip", PIPS[-1], (f"pip install {OFFLINE} -r requirements.txt",), files, ()),
        "local": Layout("pip, local", PIPS[-1], (local,), files | setuptools_package("liby"), ()),
        "uv": Layout("uv", UV, (f"uv pip install {OFFLINE} -r requirements.txt",), files, ()),
    }


def _sample(project: Project, *, is_watched: bool) -> Sample:
    project.become_another()
    environ = project.environ | ({} if is_watched else {VARIABLE: "off"})
    spec = project.spec()
    keyed = make_key(spec, environ)
    of_setup = setup_environ(environ, keyed.targets)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s, began_s = time.process_time(), time.perf_counter()
    planned = plan(keyed, spec, of_setup)
    if (planned.watch is not None) is not is_watched:
        raise BenchError(f"set-up cannot be watched here: {planned.why_not}")
    ran = run_setup(
        spec.commands,
        environ=of_setup,
        cwd=spec.cwd,
        log_path=os.path.join(project.top, "log"),
        timeout_s=spec.timeout_s,
        watch=planned.watch,
    )
    decided = decide(keyed, spec, environ, planned, ran.watched)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - own_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if decided.why_not or decided.is_watched is not is_watched:
        raise BenchError(f"{project.layout.name}: {decided.why_not or decided.notes}")
    cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall_s, cpu_s, int((ran.watched or {}).get("calls", 0)))


@contextmanager
def _first() -> Iterator[None]:
    """Before other processes."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    except PermissionError:
        note("this user may not run before others: figures of a busy machine")
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _get_wheels(tools: Tools) -> list[str]:
    """The wheels, downloaded once; NAME==VERSION of each."""
    directory = os.path.join(tools.folder, "wheels")
    if not os.path.isdir(directory):
        note("downloading wheels")
        beside = f"{directory}.part"
        shutil.rmtree(beside, ignore_errors=True)
        python = os.path.join(tools.program(PIPS[-1]), "python")
        command = [python, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", beside, *WANTED]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"pip download: {done.stderr[-2000:]}")
        os.rename(beside, directory)
    return sorted("==".join(name.split("-")[:2]) for name in os.listdir(directory) if name.endswith(".whl"))
