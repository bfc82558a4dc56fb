"""The ways of `bench env`, each from nothing on a new disk, and the import that follows each.

    pip                 local wheels, with bytecode, as pip does by itself
    uv_cold             the same wheels, nothing in uv's cache; uv makes no bytecode
    uv_cold_compiled    with --compile-bytecode
    uv_warm, ..._compiled   its cache filled by an installation before
    cp                  cp -a of the installed tree
    tar, packed         zstd | tar; tar of the archive that venv-pack has made
    unpack, mount       ours, from a store on the disk: key, look into the store, signature, digest of each block
    mount_traced        the store has an access trace, as after the first step of the job that built the snapshot
    mount_again         the same node once more: its cache has what the first start has read
    tar_remote, unpack_remote, mount_remote     behind a link (image_remote.py)
    ..._3               on three nodes at once, behind the same link

A node has its own cache, runtime folder and, where there are three, a mount namespace in which its environment
lies at the same path. What a way reads is in memory before it, what it writes to is new. Right before each way
memory is touched and freed: where free memory goes back to a host, new pages cost up to 2.4 CPU seconds a GB, by
chance.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench import ckpt_pages
from bench.ckpt_run import BOUND, Program, programs, python
from bench.env_disk import Disk
from bench.env_kept import INSTALL_S, Kept, count, install, make_venv, run
from bench.env_machine import Node, begin, import_on, make_nodes, read_all
from bench.env_packages import Wheels, clean_environ
from bench.image_remote import Link, Remote, check_link
from bench.image_ways import run_bootseer
from bench.record import BenchError

INSTALLERS = ("pip", "uv_cold", "uv_cold_compiled", "uv_warm", "uv_warm_compiled")
COPIES = ("cp", "tar", "packed")
REMOTE = ("tar_remote", "unpack_remote", "mount_remote", "tar_remote_3", "unpack_remote_3", "mount_remote_3")
WAYS = (*INSTALLERS, *COPIES, "unpack", "mount", "mount_traced", "mount_again", *REMOTE)
NODES = 3
TRACE_S = 30.0  # until a trace is in the store
_FETCH = (
    "import shutil, sys, urllib.request; "
    "shutil.copyfileobj(urllib.request.urlopen(sys.argv[1]), sys.stdout.buffer, 1 << 20)"
)
_UNPACK = 'mkdir "$0" && zstd -dcq "$1" | tar -xf - -C "$0"'
_UNTAR = 'mkdir "$0" && tar -xzf "$1" -C "$0"'
_PULL = f'mkdir "$0" && \'{sys.executable}\' -c \'{_FETCH}\' "$1" | zstd -dcq | tar -xf - -C "$0"'


class Sample(NamedTuple):
    """One way, once."""

    wall_s: float  # until ranks could be started
    import_s: float  # of the interpreter's start and the import, after that
    restore_s: float = 0.0  # of wall_s: in `restore`; the most of all nodes
    sent_bytes: int = 0  # by the remote, until the import was over
    requests: int = 0


class Bench:
    """The ways, as `run(name)`."""

    def __init__(self, kept: Kept, disk: Disk, remote: Remote, uv: str) -> None:
        self._kept, self._disk, self._remote, self._uv = kept, disk, remote, uv
        self._wheels: Wheels = kept.wheels
        self._checksum = ""
        self._traces = os.path.join(os.path.dirname(os.path.dirname(kept.packs[0])), "traces")  # of the store
        self._traces_aside = self._traces + "-aside"
        for left in (self._traces, self._traces_aside):  # by a bench that was killed
            shutil.rmtree(left, ignore_errors=True)

    def ways(self) -> list[str]:
        """Those that can be had here."""
        has_mounts = os.geteuid() == 0
        left_out = {name for name in WAYS if not has_mounts and (name.startswith("mount") or name.endswith("_3"))}
        if not self._kept.packed:
            left_out.add("packed")
        return [name for name in WAYS if name not in left_out]

    def link(self) -> Link:
        """What the remote gives now, if it is what it should be. Raises: BenchError."""
        largest = max(self._kept.packs, key=os.path.getsize)
        found = self._remote.measure(os.path.relpath(largest, self._kept.data))
        check_link(found)
        return found

    def run(self, way: str) -> Sample:
        """One way on a new disk. Raises: BenchError."""
        self._disk.renew()
        self._warm(way)
        kind, nodes = way.removesuffix("_3"), self._nodes(NODES if way.endswith("_3") else 1)
        if way == "mount_again":
            self._restore("mount", nodes)
            return self._restore("mount", nodes)
        if way == "mount_traced":
            with self._traced():
                return self._restore("mount", nodes)
        if kind.startswith(("unpack", "mount")):
            return self._restore(kind, nodes)
        return self._commands(kind, nodes)

    # ---- by commands ---------------------------------------------------------------------------------------

    def _commands(self, kind: str, nodes: Sequence[Node]) -> Sample:
        if kind.startswith("uv_warm"):
            other = os.path.join(self._disk.path, "other")
            run(make_venv(other), clean_environ())
            run(self._uv_install(other, is_compiled=kind.endswith("_compiled")), clean_environ())
        before, begin_s = self._remote.served(), begin()

        def one(node: Node) -> None:
            for argv in self._argvs(kind):
                run([*node.prefix, *argv], node.environ)

        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(one, nodes))
        wall_s = time.monotonic() - begin_s
        self._check(kind, nodes)
        import_s = self._import([(node, []) for node in nodes])
        requests, sent = self._remote.served().since(before)
        return Sample(wall_s, import_s, 0.0, sent, requests)

    def _argvs(self, kind: str) -> list[list[str]]:
        kept, target = self._kept, self._kept.target
        shell = ["bash", "-o", "pipefail", "-c"]
        if kind == "pip":
            return [make_venv(target), install(target, self._wheels)]
        if kind.startswith("uv"):
            return [make_venv(target), self._uv_install(target, is_compiled=kind.endswith("_compiled"))]
        if kind == "tar_remote":
            return [[*shell, _PULL, target, self._remote.url(os.path.basename(kept.tar))]]
        return [
            {
                "cp": ["cp", "-a", "--", kept.reference, target],
                "tar": [*shell, _UNPACK, target, kept.tar],
                "packed": [*shell, _UNTAR, target, kept.packed],
            }[kind]
        ]

    def _uv_install(self, target: str, *, is_compiled: bool) -> list[str]:
        words = ["pip", "install", "--quiet", "--offline", "--no-index", "--no-deps"]
        words += ["--python", os.path.join(target, "bin", "python"), "--find-links", self._wheels.folder]
        words += ["--cache-dir", os.path.join(self._disk.path, "uv-cache"), "-r", self._wheels.lock]
        return [*BOUND, self._uv, *words, *(["--compile-bytecode"] if is_compiled else [])]

    # ---- ours ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """The store has an access trace meanwhile; at first one start is recorded."""
        if os.path.isdir(self._traces_aside):
            os.rename(self._traces_aside, self._traces)
        else:
            self._restore("mount", self._nodes(1), traces=os.path.join(self._traces, self._kept.digest))
            self._disk.renew()
            self._warm("mount")
        try:
            yield
        finally:
            os.rename(self._traces, self._traces_aside)

    def _restore(self, kind: str, nodes: Sequence[Node], traces: str = "") -> Sample:
        """Args: traces: where the start's access trace has to be published; "": nowhere."""
        name, is_remote = kind.removesuffix("_remote"), kind.endswith("_remote")
        store = self._remote.url("store") if is_remote else os.path.join(self._kept.data, "store")
        order: dict[str, object] = {"store": store, "lock": self._wheels.lock, "target": self._kept.target}
        order |= {"way": name, "records": bool(traces)}
        argv = python("bench.env_node", json.dumps(order))
        before, begin_s = self._remote.served(), begin()
        with self._started([([*node.prefix, *argv], node.environ) for node in nodes], nodes) as programs:
            answers = []
            for program in programs:
                answers.append(json.loads(program.listen(lambda line: line.startswith("{"), INSTALL_S)))
            wall_s = time.monotonic() - begin_s
            for answer in answers:
                if answer["how"] != name or answer["notes"]:
                    raise BenchError(f"{kind}: restored by {answer['how']}: {answer['notes']}")
            if name == "unpack":
                for program in programs:
                    program.wait()
                self._check(name, nodes)
                import_s = self._import([(node, []) for node in nodes])
            else:
                places = [(node, answer["prefix"]) for node, answer in zip(nodes, answers, strict=True)]
                import_s = self._import(places)
                for program in programs:
                    program.say("end")
                if traces:
                    _await_trace(traces)
                    programs[0].say("published")
                for program in programs:
                    program.wait()
        requests, sent = self._remote.served().since(before)
        return Sample(wall_s, import_s, max(each["took_s"] for each in answers), sent, requests)

    @contextlib.contextmanager
    def _started(
        self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], nodes: Sequence[Node]
    ) -> Iterator[list[Program]]:
        """Nodes that restore; at the end neither they nor daemons of mounts are left."""
        try:
            with programs(commands) as started:
                yield started
        finally:
            for node in nodes:
                if os.path.isdir(os.path.join(node.folder, "run", "trees", self._kept.digest)):
                    with contextlib.suppress(BenchError):  # one that its own mount namespace has taken along
                        run_bootseer(["image", "umount", self._kept.digest, "--force"], node.environ)

    # ---- what all do ---------------------------------------------------------------------------------------

    def _nodes(self, count_of: int) -> list[Node]:
        shared = os.path.dirname(self._kept.target)
        return make_nodes(os.path.join(self._disk.path, "nodes"), shared, count_of, self._kept.keys)

    def _import(self, places: Sequence[tuple[Node, Sequence[str]]]) -> float:
        """On all nodes at once: seconds until the last one is through. All ways have to import the same."""
        found = import_on(places, os.path.join(self._kept.target, "bin", "python"))
        for checksum in found.checksums:
            self._checksum = self._checksum or checksum
            if checksum != self._checksum:
                raise BenchError("the ways imported different modules")
        return found.seconds

    def _check(self, kind: str, nodes: Sequence[Node]) -> None:
        """A way that leaves something out would be fast."""
        least = {"unpack": self._kept.tree_files, "packed": 0}.get(kind, self._kept.files)
        if kind.startswith("uv") and not kind.endswith("_compiled"):
            return
        for node in nodes:
            directory = os.path.join(node.folder, "env", "venv") if node.prefix else self._kept.target
            found, _ = count(directory)
            # uv leaves files of its own away, and writes others.
            if found < (least * 0.95 if kind.startswith("uv") else least):
                raise BenchError(f"{kind}: has made {found} files of {least}")

    def _warm(self, way: str) -> None:
        """What the way reads is in memory; what others have left unwritten is not."""
        os.sync()
        if way in INSTALLERS:
            ckpt_pages.make_warm([self._wheels.folder])
        elif way == "cp":
            read_all(self._kept.reference)
        elif way == "packed":
            ckpt_pages.make_warm([self._kept.packed])
        elif way.startswith("tar"):
            ckpt_pages.make_warm([self._kept.tar])
        else:
            ckpt_pages.make_warm(self._kept.packs)


def _await_trace(directory: str) -> None:
    """Wait until a trace of its workload, and the merge of all, are in the store. Raises: BenchError."""
    end_s = time.monotonic() + TRACE_S
    while len(glob.glob(os.path.join(directory, "*.json"))) < 2:
        if time.monotonic() > end_s:
            raise BenchError(f"{directory}: has no access trace {TRACE_S:g} s after the start")
        time.sleep(0.05)


def find_uv() -> str:
    """Raises: BenchError."""
    for directory in (sysconfig.get_path("scripts"), *os.environ.get("PATH", "").split(os.pathsep)):
        path = os.path.join(directory, "uv")
        if os.access(path, os.X_OK):
            return path
    raise BenchError("uv is not installed here, and is one of the ways: pip install uv")
