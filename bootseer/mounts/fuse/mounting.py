"""Mounts files as a directory until it is unmounted, or a signal comes.

In: `MountedFiles`, for a writable mount also a `Saver`, and an empty directory. Runs in this process and returns
at the end: after an unmount by another process, SIGTERM, SIGINT or SIGHUP. Saves that are complete by then become
versions before it returns; all other written data is dropped.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from bootseer.linux import processes
from bootseer.log_lines import destination
from bootseer.logs import prepare, sent_to
from bootseer.mounts.fuse.operations import Operations, show
from bootseer.mounts.fuse.protocol import MountedFiles, Saver
from bootseer.mounts.fuse.reading import Reader
from bootseer.mounts.fuse.saving import PendingSaves
from bootseer.mounts.fuse.server import KICK_S, Session, check_directory, check_system
from bootseer.mounts.fuse.spool import Spool
from bootseer.mounts.fuse.writing import WritableOperations
from bootseer.mounts.log import Log

WINDOW_BYTES = 256 << 20  # 2 x 8 units of 16 MiB
SPOOL_BYTES = 1 << 30
SETTLE_S = 30.0
LOOK_S = 0.1  # between checks for signals
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Options(NamedTuple):
    """Options of a mount; a read-only mount ignores those for writes."""

    name: str = "bootseer"  # in the list of mounts
    window_bytes: int = WINDOW_BYTES  # memory for reads and read-ahead
    allow_other: bool = False  # let other users in; needs root or user_allow_other in /etc/fuse.conf
    spool_bytes: int = SPOOL_BYTES  # memory for writes; more goes to the disk
    spool_directory: str = ""  # there; "" for TMPDIR
    settle_s: float | None = SETTLE_S  # a directory without changes for so long is complete; None: never


def mount(
    files: MountedFiles,
    directory: str,
    *,
    read_only: bool = True,
    saver: Saver | None = None,
    options: Options | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount, call `on_ready`, and return when the mount has ended.

    Signals are handled when it is called in the main thread. Without a destination its lines go to
    stderr meanwhile, those of the whole process.
    Raises: ConfigError when nothing can be mounted there or here; StorageError when the mount fails.
    """
    options = options or Options()
    directory = os.path.abspath(directory)
    check_system()
    check_directory(directory)
    tree = show(files)
    reader = Reader(options.window_bytes)
    lock = threading.RLock()
    saves: PendingSaves | None = None
    operations = Operations(tree, reader, lock)
    if not read_only and saver is not None:
        processes.allow_files(1 << 20)  # each file that is being written needs one
        spool = Spool(options.spool_bytes, options.spool_directory or tempfile.gettempdir())
        saves = PendingSaves(tree, saver, lock, files, settle_s=options.settle_s)
        operations = WritableOperations(tree, reader, lock, saves, spool)
    session = Session(
        operations, directory, name=options.name, read_only=saves is None, allow_other=options.allow_other
    )
    with _signals() as signals, sent_to(Log(destination() or _to_stderr)):
        session.start()
        session.is_ready.wait()
        try:
            if session.error is None:
                if saves is not None:
                    saves.start()
                on_ready()
                prepare()
            while not session.join(LOOK_S) and not signals.end_requested:
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
    """The first signal requests the end; one during the last saves ends it at once."""

    def __init__(self) -> None:
        self.end_requested = False
        self.interrupt = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.interrupt:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.end_requested = True


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Handle signals that end the mount during the `with` block, in the main thread."""
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


def _to_stderr(line: str) -> None:
    print(f"bootseer mount: {line}", file=sys.stderr, flush=True)
