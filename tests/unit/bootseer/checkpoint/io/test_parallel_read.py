"""Chunks read by several threads into pages that others make."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bootseer.checkpoint.io import local_source, parallel_read
from bootseer.checkpoint.io.local_source import ALONE_BYTES, LocalSource, open_local
from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.io.parallel_read import read_all
from bootseer.checkpoint.io.populate import make_pages
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.opening import open_source

MIB = 1 << 20


@pytest.fixture
def chunks() -> list[Request]:
    """Enough for threads that make pages."""
    memory = allocate(parallel_read.MIN_BYTES)
    return [Request("x", at, memory[at : at + MIB]) for at in range(0, len(memory), MIB)]


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]


@pytest.mark.parametrize("makers", ["make", "cannot", "refused", "none"])
def test_every_chunk_is_read_once(makers: str, chunks: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    if makers == "cannot":
        monkeypatch.setattr(parallel_read, "make_pages", lambda _, is_huge: False)
    if makers == "refused":

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    if makers == "none":
        chunks = chunks[:3]
    read: list[int] = []
    read_all(chunks, lambda chunk: read.append(chunk.offset))
    assert sorted(read) == [chunk.offset for chunk in chunks]
    assert names() == []


def test_nothing_to_read() -> None:
    read_all([], lambda _: pytest.fail("there is nothing"))


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_the_first_error_ends_all(error: BaseException, chunks: list[Request]) -> None:
    def fail(chunk: Request) -> None:
        if chunk.offset == 2 * MIB:
            raise error

    with pytest.raises(type(error)):
        read_all(chunks, fail)
    assert names() == []


def test_makers_that_fail_leave_the_pages_to_the_reads(
    chunks: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def make(view: memoryview, *, is_huge: bool) -> bool:
        asked.append(len(view))
        return len(asked) < 3

    monkeypatch.setattr(parallel_read, "make_pages", make)
    read: list[int] = []
    read_all(chunks, lambda chunk: read.append(chunk.offset))
    assert len(read) == len(chunks)
    assert len(asked) <= 3 + parallel_read.MAKERS


def resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def test_pages_are_made_and_keep_what_is_in_them() -> None:
    view = allocate(64 * MIB)
    view[5] = 7
    before = resident_kib()
    assert make_pages(view[1:-1])
    assert resident_kib() - before > 48 << 10
    assert view[5] == 7 and view[4] == 0
    assert make_pages(view[1:5]), "less than a page"
    assert make_pages(view, is_huge=False), "small ones, of what is not there yet"


# ---- who reads this way --------------------------------------------------------------------------------------


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "model"
    with path.open("wb") as file:
        file.truncate(ALONE_BYTES + MIB)
    monkeypatch.setattr(local_source, "_is_warm", lambda *_: False)
    monkeypatch.setattr(local_source, "populate", lambda *_: True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return path


def is_mapped(source: object, length: int = ALONE_BYTES) -> bool:
    assert isinstance(source, LocalSource)
    view = source.map("model", 0, length)
    return view is not None


def test_a_process_that_is_alone_reads_a_cold_file_into_memory_of_its_own(cold: Path) -> None:
    with open_source(cold) as opened:
        assert not is_mapped(opened.source)
        assert is_mapped(opened.source, ALONE_BYTES - 1), "too little to pay"


@pytest.mark.parametrize(("ranks", "mapped"), [("", False), ("1", False), ("2", True), ("8", True)])
def test_ranks_of_one_node_share_what_is_read(
    ranks: str, mapped: bool, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert is_mapped(open_local(str(cold))) == mapped


def test_what_is_warm_is_mapped(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_source, "_is_warm", lambda *_: True)
    assert is_mapped(open_local(str(cold)))


def test_what_memory_has_no_room_for_is_mapped(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_local(str(cold))
    memory = local_source.read_memory()
    monkeypatch.setattr(local_source, "read_memory", lambda: memory._replace(free_bytes=ALONE_BYTES // 3 * 5))
    assert [is_mapped(source), is_mapped(source)] == [False, True], "the second one is too much"
