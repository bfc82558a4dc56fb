"""Section `compile` of `bench gpu`: the first step of a compiled GPT, and what it costs at the next start.

The same job of one rank, with a home of its own each time but where said otherwise: `cold` without first-step
caches; `keep` with --keep-caches, on a node that has none; `again` and `fork` with those that `keep` has left on
this node, by exec'd ranks and as bootrun starts them. Seconds of the first step, and from the launcher's start to
its end.
"""

from __future__ import annotations

import json
import os
from typing import Any

from bench.fork import read_events
from bench.gpu_section import Section
from bench.launch import HERE, SCRIPTS, Place, make_place
from bench.processes import run_all
from bench.record import BenchError

SIZES = {"full": ("8", "768", "1024"), "small": ("0", "32", "32")}  # layers, width, length
EXEC = ("--fork-ranks", "off")
JOBS = {  # name: flags, and whose home
    "cold": (("--no-keep-caches", *EXEC), "cold"),
    "keep": (("--keep-caches", *EXEC), "kept"),
    "again": (("--keep-caches", *EXEC), "kept"),
    "fork": (("--keep-caches",), "kept"),
}
MIN_S = 12.0


def measure(section: Section) -> None:
    """Each job once."""
    if section.size == "tiny":
        section.say("nothing is compiled without torch")
        return
    place = make_place(section.folder)
    cold: dict[str, Any] = {}
    for name in JOBS:
        if section.left_s() < MIN_S:
            section.say(f"no time for {name}")
            break
        found = run_job(place, name, [section.device, *SIZES[section.size]], section.left_s() - 3)
        section.say(f"{name}: {found}")
        section.sample(f"compile_{name}_first_step_s", "s", found["first_step_s"])
        section.sample(f"compile_{name}_to_step_s", "s", found["to_step_s"])
        cold = cold or found
        if abs(found["loss"] - cold["loss"]) > 0.05 * abs(cold["loss"]):
            raise BenchError(f"caches changed the loss: {cold['loss']}, {name} {found['loss']}")
        if name == "keep":
            section.sample("compile_first_cost", "ratio", found["first_step_s"] / cold["first_step_s"])
        elif name != "cold":
            section.sample(f"compile_{name}_misses", "misses", found["misses"])
            section.sample(f"compile_{name}_ratio", "ratio", cold["first_step_s"] / found["first_step_s"])
            section.sample(f"compile_{name}_to_step_ratio", "ratio", cold["to_step_s"] / found["to_step_s"])


def run_job(place: Place, name: str, words: list[str], limit_s: float) -> dict[str, Any]:
    """One job; what its rank has written."""
    flags, whose = JOBS[name]
    home = os.path.join(place.folder, whose)
    for part in ("home", "tmp"):
        os.makedirs(os.path.join(home, part), exist_ok=True)
    environ = {
        **place.environ,
        "HOME": os.path.join(home, "home"),
        "TMPDIR": os.path.join(home, "tmp"),
        "BOOTSEER_CACHE": os.path.join(home, "cache"),
        "BOOTSEER_CACHE_DIR": os.path.join(home, "records"),
        "PYTHONSAFEPATH": "1",  # the script lies beside modules of the bench
    }
    for variable in list(environ):
        if variable.startswith(("TORCHINDUCTOR_", "TRITON_", "CUDA_CACHE_", "XDG_CACHE_HOME")):
            del environ[variable]
    directory = place.fresh()
    logs = os.path.join(directory, "logs")
    command = [
        os.path.join(SCRIPTS, "bootrun"),
        "--standalone",
        "--nproc-per-node",
        "1",
        "--log-dir",
        logs,
        *flags,
    ]
    command += [os.path.join(HERE, "gpu_compile_rank.py"), directory, *words]
    (ended,) = run_all([command], environ, place.folder, limit_s)
    with open(os.path.join(directory, "steps.json"), encoding="ascii") as file:
        found: dict[str, Any] = json.load(file)
    how = [event["attrs"].get("how") for event in read_events(logs) if event["name"] == "rank_started"]
    if EXEC[1] not in flags and how != ["fork"]:
        raise BenchError(f"the rank should have been forked, and was started by {how}: {ended.output[-1000:]}")
    return {**found, "to_step_s": (found.pop("stepped_ns") - ended.began_ns) / 1e9}
