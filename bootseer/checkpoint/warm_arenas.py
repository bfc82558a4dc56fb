"""Checkpoints that `bootseer warm` holds in a node's memory: offered by its keeper, taken over by that of a job.

In: a version by its digest, names and sizes of its files. Out: descriptors of sealed memory that has all of it.
They are passed over the socket at which ranks find an arena, between processes of one user; the memory stays when
the keeper that made it has gone. Whatever is not as it should be is as if nothing had been offered.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress

from bootseer.checkpoint.arena import F_SEAL_FUTURE_WRITE, READY, Held
from bootseer.checkpoint.arena_client import KeeperConnection
from bootseer.checkpoint.arena_server import SOCKET_NAME
from bootseer.checkpoint.keeper_process import FOLDER, folder_base
from bootseer.checkpoint.mapping import map_range
from bootseer.checkpoint.source import SourceFile

OFFER = "offer-"  # and the digest: a file in the folder of a keeper that offers what it holds
LIMIT_S = 2.0  # a keeper that does not answer is passed over
_SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def offer(folder: str, digest: str) -> None:
    """Says in a keeper's own folder that it holds all of this version, for whoever wants it. Raises: OSError."""
    fd = os.open(os.path.join(folder, OFFER + digest), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(fd)


def take(digest: str, files: Sequence[SourceFile], own_folder: str) -> dict[str, Held]:
    """The memory of all files, by path; empty where nobody offers them. Who offered them is told.

    Args: own_folder: of the keeper that asks.
    """
    for folder in _offering(digest, own_folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = _take(os.path.join(folder, SOCKET_NAME), digest, files)
            if found:
                return found
    return {}


def _offering(digest: str, own_folder: str) -> Iterator[str]:
    base = folder_base(tempfile.gettempdir())
    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if not entry.name.startswith(FOLDER) or entry.path == own_folder:
                continue
            with suppress(OSError):
                is_ours = entry.is_dir(follow_symlinks=False)
                is_ours = is_ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                if is_ours and os.path.isfile(os.path.join(entry.path, OFFER + digest)):
                    yield entry.path


def _take(address: str, digest: str, files: Sequence[SourceFile]) -> dict[str, Held]:
    keeper = KeeperConnection(address, digest, limit_s=LIMIT_S)
    fds: list[int] = []
    try:
        header = keeper.header
        if header["why"] or [(path, size) for path, size, _ in header["files"]] != [
            (f.path, f.size) for f in files
        ]:
            return {}
        units = sum(-(-size // length) for _, size, length in header["files"])
        states = bytes(map_range(keeper.states_fd, 0, units, is_writable=False))
        if states != bytes([READY]) * units:
            return {}
        for number, file in enumerate(files):
            fds.append(keeper.open(number))
            sealed = fcntl.fcntl(fds[-1], fcntl.F_GET_SEALS)
            if sealed & _SEALS != _SEALS or os.fstat(fds[-1]).st_size != file.size:
                return {}
        found = {
            file.path: Held(fd, map_range(fd, 0, file.size, is_writable=False).toreadonly())
            for file, fd in zip(files, fds, strict=True)
        }
        keeper.tell({"do": "taken"})
        fds = []
        return found
    finally:
        keeper.close()
        for fd in fds:
            os.close(fd)
