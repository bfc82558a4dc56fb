"""The order that the daemon of a tree receives at its start, by a socket: the tree and its settings.

LENGTHS (of the two that follow), the tree's directory, settings (settings.py, JSON). Three descriptors are
sent with LENGTHS: a pipe for one line when the tree can be used, the lock of its directory, its log. Two more
follow if the starter itself validates the index: memory with the index object, a pipe for RIGHT once it is valid.
-> ACCEPTED, at once: from then on the daemon has the lock, too
"""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import NamedTuple

ACCEPTED = RIGHT = b"+"
MAX_DIRECTORY_BYTES = 4096
MAX_SETTINGS_BYTES = 8 << 20
SEND_S, RECEIVE_S = 30.0, 30.0  # of an order that has begun
_LENGTHS = struct.Struct("<II")


class DaemonOrder(NamedTuple):
    folder: str
    settings: bytes
    ready: int  # descriptors
    lock: int
    log: int
    vetted_index: int = -1  # both or none
    verdict: int = -1

    @property
    def descriptors(self) -> list[int]:
        more = [self.vetted_index, self.verdict]
        return [self.ready, self.lock, self.log, *(more if self.vetted_index >= 0 else ())]


def send(connection: socket.socket, order: DaemonOrder) -> bool:
    """Send an order; return False when the receiver has ended. Raises: OSError, TimeoutError."""
    directory = os.fsencode(order.folder)
    lengths = _LENGTHS.pack(len(directory), len(order.settings))
    connection.settimeout(SEND_S)
    try:
        # All of the lengths: the descriptors go with the first byte.
        socket.send_fds(connection, [lengths], order.descriptors)
        connection.sendall(directory + order.settings)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def was_accepted(connection: socket.socket) -> bool:
    """Return whether a sent order was accepted, once its receiver has answered or ended."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == ACCEPTED
    except OSError:
        return False


def receive(connection: socket.socket, max_s: float) -> DaemonOrder | None:
    """Receive an order; return None when there is none within `max_s`, or never will be one."""
    if not select.select([connection], [], [], max_s)[0]:
        return None
    connection.settimeout(RECEIVE_S)
    try:
        begin, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, 5)
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds takes flags, and forgets them (Python 3.11)
        if len(fds) not in (3, 5):
            return None
        directory_bytes, settings_bytes = _LENGTHS.unpack(begin + _read(connection, _LENGTHS.size - len(begin)))
        if directory_bytes > MAX_DIRECTORY_BYTES or settings_bytes > MAX_SETTINGS_BYTES:
            return None
        directory = os.fsdecode(_read(connection, directory_bytes))
        return DaemonOrder(directory, _read(connection, settings_bytes), *fds)
    except (OSError, struct.error):
        return None  # its sender has ended in the middle


def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes. Raises: OSError."""
    found = bytearray()
    while len(found) < count:
        data = connection.recv(min(count - len(found), 1 << 16))
        if not data:
            raise ConnectionResetError
        found += data
    return bytes(found)
