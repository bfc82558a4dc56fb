"""`bench ckpt --http`: a checkpoint behind an HTTP server of the loopback that counts what it sends.

`node`: eight ranks of one node take the same safetensors file through their keeper's arena; `readers`: eight
that each read it for themselves. Both from the order to load until the last rank has touched all tensors. Beside
them single readers: ours to tensors, fsspec's cat_ranges and obstore to bare bytes (which is less work); runai's
streamer does not speak HTTP. Once a run: four nodes load a sharded DCP checkpoint, without and with the record
of an earlier load; what a keeper fetched and no rank read is waste. The file is in the page cache, memory was
made ready before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench import ckpt_pages
from bench.ckpt_keeper import open_node
from bench.ckpt_model import FILES
from bench.ckpt_run import Load, Sums, load, load_together, loader, make_model, order, span_s
from bench.ckpt_server import Server
from bench.ckpt_waste import measure_waste
from bench.record import BenchError, Figures, note

RANKS = 8
SINGLES = ("bootseer_http", "fsspec_http", "obstore_http")
CASES = (*SINGLES, "node", "readers")
MB = 1e6


class Sample(NamedTuple):
    """One case of a round."""

    seconds: float
    cpu_s: float  # of readers, ranks and keeper; not of the server
    size_bytes: int  # of the file
    sent_bytes: int  # by the server

    @property
    def rate(self) -> float:
        """Bytes of the file per second."""
        return self.size_bytes / self.seconds


def measure(directory: str, size: str, rounds: int) -> Figures:
    """All rounds, as figures."""
    data = os.path.join(directory, "data")
    os.makedirs(data)
    path = make_model(data, size, ["safetensors"])["safetensors"]
    cache = os.path.join(directory, "cache")
    taken: dict[str, list[Sample]] = {case: [] for case in CASES}
    sums = Sums()
    sums.check("safetensors", load("safetensors", path).digests)
    with Server(data, os.path.join(directory, "server")) as server:
        note(f"served by {server.kind}")
        for number in range(rounds):
            for case in order(CASES, number):
                ckpt_pages.make_warm([path])
                taken[case].append(run_case(case, server, path, cache, sums))
            told = ", ".join(f"{case} {samples[-1].seconds:.2f} s" for case, samples in taken.items())
            note(f"round {number + 1} of {rounds}: {told}")
    figures = to_figures(taken)
    for name, made in measure_waste(directory, size):
        figures.add(name, made.unit, made.samples)
    return figures


def run_case(case: str, server: Server, path: str, cache: str, sums: Sums) -> Sample:
    """One sample."""
    if case == "node":
        return run_node(server, path, cache, sums)
    count = RANKS if case == "readers" else 1
    name = "bootseer_http" if case == "readers" else case
    (before,) = server.served_bytes()
    loads = load_together([loader(name, server.url(FILES["safetensors"]))] * count)
    (after,) = server.served_bytes()
    check(case, loads, sums)
    return Sample(span_s(loads), cpu_of_all(loads), os.path.getsize(path), after - before)


def run_node(server: Server, path: str, cache: str, sums: Sums) -> Sample:
    """Ranks that have imported what they need; then the order to load; then they take their tensors."""
    size = os.path.getsize(path)
    (before,) = server.served_bytes()
    began_ns, began_cpu_s = 0, 0.0
    with open_node(server.url(FILES["safetensors"]), cache) as node:
        node.start(RANKS)
        node.resolve()
        node.wait_memory(size)

        def begin() -> Mapping[str, str]:
            nonlocal began_ns, began_cpu_s
            began_cpu_s = node.cpu_s()
            began_ns = time.monotonic_ns()
            return node.load(RANKS)

        loads = load_together([loader("arena", "")] * RANKS, begin)
        service_cpu_s = node.cpu_s() - began_cpu_s
        node.end()
    (after,) = server.served_bytes()
    check("node", loads, sums)
    return Sample(span_s(loads, began_ns), cpu_of_all(loads) + service_cpu_s, size, after - before)


def check(case: str, loads: Sequence[Load], sums: Sums) -> None:
    """All have to have the right tensors."""
    for each in loads:
        sums.check(case, each.digests)


def cpu_of_all(loads: Sequence[Load]) -> float:
    """Of all processes."""
    return sum(each.cpu_s for each in loads)


def to_figures(taken: Mapping[str, Sequence[Sample]]) -> Figures:
    """Ratios first, then what they are made of."""
    figures = Figures()

    def seconds(case: str) -> list[float]:
        return [sample.seconds for sample in taken[case]]

    def reads(case: str) -> list[float]:
        return [sample.sent_bytes / sample.size_bytes for sample in taken[case]]

    figures.add("ckpt.node_reads", "times the file", reads("node"))
    figures.add_ratio("ckpt.vs_8_readers", seconds("readers"), seconds("node"))
    for name in ("fsspec", "obstore"):
        figures.add_ratio(f"ckpt.http_vs_{name}", seconds(f"{name}_http"), seconds("bootseer_http"))
    for case, samples in taken.items():
        name = case if case.startswith("node") else case.removesuffix("_http")
        figures.add(f"ckpt.http_{name}_s", "s", seconds(case))
        figures.add(f"ckpt.http_{name}_mb_s", "MB/s", [sample.rate / MB for sample in samples])
        cpu = [sample.cpu_s / sample.size_bytes * 1e9 for sample in samples]
        figures.add(f"ckpt.http_{name}_cpu_s_per_gb", "CPU s/GB of the file", cpu)
        if case != "node":
            figures.add(f"ckpt.http_{name}_reads", "times the file", reads(case))
    if min(reads("node")) < 1:
        raise BenchError("the server sent less than the file: what it counts is not what was read")
    return figures
