"""Loading of checkpoints: from a disk, over HTTP, from HDFS and through DCP, against what others do it with.

Parts: --local, --http, --hdfs (root, Java), --dcp; without any of them all. In each round all take turns in an
order that is shuffled each time, ratios are formed within rounds, and every loader's tensors are compared. What
the parts do stands in ckpt_local.py, ckpt_http.py, ckpt_hdfs.py and ckpt_dcp.py. Files lie in --folder, which has
to be on a real disk; they, and all that was started, are gone at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import cast

from bench.ckpt_model import SIZES
from bench.ckpt_pages import check_disk
from bench.record import (
    BenchError,
    Figures,
    Target,
    describe_commit,
    make_document,
    note,
    write_document,
)
from bootseer.errors import BootseerError

ROUNDS = 9
MINIMUM_ROUNDS = 9
PARTS = ("local", "http", "hdfs", "dcp")
NEEDED_BYTES = {"full": 12_000_000_000, "small": 500_000_000}
# Programs that are measured beside ours.
PEERS = {
    "local": ("safetensors", "transformers", "runai_model_streamer", "fastsafetensors"),
    "http": ("safetensors", "transformers", "fsspec", "aiohttp", "obstore"),
    "hdfs": ("hdfs_native", "fsspec", "mfusepy"),
    "dcp": (),
}
TARGETS = {
    "ckpt.disk_share": Target(at_least=0.8, samples=MINIMUM_ROUNDS),
    "ckpt.vs_safetensors": Target(at_least=1.8, samples=MINIMUM_ROUNDS),
    "ckpt.vs_dcp": Target(at_least=2.2, samples=MINIMUM_ROUNDS),
    "ckpt.vs_runai": Target(at_least=1.2, samples=MINIMUM_ROUNDS),
    "ckpt.arena_disk_share": Target(at_least=0.95, samples=MINIMUM_ROUNDS),
    "ckpt.arena_cpu_s_per_gb": Target(at_most=0.15, samples=MINIMUM_ROUNDS),
    "ckpt.warm_vs_safetensors": Target(at_least=0.9, samples=MINIMUM_ROUNDS),
    "ckpt.node_reads": Target(at_most=1.01, samples=MINIMUM_ROUNDS),
    "ckpt.prefetch_waste": Target(at_most=0.05),
    "ckpt.prefetch_waste_first": Target(at_most=0),
    "ckpt.hdfs_read_ratio": Target(at_least=2.4, samples=MINIMUM_ROUNDS),
    "ckpt.hdfs_write_ratio": Target(at_least=2.2, samples=MINIMUM_ROUNDS),
    "ckpt.hdfs_concat_ratio": Target(at_least=2.2, samples=MINIMUM_ROUNDS),
    "ckpt.hdfs_mount_ratio": Target(at_least=2, samples=MINIMUM_ROUNDS),
    "ckpt.hdfs_read_ratio_r2": Target(at_least=2, samples=MINIMUM_ROUNDS),
    "ckpt.hdfs_write_ratio_r2": Target(at_least=1.2, samples=MINIMUM_ROUNDS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help=f"only this part ({part}), and others so named")
    parser.add_argument("--folder", default="/var/tmp", help="where the files lie, on a real disk")
    parser.add_argument("--also", metavar="FILE", help="JSON of other parts at the same commit: its figures join")
    parser.add_argument("--size", choices=SIZES, default="full", help="small: to try the bench, not to measure")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    chosen = [part for part in PARTS if getattr(args, part)] or list(PARTS)
    check_installed(chosen, args.size)
    check_disk(args.folder, NEEDED_BYTES[args.size])
    # So that what was started is ended and what was written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    figures = Figures()
    if args.also:
        add_file(figures, args.also)
    for part in chosen:
        note(f"== {part}")
        measure = cast(Callable[[str, str, int], Figures], importlib.import_module(f"bench.ckpt_{part}").measure)
        with tempfile.TemporaryDirectory(prefix=f"bench-ckpt-{part}-", dir=args.folder) as directory:
            try:
                found = measure(directory, args.size, args.rounds)
            except BootseerError as error:
                raise BenchError(f"--{part}: {error}") from error
            for name, made in found:
                figures.add(name, made.unit, made.samples)
        if args.json:
            # A later part may fail; what took an hour is kept.
            write_document(args.json, make_document("ckpt", sys.argv[1:], figures))
    return figures


def add_file(figures: Figures, path: str) -> None:
    """Adds the figures of an earlier run, made of their samples, if the same code was measured."""
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    if document["bench"] != "ckpt" or document["commit"] != describe_commit():
        raise BenchError(f"{path} is of commit {document['commit']}, this is {describe_commit()}: measure it anew")
    for name, stated in document["figures"].items():
        figures.add(name, stated["unit"], stated["samples"])


def check_installed(parts: list[str], size: str) -> None:
    """A peer that is missing would be a figure that is missing."""
    wanted = dict.fromkeys(("torch", *(name for part in parts for name in PEERS[part])))
    if size == "small":
        wanted.pop("transformers", None)
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(f"not installed here: {', '.join(missing)}: pip install '.[bench]'")
