"""Servers on the loopback that stores are tested against: a small web server, nginx, and moto's S3."""

from __future__ import annotations

import http.server
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests import support


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of files below `folder`, with ranges, ETag and If-Match."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_HEAD(self) -> None:
        self.answer(is_head=True)

    def do_GET(self) -> None:
        self.answer(is_head=False)

    def answer(self, *, is_head: bool) -> None:
        path = self.folder / unquote(urlsplit(self.path).path, errors="surrogateescape").lstrip("/")
        data, etag, status = b"", "", 200
        try:
            if path.is_dir():
                status = 404
            else:
                data = path.read_bytes()
                etag = f'"{path.stat().st_mtime_ns:x}"'
        except PermissionError:
            status = 403
        except OSError:
            status = 404
        first, last, content_range = 0, len(data) - 1, ""
        if status == 200 and self.headers.get("If-Match", etag) != etag:
            status = 412
        elif status == 200 and (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, last, status = int(wanted[1]), min(last, int(wanted[2] or last)), 206
            content_range = f"bytes {first}-{last}/{len(data)}"
            if first >= len(data):
                status, content_range = 416, f"bytes */{len(data)}"
        body = data[first : last + 1] if status in (200, 206) else b"no\n"
        self.send_response(status)
        if etag:
            self.send_header("ETag", etag)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Tests are quiet."""


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what is tested."""


@contextmanager
def serve(handler: type[http.server.BaseHTTPRequestHandler], context: Any = None) -> Iterator[str]:
    """A server for a handler; gives its URL."""
    server = _Quiet(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_directory(directory: Path) -> Iterator[str]:
    """The small web server over a folder."""
    with serve(type("Handler", (RangeHandler,), {"folder": directory})) as url:
        yield url


NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
_CONFIG = """
daemon off; master_process off; pid {here}/pid; error_log {here}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; disable_symlinks off; default_type application/octet-stream;
  client_body_temp_path {here}/t1; proxy_temp_path {here}/t2; fastcgi_temp_path {here}/t3;
  uwsgi_temp_path {here}/t4; scgi_temp_path {here}/t5;
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""


@contextmanager
def serve_nginx(directory: Path, here: Path) -> Iterator[str]:
    """nginx over a folder; its own files lie in `here`."""
    assert NGINX is not None
    port = support.find_free_port()
    here.mkdir(exist_ok=True)
    config = here / "nginx.conf"
    config.write_text(_CONFIG.format(here=here, port=port, folder=directory))
    process = subprocess.Popen(
        [NGINX, "-c", config, "-p", here, "-e", here / "error.log"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        support.wait_until(lambda: process.poll() is not None or _listens(port), 10.0)
        assert process.poll() is None, (here / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class _OneAtATime:
    """moto looks whether an object is there and then puts it: only without others in between is that one step."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._lock:
            return list(self._app(environ, start_response))


@contextmanager
def serve_s3(context: Any = None) -> Iterator[str]:
    """moto's S3; gives the endpoint. `context`: for TLS."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *args: object) -> None:
            """Tests are quiet."""

        def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
            """Its selector was not closed, and lies in a cycle: an epoll would be left behind."""
            for frame, _ in traceback.walk_tb(error.__traceback__):
                selector = frame.f_locals.get("selector")
                if isinstance(selector, selectors.BaseSelector):
                    selector.close()

    app = _OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_clock = [int(time.time()) - 100_000]


def write_file(directory: Path, path: str, data: bytes) -> None:
    """A file of a web server, replaced whole; each version has another second: nginx's ETag knows no finer."""
    full = directory / path
    full.parent.mkdir(parents=True, exist_ok=True)
    aside = directory / f".aside-{os.getpid()}"
    aside.write_bytes(data)
    _clock[0] += 1
    os.utime(aside, (_clock[0], _clock[0]))
    aside.rename(full)
