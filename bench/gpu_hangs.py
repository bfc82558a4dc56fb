"""Section `hangs` of `bench gpu`: ranks that wait for a GPU look busy; is it told, and who is named.

`spin_asleep`: four ranks compute on the GPU and all-reduce with gloo; while they wait they run kernels that use no
memory and spin, as NCCL's collectives do; one rank sleeps. `all_spin`: all wait for kernels of their own, and no
rank is to blame. `nccl_...`: those of `bench trace --backend nccl`, with --trace-collectives. On the CPU ranks
only spin.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from bench.gpu_section import Section
from bench.launch import SCRIPTS, make_place
from bench.trace_jobs import JOB as TRACED_JOB
from bench.trace_jobs import NCCL_AT_STEP, NCCL_CAUSES

RANKS, CULPRIT, AT_STEP = 4, 3, 60
REPORT_S = 45.0  # from the job's start: all import torch, make their steps, and stand still
MIN_S = 20.0
JOB = """
import os, sys, time
import torch
import torch.distributed as dist
cause, device, culprit, at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
beat = sys.modules["_bootseer_rank"].heartbeat
ones = torch.ones(512, 512, device=device)

def spin():
    if device == "cuda":
        torch.cuda._sleep(5_000_000_000)  # cycles: some 3 s
        torch.cuda.synchronize()
        return
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        pass

def all_reduce(tensor):
    work = dist.all_reduce(tensor, async_op=True)
    end_s = time.monotonic() + 0.3
    while not work.is_completed() and time.monotonic() < end_s:
        time.sleep(0.001)
    while not work.is_completed():
        spin()

for step in range(1000000):
    loss = (ones @ ones).sum().reshape(1).cpu()
    if step == at and cause == "all_spin":
        while True:
            spin()
    if step == at and rank == culprit and cause == "spin_asleep":
        time.sleep(1000)
    all_reduce(loss)
    beat(step, {})
    time.sleep(0.005)
"""


class Case(NamedTuple):
    """A job that comes to stand still."""

    text: str
    words: tuple[str, ...]
    flags: tuple[str, ...]
    culprit: int | None  # None: nobody
    needs_gpu: bool


def cases_of(device: str) -> dict[str, Case]:
    """All of them."""
    own = (device, str(CULPRIT), str(AT_STEP))
    made = {
        "spin_asleep": Case(JOB, ("spin_asleep", *own), (), CULPRIT, False),
        "all_spin": Case(JOB, ("all_spin", *own), (), None, True),
    }
    for name in ("asleep", "loops", "stopped"):
        rank = NCCL_CAUSES[name].rank
        words = (name, str(rank), str(NCCL_AT_STEP), "nccl")
        made[f"nccl_{name}"] = Case(TRACED_JOB, words, ("--trace-collectives",), rank, True)
    return made


def measure(section: Section) -> None:
    """Each once, as far as there is time."""
    if section.size == "tiny":
        section.say("nothing hangs without torch")
        return
    for name, case in cases_of(section.device).items():
        if case.needs_gpu and not section.has_gpu:
            section.say(f"{name}: not run: no GPU")
        elif section.left_s() < MIN_S:
            section.say(f"{name}: no time left")
        else:
            judge(section, name, case)


def judge(section: Section, name: str, case: Case) -> None:
    """Runs a job until it is told that it stands still."""
    found, said = run_job(section, name, case)
    section.sample("hangs_told", "share", float(bool(found)))
    if not found:
        section.say(f"{name}: NOT TOLD; {said[-1] if said else 'nothing was said'}")
        return
    causes = found.get("causes") or []
    ranks = causes[0]["ranks"] if causes else found["ranks"]
    if case.culprit is not None:
        section.sample("hangs_named", "share", float(ranks == [case.culprit]))
    section.say(f"{name}: {found['kind']}, ranks {ranks}, meant {case.culprit}: {found['why']}")
    for use in found.get("accelerators", []):
        section.say(
            f"  accelerator {use['number']}: busy {use['busy']} %, memory {use['memory']} %, {use['power_w']} W"
        )


def run_job(section: Section, name: str, case: Case) -> tuple[dict[str, Any], list[str]]:
    """Its report of a standstill, empty for none, and what bootrun said."""
    place = make_place(section.folder)
    directory = place.fresh()
    script, logs = os.path.join(directory, "job.py"), os.path.join(directory, "logs")
    with open(script, "w", encoding="ascii") as file:
        file.write(case.text)
    flags = ["--standalone", "--nproc-per-node", str(RANKS), "--local-addr", "127.0.0.1"]
    flags += ["--hang-least", "2", "--log-dir", logs]
    command = [
        os.path.join(SCRIPTS, "bootrun"),
        *flags,
        "--shutdown-timeout",
        "1",
        *case.flags,
        script,
        *case.words,
    ]
    environ = {**place.environ, "GLOO_SOCKET_IFNAME": "lo"}
    end_s = time.monotonic() + min(REPORT_S, section.left_s() - 5)
    with open(os.path.join(directory, "said"), "wb") as said:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ)
    try:
        while job.poll() is None and time.monotonic() < end_s:
            # The text is written after the record.
            if glob.glob(f"{logs}/*/standstill-0.txt"):
                (path,) = glob.glob(f"{logs}/*/standstill-0.json")
                with open(path, encoding="utf-8") as file:
                    found: dict[str, Any] = json.load(file)
                return found, []
            time.sleep(0.05)
    finally:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        with open(os.path.join(directory, "said"), encoding="utf-8", errors="replace") as file:
            text = file.read()
        print(f"== {name}\n{text[-4000:]}", file=sys.stderr)
    return {}, text.splitlines()
