"""Metadata that is still being made: nothing of it is seen before it is there, and nobody waits for ever."""

from __future__ import annotations

import random
import threading

import pytest

from bootseer.mounts.device.metadata_memory import MetadataMemory

DATA = random.Random(1).randbytes(40_000)
FIRST = 8192


class Reader:
    """Collects answers."""

    def __init__(self, memory: MetadataMemory) -> None:
        self._memory = memory
        self.answers: list[bytes | None] = []

    def read(self, offset: int, length: int) -> None:
        target = bytearray(length)
        if self._memory.try_read(offset, memoryview(target)):
            self.answers.append(bytes(target))
        else:
            self._memory.read_later(offset, length, lambda data: self.answers.append(data and bytes(data)))


@pytest.fixture
def made() -> bytearray:
    """What there is of it at first."""
    return bytearray(DATA[:FIRST] + bytes(len(DATA) - FIRST))


def test_what_is_there_is_answered_at_once_and_the_rest_when_it_is_complete(made: bytearray) -> None:
    memory = MetadataMemory(made, FIRST)
    reader = Reader(memory)
    reader.read(4096, FIRST - 4096)
    assert reader.answers == [DATA[4096:FIRST]]
    for offset, length in ((4096, FIRST - 4095), (FIRST, 1), (20_000, 20_000)):
        reader.read(offset, length)
    assert len(reader.answers) == 1, "it was not there yet"
    made[:] = DATA
    memory.complete(len(DATA))
    assert reader.answers[1:] == [DATA[4096 : FIRST + 1], DATA[FIRST : FIRST + 1], DATA[20_000:]]
    reader.read(0, len(DATA))
    assert reader.answers[-1] == DATA == bytes(memory.data)
    memory.fail()
    reader.read(FIRST, 10)
    assert reader.answers[-1] == DATA[FIRST : FIRST + 10], "it is there all the same"


def test_another_one_takes_the_place_of_what_was_not_finished(made: bytearray) -> None:
    memory = MetadataMemory(made, FIRST)
    reader = Reader(memory)
    reader.read(FIRST, 100)
    memory.complete(len(DATA), bytearray(DATA))
    reader.read(30_000, 100)
    assert reader.answers == [DATA[FIRST : FIRST + 100], DATA[30_000:30_100]]
    with pytest.raises(AssertionError):
        memory.complete(len(DATA) + 1)


def test_whoever_waits_gets_an_error_when_it_fails(made: bytearray) -> None:
    memory = MetadataMemory(made, FIRST)
    reader = Reader(memory)
    reader.read(FIRST, 100)
    memory.fail()
    reader.read(FIRST + 1, 100)
    reader.read(0, 10)
    assert reader.answers == [None, None, DATA[:10]]


def test_each_reader_gets_one_answer_whenever_it_is_completed(made: bytearray) -> None:
    memory = MetadataMemory(made, FIRST)
    readers = [Reader(memory) for _ in range(4)]
    chance = random.Random(2)
    places = [(offset, chance.randrange(1, 4097)) for offset in chance.sample(range(36_000), 300)]

    def read(reader: Reader) -> None:
        for offset, length in places:
            reader.read(offset, length)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    made[:] = DATA
    memory.complete(len(DATA))
    for thread in threads:
        thread.join()
    right = sorted(DATA[offset : offset + length] for offset, length in places)
    for reader in readers:
        assert sorted(answer or b"" for answer in reader.answers) == right


def test_whole_memory() -> None:
    memory = MetadataMemory(DATA)
    target = bytearray(100)
    assert memory.size == len(DATA) and memory.try_read(500, memoryview(target)) and target == DATA[500:600]


def test_what_is_shorter_than_was_foreseen_ends_in_zeros() -> None:
    for other in (None, bytearray(DATA)):
        memory = MetadataMemory(bytearray(DATA + bytes(20_000)), FIRST)
        reader = Reader(memory)
        reader.read(len(DATA) - 100, 5000)
        memory.complete(len(DATA), other)
        reader.read(0, len(DATA) + 20_000)
        assert reader.answers == [DATA[-100:] + bytes(4900), DATA + bytes(20_000)]
        assert bytes(memory.data) == DATA
