"""`bench ckpt --hdfs`: striped files against plain ones on a real HDFS whose DataNodes have links of a set rate.

Three DataNodes, each behind a link capped in both directions, in network namespaces (root); blocks of 16 MiB; a
torch.save file of 510 MiB; replication 1, then 2. A round writes it plainly by one stream, striped, and as one
ordinary file in parts that are concatenated, reads each of these back in every way, and deletes them. `plain` is
one file and one stream, as every tool has it; `ranges` is the ordinary file, of the stripes' placement, read by
our reader with the same window. Each round says where the blocks lay and how much each DataNode sent or got.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bench.ckpt_run import BOUND, ROOT, Program, make_environ, order, programs, python
from bench.record import BenchError, Figures, note
from bootseer.mounts.fuse.server import check_system
from tests.testing.minihdfs import MiniHdfs, why_not
from tests.testing.minihdfs_net import why_not_capped

DATANODES = 3
BLOCK_BYTES = 16 << 20
RATE_MBIT = 320.0
SIZES = {"full": 510 << 20, "small": 72 << 20}  # bytes of tensors; the file has 32 whole units less a bit
FILE = "state.pt"
MB = 1e6
DEADLINE_S = 180.0
MOUNTED_S = 30.0
WRITES = ("write_plain", "write_striped", "write_concat")
# Way -> action of the client, which of the three files.
READS = {
    "plain": ("read_plain", "plain"),
    "striped": ("read_whole", "striped"),
    "ranges": ("read_whole", "concat"),
    "fsspec": ("read_fsspec", "striped"),
    "mount": ("read_path", "striped"),
    "mount_ranges": ("read_path", "concat"),
    "torch_plain": ("torch_plain", "plain"),
    "torch_mount": ("torch_path", "striped"),
}


class Transfer(NamedTuple):
    """One read or write."""

    seconds: float
    cpu_s: float
    size_bytes: int
    digest: str
    by_node: tuple[int, ...]  # bytes that each DataNode sent to clients (read), or got and passed on (write)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.seconds

    @property
    def busiest_share(self) -> float:
        """How much of all went through the busiest DataNode: its link sets the limit."""
        return max(self.by_node) / max(1, sum(self.by_node))


Round = dict[str, Transfer]


class Cluster:
    """The HDFS, and what the bench has on it."""

    def __init__(self, hdfs: MiniHdfs, folder: str, source: str) -> None:
        self._hdfs = hdfs
        self._directory = folder
        self._source = source

    def path(self, kind: str, number: int) -> str:
        """Where a file of a round is: a file, for stripes the checkpoint's folder."""
        return f"/bench/{kind}-{number}" + ("" if kind == "striped" else f"/{FILE}")

    def write(self, action: str, number: int) -> Transfer:
        """One of WRITES."""
        kind = action.removeprefix("write_")
        return self._transfer(action, self._source, self._hdfs.url + self.path(kind, number), reading=False)

    def read(self, way: str, number: int) -> Transfer:
        """One of READS."""
        action, kind = READS[way]
        url = self._hdfs.url + self.path(kind, number)
        if action in ("read_path", "torch_path"):
            with self._mounted(url.removesuffix(f"/{FILE}"), way, number) as mounted:
                return self._transfer(action, os.path.join(mounted, FILE), "", reading=True)
        if action == "read_fsspec":
            url = f"stripe::{url}/{FILE}" if kind == "striped" else f"stripe::{url}"
        return self._transfer(action, url, FILE, reading=True)

    def placement(self, kind: str, number: int) -> str:
        """How many first replicas of blocks lie on each DataNode, by file."""
        top = self.path(kind, number)
        found = []
        for path in [top] if kind != "striped" else self._stripe_files(top):
            blocks = self._hdfs.blocks(path)
            counts = [sum(node.address in block.addresses for block in blocks) for node in self._hdfs.datanodes]
            found.append("/".join(map(str, counts)))
        return " ".join(found)

    def delete(self, number: int) -> None:
        """Removes a round's files."""
        script = (
            "import sys, hdfs_native; c = hdfs_native.Client(sys.argv[1]); "
            "[c.delete(p, True) for p in sys.argv[2:]]"
        )
        tops = [f"/bench/{kind}-{number}" for kind in ("plain", "striped", "concat")]
        argv = [*self._hdfs.client_prefix, *BOUND, sys.executable, "-c", script, self._hdfs.url, *tops]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
        if ended.returncode:
            raise BenchError(f"files of a round could not be deleted:\n{ended.stderr[-2000:]}")

    def _stripe_files(self, top: str) -> list[str]:
        script = (
            "import sys, hdfs_native; found = hdfs_native.Client(sys.argv[1]).list_status(sys.argv[2], True); "
            "print(*(each.path for each in found if not each.isdir and '.s' in each.path), sep='\\n')"
        )
        argv = [*self._hdfs.client_prefix, *BOUND, sys.executable, "-c", script, self._hdfs.url, top]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
        if ended.returncode or not ended.stdout.strip():
            raise BenchError(f"{top}: no stripe files\n{ended.stderr[-2000:]}")
        return sorted(ended.stdout.split())

    def _command(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        cache = os.path.join(self._directory, "cache")
        environ = make_environ(HADOOP_CONF_DIR=self._hdfs.conf_folder, BOOTSEER_CACHE_DIR=cache)
        return [*self._hdfs.client_prefix, *argv], environ

    def _transfer(self, action: str, source: str, target: str, *, reading: bool) -> Transfer:
        command = self._command(python("bench.ckpt_hdfs_client", action, source, target))
        with programs([command]) as (client,):
            client.listen(lambda line: line == "ready\n", DEADLINE_S)
            before = self._traffic(reading)
            client.say("go")
            answer = json.loads(client.listen(lambda line: line.startswith("{"), DEADLINE_S))
            by_node = tuple(b - a for a, b in zip(before, self._traffic(reading), strict=True))
            client.wait()
        return Transfer(answer["seconds"], answer["cpu_s"], answer["bytes"], answer["digest"], by_node)

    def _traffic(self, reading: bool) -> list[int]:
        found = [node.traffic() for node in self._hdfs.datanodes]
        return [each.sent_bytes if reading else each.received_bytes for each in found]

    @contextmanager
    def _mounted(self, url: str, way: str, number: int) -> Iterator[str]:
        """A mount of its own for each read: the kernel keeps what was read through one."""
        directory = os.path.join(self._directory, f"{way}-{number}")
        os.makedirs(directory)
        command = self._command(python("bench.ckpt_hdfs_client", "mount", url, directory))
        with programs([command]) as (mount,):
            wait_mounted(mount, directory)
            try:
                yield directory
            finally:
                subprocess.run(["umount", directory], capture_output=True)
                mount.wait(DEADLINE_S)


def wait_mounted(mount: Program, directory: str) -> None:
    """Until the file can be seen."""
    end_s = time.monotonic() + MOUNTED_S
    while not os.path.exists(os.path.join(directory, FILE)):
        if time.monotonic() > end_s or mount.has_ended():
            raise mount.failure("mounts nothing")
        time.sleep(0.02)


def why_not_stripe() -> str:
    """Why fsspec would not find the protocol stripe::, "" when it does."""
    if importlib.metadata.entry_points(group="fsspec.specs", name="stripe"):
        return ""
    return "fsspec does not know stripe:: (an old installation of bootseer?): pip install -e ."


def make_source(directory: str, size: str) -> tuple[str, str, str]:
    """A torch.save file; its path, the digest of its bytes, and that of its tensors."""
    import torch

    from bench.ckpt_hdfs_client import describe

    torch.manual_seed(0)
    count = SIZES[size] // 4 // 4
    state = {f"weight{number}": torch.randn(count) for number in range(4)}
    path = os.path.join(directory, FILE)
    torch.save(state, path)
    with open(path, "rb") as file:
        return path, describe([file.read()])[1], describe(state)[1]


def measure(directory: str, size: str, rounds: int) -> Figures:
    """Both replications, as figures."""
    if problem := why_not() or why_not_capped() or why_not_stripe():
        raise BenchError(f"--hdfs: {problem}")
    check_system()
    source, bytes_digest, tensors_digest = make_source(directory, size)
    figures = Figures()
    for replication in (1, 2):
        place = os.path.join(directory, f"r{replication}")
        os.makedirs(place)
        with MiniHdfs(
            place, datanodes=DATANODES, replication=replication, block_bytes=BLOCK_BYTES, rate_mbit=RATE_MBIT
        ) as hdfs:
            cluster = Cluster(hdfs, place, source)
            note(
                f"replication {replication}: {DATANODES} DataNodes with {RATE_MBIT:g} Mbit/s each way, "
                f"blocks of {BLOCK_BYTES >> 20} MiB, a file of {os.path.getsize(source) / MB:.0f} MB"
            )
            for action in WRITES:  # not counted: the servers' code is compiled while it runs
                cluster.write(action, rounds)
            cluster.delete(rounds)
            taken = []
            for number in range(rounds):
                taken.append(take_round(cluster, number))
                check(taken[-1], bytes_digest, tensors_digest)
                cluster.delete(number)
        add_figures(figures, taken, "" if replication == 1 else f"_r{replication}")
    return figures


def take_round(cluster: Cluster, number: int) -> Round:
    """Writes, then reads, in an order that depends on the round's number."""
    made: Round = {}
    for action in order(WRITES, number):
        made[action] = tell(number, action, cluster.write(action, number))
    for kind in ("striped", "concat", "plain"):
        note(f"round {number + 1}: {kind}: blocks per DataNode: {cluster.placement(kind, number)}")
    for way in order(list(READS), number):
        made[way] = tell(number, way, cluster.read(way, number))
    return made


def tell(number: int, what: str, made: Transfer) -> Transfer:
    """A line for people."""
    nodes = "/".join(f"{count / MB:.0f}" for count in made.by_node)
    note(
        f"round {number + 1}: {what}: {made.seconds:.2f} s, {made.rate / MB:.1f} MB/s, "
        f"{made.cpu_s:.2f} CPU s, MB by DataNode {nodes}"
    )
    return made


def check(made: Round, bytes_digest: str, tensors_digest: str) -> None:
    """Each read has to have given what was written."""
    for way in READS:
        right = tensors_digest if way.startswith("torch") else bytes_digest
        if made[way].digest != right:
            raise BenchError(f"{way} read something else than was written")


def add_figures(figures: Figures, taken: Sequence[Round], suffix: str) -> None:
    """Ratios first; `suffix` names the replication."""

    def seconds(name: str) -> list[float]:
        return [each[name].seconds for each in taken]

    def ratio(figure: str, above: str, below: str) -> None:
        figures.add_ratio(f"ckpt.hdfs_{figure}{suffix}", seconds(above), seconds(below))

    ratio("read_ratio", "plain", "striped")
    ratio("fsspec_ratio", "plain", "fsspec")
    ratio("ranges_ratio", "plain", "ranges")
    ratio("striped_vs_ranges", "ranges", "striped")
    ratio("write_ratio", "write_plain", "write_striped")
    ratio("concat_ratio", "write_plain", "write_concat")
    ratio("mount_ratio", "plain", "mount")
    ratio("mount_torch_ratio", "torch_plain", "torch_mount")
    ratio("mount_vs_mounted_plain", "mount_ranges", "mount")
    for name in (*WRITES, *READS):
        transfers = [each[name] for each in taken]
        figures.add(f"ckpt.hdfs_{name}_mb_s{suffix}", "MB/s", [each.rate / MB for each in transfers])
        cpu = [each.cpu_s / each.size_bytes * 1e9 for each in transfers]
        figures.add(f"ckpt.hdfs_{name}_cpu_s_per_gb{suffix}", "CPU s/GB", cpu)
        shares = [each.busiest_share for each in transfers]
        figures.add(f"ckpt.hdfs_{name}_busiest_share{suffix}", "of all bytes by one DataNode", shares)
