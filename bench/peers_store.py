"""The store of `bench peers`: a folder behind one link, as that of `bench image`, with an address and a rate.

Run as `python -m bench.peers_store DIRECTORY ADDRESS PORT BYTES_PER_S`.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from bench.image_remote import Pipe, Server


class StoreServer(Server):
    """All answers share `bytes_per_s`; each is late by LATENCY_S."""

    def __init__(self, folder: str, bytes_per_s: float) -> None:
        super().__init__(folder)
        self._pipe = Pipe(bytes_per_s)

    async def serve_at(self, address: str, port: int) -> None:
        """Until it is ended."""
        loop = asyncio.get_running_loop()
        with socket.create_server((address, port), backlog=1024) as listener:
            listener.setblocking(False)
            print("ready", flush=True)
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await loop.sock_accept(listener)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    group.create_task(self._connected(connection))


def main(argv: list[str]) -> int:
    """Serves until it is ended."""
    directory, address, port, rate = argv
    asyncio.run(StoreServer(directory, float(rate)).serve_at(address, int(port)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
