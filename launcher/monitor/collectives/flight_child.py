"""Child that reads files of ranks: dumps of torch's flight recorder, and the layout of parallel groups.

A separate process, so that bad files or mounts affect nothing else. `python -m
launcher.monitor.collectives.flight_child`; in: a line {"ranks": [rank, ...], "after_wall_s": N, "shift_ns": N,
"layout": path, or ""}; out: a line {"traces": base64 of monitor/collectives/ring.py's pack_rings, or "", "layout":
line}. Torch writes dumps when a collective of NCCL has timed out, or on request. Only dumps of this user that are
newer than the query's time count: files of earlier jobs lie at the same places.
"""

from __future__ import annotations

import base64
import os
import resource
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bootseer.hangs.flight import read_dump
from bootseer.hangs.layout import MAX_LINE
from bootseer.ipc.framing import decode, encode
from launcher.monitor.collectives.ring import RankRing, pack_rings

MAX_DUMP_BYTES = 64 << 20
MEMORY_BYTES, CPU_S = 2 << 30, 20
MAX_ANSWER_BYTES = 60 << 10


def find_dumps(ranks: Iterable[int], environ: Mapping[str, str], after_wall_s: float) -> dict[int, str]:
    """Find existing dumps: paths by rank. Args: after_wall_s: older files belong to others."""
    home, cache = environ.get("HOME") or "/tmp", environ.get("XDG_CACHE_HOME")  # noqa: S108
    prefixes = [
        environ.get("TORCH_FR_DUMP_TEMP_FILE"),
        environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
        f"{cache or f'{home}/.cache'}/torch/comm_lib_trace_rank_",
        "/tmp/nccl_trace_rank_",  # noqa: S108 - of older torch; the owner of the file is checked
    ]
    directories: dict[str, set[str]] = {}
    found: dict[int, str] = {}
    for rank in ranks:
        for prefix in prefixes:
            if not prefix or rank in found:
                continue
            directory, _, name = f"{prefix}{rank}".rpartition("/")
            try:
                if directory not in directories:
                    directories[directory] = set(os.listdir(directory or "."))
                if name in directories[directory] and os.lstat(f"{prefix}{rank}").st_mtime >= after_wall_s:
                    found[rank] = f"{prefix}{rank}"
            except OSError:
                directories.setdefault(directory, set())
    return found


def read_file(path: str) -> bytes:
    """Read a file. Raises: OSError if it is no plain file of this user, or too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_DUMP_BYTES:
            raise OSError(path)
        return file.read(MAX_DUMP_BYTES)


def read_layout(path: str) -> str:
    """Read the layout of parallel groups that ranks declared with bootseer.layout; "" for none."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read(MAX_LINE)
    except (OSError, ValueError):
        return ""


def answer(order: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Answer a request. See the module's docstring."""
    shift_ns = order["shift_ns"] + time.monotonic_ns() - time.time_ns()  # for dumps, which use the wall clock
    rings = []
    for rank, path in find_dumps(order["ranks"], environ, order["after_wall_s"]).items():
        try:
            trace = read_dump(read_file(path), rank)
        except OSError:
            continue
        if trace is not None:
            rings.append(RankRing(rank, trace.calls, False))
    data = pack_rings(rings, shift_ns, MAX_ANSWER_BYTES)
    layout = read_layout(order["layout"]) if order["layout"] else ""
    return {"traces": base64.b64encode(data).decode(), "layout": layout}


def main() -> None:
    """Answer one request."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors caused by a file are not printed
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    sys.stdout.buffer.write(encode(answer(decode(sys.stdin.buffer.readline()), os.environ)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
