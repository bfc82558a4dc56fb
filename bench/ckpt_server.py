"""An HTTP server on the loopback that counts the bytes of the bodies it sends, by port.

nginx (Debian's nginx-light) where it is installed, its access log being the count; else a Python server of our
own, `python -m bench.ckpt_server DIRECTORY PORT...`, which says the count itself. Both answer ranges, with an
ETag.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from bench.ckpt_run import BOUND, ROOT, make_environ, python
from bench.record import BenchError

READY_S = 10.0
CHUNK_BYTES = 1 << 20
MARK = "/.mark"
SERVED = "/.served"
NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.err;
events {{ worker_connections 1024; }}
http {{
    log_format sent '$server_port $body_bytes_sent $request_uri';
    access_log {folder}/nginx.log sent;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000;
    server {{
        {listen}
        root {data};
        location = {mark} {{ return 204; }}
    }}
}}
"""


class Server:
    """Serves the folder `data` at so many ports while it is entered."""

    def __init__(self, data: str, folder: str, ports: int = 1) -> None:
        self.kind = "nginx" if shutil.which("nginx") else "python"
        self.ports = free_ports(ports)
        self._data = data
        self._directory = folder
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, name: str, port: int = 0) -> str:
        """Where a file of the folder is; `port` counts from 0."""
        return f"http://127.0.0.1:{self.ports[port]}/{name}"

    def __enter__(self) -> Server:
        os.makedirs(self._directory)
        if self.kind == "nginx":
            listen = " ".join(f"listen 127.0.0.1:{port};" for port in self.ports)
            with open(self._path("nginx.conf"), "w", encoding="utf-8") as file:
                file.write(NGINX.format(folder=self._directory, listen=listen, data=self._data, mark=MARK))
            config = ("-c", self._path("nginx.conf"), "-p", self._directory, "-e", self._path("nginx.err"))
            argv = [*BOUND, "nginx", *config]
        else:
            argv = python("bench.ckpt_server", self._data, *map(str, self.ports))
        with open(self._path("server.out"), "wb") as output:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=make_environ(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def served_bytes(self) -> list[int]:
        """Bytes of bodies sent so far, by port."""
        if self.kind == "python":
            counts = {int(port): int(count) for port, count in json.loads(fetch(self.url(SERVED[1:]))).items()}
            return [counts.get(port, 0) for port in self.ports]
        # One process answers one event after the other: what was sent before the mark stands before it in the log.
        mark = f"{MARK}?{os.urandom(8).hex()}"
        fetch(self.url(mark[1:]))
        sent: Counter[int] = Counter()
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            sent.clear()
            with open(self._path("nginx.log"), encoding="utf-8", errors="replace") as file:
                for line in file:
                    port, count, uri = line.rstrip("\n").split(" ", 2)
                    if uri == mark:
                        return [sent[number] for number in self.ports]
                    sent[int(port)] += int(count)
            time.sleep(0.01)
        raise BenchError("nginx did not write its log")

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _wait_ready(self) -> None:
        assert self._process is not None
        end_s = time.monotonic() + READY_S
        for port in self.ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if self._process.poll() is not None or time.monotonic() > end_s:
                        raise BenchError(f"{self.kind} does not serve:\n{self._said()}") from None
                    time.sleep(0.01)

    def _said(self) -> str:
        found = ""
        for name in ("server.out", "nginx.err"):
            if os.path.exists(self._path(name)):
                with open(self._path(name), encoding="utf-8", errors="replace") as file:
                    found += file.read()[-2000:]
        return found


def fetch(url: str) -> bytes:
    """A small answer, whatever proxies the environment names."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=READY_S) as answer:
        found: bytes = answer.read()
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Handler(BaseHTTPRequestHandler):
    """Files of a folder, whole or by one range; counts what it sends before it does so."""

    protocol_version = "HTTP/1.1"
    folder = ""
    sent: ClassVar[Counter[int]] = Counter()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == SERVED:
            self._small(json.dumps(self.sent).encode())
            return
        top = os.path.realpath(self.folder)
        full = os.path.realpath(os.path.join(top, path.lstrip("/")))
        if not full.startswith(top + os.sep) or not os.path.isfile(full):
            self.send_error(404)
            return
        with open(full, "rb") as file:
            about = os.fstat(file.fileno())
            start, end = to_span(self.headers.get("Range"), about.st_size)
            if start >= end and about.st_size:
                self.send_error(416)
                return
            self.send_response(200 if self.headers.get("Range") is None else 206)
            if self.headers.get("Range") is not None:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{about.st_size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{about.st_mtime_ns:x}-{about.st_size:x}"')
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.flush()
            while body and start < end:
                count = min(CHUNK_BYTES, end - start)
                # Before it is sent: who has it must find it counted.
                self._count(count)
                done = 0
                try:
                    done = os.sendfile(self.connection.fileno(), file.fileno(), start, count)
                finally:
                    self._count(done - count)
                start += done

    def _count(self, count: int) -> None:
        with self.lock:
            self.sent[self.connection.getsockname()[1]] += count

    def _small(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def to_span(text: str | None, size: int) -> tuple[int, int]:
    """Start and end that a Range header asks for; an empty span for what cannot be."""
    if text is None:
        return 0, size
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not text.startswith("bytes=") or "," in text or not (first or last):
        return 0, 0
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def main(argv: list[str]) -> int:
    """Serves until it is ended."""
    Handler.folder = argv[0]
    servers = [ThreadingHTTPServer(("127.0.0.1", int(port)), Handler) for port in argv[1:]]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
