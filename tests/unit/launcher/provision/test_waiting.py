"""Lines about what a start waits for."""

from __future__ import annotations

import time
from typing import cast

from launcher.base.loop import EventLoop
from launcher.provision.waiting import EVERY_S, FIRST_AFTER_S, WaitingLines
from tests.unit.launcher.fake_loop import FakeLoop


def test_lines_come_at_intervals_until_the_part_is_ready() -> None:
    loop, said = FakeLoop(), list[str]()
    began_ns = time.monotonic_ns() - 12 * 10**9
    lines = WaitingLines(cast(EventLoop, loop), said.append, lambda: began_ns, lambda took: f"opening: {took}")
    lines.begin()
    loop.advance(FIRST_AFTER_S - 1)
    assert said == [] and lines.has_begun
    loop.advance(1)
    assert len(said) == 1 and said[0].startswith("opening: 1") and said[0].endswith(" s so far")
    loop.advance(2 * EVERY_S)
    assert len(said) == 3
    lines.stop()
    loop.advance(10 * EVERY_S)
    assert len(said) == 3 and not lines.has_begun
