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

from bench.fork import check_forked
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
LEAST_S = 12.0


def measure(section: Section) -> None:
    """Each job once."""
    if section.size == "tiny":
        section.say("nothing is compiled without torch")
        return
    place = make_place(section.folder)
    found: dict[str, dict[str, Any]] = {}
    for name in JOBS:
        if section.left_s() < LEAST_S:
            section.say(f"no time for {name}")
            break
        found[name] = run_job(place, name, [section.device, *SIZES[section.size]], section.left_s() - 3)
        section.sample(f"compile_{name}_first_step_s", "s", found[name]["first_step_s"])
        section.sample(f"compile_{name}_to_step_s", "s", found[name]["to_step_s"])
        section.say(f"{name}: {found[name]}")
    cold = found.get("cold")
    for name in ("keep", "again", "fork"):
        if cold is None or name not in found:
            continue
        if abs(found[name]["loss"] - cold["loss"]) > 0.05 * abs(cold["loss"]):
            raise BenchError(f"caches changed the loss: {cold['loss']}, {name} {found[name]['loss']}")
        if name != "keep" and found[name]["misses"]:
            section.say(f"{name}: {found[name]['misses']} things were compiled again")
    if cold and "keep" in found:
        section.sample("compile_first_cost", "ratio", found["keep"]["first_step_s"] / cold["first_step_s"])
    if cold and "again" in found:
        section.sample("compile_first_step_ratio", "ratio", cold["first_step_s"] / found["again"]["first_step_s"])
    if cold and "fork" in found:
        section.sample("compile_to_step_ratio", "ratio", cold["to_step_s"] / found["fork"]["to_step_s"])


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
    folder = place.fresh()
    logs = os.path.join(folder, "logs")
    command = [
        os.path.join(SCRIPTS, "bootrun"),
        "--standalone",
        "--nproc-per-node",
        "1",
        "--log-dir",
        logs,
        *flags,
    ]
    command += [os.path.join(HERE, "gpu_compile_rank.py"), folder, *words]
    (ended,) = run_all([command], environ, place.folder, limit_s)
    if flags == ("--keep-caches",):
        check_forked(logs, ended.output, 1)
    with open(os.path.join(folder, "steps.json"), encoding="ascii") as file:
        found: dict[str, Any] = json.load(file)
    return {**found, "to_step_s": (found.pop("stepped_ns") - ended.began_ns) / 1e9}
