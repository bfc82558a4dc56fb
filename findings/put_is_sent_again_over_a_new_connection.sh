#!/bin/bash
# WebHDFS renames by PUT, and a second RENAME of the same names answers "no such file": the first one moved it. aiohttp
# counts PUT and DELETE as idempotent (as RFC 9110 does) and sends such a request once more by itself when the server ends
# the connection without an answer: not only over a kept connection, which may just have been closed, but over the new one
# that was made for it. A gateway that loses its NameNode after the rename thus turns a success into "not found". POST (of
# CONCAT) is sent once, and http.client and requests send a PUT once. There is no public switch. Seen with aiohttp 3.14.5
# and requests 2.33.0, CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check aiohttp==3.14.5 requests==2.33.0 2>/dev/null
found=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import http.client
import socket
import threading

import aiohttp
import requests

listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
connections = []


def serve():
    """Read one request of each connection, and close it without an answer, as a gateway that dies."""
    while True:
        connected, _ = listener.accept()
        with connected:
            connections.append(connected.recv(4096).split()[0].decode())


threading.Thread(target=serve, daemon=True).start()
url = f"http://127.0.0.1:{port}/webhdfs/v1/a?op=RENAME&destination=/b"


async def with_aiohttp(method):
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url):
            pass


def with_http_client(method):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, url)
    connection.getresponse()


for name, send in (
    ("aiohttp", lambda method: asyncio.run(with_aiohttp(method))),
    ("http.client", with_http_client),
    ("requests", lambda method: requests.request(method, url)),
):
    for method in ("PUT", "DELETE", "POST"):
        connections.clear()
        try:
            send(method)
        except Exception as error:
            print(f"{name} {method}: sent {len(connections)} times, then {type(error).__name__}")
PY
)
echo "$found"
[ "$found" = "aiohttp PUT: sent 2 times, then ServerDisconnectedError
aiohttp DELETE: sent 2 times, then ServerDisconnectedError
aiohttp POST: sent 1 times, then ServerDisconnectedError
http.client PUT: sent 1 times, then RemoteDisconnected
http.client DELETE: sent 1 times, then RemoteDisconnected
http.client POST: sent 1 times, then RemoteDisconnected
requests PUT: sent 1 times, then ConnectionError
requests DELETE: sent 1 times, then ConnectionError
requests POST: sent 1 times, then ConnectionError" ] || { echo "changed"; exit 1; }
