"""The event loop: events are for whoever watched when they came."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from launcher.base.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["readers", "writers"])
def test_who_begins_to_watch_a_reused_descriptor_is_not_called_for_what_was_before(loop: Loop, kind: str) -> None:
    """Of two descriptors with events, the first one called closes the other, and a new one gets its number."""
    called: list[str] = []
    add = loop.add_reader if kind == "readers" else loop.add_writer
    remove = loop.remove_reader if kind == "readers" else loop.remove_writer
    with ExitStack() as stack:
        ours: list[socket.socket] = []
        for _ in range(2):
            one, other = socket.socketpair()
            stack.enter_context(other)
            other.send(b"x")
            ours.append(one)
        new, far = socket.socketpair()
        stack.enter_context(far)
        stack.enter_context(new)
        new.setblocking(False)
        if kind == "writers":  # it has no room
            new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            with pytest.raises(BlockingIOError):
                while True:
                    new.send(bytes(1 << 16))

        def replace(number: int) -> None:
            called.append("old")
            fd = ours[1 - number].fileno()
            for each in ours:
                remove(each.fileno())
            ours[1 - number].close()
            os.dup2(new.fileno(), fd, inheritable=False)
            stack.callback(os.close, fd)
            add(fd, called.append, "new")

        stack.callback(lambda: [each.close() for each in ours if each.fileno() >= 0])
        for number, each in enumerate(ours):
            add(each.fileno(), replace, number)
        loop.run_once(0)
        loop.run_once(0)
        assert called == ["old"]
        if kind == "readers":
            far.send(b"x")
        else:
            far.setblocking(False)
            with suppress(BlockingIOError):
                while far.recv(1 << 20):
                    pass
        loop.run_once(0)
        assert called == ["old", "new"]
