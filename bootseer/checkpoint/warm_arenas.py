"""Checkpoints that `bootseer warm` holds in a node's memory: offered by its keeper, taken over by that of a job.

In: a version by its digest, names and sizes of its files. Out: descriptors of sealed memory that has all of it.
They are passed over the socket at which ranks find an arena, between processes of one user; the memory stays when
the keeper that made it has gone. Where to ask is a file in the user's private runtime folder, as jobs have
temporary folders of their own. Whatever is not as it should be is as if nothing had been offered.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bootseer.checkpoint.arena import F_SEAL_FUTURE_WRITE, READY, Held
from bootseer.checkpoint.arena_client import KeeperConnection
from bootseer.checkpoint.mapping import map_range
from bootseer.checkpoint.source import SourceFile
from bootseer.errors import BootseerError
from bootseer.mounts.tree_places import locate, prepare
from bootseer.trust.owned_files import NotOwnedError, read_owned

FOLDER = "arenas"  # in the runtime folder: a file for each version, which says at which socket it is to be had
MOST_ADDRESS_BYTES = 4096
LIMIT_S = 2.0  # a keeper that does not answer is passed over
_SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def offer(digest: str, address: str, environ: Mapping[str, str]) -> None:
    """Says that the keeper at this address holds all of a version. Raises: ConfigError, StorageError, OSError."""
    folder = os.path.join(prepare(locate(environ)), FOLDER)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    temporary = os.path.join(folder, f".{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(os.fsencode(address))
    os.rename(temporary, os.path.join(folder, digest))


def withdraw(digest: str, address: str, environ: Mapping[str, str]) -> None:
    """It holds it no more."""
    with suppress(BootseerError, OSError):
        if _find(digest, environ) == address:
            os.unlink(os.path.join(locate(environ), FOLDER, digest))


def take(digest: str, files: Sequence[SourceFile], environ: Mapping[str, str]) -> dict[str, Held]:
    """The memory of all files, by path; empty where nobody offers them. Who offered them is told."""
    with suppress(BootseerError, OSError, ValueError, KeyError, TypeError):
        address = _find(digest, environ)
        if address:
            return _take(address, digest, files)
    return {}


def _find(digest: str, environ: Mapping[str, str]) -> str:
    path = os.path.join(locate(environ), FOLDER, digest)
    try:
        data, _ = read_owned(path, most_bytes=MOST_ADDRESS_BYTES)
    except (OSError, NotOwnedError):
        return ""
    return os.fsdecode(data)


def _take(address: str, digest: str, files: Sequence[SourceFile]) -> dict[str, Held]:
    keeper = KeeperConnection(address, digest, limit_s=LIMIT_S)
    fds: list[int] = []
    try:
        header = keeper.header
        wanted = [(file.path, file.size) for file in files]
        if header["why"] or [(path, size) for path, size, _ in header["files"]] != wanted:
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
