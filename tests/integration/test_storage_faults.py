"""Ranges over HTTP from a server that fails in all ways servers do: right bytes in a bounded time, or one error.

Real sockets and threads; the leak check after each test sees to it that none is left.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator

import pytest

from bootseer import aio
from bootseer.errors import NotFound, SourceChanged, StorageError, StorageTimeout, Truncated, Unavailable
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.http.store import HttpStore
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

KIB = 1024
PIECE = 64 * KIB
SIZE = 1024 * KIB - 123
FILES = {name: random.Random(name).randbytes(SIZE) for name in ("model.bin", "folder/optimizer 1.bin")}
PIECES = 32
TIMEOUT_S = 0.5  # the store's: no bytes for so long
PATIENT_S = 20.0  # where no time-out is expected: a busy machine's pauses are none
MIDDLE = 5 * PIECE  # where a piece begins


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer(FILES) as server:
        yield server
    aio.close()


class Outcome:
    """All files read at once through one reader, and what it cost."""

    def __init__(self, server: FaultyHttpServer, *plan: HttpFault, **options: object) -> None:
        self.server = server
        self.error: StorageError | SourceChanged | Truncated | None = None
        server.plan = list(plan)
        self.came = 0
        begin_s = time.monotonic()
        asyncio.run(self._read(options))
        self.took_s = time.monotonic() - begin_s

    async def _read(self, options: dict[str, object]) -> None:
        store = HttpStore(self.server.url, timeout_s=options.pop("timeout_s", TIMEOUT_S))  # type: ignore[arg-type]
        settings = {"piece_bytes": PIECE, "jitter": lambda: 0.2, **options}
        reader = RangeReader(store, **settings)  # type: ignore[arg-type]
        targets = {name: bytearray(SIZE) for name in FILES}
        try:
            requests = [
                RangeRequest(name, 0, memoryview(target), (await store.stat(name)).etag)
                for name, target in targets.items()
            ]
            await reader.read(requests, on_piece=self._on_piece)
            self.is_right = all(target == FILES[name] for name, target in targets.items())
        except (StorageError, SourceChanged, Truncated) as error:
            self.error = error
            after_error = {name: bytes(target) for name, target in targets.items()}
            await asyncio.sleep(0.3)
            assert after_error == targets, "nobody writes after the error"
        finally:
            await store.aclose()
        self.counts = reader.statistics()
        assert self.counts["in_flight"] == 0

    def _on_piece(self, _request: int, _offset: int, length: int) -> None:
        self.came += length

    def assert_right(self, within_s: float, retries: int) -> None:
        assert self.error is None
        assert self.is_right
        assert self.came == 2 * SIZE
        assert self.took_s < within_s
        assert self.counts["retries"] == retries


def hit(kind: HttpKind, **options: object) -> HttpFault:
    """One request of the middle of one file fails."""
    settings = {"path": "model.bin", "first": MIDDLE, "last": MIDDLE, "requests": {0}, **options}
    return HttpFault(kind, **settings)  # type: ignore[arg-type]


def test_undisturbed(server: FaultyHttpServer) -> None:
    outcome = Outcome(server, timeout_s=PATIENT_S)
    outcome.assert_right(within_s=5.0, retries=0)
    assert server.served_bytes.total() == 2 * SIZE, "each byte once"
    assert outcome.counts["requests"] == server.count() == PIECES


@pytest.mark.parametrize(
    ("fault", "within_s", "again"),
    [
        pytest.param(hit(HttpKind.STATUS, status=500), 5.0, 0, id="500"),
        pytest.param(hit(HttpKind.STATUS, status=503), 5.0, 0, id="503"),
        pytest.param(hit(HttpKind.STATUS, status=429, retry_after_s=1), 5.0, 0, id="429"),
        pytest.param(hit(HttpKind.SILENCE), 5.0, 0, id="silence"),
        pytest.param(hit(HttpKind.STALL, keep_bytes=KIB), 5.0, KIB, id="stall"),
        pytest.param(hit(HttpKind.SHORT, keep_bytes=KIB), 5.0, 0, id="short body"),
        pytest.param(hit(HttpKind.RESET, keep_bytes=KIB), 5.0, KIB, id="reset"),
        pytest.param(hit(HttpKind.LESS, keep_bytes=KIB), 5.0, 0, id="less than asked"),
        pytest.param(hit(HttpKind.OTHER_RANGE), 5.0, PIECE, id="other range"),
        pytest.param(hit(HttpKind.LYING_RANGE), 5.0, PIECE, id="206 without Content-Range"),
        pytest.param(hit(HttpKind.SHORT, requests=range(3)), 5.0, 0, id="three times nothing"),
    ],
)
def test_passing_trouble_of_one_request(
    server: FaultyHttpServer, fault: HttpFault, within_s: float, again: int
) -> None:
    waits = fault.kind in (HttpKind.SILENCE, HttpKind.STALL)
    outcome = Outcome(server, fault, timeout_s=1.5 if waits else PATIENT_S)
    times = 3 if isinstance(fault.requests, range) else 1
    outcome.assert_right(within_s, retries=times)
    if fault.retry_after_s:
        assert outcome.took_s >= fault.retry_after_s, "the server is given the time it asked for"
    assert outcome.counts["requests"] == PIECES + times
    # It goes on from the last byte. What a reset swallowed on its way comes again, what had not come yet when the
    # time of a request was over (on a busy machine), and answers that are none.
    assert 2 * SIZE <= server.served_bytes.total() <= 2 * SIZE + again
    tried = [each for each in server.requests if each.last == MIDDLE + PIECE - 1 and each.path == "model.bin"]
    assert len(tried) == times + 1


def test_slow_drip_is_waited_for(server: FaultyHttpServer) -> None:
    drip = hit(HttpKind.DRIP, keep_bytes=PIECE - 20, delay_s=0.01)
    Outcome(server, drip, timeout_s=1.5).assert_right(within_s=5.0, retries=0)


def test_every_third_answer_breaks(server: FaultyHttpServer) -> None:
    faults = [
        HttpFault(kind, keep_bytes=20 * KIB, requests=range(number, 500, 12))
        for number, kind in enumerate((HttpKind.SHORT, HttpKind.RESET, HttpKind.STATUS, HttpKind.LESS))
    ]
    outcome = Outcome(server, *faults)
    assert outcome.error is None
    assert outcome.is_right
    assert 4 <= outcome.counts["retries"] <= 60
    assert outcome.took_s < 15.0
    assert server.served_bytes.total() < 1.5 * 2 * SIZE


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(hit(HttpKind.SILENCE), id="silence"),
        pytest.param(hit(HttpKind.STALL, keep_bytes=KIB), id="stall"),
        pytest.param(hit(HttpKind.DRIP, delay_s=0.2, drip_bytes=KIB), id="drip of 13 s"),
    ],
)
def test_straggler_loses_against_its_hedge(server: FaultyHttpServer, fault: HttpFault) -> None:
    outcome = Outcome(server, fault, timeout_s=20.0, hedges=True)
    outcome.assert_right(within_s=3.0, retries=0)
    assert (outcome.counts["hedges"], outcome.counts["hedge_wins"]) == (1, 1)
    first, second = (each for each in server.requests if each.first == MIDDLE and each.path == "model.bin")
    assert first.connection != second.connection, "another way"


@pytest.mark.slow
def test_straggler_without_a_hedge_ends_at_its_deadline(server: FaultyHttpServer) -> None:
    outcome = Outcome(server, hit(HttpKind.SILENCE), timeout_s=20.0)
    outcome.assert_right(within_s=8.0, retries=1)
    assert outcome.took_s >= 5.0
    assert outcome.counts["timeouts"] == 1


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        pytest.param(hit(HttpKind.FULL), StorageError, "not ranges", id="Range ignored"),
        pytest.param(hit(HttpKind.CHANGED), SourceChanged, "has changed since the read began", id="ETag changed"),
        pytest.param(hit(HttpKind.STATUS, status=404), NotFound, "404", id="gone"),
        pytest.param(
            hit(HttpKind.STATUS, status=500, requests=None), Unavailable, "500.*given up after 4 tries", id="500"
        ),
        pytest.param(hit(HttpKind.SHORT, requests=None), Unavailable, "given up after 4 tries", id="always short"),
        pytest.param(hit(HttpKind.STALL, requests=None), StorageTimeout, "given up after 4", id="always stalled"),
        pytest.param(
            hit(HttpKind.OTHER_RANGE, requests=None), Unavailable, f"sent {MIDDLE + 1}-", id="always another range"
        ),
    ],
)
def test_lasting_trouble_is_one_clear_error(
    server: FaultyHttpServer, fault: HttpFault, error: type[StorageError], said: str
) -> None:
    outcome = Outcome(server, fault)
    assert type(outcome.error) is error
    text = str(outcome.error)
    assert re.search(said, text)
    assert "\n" not in text
    assert server.url in text
    assert (outcome.error.__cause__ is not None) == ("given up" in text), "what happened last is told as well"
    assert outcome.took_s < 4 * (TIMEOUT_S + 1.0) + 2.0


def test_file_that_is_shorter_than_asked(server: FaultyHttpServer) -> None:
    async def main() -> None:
        store = HttpStore(server.url, timeout_s=TIMEOUT_S)
        target = bytearray(PIECE)
        with pytest.raises(Truncated, match=f"of {SIZE}"):
            await RangeReader(store).read([RangeRequest("model.bin", SIZE - 10, memoryview(target))])
        await store.aclose()

    asyncio.run(main())
    assert server.count() == 1, "another try would not make it longer"


def test_server_that_is_gone(server: FaultyHttpServer) -> None:
    server.close()

    async def main() -> None:
        store = HttpStore(server.url, timeout_s=TIMEOUT_S)
        reader = RangeReader(store, jitter=lambda: 0.1)
        with pytest.raises(Unavailable, match="given up after 4 tries"):
            await reader.read([RangeRequest("model.bin", 0, memoryview(bytearray(PIECE)))])
        await store.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("when_s", [0.0, 0.02, 0.1, 0.4])
def test_cancelled_in_the_middle(server: FaultyHttpServer, when_s: float) -> None:
    server.rate = 500e3
    targets = {name: bytearray(SIZE) for name in FILES}

    async def main() -> None:
        store = HttpStore(server.url, timeout_s=TIMEOUT_S)
        reader = RangeReader(store, piece_bytes=PIECE)
        begin_s = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(when_s):
                await reader.read([RangeRequest(name, 0, memoryview(target)) for name, target in targets.items()])
        assert time.monotonic() - begin_s < when_s + 1.0
        after = {name: bytes(target) for name, target in targets.items()}
        await asyncio.sleep(0.3)
        assert after == targets
        assert reader.statistics()["in_flight"] == 0
        await store.aclose()

    asyncio.run(main())


def test_connections_dropped_by_a_restart(server: FaultyHttpServer) -> None:
    server.rate = 2e6
    # One answer is unfinished when the first piece is there, however slow this process is.
    server.plan = [
        HttpFault(HttpKind.STALL, path="model.bin", first=MIDDLE, last=MIDDLE, requests={0}, keep_bytes=9)
    ]

    async def main() -> tuple[dict[str, int], bool]:
        store = HttpStore(server.url, timeout_s=PATIENT_S)
        reader = RangeReader(store, piece_bytes=PIECE, jitter=lambda: 0.2)
        target = bytearray(SIZE)
        dropped: list[int] = []

        def on_piece(*_: int) -> None:
            if not dropped:
                dropped.append(1)
                server.drop_connections()

        await reader.read([RangeRequest("model.bin", 0, memoryview(target))], on_piece=on_piece)
        await store.aclose()
        return reader.statistics(), target == FILES["model.bin"]

    counts, is_right = asyncio.run(main())
    assert is_right
    assert 1 <= counts["retries"] <= 16
