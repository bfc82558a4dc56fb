"""What the server of peers refuses, drops and survives, as seen by raw sockets; and its process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.errors import Unavailable
from bootseer.own_module import command_of
from bootseer.peers import wire, write_peers
from bootseer.peers.auth import Handshake, Session
from bootseer.peers.spans import SPAN_BYTES, ObjectName
from bootseer.peers.spool import Spool
from tests import support
from tests.peer_nodes import KEY, PeerNode, PeerNodes
from tests.testing.faulty_http import FaultyHttpServer

DATA = random.Random(0).randbytes(5 << 20)
TIMEOUT_S = 10.0


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"packs/one": DATA, "tree.json": b"{}"}) as server:
        yield server
    aio.close()


@pytest.fixture
def nodes(server: FaultyHttpServer, tmp_path: Path) -> Iterator[PeerNodes]:
    with PeerNodes(tmp_path, server.url, 2, below=["packs"]) as nodes:
        yield nodes


class Client:
    """A program that speaks to a peer as it likes."""

    def __init__(self, node: PeerNode, *, receive_bytes: int = 0) -> None:
        self.node = node
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", node.port))
        self.waiting = b""
        self.sent = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.sent += data
        self.socket.sendall(data)

    def head(self) -> wire.Answer | None:
        """The next one that is no sign of life; None when the connection ended."""
        while True:
            answer = self._next()
            if answer is None or answer.status != 102:
                return answer

    def sign(self) -> int:
        """The status of the next one, whatever it is."""
        answer = self._next()
        return 0 if answer is None else answer.status

    def _next(self) -> wire.Answer | None:
        while wire.END not in self.waiting:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.waiting += data
        head, _, self.waiting = self.waiting.partition(wire.END)
        return wire.read_answer(head)

    def status(self) -> int:
        answer = self.head()
        return 0 if answer is None else answer.status

    def body(self, length: int) -> bytes:
        while len(self.waiting) < length:
            data = self.socket.recv(65536)
            if not data:
                break
            self.waiting += data
        found, self.waiting = self.waiting[:length], self.waiting[length:]
        return found

    def greet(self, own: str = "node0", other: str | None = None, key: bytes = KEY) -> Session:
        nonce = os.urandom(32)
        other = self.node.id if other is None else other
        self.send(wire.write_hello(wire.Hello(own, other, nonce)))
        answer = self.head()
        assert answer is not None
        assert answer.status == 200
        greeting = Handshake(own, other, nonce, wire.read_nonce(answer.headers))
        assert greeting.is_server(KEY, answer.headers["bootseer-proof"])
        return greeting.session(key)

    def ask(
        self,
        session: Session,
        nodes: PeerNodes,
        start: int = 0,
        end: int = 1000,
        *,
        path: str = "packs/one",
        **more: str,
    ) -> None:
        target = more.get("target") or wire.target_of(ObjectName(more.get("origin") or nodes.origin, path))
        asked = wire.range_of(start, end)
        mac = session.sign(target, asked, "")
        self.send(wire.write_ask(more.get("sent_target") or target, more.get("sent_range") or asked, "", mac))


def count(node: PeerNode, name: str) -> int:
    found = node.server.statistics()[name]
    assert isinstance(found, int)
    return found


def test_who_knows_the_key_gets_bytes(nodes: PeerNodes) -> None:
    with Client(nodes[1]) as client:
        session = client.greet()
        for start, end in ((0, 1000), (1 << 20, 2 << 20), (2 * SPAN_BYTES, len(DATA)), (5, 6)):
            client.ask(session, nodes, start, end)
            assert client.status() == 206
            assert client.body(end - start) == DATA[start:end]


def test_a_read_without_a_thread_costs_one_connection(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_call: object) -> None:
        raise Unavailable("no thread could be started")

    with Client(nodes[1]) as client, Client(nodes[1]) as other:
        session, others = client.greet(), other.greet()
        client.ask(session, nodes)
        assert client.status() == 206 and client.body(1000) == DATA[:1000]
        monkeypatch.setattr("bootseer.peers.server.cached_share", lambda *_: 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(aio._io, "submit", refuse)
            client.ask(session, nodes)
            assert client.status() == 206 and client.body(1000) == b""
        other.ask(others, nodes)
        assert other.status() == 206 and other.body(1000) == DATA[:1000]
    assert count(nodes[1], "failed") == 1


def test_an_unexpected_error_costs_one_connection(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    with Client(nodes[1]) as client, Client(nodes[1]) as other:
        session, others = client.greet(), other.greet()
        with monkeypatch.context() as patch:
            patch.setattr("bootseer.peers.server.open_store", fail)
            client.ask(session, nodes)
            assert client.head() is None
        other.ask(others, nodes)
        assert other.status() == 206 and other.body(1000) == DATA[:1000]
    assert count(nodes[1], "failed") == 1


def test_a_fetch_that_fails_unexpectedly_is_an_answer(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with Client(nodes[1]) as client:
        session = client.greet()
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "write", fail)
            client.ask(session, nodes)
            assert client.status() == 502
        client.ask(session, nodes)
        assert client.status() == 206 and client.body(1000) == DATA[:1000]


def test_another_secret_is_refused(nodes: PeerNodes) -> None:
    with Client(nodes[1]) as client:
        client.ask(client.greet(key=b"x" * 32), nodes)
        assert client.status() == 403
        assert client.status() == 0, "and the connection ends"
    assert count(nodes[1], "upload_bytes") == 0
    assert count(nodes[1], "refused") == 1


def test_an_overheard_connection_cannot_be_played_again(nodes: PeerNodes) -> None:
    with Client(nodes[1]) as client:
        client.ask(client.greet(), nodes)
        assert client.status() == 206
        overheard = client.sent
    with Client(nodes[1]) as client:
        client.send(overheard)
        assert client.status() == 200
        assert client.status() == 403
    with Client(nodes[0]) as client:  # nor to somebody else
        client.send(overheard)
        assert client.status() == 403


def test_an_overheard_request_cannot_be_sent_again(nodes: PeerNodes) -> None:
    with Client(nodes[1]) as client:
        session = client.greet()
        before = len(client.sent)
        client.ask(session, nodes)
        assert client.status() == 206
        client.body(1000)
        client.send(client.sent[before:])
        assert client.status() == 403


@pytest.mark.parametrize(
    "change", [{"sent_range": "bytes=0-1000"}, {"sent_target": f"/1/{'0' * 32}/packs/one"}, {"own": "node1"}]
)
def test_a_request_cannot_be_changed(nodes: PeerNodes, change: dict[str, str]) -> None:
    with Client(nodes[1]) as client:
        session = client.greet()
        if "own" in change:
            session = Handshake(change["own"], "node1", b"1" * 32, b"2" * 32).session(KEY)
        client.ask(session, nodes, **change)  # type: ignore[arg-type]
        assert client.status() == 403


@pytest.mark.parametrize(
    "path",
    [
        *("tree.json", "packs", "packs/../tree.json", "../packs/one", "/etc/passwd", "packs//one", "packs/./one"),
        *("packs/..", "packs/\0", "packs/\n", "x" * 3000, "packs/\\..\\one"),
    ],
)
def test_only_objects_of_the_job_can_be_asked(
    nodes: PeerNodes, server: FaultyHttpServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.server.REGISTER_S", 0.0)
    with Client(nodes[1]) as client:
        session = client.greet()
        client.ask(session, nodes, path=path)
        assert client.status() == 404
        client.ask(session, nodes, origin="0" * 32)
        assert client.status() == 404
        client.ask(session, nodes)
        assert client.status() == 206, "the connection is as good as before"
    assert [each.path for each in server.requests] == ["packs/one"]


def test_who_asks_before_this_node_has_named_the_store_waits_for_it(nodes: PeerNodes) -> None:
    node = nodes[1]
    write_peers(node.path, nodes.peers(node.id, origins=[]))
    with Client(node) as client:
        client.ask(client.greet(), nodes)
        assert client.sign() == 102, "it waits, and says so"
        nodes.write()
        assert client.status() == 206


def test_a_store_that_this_node_never_names_is_waited_for_once(
    nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.server.REGISTER_S", 0.1)
    with Client(nodes[1]) as client:
        session = client.greet()
        client.ask(session, nodes, origin="0" * 32)
        assert client.sign() == 102
        assert client.status() == 404
        client.ask(session, nodes, origin="0" * 32)
        assert client.sign() == 404, "at once"


def test_ranges_of_more_than_a_span_are_refused(nodes: PeerNodes) -> None:
    with Client(nodes[1]) as client:
        session = client.greet()
        for start, end in ((0, SPAN_BYTES + 1), (SPAN_BYTES - 1, SPAN_BYTES + 1), (0, 1 << 50)):
            client.ask(session, nodes, start, end)
            assert client.status() == 416
        client.ask(session, nodes, 1 << 40, (1 << 40) + 5)
        assert client.status() == 416
        client.ask(session, nodes, path="packs/none")
        assert client.status() == 404


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"POST /1/hello HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde", 400),
        (b"A" * 40_000, 400),
        (wire.write_ask(f"/1/{'0' * 32}/packs/one", "bytes=0-1", "", "00"), 403),
        (wire.write_hello(wire.Hello("node0", "node0", bytes(32))), 403),
        (wire.write_hello(wire.Hello("stranger", "node1", bytes(32))), 503),
    ],
)
def test_strangers_are_refused(nodes: PeerNodes, data: bytes, status: int) -> None:
    with Client(nodes[1]) as client:
        client.send(data)
        assert client.status() in (status, 0)
        client.waiting = b""
        assert client.status() == 0
    assert count(nodes[1], "refused") == 1
    assert count(nodes[1], "answers") == 0


def test_who_says_nothing_is_dropped(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.server.HANDSHAKE_S", 0.2)
    monkeypatch.setattr("bootseer.peers.server.MAX_UNAUTHENTICATED", 3)
    clients = [Client(nodes[1]) for _ in range(6)]
    try:
        support.wait_until(lambda: count(nodes[1], "refused") == 3)
        assert [client.status() for client in clients] == [0] * 6
    finally:
        for client in clients:
            client.socket.close()
    support.wait_until(lambda: count(nodes[1], "connections") == 0)
    with Client(nodes[1]) as client:
        client.greet()


def test_who_takes_nothing_is_dropped(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.server.STALL_S", 0.3)
    with Client(nodes[1], receive_bytes=8192) as client:
        session = client.greet()
        for _ in range(12):  # more than the kernel keeps for a reader
            client.ask(session, nodes, 0, SPAN_BYTES)
        support.wait_until(lambda: count(nodes[1], "dropped") == 1)
    support.wait_until(lambda: count(nodes[1], "connections") == 0)
    assert nodes.held() == 0


def test_a_client_that_goes_away_does_not_stop_what_it_began(nodes: PeerNodes, server: FaultyHttpServer) -> None:
    server.rate = 4e6
    with Client(nodes[1]) as client:
        client.ask(client.greet(), nodes, 0, SPAN_BYTES)
        support.wait_until(server.count)
    support.wait_until(lambda: nodes[1].spool.statistics()["kept_bytes"] == SPAN_BYTES)
    support.wait_until(lambda: nodes.held() == 0)


# ---- the process ---------------------------------------------------------------------------------------------


def start(node: PeerNode, directory: Path, *more: str) -> subprocess.Popen[str]:
    argv = command_of("bootseer.peers.serve", node.path, "--spool", str(directory / "spool"))
    return subprocess.Popen(
        [*argv, "--address", "127.0.0.1", *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it had still to say. Its input ends."""
    try:
        return process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def test_the_process_serves_until_its_input_ends(nodes: PeerNodes, tmp_path: Path) -> None:
    process = start(nodes[1], tmp_path)
    try:
        nodes[1].port = line(process)["port"]
        with Client(nodes[1]) as client:
            client.ask(client.greet(), nodes, 0, 1000)
            assert client.status() == 206
            assert client.body(1000) == DATA[:1000]
        assert process.stdin is not None
        process.stdin.write("statistics\n")
        process.stdin.flush()
        assert line(process)["statistics"]["upload_bytes"] == 1000
        with open(f"/proc/{process.pid}/cmdline", encoding="utf-8") as file:
            assert nodes.key.hex() not in file.read()
    finally:
        out, err = finish(process)
    assert json.loads(out)["statistics"]["sent_to"] == {"node0": 1000}
    assert err == ""
    assert process.returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_by_a_signal(nodes: PeerNodes, tmp_path: Path, signum: int) -> None:
    process = start(nodes[1], tmp_path)
    try:
        assert line(process)["port"] > 0
        process.send_signal(signum)
        assert "statistics" in line(process)
    finally:
        finish(process)
    assert process.returncode == 0


def test_a_process_that_cannot_serve_says_why(nodes: PeerNodes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for more, culprit in (
        (("--port", str(nodes[0].port)), str(nodes[0].port)),
        (("--spool", str(tmp_path / "file")), "file"),
        (("--address", "nonsense"), "nonsense"),
        (("--port", "99999"), "99999"),
    ):
        process = start(nodes[1], tmp_path, *more)
        out, err = finish(process)
        assert out == ""
        assert process.returncode == 1
        assert len(err.splitlines()) == 1
        assert culprit in err


def test_a_process_that_is_killed_meanwhile(nodes: PeerNodes, server: FaultyHttpServer, tmp_path: Path) -> None:
    """Its readers go on with the next owner."""
    server.rate = 20e6
    owner = nodes.owner("packs/one")
    other = next(number for number in range(2) if nodes[number] is not owner)
    process = start(owner, tmp_path)
    try:
        nodes.stop(owner)
        owner.port = line(process)["port"]
        nodes.write()

        async def main() -> None:
            store = nodes.store(other)
            target = bytearray(SPAN_BYTES)
            begin_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                group.create_task(store.read_into("packs/one", 0, memoryview(target)))
                while not store._helpers._peers or not server.served_bytes["packs/one"]:
                    await asyncio.sleep(0.001)
                process.kill()
            assert target == DATA[:SPAN_BYTES]
            assert time.monotonic() - begin_s < 3.0
            assert store.statistics()["lost"] == 1
            await store.aclose()

        asyncio.run(main())
    finally:
        finish(process)
