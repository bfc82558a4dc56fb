"""PURE: who may read the dashboard. In: where the server listens, the head of a request. Out: a refusal.

On loopback everybody on the node may read. Elsewhere a request needs the token: as `Authorization: Bearer TOKEN`,
or as the password of HTTP's basic authentication, which browsers ask for. `Host` must be a known name, so that no
foreign name resolves to this server (DNS rebinding), and `Origin`, where a browser sends one, must be the same.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.errors import UsageError
from launcher.base.listen_address import Address, is_ip, split

MAX_CREDENTIALS = 8192  # characters of the header
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Refusal(NamedTuple):
    """The answer to a request that is refused."""

    status: int  # of HTTP
    reason: str


def split_host(header: str) -> str:
    """Return the name in a `Host` header, in lower case, without port and brackets."""
    return split(header.strip())[0].lower().rstrip(".")


class Access:
    """The rules of one server."""

    def __init__(self, address: Address, token: bytes | None, names: Iterable[str] = ()) -> None:
        """Args: token: needed for each request; None: none is. names: further names of this server.

        Raises: UsageError for a server that others can reach and that has no token.
        """
        if token is None and not address.is_loopback:
            raise UsageError(
                f"{address}: other machines can reach this address, so --token-file FILE is required "
                f"(make one: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE)"
            )
        self._token = token
        self._names = {name.lower().rstrip(".") for name in (*_LOCAL_NAMES, address.host, *names)}

    @property
    def needs_token(self) -> bool:
        """Whether each request must carry the token."""
        return self._token is not None

    def check(self, host: str | None, origin: str | None, authorization: str | None) -> Refusal | None:
        """Return why a request is refused, None if it is not. Args: its headers."""
        if host is None or not self._is_known(split_host(host)):
            return Refusal(421, "unknown Host: give --allow-host NAME to use this name")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return Refusal(403, "another site's page may not read this")
        if self._token is not None and not self._is_right(authorization or ""):
            return Refusal(401, "give the token: Authorization: Bearer TOKEN, or as the password in a browser")
        return None

    def _is_known(self, name: str) -> bool:
        # With a token an address of any form is harmless, and Prometheus often scrapes by address.
        return name in self._names or (self._token is not None and is_ip(name))

    def _is_right(self, authorization: str) -> bool:
        scheme, _, given = authorization[:MAX_CREDENTIALS].partition(" ")
        token = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        assert self._token is not None
        return hmac.compare_digest(token, self._token)
