"""`make bench-guard`: is this code as fast as that of an earlier commit, by default of the last release?

Both products run by the same bench code, interpreter and torch, in turns that rotate; each figure is our time over
theirs, formed within rounds. Cases: `launch` two empty ranks to the end of the job, `launch_cpu` the CPU time of
bootrun's own processes until the first statement of both ranks, `restart_2` and `restart_8` the death of a forked
rank until all ranks of the next attempt are past an all-reduce, `env` a start whose environment of 1,500 files is
mounted on a node that has none (root), `rendezvous` 1,000 simulated nodes from the first join until all have their
ranks. The earlier product is unpacked into a folder that ends with the bench.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from bench import fork, launch
from bench.processes import Running, become_subreaper, reap_orphans, run_all
from bench.record import BenchError, Figures, Target, note

ROUNDS = 9
MINIMUM_ROUNDS = 7
CASES = ("launch", "launch_cpu", "restart_2", "restart_8", "env", "rendezvous")
SLOWER = 1.03  # what passes for noise
TARGETS = {f"guard.{case}": Target(at_most=SLOWER, samples=MINIMUM_ROUNDS) for case in CASES}
REPEATS = {"launch": 3, "launch_cpu": 3}  # a case of less than a tenth of a second takes its median in each turn
NODES = 1000
FILES = 1500
DEADLINE_S = 180.0
PACKAGES, ENTRY = ("launcher", "bootseer"), "_bootseer_entry.py"  # the last one came later than some commits
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Product(NamedTuple):
    """One of the two that are compared."""

    name: str
    root: str  # its packages, beside this bench code

    def program(self, name: str) -> str:
        """The path of one of its commands."""
        return os.path.join(self.root, "bin", name)


Measure = Callable[[Product, launch.Place], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument(
        "--against", default="", metavar="COMMIT", help="the earlier code (default: the last release)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    earlier = args.against or find_last_release()
    commit = _git("rev-parse", "--verify", f"{earlier}^{{commit}}").strip()
    become_subreaper()
    if not fork.enter_private_network():
        note("no right to a private network (root has it): a slow name server may slow both")
    cases = [case for case in args.cases if case != "env" or os.geteuid() == 0]
    if cases != args.cases:
        note("env is left out: it needs root")
    samples: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-guard-") as directory:
        ours = put_together("ours", ROOT, directory)
        theirs = put_together("theirs", check_out(commit, directory), directory)
        place = launch.make_place(directory)
        for script in ("fork_rank.py", "fork_floor.py"):
            shutil.copy(os.path.join(launch.HERE, script), directory)
        measures = measures_of(directory)
        for number in range(-1, args.rounds):
            for case in cases:
                for product in (ours, theirs) if number % 2 else (theirs, ours):
                    repeats = REPEATS.get(case, 1)
                    taken = sorted(measures[case](product, place) for _ in range(repeats))[repeats // 2]
                    if number >= 0:
                        samples.setdefault((case, product.name), []).append(taken)
            note(f"round {number + 1} of {args.rounds}" if number >= 0 else f"warmed up, against {commit[:12]}")
    figures = Figures()
    for case in cases:
        figures.add_ratio(f"guard.{case}", samples[case, "ours"], samples[case, "theirs"])
    for (case, name), taken_s in samples.items():
        figures.add(f"guard.{case}_{name}_s", "s", taken_s)
    figures.facts["against"] = commit
    return figures


def find_last_release() -> str:
    """The last tag; where tags were not fetched, the commit that put its heading into CHANGELOG.md."""
    tags = _git("tag", "--merged", "HEAD", "--sort=-creatordate", "--list", "v*").split()
    if tags:
        return tags[0]
    with open(os.path.join(ROOT, "CHANGELOG.md"), encoding="utf-8") as file:
        headings = [line.rstrip("\n") for line in file if re.match(r"## \[\d", line)]
    if not headings:
        raise BenchError("there is no tag, and no release in CHANGELOG.md: name a commit by --against")
    return _git("log", "-1", "--format=%H", f"-S{headings[0]}", "--", "CHANGELOG.md").strip()


def check_out(commit: str, directory: str) -> str:
    """The packages of an earlier commit."""
    root = os.path.join(directory, "earlier")
    os.mkdir(root)
    names = [name for name in _git("ls-tree", "--name-only", commit).split() if name in (*PACKAGES, ENTRY)]
    packed = subprocess.run(["git", "-C", ROOT, "archive", commit, *names], check=False, capture_output=True)
    if packed.returncode != 0:
        raise BenchError(f"{commit} cannot be read: {packed.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "-x", "-C", root], input=packed.stdout, check=True)
    return root


def put_together(name: str, product: str, directory: str) -> Product:
    """A folder in which `python -m bench` and bin/bootrun have the packages of this product."""
    root = os.path.join(directory, name)
    os.makedirs(os.path.join(root, "bin"))
    if os.path.exists(os.path.join(product, ENTRY)):
        shutil.copy(os.path.join(product, ENTRY), root)
    for package in PACKAGES:
        shutil.copytree(
            os.path.join(product, package),
            os.path.join(root, package),
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    os.symlink(os.path.join(ROOT, "bench"), os.path.join(root, "bench"))
    for program in ("bootrun", "bootseer"):
        path = os.path.join(root, "bin", program)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!{sys.executable}\nimport sys\nsys.path[0] = {root!r}\n")
            file.write(f"from launcher.__main__ import {program}\nif __name__ == '__main__':\n    {program}()\n")
        os.chmod(path, 0o755)
    return Product(name, root)


def measures_of(directory: str) -> dict[str, Measure]:
    """How each case is measured."""
    tree = os.path.join(directory, "files")
    os.mkdir(tree)
    for number in range(FILES):
        with open(os.path.join(tree, f"part{number}.py"), "w", encoding="ascii") as file:
            file.write(f"value = {number}\n" * 40)
    return {
        "launch": _launch,
        "launch_cpu": _launch_cpu,
        "restart_2": partial(_restart, 2),
        "restart_8": partial(_restart, 8),
        "env": partial(_env, tree),
        "rendezvous": _rendezvous,
    }


def _launch(product: Product, place: launch.Place) -> float:
    return launch.start_to_end(_two_ranks(product), "empty.py", place).seconds


def _launch_cpu(product: Product, place: launch.Place) -> float:
    return launch.start_to_first_statement([_two_ranks(product)], 2, place).own_cpu_s


def _two_ranks(product: Product) -> launch.Launcher:
    return lambda script: [product.program("bootrun"), "--standalone", "--nproc-per-node", "2", *script]


def _restart(ranks: int, product: Product, place: launch.Place) -> float:
    command = [product.program("bootrun"), "--standalone", "--nproc-per-node", str(ranks), "--fork-ranks", "on"]
    return fork.restart(command, ranks, 2 * ranks, place).values["s"]


def _env(tree: str, product: Product, place: launch.Place) -> float:
    """A start on a node that has nothing; the store is filled by the first of them."""
    target, store = os.path.join(product.root, "target"), os.path.join(product.root, "store")
    node = place.fresh()
    environ = {
        **place.environ,
        "PYTHONPATH": product.root,  # an earlier product starts its processes by the name of their module
        "BOOTSEER_KEYS": os.path.join(product.root, "keys"),
        "BOOTSEER_CACHE": os.path.join(node, "cache"),
        "BOOTSEER_RUNTIME": os.path.join(node, "run"),
    }
    shutil.rmtree(target, ignore_errors=True)
    words = ["--setup", f"cp -r {tree} {target}", "--setup-target", target, "--env-store", store]
    ways = ["--env-way", "mount"] if os.path.isdir(store) else []
    os.makedirs(store, exist_ok=True)
    check = f"import glob, sys; sys.exit(len(glob.glob({target + '/*.py'!r})) != {FILES})"
    script = os.path.join(product.root, "look.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(check + "\n")
    command = [
        product.program("bootrun"),
        "--standalone",
        "--nproc-per-node",
        "1",
        "--strict",
        *words,
        *ways,
        script,
    ]
    trees = os.path.join(node, "run", "trees")
    program = Running([*command, script], environ, os.path.join(node, "output"))
    try:
        status, wall_s, _ = program.wait(DEADLINE_S)
    finally:  # what serves the mount stays for other jobs
        for digest in os.listdir(trees) if os.path.isdir(trees) else ():
            end = [product.program("bootseer"), "image", "umount", digest, "--force"]
            subprocess.run(end, env=environ, check=False, capture_output=True, timeout=DEADLINE_S)
    reap_orphans()
    if status != 0:
        raise BenchError(f"exit status {status} instead of 0: {' '.join(command)}\n{program.text()[-4000:]}")
    return wall_s


def _rendezvous(product: Product, place: launch.Place) -> float:
    path = os.path.join(place.fresh(), "figures.json")
    argv = [sys.executable, "-m", "bench", "rendezvous", "--agents", str(NODES), "--rounds", "1"]
    argv += ["--idle", "0.2", "--settle", "0.2", "--json", path]
    run_all([argv], {**place.environ, "PYTHONPATH": product.root}, product.root, DEADLINE_S)
    with open(path, encoding="utf-8") as file:
        return float(json.load(file)["figures"]["rendezvous.seconds"]["value"])


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise BenchError(f"git {' '.join(words)}: {said.strip()}; name a commit: --against COMMIT") from None
