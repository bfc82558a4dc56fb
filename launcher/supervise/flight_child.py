"""Reads what ranks have left in files: dumps of torch's flight recorder, and how they lie in parallel groups.

In a process of its own: whatever the files hold, or on whatever mount they lie, costs no more than this one.
`python -m launcher.supervise.flight_child`; in: a line {"ranks": [rank, ...], "after_wall_s": N, "shift_ns": N,
"layout": path, or ""}; out: a line {"traces": base64 of supervise/ring.py's pack_rings, or "", "layout": line}.
Torch writes dumps when a collective of NCCL has timed out, or when it is told to. Only those of this user count
that are newer than what is asked about: files of earlier jobs lie at the same places.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bootseer.diagnose.flight import read_dump
from bootseer.diagnose.layout import MOST_LINE
from launcher.supervise.ring import RankRing, pack_rings

MOST_DUMP_BYTES = 64 << 20
MEMORY_BYTES, CPU_S = 2 << 30, 20
MOST_ANSWER_BYTES = 60 << 10


def find_dumps(ranks: Iterable[int], environ: Mapping[str, str], after_wall_s: float) -> dict[int, str]:
    """Paths by rank, of those that are there. Args: after_wall_s: older files are others'."""
    home, cache = environ.get("HOME") or "/tmp", environ.get("XDG_CACHE_HOME")  # noqa: S108
    prefixes = [
        environ.get("TORCH_FR_DUMP_TEMP_FILE"),
        environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
        f"{cache or f'{home}/.cache'}/torch/comm_lib_trace_rank_",
        "/tmp/nccl_trace_rank_",  # noqa: S108 - of older torch; whose file it is, is looked at
    ]
    folders: dict[str, set[str]] = {}
    found: dict[int, str] = {}
    for rank in ranks:
        for prefix in prefixes:
            if not prefix or rank in found:
                continue
            folder, _, name = f"{prefix}{rank}".rpartition("/")
            try:
                if folder not in folders:
                    folders[folder] = set(os.listdir(folder or "."))
                if name in folders[folder] and os.lstat(f"{prefix}{rank}").st_mtime >= after_wall_s:
                    found[rank] = f"{prefix}{rank}"
            except OSError:
                folders.setdefault(folder, set())
    return found


def read_file(path: str) -> bytes:
    """Raises: OSError for what is no plain file of this user, or too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MOST_DUMP_BYTES:
            raise OSError(path)
        return file.read(MOST_DUMP_BYTES)


def read_layout(path: str) -> str:
    """How the ranks lie in parallel groups, as they have said by bootseer.layout; "" for nothing."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read(MOST_LINE)
    except (OSError, ValueError):
        return ""


def answer(order: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """See the module's docstring."""
    shift_ns = order["shift_ns"] + time.monotonic_ns() - time.time_ns()  # of dumps, which have the wall clock
    rings = []
    for rank, path in find_dumps(order["ranks"], environ, order["after_wall_s"]).items():
        try:
            trace = read_dump(read_file(path), rank)
        except OSError:
            continue
        if trace is not None:
            rings.append(RankRing(rank, trace.calls, False))
    data = pack_rings(rings, shift_ns, MOST_ANSWER_BYTES)
    layout = read_layout(order["layout"]) if order["layout"] else ""
    return {"traces": base64.b64encode(data).decode(), "layout": layout}


def main() -> None:
    """Answers one order."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a file leads to is told to nobody
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    print(json.dumps(answer(json.loads(sys.stdin.readline()), os.environ)), flush=True)


if __name__ == "__main__":
    main()
