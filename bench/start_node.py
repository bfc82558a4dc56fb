"""A node of `bench start` that does without Bootseer: `python -m bench.start_node ORDER`, ORDER a line of JSON.

    plain    the image's layers pulled and unpacked as containerd does (image_layers.py), pip from the index in
             the store, the checkpoint as one stream, torchrun
    tuned    zstd layers, all ranges at once, unpacked beside each other; uv with bytecode from its cache on the
             node's disk, the checkpoint in ranges meanwhile; torchrun; the checkpoint is mapped
    again    what is on the node is used: torchrun alone
    alone    bootrun with one technique; what the others would do for image and checkpoint is done as in `plain`

Runs in the node's namespaces, and writes what it did when to `stages` of the order, by the monotonic clock.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from bench.image_layers import MANIFEST, pull
from bench.record import BenchError
from bench.start_made import INDEX, LOCK, PYTHON
from bootseer.linux import mount as kernel
from bootseer.linux import namespaces

ENV = "/opt/env"  # in the root
WORK = "/job"  # in the root: the node's own folder
RANGE_BYTES = 16 << 20
READERS = 8
_BOUND = ("/proc", "/dev", "/sys", "/etc/hosts")


class Node:
    """One node; folders are its own."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._url: str = order["url"]
        self._directory: str = order["folder"]
        self._root = os.path.join(self._directory, "root")
        self._work = os.path.join(self._directory, "work")
        self._stages: list[tuple[str, int, int]] = []

    def run(self) -> None:
        """Everything. Raises: BenchError."""
        way = self._order["way"]
        try:
            if way == "plain":
                self._do("image", self._pull_plainly)
                self._enter()
                self._do("env", self._install_by_pip)
                self._do("checkpoint", self._read_plainly)
            elif way == "tuned":
                self._do("image", self._pull_fast)
                self._enter()
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    reading = pool.submit(self._do, "checkpoint", self._read_fast)
                    self._do("env", self._install_by_uv)
                    reading.result()
            elif way == "alone":
                if self._order["technique"] not in ("image", "env"):
                    self._do("image_pulled", self._pull_plainly)
                if self._order["technique"] != "checkpoint":
                    self._do("checkpoint_read", self._read_plainly)
                run(self._order["bootrun"], {**os.environ, "CHECKPOINT": os.path.join(self._work, "ckpt")})
                return
            else:
                self._enter()
            self._do("ranks", self._train)
        finally:
            with open(self._order["stages"], "w", encoding="utf-8") as file:
                json.dump(self._stages, file)

    def _do(self, name: str, work: Callable[[], object]) -> None:
        began_ns = time.monotonic_ns()
        work()
        self._stages.append((name, began_ns, time.monotonic_ns()))

    # ---- the image -------------------------------------------------------------------------------------------

    def _pull_plainly(self) -> None:
        pull(f"{self._url}/layers", self._root, os.path.join(self._directory, "blobs"))

    def _pull_fast(self) -> None:
        os.makedirs(self._root)
        kept = os.path.join(self._directory, "blobs")
        os.makedirs(kept)
        sizes = json.loads(_get(f"{self._url}/layers-zstd/{MANIFEST}"))
        with concurrent.futures.ThreadPoolExecutor(READERS) as readers, _unpackers(len(sizes)) as unpackers:
            fetched = {
                name: fetch_ranges(readers, f"{self._url}/layers-zstd/{name}", os.path.join(kept, name), size)
                for name, size in sizes.items()
            }
            done = [
                unpackers.submit(self._unpack, os.path.join(kept, name), parts) for name, parts in fetched.items()
            ]
            for each in done:
                each.result()

    def _unpack(self, path: str, parts: Sequence[concurrent.futures.Future[None]]) -> None:
        for part in parts:
            part.result()
        run(["tar", "--zstd", "-x", "-p", "--numeric-owner", "-f", path, "-C", self._root])

    def _enter(self) -> None:
        """The root gets what a container has of its node."""
        for path in (*_BOUND, WORK):
            source = self._work if path == WORK else path
            target = self._root + path
            if os.path.isdir(source):
                os.makedirs(target, exist_ok=True)
            elif not os.path.exists(target):
                open(target, "w").close()
            kernel.mount(source, target, "", kernel.BIND | namespaces.REC)

    def _inside(self, words: Sequence[str], **more: str) -> None:
        environ = {"PATH": f"{ENV}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **more}
        run([shutil.which("chroot") or "chroot", self._root, *words], environ)

    # ---- the environment -------------------------------------------------------------------------------------

    def _install_by_pip(self) -> None:
        self._inside([PYTHON, "-m", "venv", ENV])
        words = [f"{ENV}/bin/pip", "install", "-q", "--no-index", "--disable-pip-version-check", "--find-links"]
        host = urlsplit(self._url).hostname or ""
        self._inside([*words, f"{self._url}/{INDEX}", "--trusted-host", host, "-r", f"{WORK}/{LOCK}"])

    def _install_by_uv(self) -> None:
        self._inside(["uv", "venv", "-q", "--python", PYTHON, ENV])
        words = ["uv", "pip", "install", "-q", "--python", f"{ENV}/bin/python", "--compile-bytecode", "--no-index"]
        words += ["--find-links", f"{self._url}/{INDEX}", "-r", f"{WORK}/{LOCK}"]
        self._inside(words, UV_CACHE_DIR=f"{WORK}/uv-cache", UV_LINK_MODE="copy")

    # ---- the checkpoint --------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> tuple[str, str]:
        """Its URL, and where it goes."""
        directory = os.path.join(self._work, "ckpt")
        os.makedirs(directory, exist_ok=True)
        return f"{self._url}/ckpt/plain/step-100/model.safetensors", os.path.join(directory, "model.safetensors")

    def _read_plainly(self) -> None:
        url, path = self._checkpoint
        with open(path, "wb") as file:
            for data in _stream(url):
                file.write(data)

    def _read_fast(self) -> None:
        url, path = self._checkpoint
        with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
            for part in fetch_ranges(readers, url, path, self._order["checkpoint_bytes"]):
                part.result()

    # ---- the ranks -------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._inside(
            [f"{ENV}/bin/torchrun", *self._order["flags"], f"{WORK}/start_train.py", *self._order["words"]],
            CHECKPOINT=f"{WORK}/ckpt",
            OMP_NUM_THREADS="1",
            **self._order["environ"],
        )


def fetch_ranges(
    readers: concurrent.futures.Executor, url: str, path: str, size: int
) -> list[concurrent.futures.Future[None]]:
    """Has a file fetched in ranges, each by one of the readers."""
    with open(path, "wb") as file:
        file.truncate(size)

    def fetch(start: int) -> None:
        data = _get(url, start, min(size, start + RANGE_BYTES))
        with open(path, "r+b", buffering=0) as part:
            part.seek(start)
            part.write(data)

    return [readers.submit(fetch, start) for start in range(0, size, RANGE_BYTES)]


def run(words: Sequence[str], environ: dict[str, str] | None = None) -> None:
    """Raises: BenchError when it does not end well."""
    ran = subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise BenchError(
            f"{' '.join(words)} ended with status {ran.returncode}:\n{ran.stdout}{ran.stderr}"[-6000:]
        )


@contextmanager
def _unpackers(count: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(max(1, count)) as pool:
        yield pool


def _get(url: str, start: int = 0, end: int = 0) -> bytes:
    return b"".join(_stream(url, start, end))


def _stream(url: str, start: int = 0, end: int = 0) -> Iterator[bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        headers = {"Range": f"bytes={start}-{end - 1}"} if end else {}
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        if answer.status not in (200, 206):
            raise BenchError(f"{url}: the store answers {answer.status}")
        while data := answer.read(1 << 20):
            yield data
    finally:
        connection.close()


def main(argv: list[str]) -> int:
    """Does it."""
    try:
        Node(json.loads(argv[0])).run()
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
