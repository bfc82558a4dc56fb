"""Shows files as a folder until it is unmounted, or a signal comes.

In: `MountedFiles`, for a mount that can be written to also a `Saver`, and an empty folder. Runs in this process
and returns at the end: after an unmount from outside, SIGTERM, SIGINT or SIGHUP. Saves that are complete by then
are made versions before it returns; nothing else is ever seen of what was written.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from bootseer.mounts.fuse import KICK_S, Session, check_folder, check_system
from bootseer.mounts.log import Log
from bootseer.mounts.operations import Operations, show
from bootseer.mounts.protocol import MountedFiles, Saver
from bootseer.mounts.reading import Reader
from bootseer.mounts.saving import Saves
from bootseer.mounts.spool import Spool
from bootseer.mounts.writing import WritableOperations

WINDOW_BYTES = 256 << 20  # 2 x 8 units of 16 MiB
SPOOL_BYTES = 1 << 30
SETTLE_S = 30.0
LOOK_S = 0.1  # for signals
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Options(NamedTuple):
    """How to mount; what a mount that only reads does not need is ignored there."""

    name: str = "bootseer"  # in the list of mounts
    window_bytes: int = WINDOW_BYTES  # memory for what is read, and read ahead
    allow_other: bool = False  # let other users in; needs root or user_allow_other in /etc/fuse.conf
    spool_bytes: int = SPOOL_BYTES  # memory for what is written; more goes to the disk
    spool_folder: str = ""  # there; "" for TMPDIR
    settle_s: float | None = SETTLE_S  # a folder in which nothing changes for so long is complete; None: never


def mount(
    files: MountedFiles,
    folder: str,
    *,
    read_only: bool = True,
    saver: Saver | None = None,
    options: Options | None = None,
    on_ready: Callable[[], None] = lambda: None,
    log: Callable[[str], None] | None = None,
) -> None:
    """Mounts, calls `on_ready`, and returns when the mount has ended.

    Signals are handled when it is called in the main thread. `log` gets lines; by default they go to stderr.
    Raises: ConfigError when nothing can be mounted there or here; StorageError when the mount fails.
    """
    options = options or Options()
    folder = os.path.abspath(folder)
    check_system()
    check_folder(folder)
    lines = Log(log or _to_stderr)
    tree = show(files)
    reader = Reader(options.window_bytes)
    lock = threading.RLock()
    saves: Saves | None = None
    operations = Operations(tree, reader, lines, lock)
    if not read_only and saver is not None:
        _allow_many_files()
        spool = Spool(options.spool_bytes, options.spool_folder or tempfile.gettempdir())
        saves = Saves(tree, saver, lock, files, settle_s=options.settle_s, log=lines)
        operations = WritableOperations(tree, reader, lines, lock, saves, spool)
    session = Session(
        operations, folder, name=options.name, read_only=saves is None, allow_other=options.allow_other
    )
    with _signals() as signals:
        session.start()
        session.is_ready.wait()
        try:
            if session.error is None:
                if saves is not None:
                    saves.start()
                on_ready()
            while not session.join(LOOK_S) and not signals.are_wanted:
                pass
        finally:
            reader.stop()
            while not session.join(KICK_S):
                session.stop()
        if session.error is not None:
            raise session.error
        if saves is not None:
            signals.interrupt = True
            saves.finish()


class _Signals:
    """The first signal asks for the end; one that comes while saves are finished ends it at once."""

    def __init__(self) -> None:
        self.are_wanted = False
        self.interrupt = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.interrupt:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.are_wanted = True


@contextmanager
def _signals() -> Iterator[_Signals]:
    """In the main thread, signals that end the mount, as long as the block lasts."""
    found = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before: dict[int, Any] = {number: signal.signal(number, found.on_signal) for number in SIGNALS}
    before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_many_files() -> None:
    """Each file that is being written is a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _to_stderr(line: str) -> None:
    print(f"bootseer mount: {line}", file=sys.stderr, flush=True)
