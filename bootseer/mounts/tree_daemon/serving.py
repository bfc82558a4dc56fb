"""The process of a tree's daemon: its log, its settings, and a `Daemon` that answers requests.

Only this module knows both sides: answers.py uses the daemon, and the daemon knows no request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from bootseer.errors import StorageError
from bootseer.ipc.replies import from_error
from bootseer.linux import processes
from bootseer.logs import send_to
from bootseer.mounts.log import Log
from bootseer.mounts.tree_daemon.answers import RequestHandlers
from bootseer.mounts.tree_daemon.daemon import Daemon
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.mounts.tree_daemon.validation import SuppliedIndex
from bootseer.tuning import current

MAX_DESCRIPTORS = 1 << 14
SWITCH_S = 3e-4  # maximum wait of a thread that answers the kernel for one that unpacks; by default 5 ms


def serve(
    place: TreeDirectory,
    ready: int,
    told: bytes,
    signals: Sequence[signal.Signals],
    vetted: SuppliedIndex | None = None,
) -> int:
    """Run the daemon until its end; return its exit status.

    `ready`: a pipe for one line when it can be used, or cannot. `told`: Settings, as JSON. `signals` end it; they
    are still blocked. `vetted`: the index, if the starter validates it.
    """
    started_s = time.monotonic()
    gc.disable()  # an index is many objects, none of them garbage
    sys.setswitchinterval(SWITCH_S)
    tell = partial(_send_result, ready)
    try:
        settings = msgspec.json.decode(told, type=Settings)
    except msgspec.MsgspecError as error:
        tell(from_error(StorageError(f"the daemon's settings are invalid: {error}")))
        return 1
    send_to(Log(_print))
    processes.allow_files(MAX_DESCRIPTORS)  # each lease needs one
    with asyncio.Runner() as runner:
        daemon = Daemon(place, settings, tell, started_s, vetted)
        return runner.run(daemon.run(signals, RequestHandlers(daemon).answer))


def _send_result(ready: int, said: Mapping[str, Any]) -> None:
    try:
        os.write(ready, msgspec.json.encode(said) + b"\n")
    except OSError:
        pass  # the starter has ended; others may follow
    os.close(ready)


def _print(line: str) -> None:
    try:
        if os.fstat(2).st_size > current().mounts.daemon_log_bytes:
            os.ftruncate(2, 0)
    except OSError:
        pass  # stderr is not a file
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} bootseer tree: {line}", file=sys.stderr, flush=True)
