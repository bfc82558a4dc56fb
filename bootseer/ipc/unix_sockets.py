"""Unix sockets between processes of one machine: the user at the other end, addresses of any length."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from bootseer.light_typing import NamedTuple

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid: see SO_PEERCRED in unix(7)


class Peer(NamedTuple):
    """The process at the other end, as the kernel saw it when it connected or listened."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end. Raises: OSError."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)


def is_own(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user. Raises: OSError."""
    return peer_of(connection).uid == os.geteuid()


def is_own_or_root(peer: Peer) -> bool:
    """Whether a process belongs to this user or to root."""
    return peer.uid in (0, os.geteuid())


def with_short_address(path: str, call: Callable[[str], None]) -> None:
    """Call with an address of a socket's path; the kernel takes at most 107 bytes. Raises: OSError."""
    directory, name = os.path.split(path)
    fd = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)
