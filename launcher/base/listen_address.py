"""PURE: where a server listens, as users write it."""

from __future__ import annotations

from bootseer.errors import UsageError
from bootseer.light_typing import NamedTuple

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8484


class Address(NamedTuple):
    """Where the server listens."""

    host: str  # without brackets
    port: int  # 0: any free one

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this node can connect."""
        return self.host == "localhost" or _is_loopback_ip(self.host)


def parse_address(text: str) -> Address:
    """Return the address of HOST:PORT, :PORT, PORT, HOST or [IPV6]:PORT; missing parts are the default's.

    Raises: UsageError.
    """
    host, port = split(text.strip())
    if not host and text.startswith(":") and port:
        host = "0.0.0.0"  # noqa: S104  as asked: all addresses
    host = host or DEFAULT_HOST
    if not port:
        return Address(host, DEFAULT_PORT)
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageError(
            f"{text[:80]!r}: {port[:20]!r} is not a port; give HOST:PORT, such as {DEFAULT_HOST}:8484"
        )
    return Address(host, int(port))


def split(text: str) -> tuple[str, str]:
    """Return host and port of a text, "" for a missing one."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") > 1:
        return text, ""  # an IPv6 address alone
    host, colon, port = text.partition(":")
    if not colon and host.isascii() and host.isdecimal():
        return "", host
    return host, port


def is_ip(name: str) -> bool:
    """Return whether a name is an IP address."""
    import ipaddress

    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback_ip(host: str) -> bool:
    import ipaddress

    return is_ip(host) and ipaddress.ip_address(host).is_loopback
