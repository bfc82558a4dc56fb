"""The process that copies the arena to this node's disk once no rank waits any more.

The checkpoint service forks it at the lowest priority, with the arena inherited: the service may release the arena
meanwhile. Progress is sent as JSON lines over a socket. Copied units stay when it ends or is ended.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Set

from bootseer import cache_folder
from bootseer.checkpoint.io.arena import READY, Arena
from bootseer.checkpoint.service.disk_copy import DiskCopy, is_free
from bootseer.checkpoint.service.process import WRITER_DIED, Answers, Child, Fork, end_child
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.errors import BootseerError
from bootseer.ipc.framing import encode
from bootseer.linux.priority import lower
from bootseer.logs import get_logger

_log = get_logger(__name__)

COPY_S = 900.0  # memory is not held for longer
CHECK_BYTES = 256 << 20  # between two checks of the disk's free space
REPORT_S = 0.5
NOT_KEPT = "the checkpoint is not kept on this node's disk"


class Copier:
    """The service's side: at most one process at a time, whose news bootrun gets. Runs on the service's loop."""

    def __init__(
        self, selector: selectors.BaseSelector, fork: Fork, answers: Answers, kept: Callable[[], object]
    ) -> None:
        """Args: kept: called when all of a checkpoint is on the disk."""
        self._selector = selector
        self._fork = fork
        self._answers = answers
        self._kept = kept
        self._child: Child | None = None
        self._has_outcome = False  # of this process

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self, pinned: Pinned, arena: Arena, max_bytes: int, bad: Set[tuple[int, int]]) -> None:
        """Start to copy. Args: as `run_copier`."""
        self._has_outcome = False
        try:
            self._child = self._fork(lambda connection: run_copier(connection, pinned, arena, max_bytes, bad))
        except OSError as error:
            _log.info("%s: cannot start a process to write it: %s", NOT_KEPT, error.strerror)
            return
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self._receive)

    def stop(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            end_child(child, self._selector)

    def _receive(self) -> None:
        assert self._child is not None
        lines = self._child.lines.receive_ready()
        for news in lines or ():
            if "copied" in news:
                self._conclude(str(news["copied"]))
            else:
                self._answers.send("copying", bytes=news["bytes"], of_bytes=news["of_bytes"])
        if lines is None:
            if not self._has_outcome:
                self._conclude(WRITER_DIED)
            self.stop()

    def _conclude(self, why: str) -> None:
        self._has_outcome = True
        if why:
            _log.info("%s: %s", NOT_KEPT, why)
        else:
            self._kept()
        self._answers.send("copied", why=why)


def run_copier(
    connection: socket.socket, pinned: Pinned, arena: Arena, max_bytes: int, bad: Set[tuple[int, int]]
) -> None:
    """Copy, report the outcome, and end the process.

    Args: max_bytes: for all versions together; bad: units whose copy on the disk is damaged.
    """
    lower()
    try:
        cache = cache_folder.prepare(cache_folder.locate(os.environ, os.geteuid()))
        copy = DiskCopy.make(cache, pinned.digest, pinned.files)
        try:
            _copy(connection, copy, arena, max_bytes, bad)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                copy.remove()
            raise
        why = ""
    except BlockingIOError:
        why = ""  # another service does it
    except (OSError, BootseerError) as error:
        why = getattr(error, "strerror", None) or str(error)
    _tell(connection, {"copied": why})
    os._exit(0)


def _copy(
    connection: socket.socket, copy: DiskCopy, arena: Arena, max_bytes: int, bad: Set[tuple[int, int]]
) -> None:
    """Copy all missing and damaged units. Raises: OSError."""
    units = [
        (file, unit)
        for file in range(len(arena.files))
        for unit in arena.units_of(file)
        if arena.state(file, unit) == READY and ((file, unit) in bad or not copy.has(file, unit))
    ]
    sizes = [end - start for start, end in (arena.extent(*each) for each in units)]
    copy.make_room(sum(sizes), max_bytes)
    end_s, reported_s = time.monotonic() + COPY_S, 0.0
    done = looked = 0
    for each, size in zip(units, sizes, strict=True):
        if time.monotonic() > end_s:
            raise OSError(f"the disk was too slow: not copied within {COPY_S:g} s")
        if done - looked >= CHECK_BYTES:
            looked = done
            if not is_free(copy.folder, sum(sizes) - done):
                raise OSError(errno.ENOSPC, "the disk is nearly full", copy.folder)
        copy.write(*each, arena.view(each[0], *arena.extent(*each)))
        done += size
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            _tell(connection, {"bytes": done, "of_bytes": sum(sizes)})


def _tell(connection: socket.socket, news: dict[str, object]) -> None:
    try:
        connection.sendall(encode(news))
    except OSError:
        os._exit(0)  # the service is gone
