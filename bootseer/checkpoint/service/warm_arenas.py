"""Checkpoints that `bootseer warm` holds in a node's memory: offered by its service, taken over by a job's.

In: a version by its digest, names and sizes of its files. Out: descriptors of sealed memory that has all of it.
They are passed over the arena's socket, between processes of one user; the memory outlives the service that
created it. A file in the user's private runtime directory gives the address, as each job has a temporary directory
of its own. An invalid offer is treated as none.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bootseer.checkpoint.format.mapping import map_range
from bootseer.checkpoint.io.arena import F_SEAL_FUTURE_WRITE, READY, HeldMemory
from bootseer.checkpoint.io.arena_source import ArenaConnection
from bootseer.checkpoint.io.source import SourceFile
from bootseer.errors import BootseerError
from bootseer.linux.files import replace_file
from bootseer.mounts.tree_daemon.places import locate, prepare
from bootseer.trust.owned_files import NotOwnedError, read_owned

DIRECTORY = "arenas"  # in the runtime directory: a file per version with the address of a socket
MAX_ADDRESS_BYTES = 4096
LIMIT_S = 2.0  # a service that does not answer is skipped
_SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def offer(digest: str, address: str, environ: Mapping[str, str]) -> None:
    """Offer a version that the service at this address holds. Raises: ConfigError, StorageError, OSError."""
    directory = os.path.join(prepare(locate(environ)), DIRECTORY)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    replace_file(os.path.join(directory, digest), os.fsencode(address))


def withdraw(digest: str, address: str, environ: Mapping[str, str]) -> None:
    with suppress(BootseerError, OSError):
        if _find(digest, environ) == address:
            os.unlink(os.path.join(locate(environ), DIRECTORY, digest))


def take(digest: str, files: Sequence[SourceFile], environ: Mapping[str, str]) -> dict[str, HeldMemory]:
    """Return the memory of all files, by path; empty without an offer. Notify the service that offered them."""
    with suppress(BootseerError, OSError, ValueError, KeyError, TypeError):
        address = _find(digest, environ)
        if address:
            return _take(address, digest, files)
    return {}


def _find(digest: str, environ: Mapping[str, str]) -> str:
    path = os.path.join(locate(environ), DIRECTORY, digest)
    try:
        data, _ = read_owned(path, max_bytes=MAX_ADDRESS_BYTES)
    except (OSError, NotOwnedError):
        return ""
    return os.fsdecode(data)


def _take(address: str, digest: str, files: Sequence[SourceFile]) -> dict[str, HeldMemory]:
    service = ArenaConnection(address, digest, limit_s=LIMIT_S)
    fds: list[int] = []
    try:
        header = service.header
        wanted = [(file.path, file.size) for file in files]
        if header["why"] or [(path, size) for path, size, _ in header["files"]] != wanted:
            return {}
        units = sum(-(-size // length) for _, size, length in header["files"])
        states = bytes(map_range(service.states_fd, 0, units, is_writable=False))
        if states != bytes([READY]) * units:
            return {}
        for number, file in enumerate(files):
            fds.append(service.open(number))
            sealed = fcntl.fcntl(fds[-1], fcntl.F_GET_SEALS)
            if sealed & _SEALS != _SEALS or os.fstat(fds[-1]).st_size != file.size:
                return {}
        found = {
            file.path: HeldMemory(fd, map_range(fd, 0, file.size, is_writable=False).toreadonly())
            for file, fd in zip(files, fds, strict=True)
        }
        service.tell({"do": "taken"})
        fds = []
        return found
    finally:
        service.close()
        for fd in fds:
            os.close(fd)
