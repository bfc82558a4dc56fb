"""What the keeper forks when nobody waits any more: copies what the arena has to this node's disk.

A process of its own at the lowest priority, with the arena as it has inherited it: the keeper may give it up
meanwhile. News are JSON lines over a socket. What it has copied when it ends, or is ended, stays.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Set

from bootseer import cache_folder
from bootseer.checkpoint.arena import READY, Arena
from bootseer.checkpoint.disk_copy import DiskCopy, is_free
from bootseer.checkpoint.versions import Pinned
from bootseer.errors import BootseerError
from bootseer.priority import lower

COPY_S = 900.0  # memory is not held for longer
LOOK_BYTES = 256 << 20  # between two looks at what the disk has left
TELL_S = 0.5


def run_copier(
    connection: socket.socket, pinned: Pinned, arena: Arena, most_bytes: int, bad: Set[tuple[int, int]]
) -> None:
    """Copies, tells what came of it, and ends the process.

    Args: most_bytes: for all versions together; bad: units that the copy has, and that are not right there.
    """
    lower()
    try:
        cache = cache_folder.prepare(cache_folder.locate(os.environ, os.geteuid()))
        copy = DiskCopy.make(cache, pinned.digest, pinned.files)
        try:
            _copy(connection, copy, arena, most_bytes, bad)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                copy.remove()
            raise
        why = ""
    except BlockingIOError:
        why = ""  # another keeper does it
    except (OSError, BootseerError) as error:
        why = getattr(error, "strerror", None) or str(error)
    _tell(connection, {"copied": why})
    os._exit(0)


def _copy(
    connection: socket.socket, copy: DiskCopy, arena: Arena, most_bytes: int, bad: Set[tuple[int, int]]
) -> None:
    """Raises: OSError."""
    units = [
        (file, unit)
        for file in range(len(arena.files))
        for unit in arena.units_of(file)
        if arena.state(file, unit) == READY and ((file, unit) in bad or not copy.has(file, unit))
    ]
    sizes = [end - start for start, end in (arena.extent(*each) for each in units)]
    copy.make_room(sum(sizes), most_bytes)
    end_s, told_s = time.monotonic() + COPY_S, 0.0
    done = looked = 0
    for each, size in zip(units, sizes, strict=True):
        if time.monotonic() > end_s:
            raise OSError(f"its disk has not taken it within {COPY_S:g} s")
        if done - looked >= LOOK_BYTES:
            looked = done
            if not is_free(copy.folder, sum(sizes) - done):
                raise OSError(errno.ENOSPC, "its disk becomes full", copy.folder)
        copy.write(*each, arena.view(each[0], *arena.extent(*each)))
        done += size
        if time.monotonic() - told_s > TELL_S:
            told_s = time.monotonic()
            _tell(connection, {"bytes": done, "of_bytes": sum(sizes)})


def _tell(connection: socket.socket, news: dict[str, object]) -> None:
    try:
        connection.sendall(json.dumps(news).encode() + b"\n")
    except OSError:
        os._exit(0)  # the keeper is gone
