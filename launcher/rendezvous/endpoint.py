"""The endpoint on this node: whether it may host the coordinator, and on which addresses it listens.

Rules, tried in this order:
1. is_host, if given. Otherwise node rank 0 hosts a static job. Any other job is hosted by the node that owns an
   address of the endpoint, found by binding it: aliases, CNAMEs and all network cards work without configuration.
2. The coordinator listens on the addresses of the endpoint, so that nothing more is exposed. It uses the wildcard
   in two cases. A name (not localhost) may be a loopback address here, as Debian does for a host's own name, and
   another address for other nodes. A node that must host (is_host, node rank 0) may be reached by translation
   (containers, NAT), if the endpoint is not an address of its own.
3. If the port is taken already, another agent hosts here, so this one connects to it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from launcher.rendezvous.resolve import Address, address_literal

BACKLOG = 4096
# Heartbeats detect dead peers much sooner; this clears connections whose handshake never ended.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
WILDCARD_6 = Address(socket.AF_INET6, "::")
WILDCARD_4 = Address(socket.AF_INET, "0.0.0.0")  # noqa: S104
# Documentation addresses: the route there is the default route.
_ANYWHERE_4 = Address(socket.AF_INET, "192.0.2.1")
_ANYWHERE_6 = Address(socket.AF_INET6, "2001:db8::1")


class HostVerdict(Enum):
    """The result of trying to host."""

    HOST = "host"
    NOT_OWN = "not ours"  # the endpoint belongs to another node
    TAKEN = "taken"  # this node's, but another process listens there already
    FAILED = "failed"


class Bound(NamedTuple):
    """The outcome of `try_to_host`."""

    verdict: HostVerdict
    listener: Listener | None
    reason: str


class Listener:
    """The listening sockets of a coordinator; reopening them does not lose accepted connections."""

    def __init__(self, addresses: Sequence[Address], port: int) -> None:
        self._addresses = addresses
        self.port = port  # 0 until the first `open`
        self.sockets: list[socket.socket] = []

    def open(self) -> None:
        """Bind and listen on all addresses or none. Raises: OSError."""
        opened: list[socket.socket] = []
        port = self.port
        try:
            for address in self._addresses:
                opened.append(_listen(address, port))
                port = port or int(opened[0].getsockname()[1])
        except OSError:
            for sock in opened:
                sock.close()
            raise
        self.sockets, self.port = opened, port

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets = []


def _listen(address: Address, port: int) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != WILDCARD_6))
        # Accepted sockets inherit these, which saves some system calls for each of thousands of nodes.
        set_options(sock)
        sock.bind(address.sockaddr(port))
        # With SO_REUSEADDR two sockets may be bound; only one of them can listen, so this decides a race.
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def set_options(sock: socket.socket) -> None:
    """Set the options of all connections, at both ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def try_to_host(host: str, addresses: Sequence[Address], port: int, must_host: bool) -> Bound:
    """Listen at the endpoint if it is this node's (or, with `must_host`, in any case)."""
    ours = [address for address in addresses if owns(address)]
    if not ours and not must_host:
        return Bound(HostVerdict.NOT_OWN, None, "")
    is_literal = address_literal(host) is not None
    if not ours or (not is_literal and any(is_loopback(address.host) for address in ours)):
        return _try_listen([WILDCARD_6], port, [WILDCARD_4])
    return _try_listen(ours, port, None)


def _try_listen(addresses: Sequence[Address], port: int, otherwise: Sequence[Address] | None) -> Bound:
    listener = Listener(addresses, port)
    try:
        listener.open()
    except OSError as error:
        if otherwise is not None and error.errno in (
            errno.EAFNOSUPPORT,
            errno.EADDRNOTAVAIL,
            errno.EPROTONOSUPPORT,
        ):
            return _try_listen(otherwise, port, None)
        if error.errno == errno.EADDRINUSE:
            return Bound(HostVerdict.TAKEN, None, f"port {port} is taken by another process on this node")
        return Bound(HostVerdict.FAILED, None, f"cannot listen on port {port}: {error.strerror}")
    return Bound(HostVerdict.HOST, listener, "")


def owns(address: Address) -> bool:
    try:
        with socket.socket(address.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.bind(address.sockaddr(0))
        # Where binding to foreign addresses is allowed (ip_nonlocal_bind), every bind succeeds. But the kernel's
        # source address towards an own address is that very address. Nothing is sent.
        with socket.socket(address.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address.sockaddr(9))
            return is_loopback(address.host) or sock.getsockname()[0] == address.host
    except OSError:
        return False


def find_own_address(host: str, addresses: Sequence[Address]) -> tuple[str, bool]:
    """Find the address at which ranks of other nodes reach this node, the host of this endpoint.

    The endpoint may be a service's address, or a name that others resolve to one, which forwards its own port
    only. So an address of this node is needed. Returns: it, and whether it is certain; if not, the address at
    which other nodes have reached the coordinator is better.
    """
    if address_literal(host) is not None and any(is_loopback(address.host) for address in addresses):
        return host.strip("[]"), True  # all nodes are on this host
    for address in addresses:
        if owns(address) and not is_loopback(address.host):
            return (host if address.scope else address.host), True
    elsewhere = (address for address in addresses if not is_loopback(address.host))
    for address in (*elsewhere, _ANYWHERE_4, _ANYWHERE_6):
        found = _source_towards(address)
        if found and not is_loopback(found):
            return found, False
    return host.strip("[]"), False


def _source_towards(address: Address) -> str:
    """Return the source address of this node towards another one; nothing is sent."""
    try:
        with socket.socket(address.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address.sockaddr(9))
            return plain_address(str(sock.getsockname()[0]))
    except OSError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether this text is a loopback address."""
    plain = plain_address(host)
    return plain == "::1" or plain.startswith("127.")


def plain_address(host: str) -> str:
    """Return an IPv4 address from its IPv6 notation, without scope."""
    host = host.partition("%")[0]
    return host[7:] if host.startswith("::ffff:") and "." in host else host
