"""The simulated remote of `bench image`: a folder behind one link, each request late, all bytes through one pipe.

    python -m bench.image_remote FOLDER PORT

A request waits LATENCY_S before it is answered; bodies of all connections share RATE_BYTES_PER_S, slice after
slice in the order in which they ask. `/.served` tells the counts; it is neither counted nor late.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from email.utils import formatdate
from types import TracebackType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from bench.ckpt_run import ROOT, make_environ, python
from bench.ckpt_server import SERVED, fetch, free_ports, to_span
from bench.record import BenchError

LATENCY_S = 0.005
RATE_BYTES_PER_S = 200e6
SLICE_BYTES = 128 << 10
BURST_S = 0.01  # what late wake-ups lost may be made up for
READY_S = 10.0
PROBE_BYTES = 96 << 20
PROBES = 8  # connections at once, as many as need be to fill the link
_LINES = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    400: "Bad Request",
    404: "Not Found",
    412: "Precondition Failed",
    416: "Bad Range",
}


class Served(NamedTuple):
    """What the remote has answered."""

    requests: int
    sent_bytes: int  # of bodies

    def since(self, before: Served) -> Served:
        return Served(self.requests - before.requests, self.sent_bytes - before.sent_bytes)


class Link(NamedTuple):
    """What the link gives to plain readers."""

    bytes_per_s: float  # many connections
    latency_s: float  # of a small request on a connection that is open; the smallest


class Remote:
    """Serves the folder `data` while it is entered."""

    def __init__(self, data: str, log_path: str) -> None:
        (self._port,) = free_ports(1)
        self._data, self._log_path = data, log_path
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._port}/{name}"

    def served(self) -> Served:
        """So far."""
        return Served(*json.loads(fetch(self.url(SERVED[1:]))))

    def measure(self, name: str) -> Link:
        """Reads a file's first bytes over several connections, and single bytes; the file in the page cache."""
        size = min(PROBE_BYTES, os.path.getsize(os.path.join(self._data, name)))
        part, times = size // PROBES, PROBE_BYTES // size
        with concurrent.futures.ThreadPoolExecutor(PROBES) as pool:
            begin_s = time.monotonic()
            spans = [(number * part, (number + 1) * part) for number in range(PROBES)]
            got = sum(pool.map(lambda span: self._read(name, [span] * times)[0], spans))
            rate = got / (time.monotonic() - begin_s)
        latency_s = min(self._read(name, [(each, each + 1) for each in range(21)])[1][1:])
        return Link(rate, latency_s)

    def _read(self, name: str, spans: list[tuple[int, int]]) -> tuple[int, list[float]]:
        """Bytes that came, and how long each span took; one connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        count, took_s = 0, []
        try:
            for start, end in spans:
                begin_s = time.monotonic()
                connection.request("GET", f"/{name}", headers={"Range": f"bytes={start}-{end - 1}"})
                answer = connection.getresponse()
                count += len(answer.read())
                took_s.append(time.monotonic() - begin_s)
        finally:
            connection.close()
        return count, took_s

    def __enter__(self) -> Remote:
        argv = python("bench.image_remote", self._data, str(self._port))
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=make_environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    self.close()
                    with open(self._log_path, encoding="utf-8", errors="replace") as file:
                        raise BenchError(f"the remote does not serve:\n{file.read()[-2000:]}") from None
                time.sleep(0.01)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def check_link(link: Link) -> None:
    """A remote that gives more than it should makes no figures; less is a figure. Raises: BenchError."""
    if link.bytes_per_s > 1.1 * RATE_BYTES_PER_S or link.latency_s < LATENCY_S:
        raise BenchError(
            f"the remote gives {link.bytes_per_s / 1e6:.0f} MB/s and answers after {link.latency_s * 1e3:.1f} ms,"
            f" and has to give {RATE_BYTES_PER_S / 1e6:.0f} and {LATENCY_S * 1e3:g}"
        )


# ---- the server ----------------------------------------------------------------------------------------------


class Pipe:
    """The link: whoever sends waits for its turn, first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all that was asked for has gone through

    def reserve(self, count: int, now_s: float) -> float:
        """PURE but for its clock hand: when so many bytes have gone through, if they are asked for now."""
        self._free_s = max(self._free_s, now_s - BURST_S) + count / self._bytes_per_s
        return self._free_s


class Server:
    """Answers GET and HEAD of files of a folder, whole or one range.

    What it costs is taken from the machine whose start is measured: bodies never pass through this process.
    """

    def __init__(self, folder: str) -> None:
        self._directory = os.path.realpath(folder)
        self._pipe = Pipe(RATE_BYTES_PER_S)
        self._requests = self._sent_bytes = 0

    async def serve(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
            listener.setblocking(False)
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await loop.sock_accept(listener)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    group.create_task(self._connected(connection))

    async def _connected(self, connection: socket.socket) -> None:
        loop, waiting = asyncio.get_running_loop(), b""
        with connection:
            try:
                while True:
                    while b"\r\n\r\n" not in waiting:
                        if not (data := await loop.sock_recv(connection, 65536)):
                            return
                        waiting += data
                    text, _, waiting = waiting.partition(b"\r\n\r\n")
                    head = text.decode("latin-1").split("\r\n")
                    method, target, _ = head[0].split(" ", 2)
                    if target == SERVED:
                        await send_answer(connection, 200, json.dumps([self._requests, self._sent_bytes]).encode())
                        continue
                    self._requests += 1
                    await asyncio.sleep(LATENCY_S)
                    headers = {
                        name.strip().lower(): value.strip()
                        for name, _, value in (line.partition(":") for line in head[1:] if line)
                    }
                    await self._answer(connection, method, target, headers)
            except ConnectionError:
                pass

    async def _answer(self, connection: socket.socket, method: str, target: str, headers: dict[str, str]) -> None:
        path = os.path.realpath(os.path.join(self._directory, unquote(urlsplit(target).path).lstrip("/")))
        if not path.startswith(self._directory + os.sep) or not os.path.isfile(path):
            await send_answer(connection, 404, b"")
            return
        with open(path, "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            tag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
            if headers.get("if-match", tag) not in (tag, "*"):
                await send_answer(connection, 412, b"")
                return
            asked = headers.get("range")
            start, end = to_span(asked, about.st_size)
            if start >= end and about.st_size:
                await send_answer(connection, 416, b"")
                return
            more = f"ETag: {tag}\r\nLast-Modified: {formatdate(about.st_mtime, usegmt=True)}\r\n"
            more += "Accept-Ranges: bytes\r\n"
            if path.endswith(".html"):
                more += "Content-Type: text/html\r\n"
            if asked is not None:
                more += f"Content-Range: bytes {start}-{end - 1}/{about.st_size}\r\n"
            head = answer_head(200 if asked is None else 206, end - start, more)
            await asyncio.get_running_loop().sock_sendall(connection, head)
            while method == "GET" and start < end:
                count = min(SLICE_BYTES, end - start)
                self._sent_bytes += count  # before it is sent: who has it must find it counted
                now_s = time.monotonic()
                late_s = self._pipe.reserve(count, now_s) - now_s
                if late_s > 0:
                    await asyncio.sleep(late_s)
                await _send_file(connection, file.fileno(), start, start + count)
                start += count


def answer_head(status: int, length: int, more: str = "") -> bytes:
    """The first bytes of an answer. Args: more: further lines."""
    return f"HTTP/1.1 {status} {_LINES[status]}\r\nContent-Length: {length}\r\n{more}\r\n".encode("latin-1")


async def send_answer(connection: socket.socket, status: int, body: bytes) -> None:
    """A whole answer."""
    await asyncio.get_running_loop().sock_sendall(connection, answer_head(status, len(body)) + body)


async def _send_file(connection: socket.socket, fd: int, start: int, end: int) -> None:
    """Raises: ConnectionError."""
    while start < end:
        try:
            sent = os.sendfile(connection.fileno(), fd, start, end - start)
        except BlockingIOError:
            await _until_writable(connection)
            continue
        if not sent:
            raise ConnectionAbortedError("the file is shorter than it was")
        start += sent


async def _until_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_free = loop.create_future()
    loop.add_writer(connection, lambda: None if is_free.done() else is_free.set_result(None))
    try:
        await is_free
    finally:
        loop.remove_writer(connection)


def main(argv: list[str]) -> int:
    """Serves until it is ended."""
    asyncio.run(Server(argv[0]).serve(int(argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
