"""The port that a node holds for its next attempt."""

from __future__ import annotations

import socket

import pytest

from bootseer.errors import LaunchError
from launcher.ranks.port import NextPort, hold_any, is_listened_on


def test_the_port_of_an_attempt_is_held_and_another_one_after_it() -> None:
    port = NextPort(None)
    first = port.number
    port.take(first)
    assert port.number == first > 0
    given = hold_any(None)
    given.close()
    port.take(given.port)
    assert port.number == given.port
    port.drop()
    assert port.number == 0 and not is_listened_on(given.port)
    port.renew()
    assert port.number > 0
    port.drop()


def test_a_port_that_is_taken_leaves_none() -> None:
    port = NextPort(None)
    with socket.create_server(("", 0)) as server:
        with pytest.raises(LaunchError, match="cannot use port"):
            port.take(server.getsockname()[1])
        assert port.number == 0
