"""The order that the daemon of a tree gets: whole, with its descriptors, or none at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from bootseer.mounts.tree_daemon.orders import (
    ACCEPTED,
    MAX_SETTINGS_BYTES,
    DaemonOrder,
    receive,
    send,
    was_accepted,
)

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The giver's, the taker's."""
    both = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield both
    for each in both:
        each.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("size", [0, 100, 3 << 20], ids=["none", "some", "many"])
def test_what_is_given_is_taken(ends: Ends, pipe: tuple[int, int], size: int) -> None:
    giver, taker = ends
    order = DaemonOrder("/run/träger\udcff/trees", os.urandom(size), pipe[1], pipe[0], pipe[0])
    sent: list[bool] = []
    sending = threading.Thread(target=lambda: sent.append(send(giver, order)))
    sending.start()
    taken = receive(taker, 10.0)
    sending.join()
    assert sent == [True]
    assert taken is not None and (taken.folder, taken.settings) == (order.folder, order.settings)
    fds = (taken.ready, taken.lock, taken.log)
    assert not any(map(os.get_inheritable, fds))
    os.write(taken.ready, b"it is the pipe")
    assert os.read(taken.lock, 100) == b"it is the pipe"
    assert not was_accepted(giver)
    taker.send(ACCEPTED)
    assert was_accepted(giver)
    for fd in fds:
        os.close(fd)


def test_an_index_may_come_with_it(ends: Ends, pipe: tuple[int, int]) -> None:
    giver, taker = ends
    assert send(giver, DaemonOrder("/run", b"{}", pipe[1], pipe[0], pipe[0], pipe[0], pipe[1]))
    taken = receive(taker, 10.0)
    assert taken is not None and taken.vetted_index >= 0
    os.write(taken.verdict, b"right")
    assert os.read(taken.vetted_index, 100) == b"right"
    for fd in taken.descriptors:
        os.close(fd)


@pytest.mark.parametrize("count", [2, 4])
def test_other_numbers_of_descriptors_are_no_order(ends: Ends, pipe: tuple[int, int], count: int) -> None:
    giver, taker = ends
    lengths = (4).to_bytes(4, "little") + (2).to_bytes(4, "little")
    socket.send_fds(giver, [lengths], [pipe[0]] * count)
    giver.sendall(b"/run{}")
    assert receive(taker, 10.0) is None


def test_no_order_is_waited_for_in_vain(ends: Ends) -> None:
    giver, taker = ends
    assert receive(taker, 0.01) is None, "for so long"
    giver.close()
    assert receive(taker, 1000.0) is None


def test_half_an_order_is_none(ends: Ends, pipe: tuple[int, int]) -> None:
    giver, taker = ends
    socket.send_fds(giver, [(4).to_bytes(4, "little") + (10).to_bytes(4, "little")], [pipe[0]] * 3)
    giver.sendall(b"/rungone")
    giver.close()
    assert receive(taker, 10.0) is None


@pytest.mark.parametrize(
    "begin", [b"", (5000).to_bytes(4, "little"), b"\0\0\0\0"], ids=["short", "folder", "both"]
)
def test_an_order_is_bounded(ends: Ends, pipe: tuple[int, int], begin: bytes) -> None:
    giver, taker = ends
    socket.send_fds(giver, [(begin + (MAX_SETTINGS_BYTES + 1).to_bytes(4, "little"))], [pipe[0]] * 3)
    giver.shutdown(socket.SHUT_WR)
    assert receive(taker, 10.0) is None


def test_an_order_without_descriptors_is_none(ends: Ends) -> None:
    giver, taker = ends
    giver.sendall((1).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"ab")
    assert receive(taker, 10.0) is None


def test_a_giver_whose_taker_has_gone(ends: Ends, pipe: tuple[int, int]) -> None:
    giver, taker = ends
    taker.close()
    assert not send(giver, DaemonOrder("/run", b"{}", *pipe, pipe[0]))
    assert not was_accepted(giver)


def test_a_taker_that_goes_without_a_word_has_not_accepted(ends: Ends, pipe: tuple[int, int]) -> None:
    giver, taker = ends
    assert send(giver, DaemonOrder("/run", b"{}", *pipe, pipe[0]))
    taker.close()
    assert not was_accepted(giver)
