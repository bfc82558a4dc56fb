"""Reads over one connection, from a peer that follows a script: bytes, time and memory, whatever it sends."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bootseer.peers import wire
from bootseer.peers.auth import Handshake, derive_key
from bootseer.peers.link import LOW_WATER_BYTES, Link, RangeRead, ReadOutcome
from bootseer.peers.membership import Node
from bootseer.peers.peer import Peer, ReadResult
from bootseer.peers.spans import ObjectName
from tests.support import tune

KEY = derive_key(b"the secret of this job", "run-1")
NAME = ObjectName("0" * 32, "packs/one")
NONCE = bytes(32)
DATA = random.Random(0).randbytes(2 * LOW_WATER_BYTES + 70_001)
LIMIT_S = 20.0
LOOPS = ["asyncio", "uvloop"]
CLOCK_S = 0.002  # that of uvloop has whole milliseconds


class ScriptedPeer:
    """A peer at a port of the loopback; it sends only what the test lets it send."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.sock = socket.socket()
        self.peer = Peer(Node("b", "127.0.0.1", self.listener.getsockname()[1]), "a", KEY)

    def close(self) -> None:
        self.peer.close()
        self.sock.close()
        self.listener.close()

    async def accept(self) -> None:
        """Take the next connection, after a handshake."""
        loop = asyncio.get_running_loop()
        self.sock.close()
        self.sock, _ = await loop.sock_accept(self.listener)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = wire.read_request(await self.head())
        assert isinstance(hello, wire.Hello)
        proof = Handshake(hello.client, hello.server, hello.nonce, NONCE).server_proof(KEY)
        await self.send(wire.write_hello_answer(NONCE, proof))

    async def head(self) -> bytes:
        data = b""
        while not data.endswith(wire.END):
            more = await asyncio.get_running_loop().sock_recv(self.sock, 4096)
            assert more, "the reader closed the connection"
            data += more
        return data.removesuffix(wire.END)

    async def send(self, *pieces: bytes) -> None:
        """Send the pieces one after the other, each in a packet of its own."""
        for piece in pieces:
            await asyncio.get_running_loop().sock_sendall(self.sock, piece)
            await asyncio.sleep(0.001 if len(pieces) > 1 else 0)

    async def is_closed(self) -> bool:
        """Return whether the reader has closed the connection; wait for it."""
        try:
            return not await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        except ConnectionResetError:  # bytes were waiting there
            return True

    def read(self, memory: bytearray, late_s: float = LIMIT_S) -> asyncio.Task[ReadResult]:
        return asyncio.create_task(self.peer.read(NAME, 0, memoryview(memory), lambda: late_s))


@pytest.fixture
def scripted() -> Iterator[ScriptedPeer]:
    scripted = ScriptedPeer()
    yield scripted
    scripted.close()


def run(loop: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(limited())


def part(data: bytes = DATA) -> bytes:
    return wire.write_part(0, len(data))


def is_free(memory: bytearray) -> bool:
    """Return whether nothing refers to the memory; a view that is still there forbids to resize it."""
    try:
        memory.append(0)
    except BufferError:
        return False
    del memory[-1]
    return True


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---- what arrives --------------------------------------------------------------------------------------------


def cut_at(data: bytes, *places: int) -> list[bytes]:
    return [data[start:end] for start, end in itertools.pairwise([0, *places, len(data)])]


HEAD = len(wire.write_part(0, len(DATA)))
SPLITS = {
    "at once": [],
    "in the head": [5, HEAD - 3, HEAD - 1],
    "after the head": [HEAD],
    "a byte of the body with the head": [HEAD + 1],
    "at the low water": [HEAD, HEAD + LOW_WATER_BYTES, HEAD + 2 * LOW_WATER_BYTES],
    "around the low water": [HEAD + LOW_WATER_BYTES - 1, HEAD + 2 * LOW_WATER_BYTES + 1],
    "the last byte alone": [HEAD + len(DATA) - 1],
    "in many": list(range(HEAD + 13, HEAD + len(DATA), 9973)),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("places", SPLITS.values(), ids=SPLITS)
def test_an_answer_may_be_split_anywhere(scripted: ScriptedPeer, loop: str, places: list[int]) -> None:
    async def main() -> None:
        memory = bytearray(len(DATA))
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(*cut_at(part() + DATA, *places))
        assert await reading == ReadResult(len(DATA), ReadOutcome.DONE, lived=True)
        assert memory == DATA

    run(loop, main)


@pytest.mark.parametrize("size", [1, 3000, 4096, 5000])
def test_short_bodies_come_with_the_head(scripted: ScriptedPeer, size: int) -> None:
    async def main() -> None:
        memory = bytearray(size)
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(wire.write_answer(102) * 3 + part(DATA[:size]) + DATA[:size])
        assert (await reading).ending is ReadOutcome.DONE
        assert memory == DATA[:size]

    run("asyncio", main)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_serves_several_loops_and_short_answers_after_long_ones(
    scripted: ScriptedPeer, loop: str
) -> None:
    """The kernel must not wait for more than the head of the next answer."""

    async def first() -> None:
        memory = bytearray(len(DATA))
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA)
        assert (await reading).ending is ReadOutcome.DONE

    async def second() -> None:
        for answer in (wire.write_answer(404), wire.write_answer(503)):
            reading = scripted.read(bytearray(len(DATA)))
            await scripted.head()  # of the same connection
            await scripted.send(answer)
            assert (await reading).ending in (ReadOutcome.HAS_NOT, ReadOutcome.NO_ROOM)

    run(loop, first)
    run("asyncio", second)
    run(loop, second)


def test_bytes_are_received_in_few_steps(scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    take = Link._take

    def counted(self: Link, read: RangeRead) -> ReadOutcome | None:
        nonlocal steps
        steps += 1
        return take(self, read)

    monkeypatch.setattr(Link, "_take", counted)

    async def main() -> None:
        reading = scripted.read(bytearray(len(DATA)))
        await scripted.accept()
        await scripted.head()
        await scripted.send(part(), *cut_at(DATA, *range(8192, len(DATA), 8192)))
        assert (await reading).have == len(DATA)

    run("asyncio", main)
    assert steps < 20  # the head, the low water twice, the rest; and looks if this machine is slow


class KernelWithoutLowWater(socket.socket):
    def setsockopt(self, *args: Any) -> None:
        raise OSError(errno.ENOPROTOOPT, "not here")


class KernelThatKeepsBuffers(socket.socket):
    """Before Linux 4.18 a low water did not enlarge the buffer."""

    def setsockopt(self, level: int, name: int, value: int) -> None:  # type: ignore[override]
        if name != socket.SO_RCVLOWAT or 2 * value <= self.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF):
            super().setsockopt(level, name, value)


@pytest.mark.parametrize("kind", [socket.socket, KernelWithoutLowWater, KernelThatKeepsBuffers])
@pytest.mark.parametrize("buffer_bytes", [0, 16 << 10])
def test_old_kernels_and_small_buffers_are_good_enough(kind: type[socket.socket], buffer_bytes: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as plain:
            if buffer_bytes:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            plain.connect(listener.getsockname())
            theirs, _ = listener.accept()
            with kind(plain.family, plain.type, fileno=plain.detach()) as ours, theirs:
                for each in (ours, theirs):
                    each.setblocking(False)
                link, memory = Link(ours), bytearray(len(DATA))
                link._session = Handshake("a", "b", NONCE, NONCE).session(KEY)
                read = RangeRead(NAME, 0, memoryview(memory), lambda: LIMIT_S)  # that nothing looks after
                reading = asyncio.create_task(link.read(read))
                await loop.sock_sendall(theirs, part() + DATA)
                assert await reading is ReadOutcome.DONE
                assert memory == DATA

    run("asyncio", main)


# ---- peers that do what they should not ----------------------------------------------------------------------


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(
    ("loop", "end"),
    # uvloop does not report a reset twice: if bytes came with it, only the next look finds it.
    [("asyncio", socket.socket.close), ("uvloop", socket.socket.close), ("asyncio", reset)],
    ids=["asyncio", "uvloop", "reset"],
)
@pytest.mark.parametrize("sent", [0, 1, LOW_WATER_BYTES - 1, LOW_WATER_BYTES + 1, len(DATA) - 1])
def test_an_end_in_the_middle_leaves_valid_bytes(
    scripted: ScriptedPeer, loop: str, end: Callable[[socket.socket], None], sent: int
) -> None:
    memory = bytearray(len(DATA))

    async def main() -> None:
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA[:sent])
        end(scripted.sock)
        found = await reading
        assert found.ending is ReadOutcome.LOST
        assert memory[: found.have] == DATA[: found.have]
        if end is socket.socket.close:
            assert found.have == sent
        assert is_free(memory), "the caller may use it as it likes"

    run(loop, main)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(
    "answer",
    [
        part(b"12345678") + b"123456789",
        wire.write_part(1, 9) + b"12345678",
        wire.write_part(0, 9) + b"123456789",
        wire.write_answer(200),
        wire.write_answer(404, {"Content-Length": "1"}) + b"1",
        b"x" * (wire.MAX_HEAD_BYTES + 5000),
        b"HTTP/1.1 206 \xff" + wire.END,
    ],
    ids=["more", "other", "longer", "status", "body", "head", "bytes"],
)
def test_what_was_not_asked_for_ends_the_connection(scripted: ScriptedPeer, answer: bytes) -> None:
    memory = bytearray(8)

    async def main() -> None:
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(answer)
        assert (await reading).ending is ReadOutcome.FOREIGN
        assert is_free(memory)
        assert await scripted.is_closed()

    run("asyncio", main)


def test_bytes_after_the_body_are_not_read_and_the_connection_not_used_again(scripted: ScriptedPeer) -> None:
    async def main() -> None:
        memory = bytearray(len(DATA))
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA + b"and more")
        assert (await reading).ending is ReadOutcome.DONE
        assert memory == DATA
        first = scripted.sock
        again = scripted.read(memory)
        scripted.sock = socket.socket()
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA)
        assert (await again).ending is ReadOutcome.DONE
        first.close()

    run("asyncio", main)


def test_a_connection_that_ends_while_idle_or_at_reuse_is_replaced(scripted: ScriptedPeer) -> None:
    async def main() -> None:
        async def answer(reading: asyncio.Task[ReadResult]) -> None:
            await scripted.accept()
            await scripted.head()
            await scripted.send(part(b"12345678") + b"12345678")
            assert (await reading).ending is ReadOutcome.DONE

        await answer(scripted.read(bytearray(8)))
        scripted.sock.close()
        await answer(scripted.read(bytearray(8)))
        reading = scripted.read(bytearray(8))
        await scripted.head()
        reset(scripted.sock)
        await answer(reading)

    run("asyncio", main)


# ---- time ----------------------------------------------------------------------------------------------------


def test_drops_below_the_low_water_are_signs_of_life(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, peers__stall_s=0.8)

    async def main() -> None:
        memory = bytearray(120)
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        began_s = time.monotonic()
        await scripted.send(part(DATA[:120]))
        for number in range(12):
            await scripted.send(DATA[10 * number : 10 * number + 10])
            await asyncio.sleep(0.1)
        assert (await reading).ending is ReadOutcome.DONE
        assert time.monotonic() - began_s > 0.8
        assert memory == DATA[:120]

    run("asyncio", main)


def test_the_low_water_follows_what_a_look_has_taken(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rest would wait for the next look."""
    tune(monkeypatch, peers__begin_s=0.2, peers__stall_s=4 * LIMIT_S)

    async def main() -> None:
        memory = bytearray(LOW_WATER_BYTES)
        reading = scripted.read(memory, late_s=4 * LIMIT_S)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part(DATA[:LOW_WATER_BYTES]), DATA[:1000])
        await asyncio.sleep(0.5)  # the look is at begin_s
        await scripted.send(DATA[1000:LOW_WATER_BYTES])
        assert (await reading).ending is ReadOutcome.DONE

    run("asyncio", main)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sent", [0, 1000, LOW_WATER_BYTES + 1000])
def test_a_peer_that_stalls_is_late_and_its_bytes_are_kept(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch, loop: str, sent: int
) -> None:
    tune(monkeypatch, peers__stall_s=0.6)
    memory = bytearray(len(DATA))

    async def main() -> None:
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        began_s = time.monotonic()
        await scripted.send(part() + DATA[:sent])
        assert await reading == ReadResult(sent, ReadOutcome.LATE, lived=True)
        assert 0.6 - CLOCK_S <= time.monotonic() - began_s < 5.0
        assert memory[:sent] == DATA[:sent]
        assert await scripted.is_closed()

    run(loop, main)


def test_signs_of_life_do_not_extend_the_limit_of_a_read(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a read may be shorter than the time for its beginning."""
    tune(monkeypatch, peers__begin_s=60.0, peers__stall_s=60.0)

    async def main() -> None:
        reading = scripted.read(bytearray(len(DATA)), late_s=0.3)
        await scripted.accept()
        await scripted.head()
        while not reading.done():
            await scripted.send(wire.write_answer(102))
            await asyncio.sleep(0.02)
        assert (await reading) == ReadResult(0, ReadOutcome.LATE, lived=True)

    run("asyncio", main)


def test_a_peer_that_waits_for_the_store_is_not_late(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, peers__begin_s=0.8, peers__stall_s=0.8)

    async def main() -> None:
        memory = bytearray(8)
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        for _ in range(12):
            await scripted.send(wire.write_answer(102))
            await asyncio.sleep(0.1)
        await scripted.send(part(b"12345678") + b"12345678")
        assert (await reading).ending is ReadOutcome.DONE

    run("asyncio", main)


def test_a_silent_peer_is_late_without_a_sign_of_life(
    scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, peers__begin_s=0.2)

    async def main() -> None:
        assert await scripted.read(bytearray(8)) == ReadResult(0, ReadOutcome.LATE, lived=False)

    run("asyncio", main)


# ---- cancellation --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sent", [0, 1000, LOW_WATER_BYTES + 1000])
def test_from_the_cancellation_on_nothing_is_written(scripted: ScriptedPeer, loop: str, sent: int) -> None:
    """Also if more bytes are there, and before the task has ended."""
    memory = bytearray(len(DATA))

    async def main() -> None:
        reading = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA[:sent])
        await asyncio.sleep(0.02)
        scripted.sock.send(DATA[sent : sent + LOW_WATER_BYTES])
        reading.cancel()
        before = bytes(memory)
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert memory == before
        del reading
        await asyncio.sleep(0)  # the callback that woke this task refers to it
        assert is_free(memory)
        assert await scripted.is_closed(), "the rest of the answer would be taken for the next one"
        await asyncio.sleep(0.02)
        assert memory == before

    async def next_one() -> None:
        again = scripted.read(memory)
        await scripted.accept()
        await scripted.head()
        await scripted.send(part() + DATA)
        assert (await again).ending is ReadOutcome.DONE
        assert memory == DATA

    run(loop, main)
    run(loop, next_one)


@pytest.mark.usefixtures("no_gc")
def test_a_cancellation_in_the_turn_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """The error holds nothing, and the loop logs no error that nobody retrieved."""
    memory = bytearray(8)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            link = Link(ours)
            link._session = Handshake("a", "b", NONCE, NONCE).session(KEY)
            read = RangeRead(NAME, 0, memoryview(memory), lambda: LIMIT_S)
            reading = asyncio.create_task(link.read(read))
            while read.receive is None:
                await asyncio.sleep(0)
            theirs.close()
            assert read.receive()  # as the loop does; the task learns of it in the next turn
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    run("asyncio", main)
    assert is_free(memory)
    gc.collect()
    assert not caplog.records


# ---- forks ---------------------------------------------------------------------------------------------------


def test_a_forked_child_opens_its_own_connection(scripted: ScriptedPeer) -> None:
    async def exchange(reading: asyncio.Task[ReadResult]) -> None:
        await scripted.head()
        await scripted.send(part(b"12345678") + b"12345678")
        assert (await reading).ending is ReadOutcome.DONE

    async def first() -> None:
        reading = scripted.read(bytearray(8))
        await scripted.accept()
        await exchange(reading)

    async def again() -> None:
        await exchange(scripted.read(bytearray(8)))

    run("asyncio", first)
    child = os.fork()
    if not child:
        status = 1
        try:
            run("asyncio", first)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run("asyncio", again)  # the parent's is as good as before
