"""Chunks in bounded memory: loaded once, many at once, never wrong."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from bootseer.errors import DigestMismatch
from bootseer.mounts.fuse.chunks import Chunks, Range
from bootseer.mounts.fuse.protocol import MountedFile
from tests.support import wait_until

KIB = 1 << 10
SIZE = 64 * KIB  # the smallest buffer, so that room is counted exactly


class Files:
    """Bytes that tell their place; reads wait while the gate is closed."""

    version = ""

    def __init__(self) -> None:
        self.files = {"a": MountedFile(1 << 30), "b": MountedFile(1 << 30)}
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[str, int]] = []
        self.bad: set[int] = set()

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self.asked.append((path, offset))
        self.gate.wait()
        target[:] = b"?" * len(target)
        if offset in self.bad:
            raise DigestMismatch(f"{path} at {offset}")
        target[:] = expected(path, offset, len(target))


def expected(path: str, offset: int, length: int) -> bytes:
    return bytes([(offset // SIZE * 7 + ord(path[0])) % 251]) * length


@pytest.fixture
def files() -> Iterator[Files]:
    found = Files()
    yield found
    found.gate.set()


@pytest.fixture
def chunks() -> Iterator[Chunks]:
    found = Chunks(8 * SIZE)
    yield found
    found.stop()
    for thread in found._threads:
        thread.join(5)


def at(files: Files, index: int, path: str = "a") -> Range:
    return Range(files, path, index * SIZE, SIZE)


def read(chunks: Chunks, span: Range, *, is_kept: bool = True) -> bytes:
    target = (ctypes.c_char * span.length)()
    chunk = chunks.want(span, is_kept=is_kept)
    try:
        chunks.wait(chunk)
        chunk.copy_to(ctypes.addressof(target), span.offset, span.end)
    finally:
        chunks.release(chunk)
    return bytes(target)


def test_each_chunk_is_loaded_once(chunks: Chunks, files: Files) -> None:
    for _ in range(3):
        for index in range(4):
            assert read(chunks, at(files, index)) == expected("a", index * SIZE, SIZE)
    assert len(files.asked) == 4


def test_readers_that_want_the_same_share_one_load(chunks: Chunks, files: Files) -> None:
    files.gate.clear()
    got: list[bytes] = []
    readers = [threading.Thread(target=lambda: got.append(read(chunks, at(files, 1)))) for _ in range(20)]
    for reader in readers:
        reader.start()
    wait_until(lambda: files.asked)
    files.gate.set()
    for reader in readers:
        reader.join()
    assert got == [expected("a", SIZE, SIZE)] * 20
    assert len(files.asked) == 1


def test_what_is_not_kept_goes_with_its_reader(chunks: Chunks, files: Files) -> None:
    for _ in range(2):
        read(chunks, at(files, 0), is_kept=False)
    assert len(files.asked) == 2
    assert chunks.held_bytes == SIZE, "its memory is used again"


def test_memory_is_bounded_and_what_is_ahead_waits_for_room(chunks: Chunks, files: Files) -> None:
    assert [chunks.want_ahead(at(files, index)) for index in range(12)] == [True] * 8 + [False] * 4
    for index in range(100):
        read(chunks, at(files, index))
        chunks.want_ahead(at(files, index + 8))
    assert chunks.max_held_bytes == 8 * SIZE
    wait_until(lambda: len(files.asked) >= 108)
    assert len(files.asked) == len(set(files.asked)) == 108, "nothing was pushed out before it was read"


def test_who_waits_pushes_out_what_is_read_ahead(chunks: Chunks, files: Files) -> None:
    files.gate.clear()
    for index in range(8):
        chunks.want_ahead(at(files, index))
    wait_until(lambda: len(files.asked) == 8)
    files.gate.set()
    wait_until(lambda: not chunks.in_flight)
    assert read(chunks, at(files, 0, "b")) == expected("b", 0, SIZE)
    assert chunks.max_held_bytes == 8 * SIZE
    for index in range(7):
        read(chunks, at(files, index))
    assert len(files.asked) == 9, "what would have been read last had to go"


def test_wanted_before_ahead(files: Files) -> None:
    chunks = Chunks(64 * SIZE)
    files.gate.clear()
    for index in range(60):
        chunks.want_ahead(at(files, index))
    wait_until(lambda: len(files.asked) == 40)  # the others wait for what is wanted
    wanted = chunks.want(at(files, 0, "b"))
    wait_until(lambda: files.asked[40:] == [("b", 0)])
    promoted = chunks.want(at(files, 59))
    wait_until(lambda: files.asked[41:] == [("a", 59 * SIZE)])
    files.gate.set()
    chunks.wait(wanted)
    chunks.wait(promoted)
    chunks.stop()


def test_error_reaches_who_waits_and_is_forgotten(chunks: Chunks, files: Files) -> None:
    files.bad.add(SIZE)
    chunks.want_ahead(at(files, 1))
    for _ in range(2):
        with pytest.raises(DigestMismatch):
            read(chunks, at(files, 1))
    files.bad.clear()
    assert read(chunks, at(files, 1)) == expected("a", SIZE, SIZE)
    assert chunks.held_bytes <= 2 * SIZE


def test_one_chunk_may_be_larger_than_the_room(files: Files) -> None:
    chunks = Chunks(SIZE)
    span = Range(files, "a", 0, 3 * SIZE)
    assert not chunks.want_ahead(span)
    read(chunks, at(files, 9))
    chunk = chunks.want(span)
    chunks.wait(chunk)
    chunks.release(chunk)
    assert read(chunks, at(files, 1)) == expected("a", SIZE, SIZE)
    assert chunks.held_bytes == SIZE
    chunks.stop()


def test_nobody_waits_when_all_ends(chunks: Chunks, files: Files) -> None:
    files.gate.clear()
    chunk = chunks.want(at(files, 0))
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            chunks.wait(chunk)
        except InterruptedError as error:
            caught.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    chunks.stop()
    reader.join(5)
    assert len(caught) == 1


def test_closed_files_are_not_read_ahead(files: Files) -> None:
    chunks = Chunks(64 * SIZE)
    files.gate.clear()
    for index in range(60):
        chunks.want_ahead(at(files, index))
    wait_until(lambda: len(files.asked) == 40)
    chunks.forget(files, "a")
    files.gate.set()
    read(chunks, at(files, 0, "b"))
    assert len(files.asked) == 41
    chunks.stop()


def test_many_readers_at_random(files: Files) -> None:
    chunks = Chunks(5 * SIZE)
    wrong: list[int] = []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(150):
            index, path = pick.randrange(30), pick.choice("ab")
            span = at(files, index, path)
            if pick.random() < 0.3:
                chunks.want_ahead(span)
            elif read(chunks, span, is_kept=pick.random() < 0.5) != expected(path, index * SIZE, SIZE):
                wrong.append(index)

    readers = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert not any(reader.is_alive() for reader in readers)
    assert not wrong
    assert chunks.max_held_bytes <= 5 * SIZE
    chunks.stop()
