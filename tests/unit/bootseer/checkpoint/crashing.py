"""Stores for tests of writers: one whose process dies at its n-th step, one that fails now and then.

The last call of a process that dies has an effect or not, and no later one has any.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bootseer.errors import Unavailable
from bootseer.storage.protocol import Entry, Stat, Store
from bootseer.storage.staging import StoredFile


class Died(BaseException):
    """As SIGKILL: nobody handles it."""


class CrashingStore:
    """Implements `Store`. `after`: steps that are done before the last one, of which `is_done` says if it is."""

    def __init__(self, inner: Store, after: int, *, is_done: bool = False) -> None:
        self._inner = inner
        self._left = after
        self._is_done = is_done
        self.url = inner.url
        self.features = inner.features
        self.steps = 0

    async def _step(self, call: Any) -> Any:
        self.steps += 1
        if self._left <= 0:
            if self._left == 0 and self._is_done:
                self._left -= 1
                await call
            else:
                call.close()
            self._left -= 1
            raise Died
        self._left -= 1
        return await call

    async def stat(self, path: str) -> Stat:
        return await self._step(self._inner.stat(path))  # type: ignore[no-any-return]

    async def read_into(self, path: str, offset: int, target: memoryview, **more: Any) -> None:
        await self._step(self._inner.read_into(path, offset, target, **more))

    async def list(self, directory: str) -> list[Entry]:
        return await self._step(self._inner.list(directory))  # type: ignore[no-any-return]

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        return await self._step(self._inner.publish(path, data, if_absent=if_absent))  # type: ignore[no-any-return]

    @asynccontextmanager
    async def create(self, path: str, **more: Any) -> AsyncIterator[Any]:
        manager = self._inner.create(path, **more)
        writer = await self._step(manager.__aenter__())
        store = self

        class Writer:
            async def write(self, data: memoryview | bytes) -> None:
                await store._step(writer.write(data))

        try:
            yield Writer()
        except BaseException as error:
            await manager.__aexit__(type(error), error, error.__traceback__)
            raise
        await self._step(manager.__aexit__(None, None, None))

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        await self._step(self._inner.concat(path, parts))

    async def delete(self, path: str) -> None:
        await self._step(self._inner.delete(path))

    async def aclose(self) -> None:
        pass

    def statistics(self) -> dict[str, int]:
        return {}


class StagingStore(CrashingStore):
    """It can store a file before it is published, as HDFS does."""

    async def stage(self, path: str, data: bytes, *, folder: str) -> StoredFile:
        name = f"{folder}/.bootseer-tmp-{self.steps}"
        await self._step(self._inner.publish(name, data))
        store = self

        class File:
            async def publish(self, *, if_absent: bool = False) -> None:
                async def rename() -> None:
                    await store._inner.publish(path, data, if_absent=if_absent)
                    await store._inner.delete(name)

                await store._step(rename())

            async def discard(self) -> None:
                if store._left >= 0:  # a dead process takes nothing away
                    await store._inner.delete(name)

        return File()


class FailingStore(CrashingStore):
    """Its first writers fail; `names` are those of all files that were begun."""

    def __init__(self, inner: Store, failures: int) -> None:
        super().__init__(inner, 1 << 40)
        self.failures = failures
        self.names: list[str] = []

    @asynccontextmanager
    async def create(self, path: str, **more: Any) -> AsyncIterator[Any]:
        self.names.append(path)
        async with super().create(path, **more) as writer:
            yield writer
            if self.failures:
                self.failures -= 1
                raise Unavailable("a server is gone")
