"""Nodes of `bench env`: their folders, what is imported on them, and memory that a way may begin with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench.ckpt_run import BOUND, DEADLINE_S
from bench.env_packages import IMPORTED, clean_environ
from bench.record import BenchError

TOUCHED_BYTES = 6 << 30  # more than any way writes
_IMPORT = """\
import time
import {names}
done_ns = time.monotonic_ns()
import hashlib, json, sys
found = hashlib.sha256()
for name, module in sorted(sys.modules.items()):
    path = getattr(module, "__file__", None) or ""
    if path.startswith(sys.prefix + "/") and path.endswith(".py"):
        with open(path, "rb") as file:
            found.update(name.encode() + file.read())
print(json.dumps([done_ns, found.hexdigest()]))
"""
_ENTER = 'mount --bind "$0" "$1" && shift && exec "$@"'


class Node(NamedTuple):
    """A machine: its folder, the words that a program is started in it by, its variables."""

    folder: str
    prefix: list[str]
    environ: dict[str, str]


class Imported(NamedTuple):
    """The import, on all nodes."""

    seconds: float  # until the last one was through
    checksums: list[str]  # of the sources of all modules of the environment, by node


def make_nodes(above: str, shared: str, count_of: int, keys: str) -> list[Node]:
    """Folders below `above`. Of several nodes each sees a folder of its own at the path `shared`."""
    os.makedirs(shared, exist_ok=True)
    nodes = []
    for number in range(count_of):
        directory = os.path.join(above, str(number))
        for name in ("env", "run"):
            os.makedirs(os.path.join(directory, name), mode=0o700, exist_ok=True)
        environ = clean_environ(
            BOOTSEER_KEYS=keys,
            BOOTSEER_CACHE=os.path.join(directory, "cache"),
            BOOTSEER_RUNTIME=os.path.join(directory, "run"),
        )
        prefix = []
        if count_of > 1:
            prefix = [*BOUND, "unshare", "--mount", "--propagation", "private", "bash", "-c", _ENTER]
            prefix += [os.path.join(directory, "env"), shared]
        nodes.append(Node(directory, prefix, environ))
    return nodes


def import_on(places: Sequence[tuple[Node, Sequence[str]]], interpreter: str) -> Imported:
    """Imports at once on all. Args: places: nodes, and words that lead into their mounted environment if any."""
    code = _IMPORT.format(names=", ".join(IMPORTED))
    began_ns = time.monotonic_ns()

    def one(place: tuple[Node, Sequence[str]]) -> tuple[int, str]:
        node, prefix = place
        # Words of a mounted environment lead into the node's namespace by themselves.
        words = [*(prefix or node.prefix), interpreter, "-c", code]
        try:
            ran = subprocess.run(
                words,
                env=node.environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            done_ns, checksum = json.loads(ran.stdout.splitlines()[-1])
            return int(done_ns), str(checksum)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the import still runs after {DEADLINE_S:g} s") from None
        except (IndexError, ValueError):
            raise BenchError(f"the import failed, status {ran.returncode}:\n{ran.stderr[-3000:]}") from None

    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(one, places))
    return Imported((max(done_ns for done_ns, _ in found) - began_ns) / 1e9, [each for _, each in found])


def begin() -> float:
    """When a way begins, with memory that this machine has."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free_bytes = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    subprocess.run([sys.executable, "-c", f"b'1' * {min(TOUCHED_BYTES, free_bytes // 2)}"], check=True)
    return time.monotonic()


def read_all(directory: str) -> None:
    """A tree into memory, with what the kernel knows of its folders."""
    buffer = bytearray(1 << 20)
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
