"""Reads a mounted tree in an order by chance and compares it with the files that it was made of.

Usage: tree_reader.py SETTINGS (JSON): root, source, seed, how (read or mapped), until (a file: passes go on until
it is there). A line for each file that was read; the last one says what the reads gave:
{"right": 10, "wrong": 0, "EIO": 2, "slowest_s": 0.1}.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import sys
import time
from collections import Counter
from typing import Any

SIZES = (4096, 20_000, 65_536, 300_000)


def main(settings: dict[str, Any]) -> None:
    pick = random.Random(settings["seed"])
    root, source = settings["root"], settings["source"]
    names = []
    for above, _, found in os.walk(source):
        names += [os.path.relpath(os.path.join(above, name), source) for name in found]
    counts: Counter[str] = Counter(right=0, wrong=0)
    slowest_s = 0.0
    os.chdir("/")
    while True:
        pick.shuffle(names)
        for name in names:
            with open(os.path.join(source, name), "rb") as file:
                right = file.read()
            begin_s = time.monotonic()
            slowest_s = max(slowest_s, compare(os.path.join(root, name), right, settings["how"], pick, counts))
            slowest_s = max(slowest_s, time.monotonic() - begin_s if settings["how"] == "mapped" else 0.0)
            print(name, flush=True)
        if not settings["until"] or os.path.exists(settings["until"]):
            break
    print(json.dumps({**counts, "slowest_s": round(slowest_s, 3)}), flush=True)


def compare(path: str, right: bytes, how: str, pick: random.Random, counts: Counter[str]) -> float:
    """Counts what reads of a file gave; how long the slowest one took."""
    slowest_s = 0.0
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        counts[errno.errorcode[error.errno or 0]] += 1
        return slowest_s
    try:
        if how == "mapped" and right:
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                counts["right" if mapped[:] == right else "wrong"] += 1
            return slowest_s
        size = pick.choice(SIZES)
        offsets = list(range(0, len(right), size))
        pick.shuffle(offsets)
        for offset in offsets:
            wanted = right[offset : offset + size]
            begin_s = time.monotonic()
            try:
                got = os.pread(fd, size, offset)
            except OSError as error:
                counts[errno.errorcode[error.errno or 0]] += 1
            else:
                # The kernel gives what it has before an error; what it gives has to be right, and not nothing.
                counts["right" if got and got == wanted[: len(got)] else "wrong"] += 1
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
    finally:
        os.close(fd)
    return slowest_s


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
