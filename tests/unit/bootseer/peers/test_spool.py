"""The bounded file of spans: room, holders, a disk that is full, other users."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.peers import spool as spool_module
from bootseer.peers.server import Connection
from bootseer.peers.spans import SPAN_BYTES, ObjectName
from bootseer.peers.spool import Spool, SpooledSpan, SpoolFullError


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path / "spool"), 3 * SPAN_BYTES + 5)
    yield spool
    spool.close()


def key(number: int) -> tuple[ObjectName, int]:
    return ObjectName("o", "path"), number


def fill(spool: Spool, number: int) -> SpooledSpan:
    """Writes a span whole, and lets it go."""
    with spool.held(key(number)) as kept:
        spool.write(kept, 0, memoryview(bytes([number]) * SPAN_BYTES))
        kept.extents.add(0, SPAN_BYTES)
    return kept


def holds(spool: Spool, number: int) -> bool:
    with spool.held(key(number)) as kept:
        if not kept.extents:
            return False
        data = os.pread(spool.fd, SPAN_BYTES, spool.offset(kept, 0))
        assert data == bytes([number]) * SPAN_BYTES
        return True


def test_the_span_used_least_recently_makes_room(spool: Spool) -> None:
    for number in (1, 2, 3):
        fill(spool, number)
    assert holds(spool, 1)
    fill(spool, 4)
    assert spool.statistics()["kept_bytes"] == 3 * SPAN_BYTES
    assert [holds(spool, number) for number in (1, 3, 4)] == [True, True, True]
    assert spool.statistics()["evicted"] == 1
    assert not holds(spool, 2)


def test_what_somebody_holds_stays(spool: Spool) -> None:
    held = [spool.hold(key(number)) for number in (1, 2, 3)]
    with pytest.raises(SpoolFullError):
        spool.hold(key(4))
    assert spool.hold(key(2)) is held[1]
    spool.release(held[1])
    with pytest.raises(SpoolFullError):
        spool.hold(key(4))
    spool.release(held[1])
    assert spool.hold(key(4)).place == held[1].place
    assert spool.statistics()["refused"] == 2


def test_a_span_of_which_nothing_came_takes_no_room(spool: Spool) -> None:
    for number in range(20):
        with spool.held(key(number)):
            pass
    assert spool.statistics()["spans"] == 0
    assert os.fstat(spool.fd).st_size == 0


def test_a_full_disk_means_fewer_places(spool: Spool) -> None:
    fill(spool, 1)
    with spool.held(key(2)):
        spool.shrink()
    assert spool.statistics()["max_spans"] == 1
    fill(spool, 3)
    assert not holds(spool, 1)
    fill(spool, 3)
    spool.shrink()
    with pytest.raises(SpoolFullError):
        spool.hold(key(5))
    spool.shrink()
    assert spool.statistics()["max_spans"] == 0


def test_a_file_that_cannot_grow_is_reported(spool: Spool) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SPAN_BYTES + 1000, limits[1]))
    try:
        with spool.held(key(1)) as first, spool.held(key(2)) as second:
            spool.write(first, 0, memoryview(bytes(SPAN_BYTES)))
            with pytest.raises(SpoolFullError, match="full"):
                spool.write(second, 0, memoryview(bytes(SPAN_BYTES)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_it_is_private_and_has_no_name(tmp_path: Path, spool: Spool) -> None:
    directory = tmp_path / "spool"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.iterdir()) == []
    assert os.fstat(spool.fd).st_nlink == 0
    assert os.fstat(spool.fd).st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        Spool(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="at least"):
        Spool(str(tmp_path / "spool"), 1000)


@pytest.mark.parametrize("is_lent", [True, False])
def test_what_is_on_its_way_stays_as_it_was_when_its_place_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lent: bool
) -> None:
    """A socket may have the file's own pages, not a copy, long after it has taken them."""
    if not is_lent:
        monkeypatch.setattr(spool_module, "punch_hole", lambda *_: False)
    spool = Spool(str(tmp_path), SPAN_BYTES)
    assert spool.is_lent == is_lent
    count = 64 << 10  # fits into the buffers of a connection

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as ours,
        ):
            theirs, _ = server.accept()
            with theirs:
                with spool.held(key(1)) as first:
                    spool.write(first, 0, memoryview(b"a" * count))
                    first.extents.add(0, count)
                    await Connection(ours).send_file(spool, spool.offset(first, 0), count)
                with spool.held(key(2)) as second:
                    assert second.place == first.place
                    spool.write(second, 0, memoryview(b"b" * count))
                    second.extents.add(0, count)
                theirs.setblocking(False)
                found = bytearray()
                while len(found) < count:
                    found += await loop.sock_recv(theirs, count)
                return bytes(found)

    assert asyncio.run(main()) == b"a" * count
    spool.close()
