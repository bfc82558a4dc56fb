"""`bench image --blocks`: starts of one program with blocks of several sizes.

The format has one size, 128 KiB. For the others a copy of our packages with another constant builds, mounts,
records and prefetches: the very code, in its own processes. All sizes take turns in each round.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

from bench.ckpt_run import ROOT, order
from bench.image_programs import Program
from bench.image_remote import Remote
from bench.image_tree import Root
from bench.image_ways import NAME, Bench, Sample, build, node_environ, run_bootseer
from bench.record import BenchError, Figures, note

SIZES_KIB = (64, 128, 256, 512)
PACKAGES, ENTRY = ("bootseer", "launcher"), "_bootseer_entry.py"
CONSTANT_PATH = "bootseer/tree/index.py"
CONSTANT = "\nBLOCK_BYTES = 128 << 10\n"
WAYS = ("lazy", "prefetch", "second")
Taken = Mapping[int, Mapping[str, Sequence[Sample]]]  # by KiB and way


def measure(root: Root, program: Program, above: str, rounds: int) -> Figures:
    """All rounds of all sizes, as figures. `above`: where there is room for the trees."""
    figures = Figures()
    figures.add("image.tree_bytes", f"bytes, {root.of}", [root.size])
    taken: dict[int, dict[str, list[Sample]]] = {size: {way: [] for way in WAYS} for size in SIZES_KIB}
    with tempfile.TemporaryDirectory(prefix="blocks-", dir=above) as top, contextlib.ExitStack() as stack:
        benches = {}
        for size in SIZES_KIB:
            bench, blocks, stored_bytes = prepare(root, os.path.join(top, str(size)), size, stack)
            stack.callback(bench.clear)
            bench.publish(bench.record(program, blocks))
            benches[size] = bench
            figures.add(f"image.blocks_{size}_kib_tree_mb", "MB stored", [stored_bytes / 1e6])
            note(f"{size} KiB: {blocks} blocks, {stored_bytes / 1e6:.0f} MB")
        for number in range(rounds):
            for size in order(SIZES_KIB, number):
                for way in WAYS:
                    taken[size][way].append(benches[size].run(way, program))
            check(taken)
            walls = {size: [f"{taken[size][way][-1].wall_s:.2f}" for way in WAYS] for size in SIZES_KIB}
            told = "; ".join(f"{size} KiB {' '.join(each)}" for size, each in walls.items())
            note(f"round {number + 1} of {rounds}: s {', '.join(WAYS)}: {told}")
    add_figures(figures, taken)
    return figures


def prepare(root: Root, directory: str, size_kib: int, stack: contextlib.ExitStack) -> tuple[Bench, int, int]:
    """The tree of a root in blocks of this size behind a remote of its own; its blocks; its stored bytes."""
    package, data, node = (os.path.join(directory, name) for name in ("package", "data", "node"))
    make_package(package, size_kib)
    os.makedirs(data)
    os.makedirs(node)
    built = build(root.folder, data, os.path.join(node, "keys"), package=package)
    seen = run_bootseer(["image", "inspect", f"{data}/tree", "--name", NAME, "--json"], node_environ(package))
    about = json.loads(seen)
    if about["device_bytes"] != about["blocks"] * (size_kib << 10):
        raise BenchError(f"the tree for {size_kib} KiB has other blocks: was the copy of the packages not used?")
    remote = stack.enter_context(Remote(data, os.path.join(directory, "remote.log")))
    bench = Bench(root.folder, node, data, remote, str(built["digest"]), package=package)
    return bench, int(about["blocks"]), int(about["stored_bytes"])


def make_package(directory: str, size_kib: int) -> None:
    """A copy of our packages with blocks of another size. Raises: BenchError."""
    for name in PACKAGES:
        shutil.copytree(
            os.path.join(ROOT, name), os.path.join(directory, name), ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(os.path.join(ROOT, ENTRY), directory)  # which finds the packages beside it
    path = os.path.join(directory, CONSTANT_PATH)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if text.count(CONSTANT) != 1:
        raise BenchError(f"{CONSTANT_PATH} has no line{CONSTANT.rstrip()}: --blocks has to be told how it is now")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace(CONSTANT, f"\nBLOCK_BYTES = {size_kib} << 10\n"))


def check(taken: Taken) -> None:
    """All sizes have to have served the same. Raises: BenchError."""
    if len({samples[-1].checksum for ways in taken.values() for samples in ways.values()}) != 1:
        raise BenchError("blocks of different sizes gave different results")


def add_figures(figures: Figures, taken: Taken) -> None:
    """By size; ratios are to 128 KiB in the same round: above 1 it is slower."""
    usual = [sample.wall_s for sample in taken[128]["prefetch"]]
    for size, ways in taken.items():
        name = f"image.blocks_{size}_kib"
        figures.add_ratio(f"{name}_vs_128", [sample.wall_s for sample in ways["prefetch"]], usual)
        for way, samples in ways.items():
            figures.add(f"{name}_{way}_s", "s", [sample.wall_s for sample in samples])
            figures.add(f"{name}_{way}_mb", "MB", [sample.sent_bytes / 1e6 for sample in samples])
            figures.add(f"{name}_{way}_requests", "requests", [sample.requests for sample in samples])
            figures.add(f"{name}_{way}_blocked_s", "s", [sample.blocked_s for sample in samples])
