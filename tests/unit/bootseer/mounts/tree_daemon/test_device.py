"""A device that does not make its readers wait twice for the same failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from bootseer.mounts.device.file import Done
from bootseer.mounts.tree_daemon.stack import AGAIN_S, FailFastDevice
from bootseer.tree.index import BLOCK_BYTES
from tests.support import wait_until


class Slow:
    """Answers when it is told to."""

    size = 10 * BLOCK_BYTES

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, Done]] = []

    def try_read(self, offset: int, target: memoryview) -> bool:
        target[:] = b"x" * len(target)
        return offset == 0

    def read_later(self, offset: int, length: int, done: Done) -> None:
        self.asked.append((offset, length, done))


def fail_after(slow: Slow, device: FailFastDevice, offset: int, length: int, wait_s: float) -> list[object]:
    said: list[object] = []
    device.read_later(offset, length, said.append)
    time.sleep(wait_s)
    slow.asked.pop()[2](None)
    assert said == [None]
    return said


def ask(device: FailFastDevice, offset: int, length: int) -> list[object]:
    said: list[object] = []
    device.read_later(offset, length, said.append)
    return said


def test_what_failed_late_fails_at_once_for_a_moment() -> None:
    slow = Slow()
    device = FailFastDevice(slow, 0.1)
    fail_after(slow, device, BLOCK_BYTES + 10, 2 * BLOCK_BYTES, 0.06)
    for offset in (BLOCK_BYTES, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES - 1, 0):
        assert ask(device, offset, BLOCK_BYTES + 1) == [None]
    assert slow.asked == []
    assert ask(device, 4 * BLOCK_BYTES, 10) == [] and ask(device, 0, BLOCK_BYTES) == []
    assert [each[:2] for each in slow.asked] == [(4 * BLOCK_BYTES, 10), (0, BLOCK_BYTES)]
    is_asked: Callable[[], bool] = lambda: ask(device, BLOCK_BYTES, 10) == []  # noqa: E731
    wait_until(is_asked, AGAIN_S + 5)


def test_what_failed_soon_is_tried_again() -> None:
    slow = Slow()
    device = FailFastDevice(slow, 30.0)
    fail_after(slow, device, 0, 100, 0.0)
    assert ask(device, 0, 100) == []
    assert len(slow.asked) == 1


def test_data_comes_through() -> None:
    slow = Slow()
    device = FailFastDevice(slow, 0.0)
    said = ask(device, 5, 3)
    slow.asked.pop()[2](b"abc")
    assert said == [b"abc"]
    target = bytearray(3)
    assert device.size == slow.size
    assert device.try_read(0, memoryview(target)) and target == b"xxx"
    assert not device.try_read(1, memoryview(target))
