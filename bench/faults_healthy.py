"""Jobs in which nothing is wrong: what is said of them all the same, in real time and on a virtual clock; and
what an agent uses that has nothing to do but to look at eight ranks.

Real jobs are those of the faults, with evaluations, checkpoints, stalls of data as chance has them. Of simulated
ones only the hang detector is asked (bench/hang_healthy.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time

from bench import netns
from bench.faults_job import Job
from bench.faults_plan import Fault, Injection
from bench.hang_healthy import healthy
from bench.hang_jobs import CADENCES_S
from bench.record import BenchError, Figures, note

JOB_S = 600.0  # of each real job
BURST_EVERY_S = 30.0
REAL_STEPS_S = (0.05, 2.0, 0.5)
START_S = 120.0
RANKS = 8
REST_AFTER_S, REST_S = 20.0, 60.0
RESTING = """
import sys, time
hooks = sys.modules["_bootseer_rank"]
step = 0
while True:
    time.sleep(1)
    step += 1
    hooks.heartbeat(step, {})
"""


def add_healthy(figures: Figures, minutes: float, hours: float, seed: int, cache: str) -> None:
    """The figures of all this."""
    alarms = run_real(minutes, seed, cache)
    figures.add("faults.healthy_minutes", "min", [minutes])
    figures.add("faults.false_alarms", "false alarms", [alarms])
    false, watched_h = 0, 0.0
    for step_s in CADENCES_S:
        found, for_h, _ = healthy(seed, step_s, hours / len(CADENCES_S))
        note(f"virtual clock, steps of {step_s:g} s: {len(found)} false alarms in {for_h:.0f} h")
        false, watched_h = false + len(found), watched_h + for_h
    figures.add("faults.false_alarms_per_1000h", "false alarms in 1,000 h", [1000 * false / watched_h])
    figures.add("faults.agent_cores", "cores", [agent_cores()])


def run_real(minutes: float, seed: int, cache: str) -> int:
    """Real jobs for so long in all. Returns: how often something was said of one, or one did not go on."""
    alarms, number, left_s = 0, 0, 60 * minutes
    while left_s > 0:
        step_s = REAL_STEPS_S[number % len(REAL_STEPS_S)]
        for_s = min(JOB_S, left_s)
        said = _run_one(step_s, for_s, seed * 1000 + number, cache)
        note(f"healthy job of {step_s:g} s a step, {for_s:.0f} s: {said or 'nothing was said'}")
        alarms, left_s, number = alarms + len(said), left_s - for_s, number + 1
    return alarms


def _run_one(step_s: float, for_s: float, seed: int, cache: str) -> list[str]:
    fault = Fault(
        name="healthy",
        what="bursts",
        where="job",
        by="script",
        do="bursty",
        arguments={"seed": seed, "every_s": BURST_EVERY_S},
        first="later",
        class_="",
        culprit="",
        action="",
    )
    with netns.Hosts(2) as hosts:
        job = Job(hosts, Injection(fault, step_s, 0, -1, 1, 0.0), "bootrun", cache, [])
        try:
            while (began_s := job.reached_s()) is None:
                job.look()
                if time.monotonic() - job.began_s > START_S:
                    raise BenchError(f"a healthy job does not start\n{job.text()[-4000:]}")
                time.sleep(0.2)
            while time.monotonic() - began_s < for_s:
                job.look()
                time.sleep(0.2)
            outcome = job.outcome(began_s)
            said = [word.text for word in outcome.words]
            if outcome.ended_s is not None or outcome.goes_on_s is not None or not outcome.steps_after:
                said.append("it did not go on")
            return said
        finally:
            job.close()


def agent_cores() -> float:
    """CPU that bootrun itself uses while eight ranks run and nothing happens, in cores."""
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as directory:
        script = f"{directory}/rank.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write(RESTING)
        argv = [sys.executable, "-m", "launcher", "--standalone", "--nproc-per-node", str(RANKS)]
        argv += ["--log-dir", f"{directory}/logs", script]
        with open(f"{directory}/output", "w+b") as output:
            agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                time.sleep(REST_AFTER_S)
                before_s = _cpu_s(agent.pid)
                time.sleep(REST_S)
                used_s = _cpu_s(agent.pid) - before_s
                if agent.poll() is not None:
                    output.seek(0)
                    raise BenchError(
                        f"the job at rest has ended:\n{output.read().decode(errors='replace')[-4000:]}"
                    )
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(60)
    return used_s / REST_S


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError) as error:
        raise BenchError(f"the CPU time of process {pid} cannot be read: {error}") from error
