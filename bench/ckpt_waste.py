"""What four nodes fetch of a sharded DCP checkpoint and their ranks never read.

Four ranks save an FSDP state, which is served over HTTP; each node has a port of its own, so that the server
counts by node. The nodes' keepers and ranks (one a node) load it twice: first without any record, when only what
ranks ask for may be fetched, then by the record of the first load. Fetched is what the server sent after the
version was found; read is what the keeper recorded as asked for by its rank.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench.ckpt_dcp import SAVERS, run_job
from bench.ckpt_keeper import open_node
from bench.ckpt_run import BOOTSEER, make_environ, programs
from bench.ckpt_server import Server
from bench.record import BenchError, Figures, note

NODES = SAVERS
NAME = "sharded"
MB = 1e6


class Waste(NamedTuple):
    """One load by one node."""

    fetched_bytes: int
    read_bytes: int

    @property
    def share(self) -> float:
        """Of what was fetched, what nobody read."""
        if self.read_bytes > self.fetched_bytes:
            raise BenchError(f"a rank read {self.read_bytes} bytes of {self.fetched_bytes} that the server sent")
        return (self.fetched_bytes - self.read_bytes) / self.fetched_bytes


def measure_waste(directory: str, size: str) -> Figures:
    """Both loads, as figures with a sample a node."""
    data = os.path.join(directory, "waste")
    os.makedirs(data)
    plain = os.path.join(directory, "sharded.dcp")
    saved = run_job("save", plain, size, SAVERS, directory)
    stripe = [BOOTSEER, "ckpt", "stripe", plain, os.path.join(data, NAME)]
    with programs([(stripe, make_environ())]) as (striper,):
        striper.wait()
    caches = [os.path.join(directory, f"cache-{number}") for number in range(NODES)]
    with Server(data, os.path.join(directory, "waste-server"), NODES) as server:
        first = load_once(server, caches, size, directory, saved.digests)
        again = load_once(server, caches, size, directory, saved.digests)
    for name, taken in (("first", first), ("by the record", again)):
        told = ", ".join(f"{each.fetched_bytes / MB:.1f}/{each.read_bytes / MB:.1f}" for each in taken)
        note(f"four nodes, {name}: MB fetched/read by node: {told}")
    return to_figures(first, again)


def load_once(
    server: Server, caches: Sequence[str], size: str, directory: str, right: Sequence[dict[str, str]]
) -> list[Waste]:
    """All nodes load; each one's count."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(open_node(server.url(NAME, number), cache)) for number, cache in enumerate(caches)
        ]
        for node in nodes:
            node.start(ranks=1)
            node.resolve()
        before = server.served_bytes()
        environs = [node.load(1, number, NODES) for number, node in enumerate(nodes)]
        job = run_job("arena", "", size, NODES, directory, environs)
        if job.digests != right:
            raise BenchError("four nodes loaded other shards than were saved")
        for node in nodes:
            node.end()
        after = server.served_bytes()
    counts = [b - a for a, b in zip(before, after, strict=True)]
    return [Waste(count, recorded_bytes(cache)) for count, cache in zip(counts, caches, strict=True)]


def recorded_bytes(cache: str) -> int:
    """What the last load through a cache asked for."""
    paths = glob.glob(os.path.join(cache, "loads", "*.json"))
    if len(paths) != 1:
        raise BenchError(f"{cache}: {len(paths)} records of a load instead of one")
    with open(paths[0], encoding="utf-8") as file:
        document = json.load(file)
    return sum(end - start for each in document["files"] for start, end in each["ranges"])


def to_figures(first: Sequence[Waste], again: Sequence[Waste]) -> Figures:
    """The share that was fetched in vain, by node."""
    figures = Figures()
    figures.add("ckpt.prefetch_waste", "of what a node fetched", [each.share for each in again])
    figures.add("ckpt.prefetch_waste_first", "of what a node fetched", [each.share for each in first])
    figures.add("ckpt.prefetch_fetched_mb", "MB a node", [each.fetched_bytes / MB for each in again])
    return figures
