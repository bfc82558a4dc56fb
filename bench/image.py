"""Starts of an image: from a disk, from layers, from our packs in full, as blocks are read, and with a recording.

The tree (--tree: torch's CUDA wheels, its CPU wheel, or a folder of modules) is behind a simulated remote
(image_remote.py); the ways are in image_ways.py, the programs in image_programs.py: `import torch`, which the
targets are about, and the first steps of a training. In each round all ways take turns in an order that is
shuffled each time; `second` always follows its `prefetch`. --hot records some starts and compares the recordings;
--blocks compares sizes of blocks (image_blocks.py).
What is made of pip's packages stays in --folder for the next run. Needs root, as mounts do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence

from bench import image_blocks, image_hot
from bench.ckpt_pages import check_disk
from bench.ckpt_run import order
from bench.image_kept import Built, default_directory, kept_bytes, prepare
from bench.image_layers import unpacker
from bench.image_programs import IMPORT, TRAIN, Program
from bench.image_remote import Link, Remote
from bench.image_tree import NEEDED_BYTES, Root, make_root
from bench.image_ways import REMOTE, WAYS, Bench, Sample
from bench.record import BenchError, Figures, Target, note
from bootseer.mounts.tree_daemon.mount import probe_mount

ROUNDS = 7
HOT_RUNS = 3
MINIMUM_ROUNDS = 7
UNITS = ("local_cold", "local_warm", "layer_pull", "parallel_full", "lazy", "prefetch")
TARGETS = {
    "image.blocked_share": Target(at_most=0.05, samples=MINIMUM_ROUNDS),
    "image.vs_local_cold": Target(at_most=1.4, samples=MINIMUM_ROUNDS),
    "image.vs_layer_pull": Target(at_least=4, samples=MINIMUM_ROUNDS),
    "image.vs_parallel_full": Target(at_least=1.8, samples=MINIMUM_ROUNDS),
    "image.second_requests": Target(at_most=0, samples=MINIMUM_ROUNDS),
    "image.link_mb_s": Target(at_least=180, samples=MINIMUM_ROUNDS),
    "image.link_ms": Target(at_least=5, samples=MINIMUM_ROUNDS),
    "image.tree_bytes": Target(at_least=5e9),
    "image.tree_files": Target(at_least=25_000),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--tree", default="cuda", metavar="cuda|cpu|PATH", help="the packages of the image")
    parser.add_argument("--hot", action="store_true", help="only record starts and compare the recordings")
    parser.add_argument("--blocks", action="store_true", help="only starts with blocks of several sizes")
    parser.add_argument("--hot-runs", type=int, default=HOT_RUNS, help="recordings that --hot compares")
    parser.add_argument(
        "--program", choices=(IMPORT, TRAIN), action="append", help="only this one (may be repeated)"
    )
    parser.add_argument("--folder", default="", help="where trees are kept, on a real disk (default: the cache's)")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    check_machine()
    kind = args.tree if args.tree in ("cuda", "cpu") else os.path.abspath(args.tree)
    # So that on SIGTERM, too, what was mounted and started is ended and what was written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    above = os.path.abspath(args.folder) if args.folder else default_directory()
    directory = os.path.join(above, args.tree if args.tree in ("cuda", "cpu") else "own")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    needed = NEEDED_BYTES.get(args.tree, NEEDED_BYTES[""])
    check_disk(directory, needed - kept_bytes(directory))
    root = make_root(kind, directory)
    programs = [each for each in root.programs if not args.program or each.name in args.program]
    if not programs:
        raise BenchError(f"--program {' '.join(args.program)}: without torch only {IMPORT} can be started")
    note(f"{root.of}: {root.files} files, {root.size / 1e9:.2f} GB")
    if args.blocks:
        return image_blocks.measure(root, programs[0], above, args.rounds)
    built = prepare(root, directory)
    figures = context(root, built)
    with (
        tempfile.TemporaryDirectory(prefix="node-", dir=above) as node,
        Remote(built.data, os.path.join(node, "remote.log")) as remote,
    ):
        shutil.copytree(built.keys, os.path.join(node, "keys"))
        bench = Bench(root.folder, node, built.data, remote, built.digest)
        try:
            if args.hot:
                found = measure_hot(bench, programs, built, max(2, args.hot_runs))
            else:
                found = measure(bench, programs, built, args.rounds)
        finally:
            bench.clear()
    for name, made in found:
        figures.add(name, made.unit, made.samples)
    return figures


def check_machine() -> None:
    """Raises: BenchError when trees cannot be mounted here."""
    reason = "only root can" if os.geteuid() else probe_mount()
    if reason:
        raise BenchError(f"mounts trees and empties the kernel's caches, and cannot here: {reason}")
    missing = [name for name in ("unshare", "chroot", "mount", "umount", "tar", "ldd") if not shutil.which(name)]
    if missing:
        raise BenchError(f"not installed here: {', '.join(missing)}")


def measure(bench: Bench, programs: Sequence[Program], built: Built, rounds: int) -> Figures:
    """All rounds, as figures."""
    for program in programs:
        bench.publish(bench.record(program, built.block_count))
    taken: dict[str, dict[str, list[Sample]]] = {each.name: {way: [] for way in WAYS} for each in programs}
    links: list[Link] = []
    for number in range(rounds):
        links.append(bench.link())
        for program in order(programs, number):
            samples = taken[program.name]
            for unit in order(UNITS, number):
                for way in (unit, "second") if unit == "prefetch" else (unit,):
                    samples[way].append(bench.run(way, program))
            check_same(program, [each[-1] for each in samples.values()])
            told = ", ".join(f"{way} {each[-1].wall_s:.2f}" for way, each in samples.items())
            blocked = ", ".join(f"{way} {samples[way][-1].blocked_s:.2f}" for way in ("lazy", "prefetch"))
            note(f"round {number + 1} of {rounds}, {program.name}: {told} s; blocked: {blocked} s")
    return to_figures(taken, links)


def measure_hot(bench: Bench, programs: Sequence[Program], built: Built, runs: int) -> Figures:
    """Recordings of several starts, compared."""
    figures = Figures()
    for program in programs:
        traces = []
        for number in range(runs):
            traces.append(bench.record(program, built.block_count))
            note(f"{program.name}, recording {number + 1} of {runs}: {len(traces[-1].blocks)} blocks")
        for name, made in image_hot.to_figures(program.name, traces, built.block_count, built.block_bytes):
            figures.add(name, made.unit, made.samples)
    return figures


def check_same(program: Program, samples: Sequence[Sample]) -> None:
    """All ways have to have served the same. Raises: BenchError."""
    if len({each.checksum for each in samples}) != 1:
        raise BenchError(f"{program.name}: the ways gave different results: {[each.checksum for each in samples]}")


# ---- figures -----------------------------------------------------------------------------------------------


def to_figures(taken: Mapping[str, Mapping[str, Sequence[Sample]]], links: Sequence[Link]) -> Figures:
    """Ratios of the import first (of the training: train_...), then what they are made of."""
    figures = Figures()
    for program, ways in taken.items():
        prefix = "image." if program == IMPORT else f"image.{program}_"

        def wall(way: str, ways: Mapping[str, Sequence[Sample]] = ways) -> list[float]:
            return [sample.wall_s for sample in ways[way]]

        blocked = {way: [sample.blocked_s for sample in ways[way]] for way in ("lazy", "prefetch")}
        if min(blocked["lazy"]) <= 0 or min(each.requests for way in REMOTE[:-1] for each in ways[way]) < 1:
            raise BenchError(f"{program}: nothing was fetched where something has to be: was the cache not empty?")
        figures.add_ratio(f"{prefix}blocked_share", blocked["prefetch"], blocked["lazy"])
        figures.add_ratio(f"{prefix}vs_local_cold", wall("prefetch"), wall("local_cold"))
        figures.add_ratio(f"{prefix}vs_layer_pull", wall("layer_pull"), wall("prefetch"))
        figures.add_ratio(f"{prefix}vs_parallel_full", wall("parallel_full"), wall("prefetch"))
        figures.add_ratio(f"{prefix}vs_lazy", wall("lazy"), wall("prefetch"))
        figures.add(f"{prefix}second_requests", "requests", [sample.requests for sample in ways["second"]])
    for program, ways in taken.items():
        for way, samples in ways.items():
            name = f"image.{program}_{way}"
            figures.add(f"{name}_s", "s", [sample.wall_s for sample in samples])
            if way not in REMOTE:
                continue
            figures.add(f"{name}_ready_s", "s until the start", [sample.ready_s for sample in samples])
            figures.add(f"{name}_blocked_s", "s", [sample.blocked_s for sample in samples])
            figures.add(f"{name}_mb", "MB", [sample.sent_bytes / 1e6 for sample in samples])
            if way != "layer_pull":
                figures.add(f"{name}_reads", "of the kernel", [sample.reads for sample in samples])
                figures.add(f"{name}_late_reads", "that waited", [sample.late_reads for sample in samples])
                figures.add(f"{name}_daemon_cpu_s", "CPU s", [sample.daemon_cpu_s for sample in samples])
            if way != "second":  # which has a figure already
                figures.add(f"{name}_requests", "requests", [sample.requests for sample in samples])
    figures.add("image.link_mb_s", "MB/s, 8 readers", [link.bytes_per_s / 1e6 for link in links])
    figures.add("image.link_ms", "ms a request", [link.latency_s * 1e3 for link in links])
    return figures


def context(root: Root, built: Built) -> Figures:
    """What was measured."""
    figures = Figures()
    figures.add("image.tree_bytes", f"bytes, {root.of}", [root.size])
    figures.add("image.tree_files", "files", [root.files])
    figures.add("image.tree_blocks", "blocks of 128 KiB", [built.block_count])
    figures.add("image.tree_packs_mb", "MB", [sum(built.block_bytes) / 1e6])
    figures.add(
        "image.layers_mb", f"MB, {built.layers} layers, unpacked by {unpacker()}", [built.layers_bytes / 1e6]
    )
    return figures
