"""Reads dumps of torch's flight recorder in a process of its own: whatever they hold costs no more than this.

`python -m launcher.supervise.flight_child`; in: a line {"dumps": [[rank, path], ...], "shift_ns": N};
out: a line {"traces": base64 of supervise/ring.py's pack_rings, or ""}. Files are those of this user, and bounded.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import stat
import sys
from typing import Any

from bootseer.diagnose.flight import read_dump
from launcher.supervise.ring import RankRing, pack_rings

MOST_DUMP_BYTES = 64 << 20
MEMORY_BYTES, CPU_S = 2 << 30, 20
MOST_ANSWER_BYTES = 60 << 10


def read_file(path: str) -> bytes:
    """Raises: OSError for what is no plain file of this user, or too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MOST_DUMP_BYTES:
            raise OSError(path)
        return file.read(MOST_DUMP_BYTES)


def answer(order: dict[str, Any]) -> dict[str, str]:
    """See the module's docstring."""
    rings = []
    for rank, path in order["dumps"]:
        try:
            trace = read_dump(read_file(path), rank)
        except OSError:
            continue
        if trace is not None:
            rings.append(RankRing(rank, trace.calls, False))
    data = pack_rings(rings, order["shift_ns"], MOST_ANSWER_BYTES)
    return {"traces": base64.b64encode(data).decode()}


def main() -> None:
    """Answers one order."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    print(json.dumps(answer(json.loads(sys.stdin.readline()))), flush=True)


if __name__ == "__main__":
    main()
