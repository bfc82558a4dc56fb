"""The servers that stores are tested against leave nothing behind."""

from __future__ import annotations

import gc
import socket
import struct
import warnings
from urllib.parse import urlsplit

import pytest

from tests.contract import servers
from tests.leaks import LeakCheck

pytestmark = pytest.mark.timeout(60)


def test_a_client_that_resets_leaves_no_epoll() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as endpoint:
            url = urlsplit(endpoint)
            call(url.hostname or "", url.port or 0)  # moto's own are imported
            gc.collect()
            gc.disable()  # nothing else may take it away
            try:
                check = LeakCheck()
                for _ in range(5):
                    call(url.hostname or "", url.port or 0)
                found = check.leftovers()
                check.close()
            finally:
                gc.enable()
    assert not [each for each in found if "eventpoll" in each]


def call(host: str, port: int) -> None:
    """A request whose answer is not waited for: the connection is reset."""
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.recv(1)
