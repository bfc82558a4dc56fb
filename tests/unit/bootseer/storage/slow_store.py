"""A store for reading whose reads take (virtual) time and bring bytes bit by bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from bootseer.errors import NotFound, Truncated
from bootseer.storage.protocol import Entry, Features, Stat, StoreWriter

STEPS = 4  # in which a read's bytes come


def content(name: str, size: int) -> bytes:
    """What a file of that name has in it."""
    return random.Random(name).randbytes(size)


class SlowStore:
    """Files of `content`; a read takes `latency_s` and then `length / rate`."""

    url = "slow://"

    def __init__(
        self, sizes: dict[str, int], *, latency_s: float = 0.01, rate: float = 1e6, has_replicas: bool = True
    ) -> None:
        self.features = Features(creates_if_absent=False, concatenates=False, has_replicas=has_replicas)
        self.files = {name: content(name, size) for name, size in sizes.items()}
        self.latency_s, self.rate = latency_s, rate

    async def stat(self, path: str) -> Stat:
        return Stat(len(self._open(path)), path)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        data = self._open(path)
        if offset + len(target) > len(data):
            raise Truncated(f"{path} has {len(data)} bytes")
        await asyncio.sleep(self.latency_s)
        step = -(-len(target) // STEPS)
        for done in range(0, len(target), step):
            await asyncio.sleep(min(step, len(target) - done) / self.rate)
            end = min(done + step, len(target))
            target[done:end] = data[offset + done : offset + end]

    def _open(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFound(f"no {path}")
        return self.files[path]

    async def list(self, directory: str) -> list[Entry]:
        raise NotImplementedError

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        raise NotImplementedError

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        raise NotImplementedError

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        raise NotImplementedError

    async def delete(self, path: str) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass

    def statistics(self) -> dict[str, int]:
        return {}
