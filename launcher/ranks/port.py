"""The master port of an attempt: chosen on rank 0's node and reserved until rank 0 has bound it.

Reserved means bound with SO_REUSEADDR and not listening. The kernel gives the port to no other process, but rank
0's store, which also binds with SO_REUSEADDR, gets it. A port with a listening process cannot be reserved.
"""

from __future__ import annotations

import errno
import os

from bootseer.errors import LaunchError
from bootseer.light_stdlib import socket


class ReservedPort:
    """A socket that is bound but not listening; `close` releases it."""

    def __init__(self, held: socket.socket) -> None:
        self._socket = held
        self.port: int = held.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class NextPort:
    """The port that a node holds for its next attempt as rank 0, if it could hold one."""

    def __init__(self, port_range: tuple[int, int] | None) -> None:
        """Hold a free port, inside `port_range` if given. Raises: LaunchError, OSError."""
        self._range = port_range
        self._held: ReservedPort | None = hold_any(port_range)

    @property
    def number(self) -> int:
        """The port; 0 for none."""
        return self._held.port if self._held is not None else 0

    def take(self, port: int) -> None:
        """Hold this port, which an attempt is about to use. Raises: LaunchError, OSError."""
        if self.number != port:
            self.drop()
            self._held = hold_given(port)

    def renew(self) -> None:
        """Hold another free port instead. Raises: LaunchError, OSError."""
        self.drop()
        self._held = hold_any(self._range)

    def drop(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def hold_any(port_range: tuple[int, int] | None) -> ReservedPort:
    """Reserve a free port, inside `port_range` (both ends included) if given."""
    if port_range is None:
        return ReservedPort(_bind(0, reuse=False))
    low, high = port_range
    count = high - low + 1
    start = int.from_bytes(os.urandom(4), "little") % count
    # First ports without recent use; then also those on which only old connections time out.
    for reuse in (False, True):
        for step in range(count):
            try:
                held = _bind(low + (start + step) % count, reuse=reuse)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                return ReservedPort(held)
    raise LaunchError(f"no free port in --rdzv-conf port_range={low}-{high}: give a wider range")


def hold_given(port: int) -> ReservedPort:
    """Reserve the port that the user gave."""
    try:
        return ReservedPort(_bind(port, reuse=True))
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise LaunchError(f"cannot use port {port} for rank 0: {why}; choose another --master-port") from error


def is_listened_on(port: int) -> bool:
    """Return whether a process listens on `port` here."""
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
    """Return whether a process listens on `port` here, without hindering one that is about to listen."""
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
        # Only after the bind: the kernel must not pick a port that other sockets share.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        bound.close()
        raise
    return bound
