"""One way of many calls to a NameNode, in a process: `python -m bench.webhdfs_client WAY WEB CALLS WIDTH`.

`WEB` is http://HOST:PORT or https://HOST:PORT. Prints a JSON object: `seconds` and `cpu_s` of all calls, the most
`threads` of calls at once, and `import_s`, the CPU of what the way imports beyond the others.

    before    a TCP connection (or TLS session) and the next free of 256 threads for each call, as before
    now       the product: kept connections, four threads
    aiohttp   its session, with 16 connections
    floor     one socket that sends the same bytes and looks for the end of the answer: what the NameNode takes
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from bootseer import aio
from bootseer.storage.hdfs.webhdfs import WebHdfs
from bootseer.storage.hdfs.webhdfs_client import WebHdfsClient

TIMEOUT_S = 30.0
PATH = "/calls"
TARGET = f"/webhdfs/v1{PATH}?op=GETFILESTATUS&user.name=root"
AIOHTTP_CONNECTIONS = 16


class _Threads:
    """Counts the threads that are in the middle of calls."""

    def __init__(self) -> None:
        self._base = set(threading.enumerate())
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, len(set(threading.enumerate()) - self._base))


def _check(answer: Any) -> None:
    if answer["FileStatus"]["type"] != "DIRECTORY":
        raise ValueError(answer)


async def before(web: str, calls: int, width: int, threads: _Threads) -> None:
    parts = urlsplit(web)
    assert parts.hostname is not None
    tls = ssl.create_default_context() if parts.scheme == "https" else None

    def call(_number: int) -> None:
        threads.look()
        assert parts.hostname is not None
        made: http.client.HTTPConnection
        if tls is None:
            made = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        else:
            made = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=tls)
        try:
            made.connect()
            made.request("GET", TARGET)
            with made.getresponse() as response:
                _check(json.loads(response.read()))
        finally:
            made.close()

    await aio.map_bounded(
        lambda number: aio.run_abandonable(call, number, timeout_s=TIMEOUT_S), range(calls), width=width
    )


async def now(web: str, calls: int, width: int, threads: _Threads) -> None:
    parts = urlsplit(web)
    client = WebHdfsClient([parts.netloc], user="root", timeout_s=TIMEOUT_S, tls=parts.scheme == "https")
    place = WebHdfs(client, timeout_s=TIMEOUT_S)

    async def call(_number: int) -> None:
        status = await place.status(PATH)
        threads.look()
        if not status.is_folder:
            raise ValueError(status)

    await aio.map_bounded(call, range(calls), width=width)
    place.close()


async def with_aiohttp(web: str, calls: int, width: int, threads: _Threads) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AIOHTTP_CONNECTIONS)) as session:

        async def call(_number: int) -> None:
            threads.look()
            async with session.get(web + TARGET, allow_redirects=False) as response:
                _check(json.loads(await response.read()))

        await aio.map_bounded(call, range(calls), width=width)


async def floor(web: str, calls: int, width: int, threads: _Threads) -> None:
    del width, threads
    parts = urlsplit(web)
    assert parts.hostname is not None and parts.port is not None
    request = f"GET {TARGET} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_tls = parts.scheme == "https"
        made = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname) if is_tls else plain
        with made:
            for _ in range(calls):
                made.sendall(request)
                answer = b""
                while b"}}" not in answer:
                    answer += made.recv(64 << 10)


WAYS: dict[str, Callable[[str, int, int, _Threads], Awaitable[None]]] = {
    "before": before,
    "now": now,
    "aiohttp": with_aiohttp,
    "floor": floor,
}


def main() -> None:
    """Run one way."""
    way, web, calls, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    import_s = time.process_time()
    if way == "aiohttp":
        import aiohttp  # noqa: F401
    import_s = time.process_time() - import_s
    threads = _Threads()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    asyncio.run(_run(way, web, calls, width, threads))
    measured = {
        "seconds": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "threads": threads.most,
        "import_s": import_s,
    }
    print(json.dumps(measured))


async def _run(way: str, web: str, calls: int, width: int, threads: _Threads) -> None:
    await WAYS[way](web, calls, width, threads)


if __name__ == "__main__":
    main()
