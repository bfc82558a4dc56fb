"""The worker's input: lines of the daemon, in whatever pieces they come."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from bootseer.mounts.tree_daemon.prefetch import SHOWN
from bootseer.mounts.tree_daemon.prefetch_worker import _Input


@given(st.lists(st.integers(0, 1 << 24), max_size=20), st.integers(0, 20), st.lists(st.integers(1, 9), min_size=1))
def test_demands_and_the_mount_are_told_in_any_pieces(demands: list[int], shown_at: int, sizes: list[int]) -> None:
    lines = [b"%d\n" % number for number in demands]
    lines.insert(min(shown_at, len(lines)), SHOWN)
    data = b"".join(lines)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found: list[int] = []

        async def read() -> bool:
            read = _Input(theirs)
            read.note_demand = found.append
            at = 0
            while at < len(data):
                size = sizes[at % len(sizes)]
                ours.sendall(data[at : at + size])
                read.read()
                at += size
            return read.is_shown.is_set()

        assert asyncio.run(read())
    assert found == demands


def test_the_mount_is_not_told_by_a_demand() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        async def read() -> bool:
            read = _Input(theirs)
            ours.sendall(b"17\n")
            read.read()
            return read.is_shown.is_set()

        assert not asyncio.run(read())
