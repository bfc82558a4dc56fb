"""A store that speaks S3, for benches: a folder behind one link, each request late, all answers through one pipe.

    python -m bench.s3_store FOLDER ADDRESS PORT BYTES_PER_S

Buckets are folders of FOLDER. What obstore uses is there: GET (ranges), HEAD, PUT (also only if nothing has the
name), uploads in parts, listing, DELETE. Signatures are not looked at. `/.served` tells the counts. Plain files
can be had as well, so that other tools read through the same link.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from bench.ckpt_server import SERVED
from bench.image_remote import LATENCY_S, answer_head, send_answer
from bench.peers_store import StoreServer

_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_PARTS = ".uploads"  # in FOLDER, which is no bucket
_MAX_BODY_BYTES = 256 << 20


class S3Server(StoreServer):
    """See the module's docstring."""

    async def _connected(self, connection: socket.socket) -> None:
        loop, waiting = asyncio.get_running_loop(), bytearray()
        with connection:
            try:
                while True:
                    while (end := waiting.find(b"\r\n\r\n")) < 0:
                        if not (data := await loop.sock_recv(connection, 1 << 18)):
                            return
                        waiting += data
                    lines = bytes(waiting[:end]).decode("latin-1").split("\r\n")
                    del waiting[: end + 4]
                    headers = {
                        name.strip().lower(): value.strip()
                        for name, _, value in (line.partition(":") for line in lines[1:] if line)
                    }
                    length = int(headers.get("content-length", "0"))
                    if length > _MAX_BODY_BYTES:
                        return
                    while len(waiting) < length:
                        if not (data := await loop.sock_recv(connection, 1 << 18)):
                            return
                        waiting += data
                    body = bytes(waiting[:length])
                    del waiting[:length]
                    method, target, _ = lines[0].split(" ", 2)
                    if target == SERVED:
                        counts = json.dumps([self._requests, self._sent_bytes]).encode()
                        await send_answer(connection, 200, counts)
                        continue
                    self._requests += 1
                    await asyncio.sleep(LATENCY_S)
                    await self._speak(connection, method, target, headers, body)
            except ConnectionError:
                pass

    async def _speak(
        self, connection: socket.socket, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        split = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        name = unquote(split.path).strip("/")
        if method in ("GET", "HEAD") and not query:
            await self._answer(connection, method, split.path, dict(headers))
        elif method == "GET" and ("list-type" in query or "location" in query):
            await send_answer(connection, 200, self._list(name, query))
        elif method == "PUT" and "uploadId" in query:
            await self._put_part(connection, query, body)
        elif method == "PUT":
            await self._put(connection, name, body, is_new=headers.get("if-none-match") == "*")
        elif method == "POST" and "uploads" in query:
            upload = secrets.token_hex(16)
            os.makedirs(os.path.join(self._directory, _PARTS, upload))
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            await send_answer(connection, 200, (_XML + text).encode())
        elif method == "POST" and "uploadId" in query:
            await self._join(connection, name, query["uploadId"], is_new=headers.get("if-none-match") == "*")
        elif method == "POST" and "delete" in query:
            for each in ElementTree.fromstring(body).iter():
                if each.tag.endswith("Key"):
                    self._delete(f"{name}/{each.text}")
            await send_answer(connection, 200, (_XML + "<DeleteResult></DeleteResult>").encode())
        elif method == "DELETE" and "uploadId" in query:
            shutil.rmtree(self._upload(query), ignore_errors=True)
            await send_answer(connection, 204, b"")
        elif method == "DELETE":
            self._delete(name)
            await send_answer(connection, 204, b"")
        else:
            await send_answer(connection, 400, b"")

    # ---- writing ---------------------------------------------------------------------------------------------

    async def _put(self, connection: socket.socket, name: str, body: bytes, *, is_new: bool) -> None:
        path = self._path(name)
        beside = os.path.join(self._directory, _PARTS, secrets.token_hex(16))
        os.makedirs(os.path.dirname(beside), exist_ok=True)
        with open(beside, "wb") as file:
            file.write(body)
        await self._give_name(connection, beside, path, is_new=is_new)

    async def _give_name(self, connection: socket.socket, beside: str, path: str, *, is_new: bool) -> None:
        """In one step, as S3 does. Where only new ones are wanted, one that is there stays."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if is_new:
            try:
                os.link(beside, path)
            except FileExistsError:
                await send_answer(connection, 412, b"")
                return
            finally:
                os.unlink(beside)
        else:
            os.replace(beside, path)
        about = os.stat(path)
        tag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, answer_head(200, 0, f"ETag: {tag}\r\n"))

    async def _put_part(self, connection: socket.socket, query: Mapping[str, str], body: bytes) -> None:
        directory = self._upload(query)
        if not os.path.isdir(directory):
            await send_answer(connection, 404, b"")
            return
        with open(os.path.join(directory, f"{int(query['partNumber']):06}"), "wb") as file:
            file.write(body)
        tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, answer_head(200, 0, f'ETag: "{tag}"\r\n'))

    async def _join(self, connection: socket.socket, name: str, upload: str, *, is_new: bool) -> None:
        directory = self._upload({"uploadId": upload})
        if not os.path.isdir(directory):
            await send_answer(connection, 404, b"")
            return
        path = self._path(name)
        if is_new and os.path.exists(path):
            await send_answer(connection, 412, b"")
            return
        whole = directory + ".whole"
        with open(whole, "wb") as file:
            for part in sorted(os.listdir(directory)):
                with open(os.path.join(directory, part), "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        shutil.rmtree(directory)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(whole, path)
        about = os.stat(path)
        tag = f"&quot;{about.st_mtime_ns:x}-{about.st_size:x}&quot;"
        text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        await send_answer(connection, 200, (_XML + text).encode())

    def _delete(self, name: str) -> None:
        try:
            os.unlink(self._path(name))
        except OSError:
            pass  # as S3: what is not there is deleted

    # ---- names -----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        """Raises: ConnectionError for what is no name: nothing of ours asks so."""
        path = os.path.normpath(os.path.join(self._directory, name))
        if not path.startswith(self._directory + os.sep) or _PARTS in path.split(os.sep):
            raise ConnectionAbortedError(f"{name} is no name of an object")
        return path

    def _upload(self, query: Mapping[str, str]) -> str:
        if not query["uploadId"].isalnum():
            raise ConnectionAbortedError("no upload has such a number")
        return os.path.join(self._directory, _PARTS, query["uploadId"])

    def _list(self, bucket: str, query: Mapping[str, str]) -> bytes:
        """All at once: nothing of ours has more than some thousands of names."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        top = self._path(bucket)
        found, directories = [], set()
        for above, names, files in os.walk(os.path.join(top, os.path.dirname(prefix))):
            relative = os.path.relpath(above, top)
            start = "" if relative == "." else relative + "/"
            if delimiter:
                directories |= {f"{start}{name}/" for name in names if f"{start}{name}/".startswith(prefix)}
                names.clear()
            found += [f"{start}{name}" for name in files if f"{start}{name}".startswith(prefix)]
        rows = []
        for key in sorted(found):
            about = os.stat(os.path.join(top, key))
            stamp = datetime.fromtimestamp(about.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            tag = f"&quot;{about.st_mtime_ns:x}-{about.st_size:x}&quot;"
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified><ETag>{tag}</ETag>"
                f"<Size>{about.st_size}</Size></Contents>"
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(directories)
        ]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        return (_XML + text).encode()


def main(argv: list[str]) -> int:
    """Serves until it is ended."""
    directory, address, port, rate = argv
    asyncio.run(S3Server(os.path.realpath(directory), float(rate)).serve_at(address, int(port)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
