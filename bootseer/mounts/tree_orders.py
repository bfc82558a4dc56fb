"""The order that the daemon of a tree gets at its start, by a socket: what it serves, and for whom.

LENGTHS (of the two that follow), the tree's folder, settings (tree_settings.py, JSON); with LENGTHS come three
descriptors: a pipe for one line when the tree can be used, the lock of its folder, its log; and two more where the
starter looks at the index itself: memory with the index object, a pipe for RIGHT when it has stood the check
-> ACCEPTED, at once: from here on the lock is the daemon's, too
"""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import NamedTuple

ACCEPTED = RIGHT = b"+"
MOST_FOLDER_BYTES = 4096
MOST_SETTINGS_BYTES = 8 << 20
SEND_S, RECEIVE_S = 30.0, 30.0  # of an order that has begun
_LENGTHS = struct.Struct("<II")


class Order(NamedTuple):
    """As it came."""

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


def send(connection: socket.socket, order: Order) -> bool:
    """Whether it went out; False when nobody is there any more. Raises: OSError, TimeoutError."""
    folder = os.fsencode(order.folder)
    lengths = _LENGTHS.pack(len(folder), len(order.settings))
    connection.settimeout(SEND_S)
    try:
        # All of the lengths: with the first byte the descriptors have gone.
        socket.send_fds(connection, [lengths], order.descriptors)
        connection.sendall(folder + order.settings)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def was_accepted(connection: socket.socket) -> bool:
    """Of an order that was sent, when its taker has said all or has ended."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == ACCEPTED
    except OSError:
        return False


def receive(connection: socket.socket, most_s: float) -> Order | None:
    """None when there is none within `most_s`, or never will be one."""
    if not select.select([connection], [], [], most_s)[0]:
        return None
    connection.settimeout(RECEIVE_S)
    try:
        begin, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, 5)
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds takes flags, and forgets them (Python 3.11)
        if len(fds) not in (3, 5):
            return None
        folder_bytes, settings_bytes = _LENGTHS.unpack(begin + _read(connection, _LENGTHS.size - len(begin)))
        if folder_bytes > MOST_FOLDER_BYTES or settings_bytes > MOST_SETTINGS_BYTES:
            return None
        folder = os.fsdecode(_read(connection, folder_bytes))
        return Order(folder, _read(connection, settings_bytes), *fds)
    except (OSError, struct.error):
        return None  # whoever gave it has gone in the middle


def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises: OSError."""
    found = bytearray()
    while len(found) < count:
        data = connection.recv(min(count - len(found), 1 << 16))
        if not data:
            raise ConnectionResetError
        found += data
    return bytes(found)
