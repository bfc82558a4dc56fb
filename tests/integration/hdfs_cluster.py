"""What the tests of HDFS share: the cluster or the reason why there is none, reads and writes that are watched."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest

from bootseer import aio
from bootseer.errors import BootseerError, NotFound
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.hdfs.store import HdfsStore
from bootseer.storage.hdfs.webhdfs_client import WebHdfsClient
from tests.leaks import LeakCheck
from tests.support import wait_until
from tests.testing import minihdfs

T = TypeVar("T")

DIRECTORY = "/tests"


class Read(NamedTuple):
    """How a watched read went."""

    seconds: float
    is_right: bool
    error: BootseerError | None


def start(directory: os.PathLike[str], **kind: Any) -> minihdfs.MiniHdfs:
    """A cluster, not started yet; without Java and outside CI the test is skipped."""
    in_ci = bool(os.environ.get("CI"))
    if reason := minihdfs.why_not():
        (pytest.fail if in_ci else pytest.skip)(f"no HDFS: {reason}")
    try:
        return minihdfs.MiniHdfs(directory, **kind)
    except BootseerError as error:
        if in_ci:
            raise
        pytest.skip(str(error))


def store(hdfs: minihdfs.MiniHdfs, *, timeout_s: float = 30.0, **options: object) -> HdfsStore:
    options.setdefault("web", web_of(hdfs))
    return HdfsStore.open(hdfs.url + DIRECTORY, timeout_s=timeout_s, options=options)


def web_of(hdfs: minihdfs.MiniHdfs) -> str:
    """host:port of the NameNode's web server."""
    return hdfs.web_url.removeprefix("webhdfs://")


def sandbox(hdfs: minihdfs.MiniHdfs, name: str) -> minihdfs.DataNode:
    """A DataNode that has the first block of a file."""
    address = hdfs.blocks(f"{DIRECTORY}/{name}")[0].addresses[0]
    return next(node for node in hdfs.datanodes if node.address == address)


def writing_to(hdfs: minihdfs.MiniHdfs) -> minihdfs.DataNode:
    """A DataNode that has some of a file in the making."""

    def find() -> minihdfs.DataNode | None:
        for name in hidden_names(hdfs):
            if hdfs.blocks(f"{DIRECTORY}/{name}"):
                return sandbox(hdfs, name)
        return None

    return wait_until(find, 10.0)


def hidden_names(hdfs: minihdfs.MiniHdfs) -> list[str]:
    """Files in the making that are there, as HDFS itself lists them."""
    client = WebHdfsClient([web_of(hdfs)], user="root", timeout_s=10.0)
    try:
        return [status.name for status in client.entries(DIRECTORY) if status.name.startswith(".")]
    except NotFound:
        return []


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


async def read(
    place: HdfsStore, name: str, expected: bytes, *, disturb: Callable[[], object] = lambda: None, pieces: int = 8
) -> Read:
    """Reads a file as a whole, many ranges at once; `disturb` is called when the first bytes are there."""
    status = await place.stat(name)
    target = bytearray(len(expected))
    is_disturbed = False

    def on_piece(*_: int) -> None:
        nonlocal is_disturbed
        if not is_disturbed:
            is_disturbed = True
            disturb()

    reader = RangeReader(place, piece_bytes=-(-len(expected) // pieces))
    error = None
    began_s = time.monotonic()
    try:
        await reader.read([RangeRequest(name, 0, memoryview(target), status.etag)], on_piece=on_piece)
    except BootseerError as failure:
        error = failure
    return Read(time.monotonic() - began_s, target == expected, error)


async def write(
    place: HdfsStore, name: str, data: bytes, *, disturb: Callable[[], object] = lambda: None, placement: int = 0
) -> tuple[float, BootseerError | None, set[int]]:
    """Writes a file, disturbed after its first quarter. Gives seconds, error, and sizes seen meanwhile."""
    seen: set[int] = set()
    ended = asyncio.Event()

    async def watch() -> None:
        watcher = HdfsStore.open(place.url, options={"web": ""})
        while not ended.is_set():
            try:
                seen.add((await watcher.stat(name)).size)
            except BootseerError:
                pass  # not there yet, or no NameNode
            try:
                await asyncio.wait_for(ended.wait(), 0.05)
            except TimeoutError:
                pass

    error = None
    view = memoryview(data)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        began_s = time.monotonic()
        try:
            async with place.create(name, size=len(data), placement=placement) as writer:
                await writer.write(view[: len(data) // 4])
                await aio.run_io(disturb)
                await writer.write(view[len(data) // 4 :])
        except BootseerError as failure:
            error = failure
        seconds = time.monotonic() - began_s
        ended.set()
    return seconds, error, seen


def forgive_native(leaks: LeakCheck) -> None:
    """hdfs-native keeps connections to DataNodes in a cache that cannot be closed; those are no leak of ours.

    They hold what their event loop was made of, an epoll and an eventfd.
    """
    inodes = _inodes_of_connections()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        is_loop = target in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
        if is_loop or target.removeprefix("socket:[").removesuffix("]") in inodes:
            leaks._fds[int(name)] = target


def _inodes_of_connections() -> set[str]:
    found = set()
    with open("/proc/self/net/tcp", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            fields = line.split()
            # Addresses of a mini HDFS: 127.x.y.z, but not those of other servers of tests, 127.0.0.z.
            remote = bytes.fromhex(fields[2].partition(":")[0])[::-1]
            if remote[0] == 127 and remote[1]:
                found.add(fields[9])
    return found
