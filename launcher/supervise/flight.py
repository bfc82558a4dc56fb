"""Dumps of torch's flight recorder: found where torch puts them, read by a process that may fail.

Torch writes them when a collective of NCCL has timed out, or when it is told to. Only those that are newer than
what is asked about count: files of earlier jobs lie at the same places.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping

MOST_RANKS = 1024  # whose dumps are read
LIMIT_S = 4.0  # less than a coordinator waits for a node, or for the stacks of its ranks


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
    for rank in list(ranks)[:MOST_RANKS]:
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


def read_dumps(dumps: Mapping[int, str], shift_ns: int = 0) -> bytes:
    """Their calls, packed as of rings (ring.py); b"" where nothing comes of it. It waits for at most LIMIT_S.

    That is when the job stands still or a rank has failed, and only where there are dumps.
    Args: shift_ns: from this node's monotonic clock to the one on which calls are told.
    """
    import subprocess

    shift_ns += time.monotonic_ns() - time.time_ns()
    order = json.dumps({"dumps": [*dumps.items()], "shift_ns": shift_ns}) + "\n"
    argv = [sys.executable, "-P", "-m", "launcher.supervise.flight_child"]
    try:
        ran = subprocess.run(
            argv,
            check=False,
            input=order.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        return base64.b64decode(str(json.loads(ran.stdout)["traces"]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
        return b""
