"""Helpers for tests that run the launcher's event loop for a while."""

import os
import time

from launcher.base.loop import Loop


def run_until(loop: Loop, condition, max_s: float = 20.0):
    """Runs the loop until the condition holds."""
    give_up_s = time.monotonic() + max_s
    while not condition():
        assert time.monotonic() < give_up_s, "the condition did not come about"
        loop.run_once(0.01)


def run_for(loop: Loop, wait_s: float):
    """Runs the loop for a time in which nothing is expected to happen."""
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        loop.run_once(left_s)


def read_ready(fd: int) -> bytes:
    """All that a non-blocking descriptor has now."""
    data = b""
    try:
        while piece := os.read(fd, 1 << 20):
            data += piece
    except BlockingIOError:
        pass
    return data
