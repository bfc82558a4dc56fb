"""`python -m bench peers`: six nodes start at once, with and without each other's help (root).

Nodes and store are network namespaces; what a node receives and what it sends is shaped to RATE_BYTES_PER_S each
(tc tbf), the store gives twice as much to all together and answers each request 5 ms late. Rates are such that
links bind and not the processors, which all nodes share here: `peers.cpu_share` says how much of them was used.
Each node brings an image's tree, an environment's tree and a checkpoint's units, at once, all verified.

    plain    every node from the store
    peers    with a peer process on each node
    lying    the peer of one node flips a bit in each quarter of a MiB
    slow     the peer of one node sends 200 kB/s
    killed   one node dies after KILLED_S, with all that runs on it; the figures are those of the others
    before   as peers, with the reader of bench/peers_before.py
    reads    each node only reads the checkpoint, from the peers
    reads_before    the same with the former reader; READS has more ways

`peers.cpu_ratio` is the CPU time a byte of the processes that read, `reads` over `reads_before` in the same round:
all that they do from the first request to the last byte (bench/peers_reader.py). The servers do not count.
`peers.node_cpu_ratio` is that of whole nodes, `peers` over `before`, so with digests, decoding, cache and imports.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench import image_ways, netns
from bench.ckpt_run import BOUND, make_environ, order, programs, python
from bench.ckpt_server import SERVED, fetch
from bench.peers_node import UNIT_BYTES
from bench.record import BenchError, Figures, Target, note
from bootseer.own_module import command_of
from bootseer.peers import JobPeers, Node, Origin, derive_key, write_peers
from bootseer.peers.auth import origin_id
from bootseer.peers.health import MAX_LATE_S, MAX_PEERS
from bootseer.peers.spans import ObjectName, cut, owners

ROUNDS = 5
MB = 1e6
NODES = 6
RATE_BYTES_PER_S = 15 * MB
STORE_BYTES_PER_S = 2 * RATE_BYTES_PER_S
PORT = 7000
TREES = {"image": 32, "env": 16}  # MB of files that do not compress
CHECKPOINT_BYTES = 2 * UNIT_BYTES
KILLED_S = 1.5
SLOW_BYTES_PER_S = 200_000
# Receiver (bench/peers_node.py) and event loop of readers that only read.
READS = {
    "reads": ("now", "asyncio"),
    "reads_before": ("before", "asyncio"),
    "reads_uvloop": ("now", "uvloop"),
    "reads_before_uvloop": ("before", "uvloop"),
    "reads_buffered": ("buffered", "asyncio"),
    "reads_buffered_uvloop": ("buffered", "uvloop"),
    "reads_buffered_low": ("buffered_low", "asyncio"),
    "reads_buffered_low_uvloop": ("buffered_low", "uvloop"),
}
WAYS = ("plain", "peers", "lying", "slow", "killed", "reads", "reads_before")
MORE_WAYS = ("before", *(way for way in READS if way not in WAYS))
BAD = NODES - 1  # which node's peer is the bad one
MAX_ADDED_S = MAX_PEERS * MAX_LATE_S
_BURST = "512kb"
TARGETS = {
    "peers.cpu_ratio": Target(at_most=0.7, samples=ROUNDS),
    "peers.origin_copies": Target(at_most=1.15, samples=ROUNDS),
    "peers.vs_store": Target(at_least=1.5, samples=ROUNDS),
    "peers.lying_added_s": Target(at_most=MAX_ADDED_S, samples=ROUNDS),
    "peers.slow_added_s": Target(at_most=MAX_ADDED_S, samples=ROUNDS),
    "peers.killed_added_s": Target(at_most=MAX_ADDED_S, samples=ROUNDS),
}


class Made(NamedTuple):
    """What is in the store."""

    trees: dict[str, str]  # digests
    sums: list[str]
    objects: list[tuple[str, str, int]]  # folder of a store's root, path in it, bytes
    object_sum: str  # SHA-256 of the checkpoint, hex

    @property
    def size_bytes(self) -> int:
        """One copy of all that a node brings."""
        return sum(size for _, _, size in self.objects)


class Sample(NamedTuple):
    """All nodes once."""

    seconds: float  # from the order until the last node has everything
    copies: float  # bytes out of the store over one copy
    cpu_share: float  # of this machine's processors
    lies: int  # liars found, by all readers together
    late: int  # reads that were taken away from a peer
    bypasses: int  # ranges that peers did not give, or not all of them
    cpu_ns: float = 0.0  # of the readers' processes, a byte


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this bench."""
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *MORE_WAYS], default=list(WAYS))


def run(args: argparse.Namespace) -> Figures:
    """All rounds, as figures."""
    if reason := netns.why_not():
        raise BenchError(reason)
    directory = tempfile.mkdtemp(prefix="bootseer-bench-peers-")
    taken: dict[str, list[Sample]] = {way: [] for way in args.ways}
    try:
        made = make(os.path.join(directory, "data"))
        with netns.Hosts(NODES + 1) as hosts:
            netns.shape(hosts.hosts[:NODES], RATE_BYTES_PER_S, _BURST)
            with store(directory, hosts.hosts[NODES]) as url:
                sums: list[str] = []
                for number in range(args.rounds):
                    for way in order(args.ways, number):
                        taken[way].append(run_way(way, made, hosts, url, os.path.join(directory, "nodes"), sums))
                        note(f"round {number + 1} of {args.rounds}: {way}: {taken[way][-1]}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return to_figures(taken)


def to_figures(taken: Mapping[str, Sequence[Sample]]) -> Figures:
    """Ratios first, then what they are made of."""
    figures = Figures()

    def column(way: str, name: str) -> list[float]:
        return [float(getattr(sample, name)) for sample in taken[way]]

    if "peers" in taken:
        figures.add("peers.origin_copies", "copies", column("peers", "copies"))
        if "plain" in taken:
            figures.add_ratio("peers.vs_store", column("plain", "seconds"), column("peers", "seconds"))
        for way in ("lying", "slow", "killed"):
            if way in taken:
                pairs = zip(column(way, "seconds"), column("peers", "seconds"), strict=True)
                figures.add(f"peers.{way}_added_s", "s", [one - other for one, other in pairs])
    if "before" in taken and "peers" in taken:
        figures.add_ratio("peers.node_cpu_ratio", column("peers", "cpu_ns"), column("before", "cpu_ns"))
    if "reads_before" in taken:
        for way in READS:
            if way in taken and way != "reads_before":
                name = "peers.cpu_ratio" if way == "reads" else f"peers.{way}_cpu_ratio"
                figures.add_ratio(name, column(way, "cpu_ns"), column("reads_before", "cpu_ns"))
    for way in taken:
        figures.add(f"peers.{way}_s", "s", column(way, "seconds"))
        if way != "peers":
            figures.add(f"peers.{way}_copies", "copies", column(way, "copies"))
        figures.add(f"peers.{way}_cpu_share", "of all processors", column(way, "cpu_share"))
        figures.add(f"peers.{way}_reader_cpu_ns", "ns a byte", column(way, "cpu_ns"))
    return figures


# ---- what is brought -----------------------------------------------------------------------------------------


def make(data: str) -> Made:
    """The store's folder."""
    note("making two trees and a checkpoint")
    chance = random.Random(0)
    trees = {}
    for name, size_mb in TREES.items():
        root = f"{data}-{name}-root"
        os.makedirs(os.path.join(root, "lib"))
        for number in range(size_mb):
            with open(os.path.join(root, "lib", f"{number}.so"), "wb") as file:
                file.write(chance.randbytes(int(MB)))
        os.makedirs(os.path.join(data, name))
        trees[f"{name}/tree"] = image_ways.build(root, os.path.join(data, name), f"{data}-{name}-keys")["digest"]
        shutil.rmtree(root)
    os.makedirs(os.path.join(data, "ckpt"))
    sums, whole = [], hashlib.sha256()
    with open(os.path.join(data, "ckpt", "model.bin"), "wb") as file:
        for _ in range(CHECKPOINT_BYTES // UNIT_BYTES):
            unit = chance.randbytes(UNIT_BYTES)
            sums.append(hashlib.sha256(unit).hexdigest())
            whole.update(unit)
            file.write(unit)
    objects = [("", "ckpt/model.bin", CHECKPOINT_BYTES)]
    for name in trees:
        for kind in ("packs", "index"):
            with os.scandir(os.path.join(data, name, kind)) as entries:
                objects += [(f"/{name}", f"{kind}/{entry.name}", entry.stat().st_size) for entry in entries]
    made = Made(trees, sums, objects, whole.hexdigest())
    note(f"one copy is {made.size_bytes / MB:.0f} MB")
    return made


# ---- hosts ---------------------------------------------------------------------------------------------------


def inside(host: netns.Host, argv: Sequence[str]) -> list[str]:
    """A command that runs on a host."""
    return [*BOUND, "nsenter", f"--net=/run/netns/{host.namespace}", *argv]


@contextlib.contextmanager
def store(directory: str, host: netns.Host) -> Iterator[str]:
    """The store while it is entered; gives its URL."""
    argv = python(
        "bench.peers_store", os.path.join(directory, "data"), host.address, str(PORT), str(STORE_BYTES_PER_S)
    )
    with programs([(inside(host, argv), make_environ())]) as (server,):
        server.listen(lambda line: line == "ready\n", 30.0)
        yield f"http://{host.address}:{PORT}"


def peer(way: str, number: int, host: netns.Host, directory: str) -> tuple[list[str], dict[str, str]]:
    """The command of a node's peer process."""
    argv = command_of("bootseer.peers.serve")
    if way == "lying" and number == BAD:
        argv = command_of("tests.testing.faulty_peer", "lies")
    argv += [os.path.join(directory, "peers.json"), "--spool", os.path.join(directory, "spool")]
    argv += ["--address", host.address, "--port", str(PORT)]
    if way == "slow" and number == BAD:
        argv += ["--upload-bytes-per-s", str(SLOW_BYTES_PER_S)]
    return inside(host, argv), make_environ()


def write_files(url: str, made: Made, hosts: Sequence[netns.Host], directories: Sequence[str]) -> None:
    """What a launcher tells the nodes of each other."""
    key = choose_key(url, made, [host.name for host in hosts]).hex()
    nodes = [Node(host.name, host.address, PORT) for host in hosts]
    origins = [Origin(url=f"{url}/{name}", below=["packs", "index"]) for name in made.trees]
    origins.append(Origin(url=url, below=["ckpt"]))
    for host, directory in zip(hosts, directories, strict=True):
        write_peers(
            os.path.join(directory, "peers.json"),
            JobPeers(job="bench", own=host.name, key=key, nodes=nodes, origins=origins),
        )


def choose_key(url: str, made: Made, ids: Sequence[str]) -> bytes:
    """One by which the bad node owns about its share of the bytes: of few spans chance might give it none."""
    for number in itertools.count():
        key = derive_key(b"a secret of this bench", str(number))
        names = {directory: origin_id(key, url + directory) for directory, _, _ in made.objects}
        own = sum(
            part.length
            for directory, path, size in made.objects
            for part in cut(0, size)
            if owners(ids, ObjectName(names[directory], path), part.span) == [ids[BAD]]
        )
        if abs(own / made.size_bytes - 1 / len(ids)) < 0.03:
            return key
    raise AssertionError("numbers do not end")


# ---- one sample ----------------------------------------------------------------------------------------------


def run_way(way: str, made: Made, hosts: netns.Hosts, url: str, top: str, sums: list[str]) -> Sample:
    """All nodes from nothing. `sums`: of all runs; the first one's are the measure."""
    shutil.rmtree(top, ignore_errors=True)
    nodes = hosts.hosts[:NODES]
    directories = [os.path.join(top, host.name) for host in nodes]
    for directory in directories:
        os.makedirs(directory, mode=0o700)
    commands = []
    if way != "plain":
        write_files(url, made, nodes, directories)
        commands = [peer(way, number, host, directories[number]) for number, host in enumerate(nodes)]
    module = "bench.peers_reader" if way in READS else "bench.peers_node"
    readers = [(inside(host, python(module)), make_environ()) for host in nodes]
    with programs(commands) as peers, programs(readers) as starting:
        for each in peers:
            each.listen(lambda line: line.startswith('{"port"'), 30.0)
        for reader, directory in zip(starting, directories, strict=True):
            task = {
                "url": url,
                "peers": os.path.join(directory, "peers.json") if peers else "",
                "object": "ckpt/model.bin",
                "size": CHECKPOINT_BYTES,
            }
            if way in READS:
                task["receiver"], task["loop"] = READS[way]
            else:
                task |= {"folder": os.path.join(directory, "cache"), "trees": made.trees, "sums": made.sums}
                task["receiver"] = "before" if way == "before" else "now"
            reader.say(json.dumps(task))
        for reader in starting:
            reader.listen(lambda line: line == "ready\n", 60.0)
        os.sync()
        before, cpu_before, began_s = served(url), cpu_s(), time.monotonic()
        for reader in starting:
            reader.say("go")
        living = list(starting)
        if way == "killed":
            time.sleep(KILLED_S)
            peers[BAD].close()
            living.pop(BAD).close()
        for reader in living:
            reader.listen(lambda line: line == "done\n")
        share = (cpu_s() - cpu_before) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
        sent = served(url) - before
        for reader in living:
            reader.say("sums")
        answers = [json.loads(reader.listen(lambda line: line.startswith("{"))) for reader in living]
    shutil.rmtree(top, ignore_errors=True)
    if way in READS:
        return to_sample(way, answers, sent / CHECKPOINT_BYTES, share, [made.object_sum], CHECKPOINT_BYTES)
    return to_sample(way, answers, sent / made.size_bytes, share, sums, made.size_bytes)


def to_sample(
    way: str,
    answers: Sequence[Mapping[str, Any]],
    copies: float,
    share: float,
    sums: list[str],
    size_bytes: int,
) -> Sample:
    """Raises: BenchError unless every node has all, and the same as ever."""
    for answer in answers:
        sums[:] = sums or answer["sums"]
        if answer["missing"] or answer["sums"] != sums:
            raise BenchError(f"{way}: a node has not the right bytes: {answer}")
    lies = sum(answer["statistics"].get("lies", 0) for answer in answers)
    late = sum(answer["statistics"].get("late", 0) for answer in answers)
    wrong = sum(answer["wrong"] for answer in answers)
    if bool(wrong) != (way == "lying") or (way == "lying" and not lies):
        found = [answer["statistics"] for answer in answers]
        raise BenchError(f"{way}: {wrong} blocks came wrong, {lies} liars were found: {found}")
    if way == "slow" and not late:
        raise BenchError("slow: nobody was late, so nothing was measured")
    bypasses = sum(answer["statistics"].get("bypasses", 0) for answer in answers)
    if way in READS and bypasses:
        raise BenchError(f"{way}: {bypasses} ranges came from the store, so its client was measured as well")
    seconds = (max(each["ended_ns"] for each in answers) - min(each["began_ns"] for each in answers)) / 1e9
    cpu_ns = sum(answer["cpu_s"] for answer in answers) * 1e9 / (size_bytes * len(answers))
    return Sample(seconds, copies, share, lies, late, bypasses, cpu_ns)


def served(url: str) -> int:
    """Bytes of bodies that the store has sent."""
    sent: int = json.loads(fetch(f"{url}{SERVED}"))[1]
    return sent


def cpu_s() -> float:
    """What all processors of this machine have worked."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(word) for word in file.readline().split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
