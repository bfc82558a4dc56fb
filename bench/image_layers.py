"""The root as gzip layers, and how containerd gets them: three fetched at once, unpacked one after the other.

Each layer is unpacked as soon as it is whole and those before it are; fetched bytes are compared with their
digest. What containerd does beyond that (the digest of the unpacked bytes, its own store's syncs) is left out,
which is in the layers' favour. gzip is unpacked by igzip or unpigz, as containerd does where they are installed,
else by isal or zlib-ng in Python, else by zlib.
"""

from __future__ import annotations

import concurrent.futures
import gzip
import hashlib
import http.client
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, cast
from urllib.parse import urlsplit

from bench.image_tree import walk
from bench.record import BenchError, note

LAYERS = 4
LEVEL = 6  # as docker build and buildkit have it
FETCHES = 3  # max_concurrent_downloads of containerd
STEP_BYTES = 1 << 20
MANIFEST = "layers.json"
_PROGRAMS = (("igzip", ("igzip", "-dc")), ("unpigz", ("unpigz", "-c")))
_MODULES = (("isal", "isal.igzip"), ("zlib_ng", "zlib_ng.gzip_ng"), ("gzip", "gzip"))


class Layer(NamedTuple):
    """A compressed layer."""

    name: str  # of its file
    size: int
    sha256: str


def make_layers(root: str, directory: str) -> list[Layer]:
    """The layers of a root, written into `directory` if they are not there yet."""
    path = os.path.join(directory, MANIFEST)
    if not os.path.exists(path):
        note("making gzip layers")
        os.makedirs(directory, exist_ok=True)
        parts = split(root)
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = list(pool.map(lambda part: _write(root, part[1], directory, part[0]), enumerate(parts)))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(made, file)
    with open(path, encoding="utf-8") as file:
        return [Layer(*each) for each in json.load(file)]


def split(root: str) -> list[list[str]]:
    """All paths of a root, in LAYERS parts of about equal bytes, parents first."""
    entries = sorted((entry.path, entry.stat(follow_symlinks=False).st_size) for entry in walk(root))
    whole = sum(size for _, size in entries)
    parts: list[list[str]] = [[] for _ in range(LAYERS)]
    done = 0
    for path, size in entries:
        parts[min(LAYERS - 1, done * LAYERS // max(1, whole))].append(os.path.relpath(path, root))
        done += size
    return [part for part in parts if part]


def unpacker() -> str:
    """What unpacks gzip here."""
    for name, _ in _PROGRAMS:
        if shutil.which(name):
            return name
    return next(name for name, module in _MODULES if importlib.util.find_spec(module.partition(".")[0]))


def pull(url: str, target: str, keep: str) -> None:
    """Fetches the layers at `url` into `keep` and unpacks them into the folder `target`. Raises: BenchError."""
    os.makedirs(target)
    os.makedirs(keep)
    found = b"".join(_read(f"{url}/{MANIFEST}"))
    layers = [Layer(*each) for each in json.loads(found)]
    with concurrent.futures.ThreadPoolExecutor(FETCHES) as pool:
        fetches = [pool.submit(_fetch, f"{url}/{layer.name}", layer, keep) for layer in layers]
        for fetched in fetches:
            _unpack(fetched.result(), target)


def _write(root: str, paths: Sequence[str], directory: str, number: int) -> Layer:
    name = f"layer-{number}.tar.gz"
    path = os.path.join(directory, name)
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=STEP_BYTES) as tar,
    ):
        for each in paths:
            tar.add(os.path.join(root, each), each, recursive=False)
    with open(path, "rb") as file:
        return Layer(name, os.path.getsize(path), hashlib.file_digest(file, "sha256").hexdigest())


def _fetch(url: str, layer: Layer, directory: str) -> str:
    path = os.path.join(directory, layer.name)
    found = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for data in _read(url):
            found.update(data)
            file.write(data)
    if found.hexdigest() != layer.sha256:
        raise BenchError(f"{url}: is not what its digest says")
    return path


def _read(url: str) -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchError(f"{url}: the remote answers {answer.status}")
        while data := answer.read(STEP_BYTES):
            yield data
    finally:
        connection.close()


def _unpack(path: str, target: str) -> None:
    tar = ["tar", "-x", "-p", "--numeric-owner", "-f", "-", "-C", target]
    name = unpacker()
    program = dict(_PROGRAMS).get(name)
    if program is not None:
        with subprocess.Popen([*program, path], stdout=subprocess.PIPE) as source:
            ran = subprocess.run(tar, stdin=source.stdout, check=False).returncode
        failed = bool(ran or source.returncode)
    else:
        module = importlib.import_module(dict(_MODULES)[name])
        with (
            cast(IO[bytes], module.open(path, "rb")) as packed,
            subprocess.Popen(tar, stdin=subprocess.PIPE) as process,
        ):
            assert process.stdin is not None
            shutil.copyfileobj(packed, process.stdin, STEP_BYTES)
            process.stdin.close()
            failed = bool(process.wait())
    if failed:
        raise BenchError(f"{path}: could not be unpacked into {target}")
