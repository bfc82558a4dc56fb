"""The ways of `bench image` from an order to start until a program in the image has ended, each from nothing.

    local_cold      the root on this disk, nothing of it in memory
    local_warm      the same, right after another start
    layer_pull      gzip layers fetched and unpacked (image_layers.py), then as local
    parallel_full   `bootseer image prefetch --all`, then mounted
    lazy            `bootseer image mount` with no recording: blocks come as they are read
    prefetch        the same with a recording that another node has published
    second          the same node once more: its cache is there, on the disk and not in memory

Ours are the commands that users type, so start of their Python, the look for the trace, index, verification,
mounts and the start of the daemon count. Bootseer's own code is in memory, as the remote's files are. Right before
each start memory is touched and freed: where free memory goes back to a host, new pages cost up to 2.4 CPU seconds
a GB, more than most of what is measured here, and by chance.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench import ckpt_pages
from bench.ckpt_run import BOOTSEER, BOUND, DEADLINE_S, make_environ
from bench.image_layers import pull
from bench.image_programs import Program, run_program
from bench.image_remote import Link, Remote, check_link
from bench.image_tree import regular_files
from bench.record import BenchError
from bootseer.blocks.trace import Trace, decode, encode, workload_key
from bootseer.errors import BootseerError
from bootseer.mounts.tree_daemon.mount import MountedTree
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.traces import PAYLOAD_TYPE
from bootseer.trust import KeyDirectory, seal

WAYS = ("local_cold", "local_warm", "layer_pull", "parallel_full", "lazy", "prefetch", "second")
REMOTE = ("layer_pull", "parallel_full", "lazy", "prefetch", "second")  # that ask the remote for something
NAME = "bench"  # of the tree
UNKNOWN = "f" * 16  # a workload that nobody has recorded
PULL_S = 1800.0
TOUCHED_BYTES = 2 << 30  # more than a start of ours needs; a pull needs more
DROP = "/proc/sys/vm/drop_caches"


class Sample(NamedTuple):
    """One start."""

    wall_s: float
    blocked_s: float  # waited for the remote: before the start, and reads
    sent_bytes: int
    requests: int
    checksum: str
    ready_s: float = 0.0  # until the program was started
    reads: int = 0  # that the kernel asked the daemon for
    late_reads: int = 0  # of these, those that waited for the remote
    daemon_cpu_s: float = 0.0


class Bench:
    """One tree, its remote, and the folders of a node that starts it."""

    def __init__(
        self, root: str, folder: str, data: str, remote: Remote, digest: str, *, package: str = ""
    ) -> None:
        """`package`: the folder of a copy of our packages that is measured in place of them."""
        self.root, self.remote, self.digest = root, remote, digest
        self._package = package
        self._data, self._directory = data, folder
        self._mount_point = os.path.join(folder, "mnt")
        self._cache, self._runtime = os.path.join(folder, "cache"), os.path.join(folder, "run")
        self._keys = os.path.join(folder, "keys")
        os.makedirs(self._mount_point)
        os.makedirs(self._runtime, mode=0o700)
        self._root_files = regular_files(root)

    def link(self) -> Link:
        """What the remote gives now, if it is what it should be. Raises: BenchError."""
        packs = os.path.join(self._data, "tree", "packs")
        largest = max(os.listdir(packs), key=lambda name: os.path.getsize(os.path.join(packs, name)))
        found = self.remote.measure(f"tree/packs/{largest}")
        check_link(found)
        return found

    # ---- ways ----------------------------------------------------------------------------------------------

    def run(self, way: str, program: Program) -> Sample:
        """One start. `second` follows a `prefetch` of the same program. Raises: BenchError."""
        ckpt_pages.make_warm([self._data])
        os.sync()
        ways: dict[str, Callable[[Program], Sample]] = {
            "local_cold": self._local_cold,
            "local_warm": self._local_warm,
            "layer_pull": self._layer_pull,
            "parallel_full": self._parallel_full,
            "lazy": lambda each: self._mounted(each, UNKNOWN),
            "prefetch": lambda each: self._mounted(each, key_of(each), tells=True),
            "second": self._second,
        }
        if way != "second":
            self.clear()
        return ways[way](program)

    def clear(self) -> None:
        """A node that has nothing."""
        self.unmount()
        for path in (self._cache, os.path.join(self._directory, "pulled"), os.path.join(self._directory, "blobs")):
            shutil.rmtree(path, ignore_errors=True)

    def _local_cold(self, program: Program) -> Sample:
        make_cold(self._root_files)
        return self._local(program)

    def _local_warm(self, program: Program) -> Sample:
        run_program(program, self.root)
        return self._local(program)

    def _local(self, program: Program) -> Sample:
        begin_s = begin()
        checksum = run_program(program, self.root)
        return Sample(time.monotonic() - begin_s, 0.0, 0, 0, checksum)

    def _layer_pull(self, program: Program) -> Sample:
        target = os.path.join(self._directory, "pulled")
        before, begin_s = self.remote.served(), begin()
        pull(self.remote.url("layers"), target, os.path.join(self._directory, "blobs"))
        ready_s = time.monotonic() - begin_s
        checksum = run_program(program, target)
        wall_s = time.monotonic() - begin_s
        requests, sent = self.remote.served().since(before)
        return Sample(wall_s, ready_s, sent, requests, checksum, ready_s)

    def _parallel_full(self, program: Program) -> Sample:
        before, begin_s = self.remote.served(), begin()
        self._bootseer("prefetch", self.url, "--all", "--quiet")
        full_s = time.monotonic() - begin_s
        found = self._mounted(program, key_of(program), since_s=time.monotonic())
        requests, sent = self.remote.served().since(before)
        return found._replace(
            wall_s=found.wall_s + full_s,
            blocked_s=found.blocked_s + full_s,
            ready_s=found.ready_s + full_s,
            sent_bytes=sent,
            requests=requests,
        )

    def _second(self, program: Program) -> Sample:
        if not os.path.isdir(self._cache):
            raise BenchError("a second start comes after a first one")
        make_cold(regular_files(self._cache))
        return self._mounted(program, key_of(program))

    def _mounted(
        self, program: Program, workload: str, *, tells: bool = False, since_s: float | None = None
    ) -> Sample:
        """`tells`: afterwards, that the program has made its first step, so that its recording is kept."""
        before, begin_s = self.remote.served(), begin() if since_s is None else since_s
        with self.mounted(self.url, workload) as tree:
            ready_s = time.monotonic() - begin_s
            checksum = run_program(program, self._mount_point)
            wall_s = time.monotonic() - begin_s
            requests, sent = self.remote.served().since(before)
            status = tree.status()
            blocked_s, device = float(status["blocks"]["blocked_s"]), status["device"]
            cpu_s = sum(map(cpu_of, TreeDirectory(self._runtime, self.digest).read_pids()))
            if not device["requests"]:
                raise BenchError(f"{program.name}: nothing was read of the mount, so it was not measured")
            # A start whose hot files were read ahead has nothing to keep unless it needed more than those.
            if tells and not tree.end_start() and not status["read_ahead"]:
                raise BenchError("the first start was not recorded")
        late = int(device["late"])
        return Sample(wall_s, blocked_s, sent, requests, checksum, ready_s, int(device["requests"]), late, cpu_s)

    # ---- recordings ----------------------------------------------------------------------------------------

    def record(self, program: Program, block_count: int) -> Trace:
        """What a start touches: of the packs on this disk, on a node that knows nothing."""
        self.clear()
        key = key_of(program)
        # One that was published would be merged into the recording, which then would tell of earlier starts.
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._published_path(key))
        with self.mounted(f"{self._data}/tree@sha256:{self.digest}", key) as tree:
            run_program(program, self._mount_point)
            tree.end_start()
            path = tree.trace_path(key)
            if not path:
                raise BenchError("nothing was recorded")
            with open(path, "rb") as file:
                found = decode(file.read(), self.digest, block_count, path)
        self.clear()
        if found.runs != 1:
            raise BenchError(f"{program.name}: a recording of one start tells of {found.runs}")
        return found

    def publish(self, trace: Trace) -> None:
        """Puts a recording beside the tree, signed, as `bootseer image record --publish` does."""
        path = self._published_path(trace.workload)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        sealed = seal(encode(trace), PAYLOAD_TYPE, KeyDirectory(self._keys).read_private())
        with open(path, "wb") as file:
            file.write(sealed)

    def _published_path(self, workload: str) -> str:
        return os.path.join(self._data, "tree", "traces", self.digest, f"{workload}.json")

    # ---- mounts --------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"{self.remote.url('tree')}@sha256:{self.digest}"

    @contextlib.contextmanager
    def mounted(self, url: str, workload: str) -> Iterator[MountedTree]:
        """The tree in the mount point while it is entered; its daemon ends with it."""
        try:
            said = self._bootseer("mount", url, self._mount_point, "--workload", workload, "--idle", "0", "--json")
            if json.loads(said)["digest"] != self.digest:
                raise BenchError(f"{url}: another tree was mounted: {said}")
            place = TreeDirectory(self._runtime, self.digest)
            yield MountedTree(place.root, self.digest, place.control_path)
        except BootseerError as error:
            raise BenchError(f"{url}: {error}") from error
        finally:
            self.unmount()

    def unmount(self) -> None:
        """Ends all that is mounted here, and the daemon."""
        while os.path.ismount(self._mount_point):
            subprocess.run(["umount", "--lazy", self._mount_point], check=True)
        if os.path.isdir(os.path.join(self._runtime, "trees", self.digest)):
            self._bootseer("umount", self.digest, "--force")

    def environ(self) -> dict[str, str]:
        return node_environ(
            self._package, BOOTSEER_CACHE=self._cache, BOOTSEER_RUNTIME=self._runtime, BOOTSEER_KEYS=self._keys
        )

    def _bootseer(self, *words: str) -> str:
        return run_bootseer(["image", *words], self.environ())


def run_bootseer(words: list[str], environ: dict[str, str], timeout_s: float = PULL_S) -> str:
    """What a command prints. Raises: BenchError."""
    try:
        ran = subprocess.run(
            [*BOUND, BOOTSEER, *words], env=environ, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"bootseer {' '.join(words)}: still running after {timeout_s:g} s") from None
    if ran.returncode:
        raise BenchError(f"bootseer {' '.join(words)}: status {ran.returncode}\n{ran.stderr[-3000:]}")
    return ran.stdout


def begin() -> float:
    """When a start begins, with memory that this machine has."""
    subprocess.run([sys.executable, "-c", f"b'1' * {TOUCHED_BYTES}"], check=True)
    return time.monotonic()


def make_cold(paths: list[str]) -> None:
    """Files out of memory, and what the kernel knows of their folders."""
    os.sync()
    ckpt_pages.make_cold(paths)
    with open(DROP, "w", encoding="ascii") as file:
        file.write("2")  # dentries and inodes; what is in memory of other files stays


def cpu_of(pid: int) -> float:
    """CPU seconds of a process that is there, and of its children that have ended."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def key_of(program: Program) -> str:
    """The workload of a program."""
    return workload_key("python3", f"bench-{program.name}")


def node_environ(package: str = "", **more: str) -> dict[str, str]:
    """The environment of our commands; of a copy of our packages, if one is given."""
    return make_environ(**more, **({"PYTHONPATH": package} if package else {}))


def build(root: str, data: str, keys: str, *, package: str = "") -> dict[str, Any]:
    """Builds the tree of a root with a key of its own; what the command says of it."""
    environ = node_environ(package, BOOTSEER_KEYS=keys)
    run_bootseer(["keys", "make", "--name", NAME], environ, DEADLINE_S)
    words = ["image", "build", f"rootfs:{root}", f"{data}/tree", "--name", NAME, "--quiet", "--json"]
    return dict(json.loads(run_bootseer(words, environ)))
