"""Limits of connections around aiohttp's protocol: how many there are, and how long one may do nothing.

aiohttp bounds the sizes of heads and bodies, and closes connections that are idle after a request. But it
waits for the first request, the rest of a head and a client that does not read, as long as these take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

MAX_CONNECTIONS = 1536  # of which feed.MAX_WATCHERS may be streams
HEAD_S = 10.0  # from the connection to the end of the first head
ANSWER_S = 60.0  # for an answer that is no stream; and for its rest to be read, and the next head to come


class Connections:
    """All connections of a server. `make` is the factory for `loop.create_server`."""

    def __init__(self, make_inner: Callable[[], asyncio.Protocol]) -> None:
        self._make_inner = make_inner
        self._open: dict[asyncio.BaseTransport, _Guarded] = {}
        self.refused = 0

    def make(self) -> asyncio.Protocol:
        return _Guarded(self, self._make_inner())

    @property
    def count(self) -> int:
        return len(self._open)

    def began(self, transport: asyncio.BaseTransport | None, *, is_stream: bool = False) -> None:
        """Note that a request has come whole. Args: is_stream: its answer may take any time."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None:
            guarded.set_limit(None if is_stream else ANSWER_S)

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that an answer was made."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None:
            guarded.set_limit(ANSWER_S)

    def opened(self, transport: asyncio.Transport, guarded: _Guarded) -> bool:
        """Return whether there is room for a connection."""
        if len(self._open) >= MAX_CONNECTIONS:
            self.refused += 1
            return False
        self._open[transport] = guarded
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)


class _Guarded(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, and ends the connection at its limit."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections, self._inner = connections, inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._connections.opened(self._transport, self):
            self._is_refused = True
            self._transport.abort()
            return
        self.set_limit(HEAD_S)
        self._inner.connection_made(transport)

    def set_limit(self, limit_s: float | None) -> None:
        """End the connection after this time, unless another limit is set before; None: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if limit_s is not None and self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.set_limit(None)
        if self._transport is not None:
            self._connections.closed(self._transport)
        if not self._is_refused:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
