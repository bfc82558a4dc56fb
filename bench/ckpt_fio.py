"""What the disk gives, by fio: the best of several ways to read a file around the page cache.

Each way reads the whole file once in requests of 4 MiB: psync with 8 jobs (each a part of its own), libaio and
io_uring with 16 requests in flight. fio's own clock counts, so its start is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from bench.record import BenchError

REQUEST_BYTES = 4 << 20
SMALL_REQUEST_BYTES = 64 << 10  # for files of tests
JOBS = 8
DEPTH = 16
ENGINES = ("psync", "libaio", "io_uring")
DEADLINE_S = 120.0


def check_fio() -> None:
    """fio is what the disk's speed is taken from: without it there is no figure."""
    if shutil.which("fio") is None:
        raise BenchError("fio is not installed, and nothing else says how fast the disk is: apt-get install fio")


def read_rates(path: str) -> dict[str, float]:
    """Bytes per second of each engine that works here."""
    rates = {}
    problems = []
    for engine in ENGINES:
        try:
            rates[engine] = read_rate(path, engine)
        except BenchError as error:
            problems.append(str(error))
    if not rates:
        raise BenchError("; ".join(problems))
    return rates


def read_rate(path: str, engine: str) -> float:
    """Bytes per second of one engine."""
    argv = command(path, os.path.getsize(path), engine)
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().split("\n")[-1]
        raise BenchError(f"fio with {engine} ended with {ended.returncode}: {said}")
    # Warnings may stand before the document.
    document = json.loads(ended.stdout[ended.stdout.index("{") :])
    rate = document["jobs"][0]["read"]["bw_bytes"]
    if not rate:
        raise BenchError(f"fio with {engine} read nothing of {path}")
    return float(rate)


def command(path: str, size: int, engine: str) -> list[str]:
    """fio's command line."""
    jobs = JOBS if engine == "psync" else 1
    request = REQUEST_BYTES if size >= jobs * REQUEST_BYTES else SMALL_REQUEST_BYTES
    part = size // jobs // request * request
    if not part:
        raise BenchError(f"{path} has {size} bytes, which is too little for fio")
    options = {
        "name": "disk",
        "filename": path,
        "readonly": "",
        "rw": "read",
        "bs": str(request),
        "direct": "1",
        "ioengine": engine,
        "iodepth": "1" if engine == "psync" else str(DEPTH),
        "numjobs": str(jobs),
        "size": str(part),
        "offset_increment": str(part) if jobs > 1 else "0",
        "thread": "",
        "group_reporting": "",
        "output-format": "json",
    }
    return ["fio", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items())]
