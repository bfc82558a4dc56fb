"""One transfer from or to an HDFS, in a fresh process: `python -m bench.ckpt_hdfs_client ACTION SOURCE TARGET`.

Runs in the network namespace of the clients. Writes "ready" when all is imported, waits for a line, prints one
JSON line: seconds, CPU seconds, bytes, and the SHA-256 of what was read (not timed). SOURCE is what is read,
TARGET the URL that is written, or the file of a checkpoint; `mount` shows the checkpoint SOURCE as the folder
TARGET. "plain" is what anybody does: one file, one stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from bench.ckpt_loader import cpu_s

CHUNK_BYTES = 8 << 20
Timed = Callable[[], Any]  # gives what was read, None for a write


def write_plain(source: str, target: str) -> Timed:
    """One HDFS file by one stream of hdfs-native."""
    import hdfs_native

    data = read_file(source)
    base, path = split(target)

    def act() -> None:
        with hdfs_native.Client(base).create(path) as writer:
            for start in range(0, len(data), CHUNK_BYTES):
                writer.write(data[start : start + CHUNK_BYTES])

    return act


def write_striped(source: str, target: str) -> Timed:
    """A striped version by our writer; `target` is the checkpoint."""
    from bootseer.checkpoint.convert import stripe

    return lambda: stripe(source, target)


def write_concat(source: str, target: str) -> Timed:
    """One ordinary HDFS file by our writer: parts at once, then concat."""
    from bootseer import aio
    from bootseer.checkpoint.convert import opened
    from bootseer.checkpoint.versions.resolve import resolve
    from bootseer.checkpoint.versions.version_input import inputs_of
    from bootseer.checkpoint.writing.plain_writer import write_plain as write_parts

    async def copy() -> None:
        async with opened(source) as (store, path), opened(target) as (goal, name):
            [(_, file)] = inputs_of(store, await resolve(store, path))
            await write_parts(goal, name, file)

    return lambda: aio.run_sync(copy())


def read_plain(source: str, target: str) -> Timed:
    """One HDFS file by one stream of hdfs-native."""
    import hdfs_native

    del target
    base, path = split(source)

    def act() -> list[bytes]:
        parts = []
        with hdfs_native.Client(base).read(path) as reader:
            while part := reader.read(CHUNK_BYTES):
                parts.append(part)
        return parts

    return act


def read_whole(source: str, target: str) -> Timed:
    """The file `target` of a checkpoint, or a plain file, by our reader: many ranges at once, into memory."""
    from bootseer.checkpoint.io.memory import allocate
    from bootseer.checkpoint.io.source import Request
    from bootseer.checkpoint.opening import open_source

    def act() -> list[memoryview]:
        with open_source(source) as opened:
            path = opened.path or target
            memory = allocate(opened.source.files[path].size)
            opened.source.read([Request(path, 0, memory)])
        return [memory]

    return act


def read_fsspec(source: str, target: str) -> Timed:
    """The same file through fsspec, sequentially; `source` is stripe::hdfs://..."""
    import fsspec

    del target

    def act() -> list[bytes]:
        parts = []
        with fsspec.open(source, "rb") as file:
            while part := file.read(CHUNK_BYTES):
                parts.append(part)
        return parts

    return act


def read_path(source: str, target: str) -> Timed:
    """A file of a mount, sequentially, as dd does with bs=8M."""
    del target

    def act() -> list[bytes]:
        parts = []
        with open(source, "rb", buffering=0) as file:
            while part := file.read(CHUNK_BYTES):
                parts.append(part)
        return parts

    return act


def torch_path(source: str, target: str) -> Timed:
    """torch.load of a file of a mount."""
    import torch

    del target
    return lambda: torch.load(source, map_location="cpu", weights_only=True)


def torch_plain(source: str, target: str) -> Timed:
    """What torch.load takes without a mount: the file by one stream, then torch.load of its bytes."""
    import io

    import torch

    read = read_plain(source, target)
    return lambda: torch.load(io.BytesIO(b"".join(read())), map_location="cpu", weights_only=True)


ACTIONS: dict[str, Callable[[str, str], Timed]] = {
    made.__name__: made
    for made in (
        write_plain,
        write_striped,
        write_concat,
        read_plain,
        read_whole,
        read_fsspec,
        read_path,
        torch_path,
        torch_plain,
    )
}


def split(url: str) -> tuple[str, str]:
    """The name node's part of an HDFS URL, and the path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", parts.path


def read_file(path: str) -> memoryview:
    """A local file in memory."""
    with open(path, "rb") as file:
        return memoryview(file.read())


def describe(found: Any) -> tuple[int, str]:
    """Size and sum of what was read: of bytes, or of the tensors that torch.load gave."""
    from bench.ckpt_loader import digest

    made = hashlib.sha256()
    if isinstance(found, dict):
        made.update(json.dumps(digest(found), sort_keys=True).encode())
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values()), made.hexdigest()
    for part in found:
        made.update(part)
    return sum(map(len, found)), made.hexdigest()


def main(argv: list[str]) -> int:
    """Does it once."""
    action, source, target = argv
    if action == "mount":
        from bootseer.checkpoint.mounting import mount_checkpoint

        mount_checkpoint(source, target)  # until it is unmounted
        return 0
    act = ACTIONS[action](source, target)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 1  # the bench is gone
    began_cpu_s = cpu_s()
    began_s = time.monotonic()
    found = act()
    seconds = time.monotonic() - began_s
    used_cpu_s = cpu_s() - began_cpu_s
    size, total = describe(found) if action.startswith(("read", "torch")) else (os.path.getsize(source), "")
    print(json.dumps({"seconds": seconds, "cpu_s": used_cpu_s, "bytes": size, "digest": total}), flush=True)
    os._exit(0)  # some clients keep threads that wait for ever


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
