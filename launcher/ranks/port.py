"""The master port of an attempt: chosen on rank 0's node and held until rank 0 has taken it.

Held means bound with SO_REUSEADDR and not listening: nobody else is given the port, while rank 0's store, which
binds with SO_REUSEADDR too, gets it. A port somebody else listens on cannot be held.
"""

from __future__ import annotations

import errno
import os
import socket

from bootseer.errors import LaunchError


class HeldPort:
    """A bound, not listening socket; `close` lets go of it."""

    def __init__(self, held: socket.socket) -> None:
        self._socket = held
        self.port: int = held.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def hold_any(port_range: tuple[int, int] | None) -> HeldPort:
    """A free port, inside `port_range` (both ends included) when given."""
    if port_range is None:
        return HeldPort(_bind(0, reuse=False))
    low, high = port_range
    count = high - low + 1
    start = int.from_bytes(os.urandom(4), "little") % count
    # At first ports that nobody has used of late; then also those on which only old connections time out.
    for reuse in (False, True):
        for step in range(count):
            try:
                held = _bind(low + (start + step) % count, reuse=reuse)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                return HeldPort(held)
    raise LaunchError(f"no free port in --rdzv-conf port_range={low}-{high}: give a wider range")


def hold_given(port: int) -> HeldPort:
    """The port the user gave."""
    try:
        return HeldPort(_bind(port, reuse=True))
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise LaunchError(f"cannot use port {port} for rank 0: {why}; choose another --master-port") from error


def is_listened_on(port: int) -> bool:
    """Whether some process listens on `port` here."""
    try:
        probe = _bind(port, reuse=True)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    try:
        probe.listen(1)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    finally:
        probe.close()
    return False


def is_served(port: int) -> bool:
    """Whether some process listens on `port` here. Nobody who is about to listen is kept from it."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            _bind_family(family, address, port, reuse=True).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False


def _bind(port: int, *, reuse: bool) -> socket.socket:
    try:
        return _bind_family(socket.AF_INET6, "::", port, reuse)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _bind_family(socket.AF_INET, "", port, reuse)


def _bind_family(family: socket.AddressFamily, address: str, port: int, reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        # Only after the bind: a port picked by the kernel must not be one that others share.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        bound.close()
        raise
    return bound
