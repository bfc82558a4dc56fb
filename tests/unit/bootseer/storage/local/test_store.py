"""What is special to files of this machine: the page cache, O_DIRECT, hanging mounts, crashes, odd files."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    IntegrityError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
)
from bootseer.linux.page_cache import cached_share
from bootseer.storage import open_store
from bootseer.storage.engine.revocable_buffer import address_of
from bootseer.storage.local import reading as local_reading
from bootseer.storage.local import store as local
from bootseer.storage.local import writing as local_writing
from bootseer.storage.local.store import LocalStore
from tests.support import wait_until
from tests.testing.store_suite import pattern, read, runs

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


@pytest.fixture
def direct_path(tmp_path: Path) -> Path:
    """A file of some MiB where O_DIRECT is possible."""
    path = tmp_path / "direct.bin"
    path.write_bytes(pattern(5 * MIB + 123))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    return path


def make_cold(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())

        def is_cold() -> bool:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return cached_share(file.fileno(), 0, path.stat().st_size) == 0

        wait_until(is_cold, 10.0)


def aligned(size: int, shift: int = 0) -> memoryview:
    """Memory that begins `shift` bytes behind a page's start."""
    return memoryview(mmap.mmap(-1, size + 8192))[shift : shift + size]


# ---- the page cache


@runs()
async def test_cold_bytes_go_around_the_page_cache(store: LocalStore, direct_path: Path) -> None:
    size = direct_path.stat().st_size
    make_cold(direct_path)
    target = aligned(size)
    await store.read_into("direct.bin", 0, target)
    assert target == pattern(size)
    assert store.statistics()["direct_bytes"] == size // 4096 * 4096
    with open(direct_path, "rb") as file:
        assert cached_share(file.fileno(), 0, size) < 0.01, "only the odd end went through it"


@runs()
async def test_warm_bytes_come_from_the_page_cache(store: LocalStore, direct_path: Path) -> None:
    direct_path.read_bytes()
    target = aligned(4 * MIB)
    await store.read_into("direct.bin", 4096, target)
    assert target == pattern(5 * MIB)[4096 : 4096 + 4 * MIB]
    assert store.statistics()["direct_bytes"] == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 3 * MIB) | st.integers(0, 700).map(lambda block: block * 4096),
    length=st.integers(1, 2 * MIB),
    shift=st.integers(0, 4095) | st.just(-1),
)
def test_any_range_into_any_memory(direct_path: Path, offset: int, length: int, shift: int) -> None:
    """shift -1: as the bytes lie in a block of the file, so that they come straight."""
    store = LocalStore(str(direct_path.parent))
    make_cold(direct_path)
    memory = aligned(length + 8192, offset % 4096 if shift == -1 else shift)
    memory[:] = b"\xee" * len(memory)
    asyncio.run(store.read_into("direct.bin", offset, memory[:length]))
    assert memory[:length] == pattern(5 * MIB + 123)[offset : offset + length]
    assert memory[length:] == b"\xee" * 8192


@runs()
async def test_only_the_odd_ends_go_through_the_page_cache(store: LocalStore, direct_path: Path) -> None:
    make_cold(direct_path)
    target = aligned(3 * MIB, 5)
    await store.read_into("direct.bin", 4096 + 5, target)
    assert target == pattern(5 * MIB)[4101 : 4101 + 3 * MIB]
    assert store.statistics()["direct_bytes"] == 3 * MIB - 4096
    with open(direct_path, "rb") as file:
        assert cached_share(file.fileno(), 0, 5 * MIB) < 0.05


@runs()
async def test_memory_that_lies_wrong_is_filled_around_the_cache_all_the_same(
    store: LocalStore, direct_path: Path
) -> None:
    make_cold(direct_path)
    target = aligned(4 * MIB, 77)
    await store.read_into("direct.bin", 8192, target)
    assert target == pattern(5 * MIB)[8192 : 8192 + 4 * MIB]
    assert store.statistics()["direct_bytes"] == 4 * MIB


@pytest.mark.parametrize("refused_by", ["open", "preadv"])
@runs()
async def test_where_there_is_no_direct_input(
    store: LocalStore, direct_path: Path, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    make_cold(direct_path)
    tries: list[int] = []
    real_open, real_preadv = os.open, os.preadv
    direct_fds: set[int] = set()

    def open_(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            tries.append(1)
            if refused_by == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *args)
        (direct_fds.add if flags & os.O_DIRECT else direct_fds.discard)(fd)
        return fd

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(local_reading.os, "open", open_)
    monkeypatch.setattr(local_reading.os, "preadv", preadv)
    for _ in range(2):
        assert await read(store, "direct.bin", 5, 4 * MIB) == pattern(5 * MIB)[5 : 5 + 4 * MIB]
        monkeypatch.undo() if len(tries) > 1 else make_cold(direct_path)
    assert len(tries) == 1, "the device is remembered"
    assert store.statistics()["direct_bytes"] == 0


@pytest.mark.parametrize("most", [12_288, 10_000, 1])
@runs()
async def test_calls_that_bring_less(
    store: LocalStore, direct_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    make_cold(direct_path)
    real = os.preadv
    is_short = True

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        nonlocal is_short
        is_short = not is_short
        count = real(fd, buffers, offset, *flags)
        return min(count, most if is_short else MIB)  # the rest comes again

    monkeypatch.setattr(local_reading.os, "preadv", preadv)
    assert await read(store, "direct.bin", 3, 300_000) == pattern(MIB)[3:300_003]
    make_cold(direct_path)
    target = aligned(MIB)
    await store.read_into("direct.bin", 0, target)
    assert target == pattern(MIB)


# ---- files that change


@pytest.mark.parametrize("change", ["shorter", "rewritten", "longer"])
@runs()
async def test_a_file_that_changes_while_it_is_read(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(pattern(200_000))
    os.utime(path, (1, 1))
    real, is_done = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count = real(fd, [buffers[0][:1000]], offset, *flags)
        if not is_done and not flags:
            is_done.append(1)
            with open(path, "r+b") as file:
                if change == "shorter":
                    file.truncate(500)
                elif change == "longer":
                    file.seek(0, 2)
                    file.write(b"x")
                else:
                    file.write(b"x" * 200_000)
        return count

    monkeypatch.setattr(local_reading.os, "preadv", preadv)
    with pytest.raises(SourceChanged, match=r"file\.bin"):
        await read(store, "file.bin", 0, 200_000)


@runs()
async def test_all_pieces_are_of_one_version(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the caller did not say which: a file replaced between two pieces is no file."""
    path = tmp_path / "file.bin"
    path.write_bytes(b"1" * (9 * MIB))
    real = local_reading.read_range

    def read_range(*args: object) -> tuple[str, int]:
        outcome = real(*args)  # type: ignore[arg-type]
        (tmp_path / "new").write_bytes(b"2" * (9 * MIB))
        (tmp_path / "new").rename(path)
        return outcome

    monkeypatch.setattr(local, "read_range", read_range)
    with pytest.raises(SourceChanged):
        await read(store, "file.bin", 0, 9 * MIB)


@runs()
async def test_what_is_read_stays_when_the_file_is_replaced(store: LocalStore, tmp_path: Path) -> None:
    await store.publish("file.bin", b"old")
    before = await store.stat("file.bin")
    await store.publish("file.bin", b"new")
    with pytest.raises(SourceChanged):
        await read(store, "file.bin", 0, 3, etag=before.etag)
    os.unlink(tmp_path / "file.bin")
    with pytest.raises(NotFound):
        await read(store, "file.bin", 0, 3)


# ---- odd files


@runs()
async def test_offsets_past_4_gib(store: LocalStore, tmp_path: Path) -> None:
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(5 << 30)
        for offset in ((1 << 31) - 5, (1 << 32) - 5, (5 << 30) - 10):
            file.seek(offset)
            file.write(b"0123456789")
    assert (await store.stat("huge.bin")).size == 5 << 30
    for offset in ((1 << 31) - 5, (1 << 32) - 5, (5 << 30) - 10):
        data = await read(store, "huge.bin", offset - 100_000, 100_010)
        assert data == bytes(100_000) + b"0123456789"
    with pytest.raises(Truncated):
        await read(store, "huge.bin", (5 << 30) - 1, 2)


@runs(limit_s=10.0)
async def test_pipes_and_devices_are_no_files(store: LocalStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "device")
    for name in ("pipe", "device"):
        with pytest.raises(StorageError, match="not a file"):
            await store.stat(name)
        with pytest.raises(StorageError, match="not a file"):
            await read(store, name, 0, 1)


@runs()
async def test_links_are_followed(store: LocalStore, tmp_path: Path) -> None:
    """Caches of models are made of links that lead out of the folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "blob").write_bytes(b"abc")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file.bin").symlink_to(outside / "blob")
    (inside / "folder").symlink_to(outside)
    (inside / "dangling").symlink_to(tmp_path / "nothing")
    linked = LocalStore(str(inside))
    assert await read(linked, "file.bin", 0, 3) == b"abc"
    assert await read(linked, "folder/blob", 0, 3) == b"abc"
    assert [entry.name for entry in await linked.list("")] == ["file.bin", "folder"]
    with pytest.raises(NotFound):
        await linked.stat("dangling")
    await linked.delete("folder")
    assert (outside / "blob").exists(), "a link is deleted, not what it leads to"


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Permissions mean nothing to root."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.fixture
def forbidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        root = Path(name)
        root.chmod(0o755)
        (root / "file.bin").write_bytes(b"abc")
        (root / "file.bin").chmod(0)
        (root / "folder").mkdir(mode=0)
        yield root
        (root / "folder").chmod(0o700)


def test_permissions(forbidden: Path, unprivileged: None) -> None:
    store = LocalStore(str(forbidden))

    async def main() -> None:
        for call in (
            read(store, "file.bin", 0, 1),
            store.list("folder"),
            store.stat("folder/file.bin"),
            store.publish("new.bin", b"x"),
            store.publish("folder/new.bin", b"x", if_absent=True),
        ):
            with pytest.raises(PermissionDenied) as caught:
                await call
            assert str(forbidden) in str(caught.value)

    if os.geteuid() != 0 and os.stat(forbidden).st_uid == os.geteuid():
        os.chmod(forbidden, 0o555)
    asyncio.run(main())


# ---- writing


@runs()
async def test_the_root_is_made_when_something_is_written(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "not" / "there"))
    with pytest.raises(NotFound):
        await store.list("")
    async with store.create("a/file.bin") as writer:
        await writer.write(b"x")
    assert (tmp_path / "not" / "there" / "a" / "file.bin").read_bytes() == b"x"


@runs()
async def test_new_files_have_the_rights_that_the_user_gives(store: LocalStore, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        await store.publish("file.bin", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file.bin").stat().st_mode & 0o777 == 0o640


@runs()
async def test_bytes_are_on_the_disk_before_the_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def note(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **options: object) -> object:
            step = name
            if name == "fsync":
                step += " folder" if os.path.isdir(f"/proc/self/fd/{args[0]}") else " file"
            steps.append(step)
            return real(*args, **options)

        return noted

    for name in ("fsync", "link", "rename"):
        monkeypatch.setattr(local_writing.os, name, note(name, getattr(os, name)))
    await store.publish("file.json", b"x")
    assert steps == ["fsync file", "rename", "fsync folder"]
    steps.clear()
    await store.publish("other.json", b"x", if_absent=True)
    assert steps == ["fsync file", "link", "fsync folder"]
    steps.clear()
    async with store.create("new/file.bin") as writer:
        await writer.write(b"x")
    assert steps == ["fsync folder", "fsync file", "link", "fsync folder"], "also the new folder's name"


@runs()
async def test_what_a_crash_left_is_not_listed(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / f"{local_writing.TEMPORARY}abc").write_bytes(b"half")
    await store.publish("file.bin", b"x")
    assert [entry.name for entry in await store.list("")] == ["file.bin"]


@runs()
async def test_a_file_is_published_although_its_temporary_name_stays(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refuse(path: str, **options: Any) -> None:
        if local_writing.TEMPORARY in os.fspath(path):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    assert (await store.publish("new", b"abc", if_absent=True)).size == 3
    with pytest.raises(AlreadyExists):
        await store.publish("new", b"abc", if_absent=True)
    assert [entry.name for entry in await store.list("")] == ["new"]
    assert (tmp_path / "new").read_bytes() == b"abc"


@runs()
async def test_parts_are_joined_although_one_cannot_be_deleted(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refuse(path: str, **options: Any) -> None:
        if os.fspath(path).endswith("a"):
            raise OSError(errno.EIO, "Input/output error", path)
        unlink(path, **options)

    for name, data in (("a", b"1"), ("b", b"2")):
        await store.publish(name, data)
    monkeypatch.setattr(os, "unlink", refuse)
    await store.concat("whole", ["a", "b"])
    assert (tmp_path / "whole").read_bytes() == b"12"
    assert [entry.name for entry in await store.list("")] == ["a", "whole"]


@pytest.mark.parametrize("renames", [True, False])
@runs()
async def test_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch, renames: bool) -> None:
    def link(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local_writing.os, "link", link)
    if not renames:
        monkeypatch.setattr(local_writing, "call", lambda *args: errno.EINVAL)
    await store.publish("file.json", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        await store.publish("file.json", b"second", if_absent=True)
    with pytest.raises(AlreadyExists):
        async with store.create("new.json") as writer:
            await writer.write(b"mine")
            await store.publish("new.json", b"theirs")
    assert await read(store, "file.json", 0, 5) == b"first"
    assert await read(store, "new.json", 0, 6) == b"theirs"
    assert [entry.name for entry in await store.list("")] == ["file.json", "new.json"]


@runs()
async def test_a_file_in_the_way_of_a_directory(store: LocalStore) -> None:
    await store.publish("file", b"x")
    with pytest.raises(StorageError, match="file"):
        await store.publish("file/below.bin", b"y")
    await store.publish("folder/file.bin", b"x")
    with pytest.raises(StorageError, match="folder"):
        await store.publish("folder", b"y")
    assert await read(store, "folder/file.bin", 0, 1) == b"x"


# ---- file systems that hang


class Stuck:
    """In place of a function: hangs until it is let go, then does what it was asked for."""

    def __init__(self, real: Callable[..., object]) -> None:
        self._real = real
        self.go = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self, *args: object, **options: object) -> object:
        try:
            self.go.wait(20.0)
            return self._real(*args, **options)
        finally:
            self.has_ended.set()


@runs(limit_s=20.0)
async def test_a_read_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.bin").write_bytes(pattern(100_000))
    store = LocalStore(str(tmp_path), timeout_s=0.05, may_hang=True)
    stuck = Stuck(local_reading.read_range)
    monkeypatch.setattr(local, "read_range", stuck)
    target = memoryview(bytearray(b"\xee" * 100_000))
    with pytest.raises(StorageTimeout, match="did not answer"):
        await store.read_into("file.bin", 0, target)
    task = asyncio.create_task(store.read_into("file.bin", 0, target))
    await asyncio.sleep(0)
    started_s = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started_s < 5.0
    stuck.go.set()
    await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
    assert target == b"\xee" * 100_000, "it came back, and wrote nothing any more"


@runs(limit_s=20.0)
async def test_a_write_that_hangs_is_given_up_and_nothing_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path), timeout_s=0.1, may_hang=True)
    stuck = Stuck(os.fsync)
    monkeypatch.setattr(local_writing.os, "fsync", stuck)
    with pytest.raises(StorageTimeout):
        async with store.create("file.bin") as writer:
            await writer.write(b"x")
    stuck.go.set()
    await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
    assert os.listdir(tmp_path) == [], "also when the call comes back later"


# ---- the rest


def test_urls(tmp_path: Path) -> None:
    root = tmp_path / "with space%20 ü"
    store = LocalStore(str(root))
    assert store.url == f"file://{tmp_path}/with%20space%2520%20%C3%BC"
    assert open_store(store.url).url == store.url
    assert open_store(str(root)).url == store.url


def test_address_of() -> None:
    memory = memoryview(bytearray(b"abcdef"))
    assert address_of(memory[3:]) == address_of(memory) + 3
    assert ctypes.string_at(address_of(memory[3:]), 3) == b"def"


@runs()
async def test_integrity_errors_name_the_file(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"abc")
    with pytest.raises(IntegrityError, match=r"file\.bin: bytes 1 to 10 of a file of 3"):
        await read(store, "file.bin", 1, 9)
