"""What Bootseer does on a machine with a GPU: bench/gpu.sh, which brings the Python for it, runs this.

Sections, each a process with a time limit of its own (gpu_section.py), one after the other, until the time for all
is over: `check` bootseer's health checks on the real driver; `tests` the tests that skip without a GPU; `start`
launch and restart of ranks that compute on the GPU, exec'd and forked, against torchrun; `compile` the first step
of a compiled GPT without caches and with those of the same node; `ckpt` 4 GB from a cold disk to the GPU, against
other loaders; `hangs` ranks that wait for a GPU, told and named. What a section has measured until it fails, or
its time is over, counts. Without a GPU what needs none is done, on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.ckpt_pages import MEMORY_SYSTEMS, file_system
from bench.fork import with_descendants
from bench.processes import become_subreaper
from bench.record import BenchError, Figures, Target, make_document, note, write_document

ROUNDS = 3
LIMIT_S = 520.0  # of all: with the machine's start less than nine minutes
RESERVE_S = 5.0  # for what is left to do when the last section ends
ENDS_WITHIN_S = 5.0  # a process that was killed; one that the driver of a GPU holds may not
MIN_S = 10.0  # a section is not begun with less
SIZES = ("full", "small", "tiny")
TARGETS = {
    "gpu.tests_failed": Target(at_most=0),
    "gpu.start_ratio": Target(at_least=1),
    "gpu.restart_ratio": Target(at_least=2),
    "gpu.hangs_told": Target(at_least=1),
    "gpu.hangs_named": Target(at_least=1),
}
ASK_FOR_GPU = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"gpus": count, "gpu": torch.cuda.get_device_name(0) if count else "none",
                  "cuda": torch.version.cuda, "torch": torch.__version__}))
"""


class Part(NamedTuple):
    """A section: the module of it has `measure(section)`."""

    module: str
    limit_s: float
    needs_gpu: bool


SECTIONS = {
    "check": Part("bench.gpu_checks", 30, True),
    "tests": Part("bench.gpu_tests", 90, True),
    "start": Part("bench.gpu_start", 130, False),
    "compile": Part("bench.gpu_compile", 110, False),
    "ckpt": Part("bench.gpu_ckpt", 90, False),
    "hangs": Part("bench.gpu_hangs", 130, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument(
        "--size", choices=SIZES, default="", help="of what is measured; small: to try it, tiny: without torch"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--began", type=float, default=0.0, help="when it began, in seconds of the clock")


def run(args: argparse.Namespace) -> Figures:
    """Runs the sections; the figures that came of them."""
    waited_s = time.time() - args.began if args.began else 0.0
    end_s = time.monotonic() + args.limit_s - min(max(waited_s, 0.0), args.limit_s)
    become_subreaper()
    facts: dict[str, Any] = (
        ask_for_gpu() if args.size != "tiny" else {"gpus": 0, "gpu": "not asked for", "torch": "not used"}
    )
    has_gpu = facts["gpus"] > 0
    size = args.size or ("full" if has_gpu else "small")
    figures = Figures()
    figures.facts = {**facts, "size": size, "sections": {}}
    logs = os.path.dirname(os.path.abspath(args.json)) if args.json else ""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=find_disk()) as directory:
        for name in args.sections:
            part = SECTIONS[name]
            left_s = end_s - time.monotonic() - RESERVE_S
            if part.needs_gpu and not has_gpu:
                outcome = "not run: no GPU"
            elif left_s < MIN_S:
                outcome = "not run: no time left"
            else:
                words = [part.module, "cuda" if has_gpu else "cpu", size, str(args.rounds)]
                own_s = part.limit_s * max(1.0, args.limit_s / LIMIT_S)  # a slow machine may be given more
                outcome = run_section(name, words, min(own_s, left_s), directory, logs or directory, figures)
            figures.facts["sections"][name] = outcome
            note(f"{name}: {outcome}")
            if args.json:  # what follows may be cut off
                write_document(args.json, make_document("gpu", sys.argv[1:], figures))
    print(f"GPU: {facts['gpu']}; torch {facts['torch']}; size {size}")
    for name, outcome in figures.facts["sections"].items():
        print(f"{name:8} {outcome}")
    print()
    return figures


def find_disk() -> str:
    """A folder for what sections write that is no memory, if there is one."""
    directories = [tempfile.gettempdir(), "/var/tmp", os.getcwd()]
    return next(
        (each for each in directories if os.path.isdir(each) and file_system(each) not in MEMORY_SYSTEMS),
        directories[0],
    )


def ask_for_gpu() -> dict[str, Any]:
    """How many there are, by torch in a process of its own, as this one is to hold none."""
    try:
        told = subprocess.run(
            [sys.executable, "-c", ASK_FOR_GPU], capture_output=True, text=True, timeout=90, check=True
        )
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", "") or ""
        raise BenchError(f"torch does not say whether there is a GPU: {error}\n{said[-2000:]}") from None
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def run_section(name: str, words: list[str], limit_s: float, directory: str, logs: str, figures: Figures) -> str:
    """Runs a section to its end, or to its limit; adds what it has measured. Returns how it ended, in words."""
    os.makedirs(logs, exist_ok=True)
    log, told = os.path.join(logs, f"gpu-{name}.log"), os.path.join(directory, f"{name}.jsonl")
    own = os.path.join(directory, name)
    os.makedirs(own)
    command = [sys.executable, "-m", "bench.gpu_section", *words, own, told, f"{limit_s:.0f}"]
    began_s = time.monotonic()
    with open(log, "wb") as file:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        status: int | None = program.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    end_all()
    program.poll()
    took_s = time.monotonic() - began_s
    samples = read_reported(told, figures)
    what = f"{samples} samples, {took_s:.0f} s"
    if status is None:
        return f"FAILED: not done within {limit_s:.0f} s; {what} ({os.path.basename(log)})"
    if status:
        return f"FAILED: {last_line(log)}; {what} ({os.path.basename(log)})"
    return f"done; {what}"


def end_all() -> None:
    """Ends what a section has left; this process, as a subreaper, is the parent of what nobody else is."""
    end_s = time.monotonic() + ENDS_WITHIN_S
    while below := with_descendants([os.getpid()]) - {os.getpid()}:
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > end_s:
            note(f"  still there, though killed: {sorted(below)}")
            return
        time.sleep(0.02)


def read_reported(path: str, figures: Figures) -> int:
    """Adds the samples that a section has written, as figures; says what it has said. Returns their number."""
    found: dict[tuple[str, str], list[float]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return 0
    for line in lines:
        told = json.loads(line)
        if "say" in told:
            note(f"  {told['say']}")
        else:
            found.setdefault((told["name"], told["unit"]), []).append(told["value"])
    for (name, unit), values in found.items():
        figures.add(f"gpu.{name}", unit, values)
    return sum(map(len, found.values()))


def last_line(path: str) -> str:
    """Of what a section has written; mostly its error."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def measure_of(module: str) -> Callable[[Any], None]:
    """What a section does."""
    found: Callable[[Any], None] = importlib.import_module(module).measure
    return found
