"""Faulty peers: a real server that sends wrong data, hangs, stalls, drips, or breaks off.

Run as `python -m tests.testing.faulty_peer FAULT FILE [options of bootseer.peers.serve]`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from enum import Enum

from bootseer.peers import serve
from bootseer.peers.server import Connection, PeerServer
from bootseer.peers.spool import SpooledSpan

DRIP_BYTES, DRIP_S = 1000, 0.02


class PeerFault(Enum):
    """The fault of a peer, in each answer."""

    NONE = "none"
    LIES = "lies"  # one bit of each slice is wrong
    SILENT = "silent"  # accepts connections and sends nothing
    STALLS = "stalls"  # sends the head of the answer, but no bytes
    DRIPS = "drips"  # 50 kB/s
    BREAKS = "breaks"  # the connection ends after half of a slice


class FaultyPeer(PeerServer):
    """A server with `fault`, which can be changed at any time."""

    fault = PeerFault.NONE

    async def _connected(self, connection: Connection) -> None:
        if self.fault is PeerFault.SILENT:
            await asyncio.Event().wait()
        await super()._connected(connection)

    async def _send_slice(self, connection: Connection, kept: SpooledSpan, at: int, count: int) -> None:
        if self.fault is PeerFault.NONE:
            await super()._send_slice(connection, kept, at, count)
            return
        loop = asyncio.get_running_loop()
        data = bytearray(os.pread(self._spool.fd, count, self._spool.offset(kept, at)))
        match self.fault:
            case PeerFault.LIES:
                data[count // 2] ^= 1
                await loop.sock_sendall(connection.sock, data)
            case PeerFault.BREAKS:
                await loop.sock_sendall(connection.sock, data[: count // 2])
                raise ConnectionResetError("a fault")
            case PeerFault.DRIPS:
                for place in range(0, count, DRIP_BYTES):
                    await loop.sock_sendall(connection.sock, data[place : place + DRIP_BYTES])
                    await asyncio.sleep(DRIP_S)
            case _:
                await asyncio.Event().wait()


def main(argv: list[str]) -> int:
    """Run a faulty peer and return the exit status."""
    kind = type("Faulty", (FaultyPeer,), {"fault": PeerFault(argv[0])})
    return serve.main(argv[1:], kind)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
