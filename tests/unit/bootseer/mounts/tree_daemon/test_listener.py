"""The socket of a tree's daemon: a client of which the kernel reports no user costs only its own connection."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bootseer.ipc.client import Client
from bootseer.ipc.unix_sockets import Peer, peer_of
from bootseer.mounts.tree_daemon import listener as module
from bootseer.mounts.tree_daemon.listener import Listener


def test_an_unknown_client_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failures = str(tmp_path / "s"), [OSError(errno.ENOTCONN, "Transport endpoint is not connected")]

    def peer(connection: socket.socket) -> Peer:
        if failures:
            raise failures.pop()
        return peer_of(connection)

    async def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        return {"got": request["do"]}

    def ask() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as unknown:
            unknown.settimeout(20)
            unknown.connect(path)
            assert unknown.recv(1) == b""
        client = Client.connect(path)
        assert client is not None
        with client:
            return client.ask("ping")

    async def run() -> dict[str, Any]:
        listener = Listener(path, answer)
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(listener.accept(group))
            try:
                return await asyncio.to_thread(ask)
            finally:
                accepting.cancel()
                await listener.finish(20)

    monkeypatch.setattr(module, "peer_of", peer)
    assert asyncio.run(run()) == {"got": "ping"}
