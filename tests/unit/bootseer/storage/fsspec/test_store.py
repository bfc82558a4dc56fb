"""File systems of fsspec that answer wrongly, fail, or do not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest

from bootseer import aio
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.fsspec.store import INSTANCES, FsspecStore
from tests.support import wait_until
from tests.testing.store_suite import pattern, read, runs

DATA = pattern(100_000)


class OddFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """One file, whose reading a test may replace."""

    protocol = "odd"
    answer: ClassVar[Callable[[int, int], bytes]]
    info_: ClassVar[dict[str, Any]] = {}
    made: ClassVar[list[object]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made.append(self)
        self.users = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.users += 1
        assert self.users == 1, "nobody else uses it"
        try:
            return type(self).answer(start or 0, len(DATA) if end is None else end)
        finally:
            self.users -= 1

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(DATA), "mtime": 1.0, **self.info_}


@pytest.fixture
def files() -> Iterator[type[OddFiles]]:
    fsspec.register_implementation("odd", OddFiles, clobber=True)
    OddFiles.answer = staticmethod(lambda start, end: DATA[start:end])  # type: ignore[assignment]
    OddFiles.info_, OddFiles.made = {}, []
    yield OddFiles


def answers(files: type[OddFiles], answer: Callable[[int, int], bytes]) -> None:
    files.answer = staticmethod(answer)  # type: ignore[assignment]


@runs()
async def test_right_answers(files: type[OddFiles]) -> None:
    store = FsspecStore("odd://x")
    found = await store.stat("file.bin")
    assert found.size == len(DATA)
    assert await read(store, "file.bin", 10, 90_000, etag=found.etag) == DATA[10:90_010]


@runs()
async def test_short_answers(files: type[OddFiles]) -> None:
    store = FsspecStore("odd://x")
    answers(files, lambda start, end: DATA[start : min(end, start + 1000)])
    target = memoryview(bytearray(5000))
    with pytest.raises(Unavailable) as caught:
        await store.read_into("file.bin", 10, target)
    assert caught.value.read_bytes == 1000
    assert target[:1000] == DATA[10:1010]
    with pytest.raises(Truncated):
        await read(store, "file.bin", len(DATA) - 10, 5000)


@runs()
async def test_ignored_ranges(files: type[OddFiles]) -> None:
    store = FsspecStore("odd://x")
    answers(files, lambda start, end: DATA)
    with pytest.raises(StorageError, match="ignores ranges"):
        await read(store, "file.bin", 10, 5000)
    with pytest.raises(Truncated):
        await read(store, "file.bin", 10, len(DATA))  # as many bytes as asked for, and not those


@runs()
async def test_a_change_while_it_is_read(files: type[OddFiles]) -> None:
    store = FsspecStore("odd://x")
    before = await store.stat("file.bin")

    def answer(start: int, end: int) -> bytes:
        files.info_ = {"mtime": 2.0}
        return DATA[start:end]

    answers(files, answer)
    with pytest.raises(SourceChanged):
        await read(store, "file.bin", 10, 5000, etag=before.etag)


@pytest.mark.parametrize(
    ("info", "etag"),
    [
        ({"ETag": '"abc"'}, '"abc"'),
        ({"etag": "abc", "mtime": 5}, "abc"),
        ({"generation": 17}, "17"),
        ({"mtime": None}, ""),
    ],
)
@runs()
async def test_versions(files: type[OddFiles], info: dict[str, Any], etag: str) -> None:
    files.info_ = info
    assert (await FsspecStore("odd://x").stat("file.bin")).etag == etag


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (FileNotFoundError("x"), NotFound),
        (PermissionError("x"), PermissionDenied),
        (IsADirectoryError("x"), NotFound),
        (ConnectionResetError("x"), Unavailable),
        (TimeoutError("x"), Unavailable),
        (NotImplementedError(), StorageError),
        (Exception("of a client library"), Unavailable),
        (TypeError("a bug"), StorageError),
    ],
)
@runs()
async def test_errors(files: type[OddFiles], raised: Exception, error: type[BootseerError]) -> None:
    def answer(start: int, end: int) -> bytes:
        raise raised

    answers(files, answer)
    store = FsspecStore("odd://user:word@x")
    with pytest.raises(StorageError) as caught:
        await read(store, "folder/file.bin", 10, 5000)
    assert type(caught.value) is error
    assert "file.bin" in str(caught.value)
    assert "word" not in str(caught.value)
    answers(files, lambda start, end: DATA[start:end])
    assert await read(store, "folder/file.bin", 0, 10) == DATA[:10]


@runs(limit_s=20.0)
async def test_no_answer(files: type[OddFiles]) -> None:
    go = threading.Event()

    def answer(start: int, end: int) -> bytes:
        go.wait(20.0)
        return DATA[start:end]

    answers(files, answer)
    store = FsspecStore("odd://x", timeout_s=0.1)
    target = memoryview(bytearray(b"\xee" * 5000))
    with pytest.raises(StorageTimeout):
        await store.read_into("file.bin", 10, target)
    made = len(files.made)
    go.set()
    await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
    assert target == b"\xee" * 5000
    assert await read(store, "file.bin", 0, 10) == DATA[:10]
    assert len(files.made) == made + 1, "the one that hung is not used again"


@runs()
async def test_each_call_has_a_file_system_of_its_own(files: type[OddFiles]) -> None:
    barrier = threading.Barrier(INSTANCES)

    def answer(start: int, end: int) -> bytes:
        barrier.wait(20.0)
        return DATA[start:end]

    answers(files, answer)
    store = FsspecStore("odd://x")
    results = await asyncio.gather(*[read(store, "file.bin", index, 10) for index in range(4 * INSTANCES)])
    assert results == [DATA[index : index + 10] for index in range(4 * INSTANCES)]
    assert len(files.made) <= INSTANCES


@runs()
async def test_what_fsspec_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nosuchscheme"):
        await FsspecStore("nosuchscheme://host/a").stat("file.bin")
    with pytest.raises(ConfigError):
        await FsspecStore("sftp://user:word@host/a").stat("file.bin")  # needs a package that is not installed
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match="pip install"):
        FsspecStore("odd://x")
