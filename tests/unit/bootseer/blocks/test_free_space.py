"""Room is looked for now and then, and not asked for again at once when there is none."""

from __future__ import annotations

import errno

import pytest

from bootseer.blocks import free_space
from bootseer.blocks.free_space import CHECK_BYTES, FreeSpace


class Rooms:
    """What a cache would answer, and what was asked."""

    def __init__(self) -> None:
        self.answer = True
        self.asked: list[bool] = []
        self.room = FreeSpace("/cache", self.make)

    def make(self, is_full: bool) -> bool:
        self.asked.append(is_full)
        return self.answer


def test_the_limit_is_looked_at_now_and_then(said: list[str]) -> None:
    rooms = Rooms()
    for _ in range(10):
        assert rooms.room.is_there(CHECK_BYTES // 4)
    assert rooms.asked == [False] * 3  # at first, and twice later
    assert not said


def test_without_room_it_rests_and_says_so_once(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    rooms = Rooms()
    rooms.answer = False
    for _ in range(5):
        assert not rooms.room.is_there(1)
    assert rooms.asked == [False]
    assert "limit" in rooms.room.full_reason
    monkeypatch.setattr(free_space, "FULL_S", -1.0)
    rooms.room._full_until_s = 0.0
    assert not rooms.room.is_there(1)
    rooms.answer = True
    assert rooms.room.is_there(1)
    assert rooms.room.full_reason == ""
    assert len(said) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_tried_again_if_something_was_evicted(number: int, said: list[str]) -> None:
    rooms = Rooms()
    error = OSError(number, "no room")
    assert rooms.room.failed(error, is_again=False)
    assert not rooms.room.failed(error, is_again=True)
    assert rooms.asked == [True]
    assert said == ["/cache: no room: blocks are fetched as they are read, and not cached"]
    rooms = Rooms()
    rooms.answer = False
    assert not rooms.room.failed(error, is_again=False)


def test_a_disk_that_fails_is_left_alone() -> None:
    rooms = Rooms()
    assert not rooms.room.failed(OSError(errno.EIO, "bad disk"), is_again=False)
    assert not rooms.asked
    assert not rooms.room.is_there(1)
