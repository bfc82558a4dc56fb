"""Calls to NameNodes: kept connections, few threads, and nothing sent twice that must not be."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.errors import NotFound, StorageTimeout, Unavailable
from bootseer.storage.hdfs.webhdfs import CALL_THREADS, WebHdfs
from bootseer.storage.hdfs.webhdfs_client import MAX_IDLE, WebHdfsClient
from tests.support import wait_until
from tests.testing.registry import make_certificates

STATUS = {"pathSuffix": "", "length": 7, "type": "FILE", "modificationTime": 1}
OK = json.dumps({"FileStatus": STATUS}).encode()
MISSING = json.dumps({"RemoteException": {"exception": "FileNotFoundException", "message": "no /x"}}).encode()

Answer = Callable[
    [str, int, int], "tuple[int, bytes] | None"
]  # request line, connection, number there; None: drop


class NameNode:
    """A server on sockets that answers as it is told, and counts connections and requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.ended = 0
        self.requests: list[str] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(connected)
            self._threads.append(threading.Thread(target=self._serve, args=(connected, self.connections)))
            self._threads[-1].start()

    def _serve(self, connected: socket.socket, number: int) -> None:
        with connected, connected.makefile("rb") as lines:
            count = 0
            while line := _head(lines):
                count += 1
                self.requests.append(line)
                answer = self._answer(line, number, count)
                if answer is None:
                    break
                status, body = answer
                try:
                    connected.sendall(
                        f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                    )
                except OSError:
                    break  # the client has gone
            self.ended += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # has ended already
        for thread in self._threads:
            thread.join()


def _head(lines: object) -> str:
    try:
        first = lines.readline().decode()  # type: ignore[attr-defined]
        while lines.readline().strip():  # type: ignore[attr-defined]
            pass
    except OSError:
        return ""
    return first.strip()


@contextmanager
def namenode(answer: Answer) -> Iterator[NameNode]:
    made = NameNode(answer)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def client_of(*addresses: str, timeout_s: float = 5.0) -> Iterator[WebHdfsClient]:
    client = WebHdfsClient(list(addresses), user="ada", timeout_s=timeout_s)
    try:
        yield client
    finally:
        client.close()


def test_one_connection_serves_calls_of_all_kinds_and_those_that_fail() -> None:
    def answer(line: str, _connection: int, _count: int) -> tuple[int, bytes]:
        return (404, MISSING) if "missing" in line else (200, OK)

    with namenode(answer) as server, client_of(server.address) as client:
        assert client.status("/x").size == 7
        with pytest.raises(NotFound, match="no /x"):
            client.status("/missing")
        client.delete("/x")
        client.set_replication("/x", 2)
        assert client.status("/x").size == 7
        assert (server.connections, len(server.requests)) == (1, 5)
        assert client.requests == 5


def test_a_connection_that_the_namenode_closed_is_replaced_without_a_word() -> None:
    with (
        namenode(lambda _line, connection, count: None if connection == 1 and count == 2 else (200, OK)) as server,
        client_of(server.address) as client,
    ):
        assert [client.status("/x").size for _ in range(3)] == [7, 7, 7]
        assert server.connections == 2


@pytest.mark.parametrize("call", ["rename", "concat"])
def test_what_must_not_happen_twice_is_not_sent_twice(call: str) -> None:
    """The NameNode renames, then loses the connection: a second RENAME would find no source."""

    def answer(line: str, _connection: int, _count: int) -> tuple[int, bytes] | None:
        return None if call.upper() in line else (200, OK)

    with namenode(answer) as server, client_of(server.address) as client:
        client.status("/x")
        with pytest.raises(Unavailable):
            if call == "rename":
                client.rename("/x", "/y", overwrite=False)
            else:
                client.concat("/x", ["/a"])
        assert sum(call.upper() in line for line in server.requests) == 1


@pytest.mark.parametrize("call", ["rename", "concat"])
def test_the_other_namenode_is_not_asked_for_what_the_first_may_have_done(call: str) -> None:
    """The first has done it and lost the connection: the other would answer that there is no such file."""

    def answer(line: str, _connection: int, _count: int) -> tuple[int, bytes] | None:
        return None if call.upper() in line else (200, OK)

    with (
        namenode(answer) as first,
        namenode(lambda *_: (404, MISSING)) as other,
        client_of(first.address, other.address) as client,
    ):
        with pytest.raises(Unavailable):
            if call == "rename":
                client.rename("/x", "/y", overwrite=False)
            else:
                client.concat("/x", ["/a"])
        assert (len(first.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize("is_there", [True, False], ids=["standby", "not_there"])
def test_a_namenode_that_has_not_done_it_leaves_it_to_the_other(is_there: bool, free_port: int) -> None:
    standby = json.dumps({"RemoteException": {"exception": "StandbyException", "message": "not here"}}).encode()
    with (
        namenode(lambda *_: (403, standby)) as first,
        namenode(lambda *_: (200, b"{}")) as other,
        client_of(first.address if is_there else f"127.0.0.1:{free_port}", other.address) as client,
    ):
        client.rename("/x", "/y", overwrite=False)
        assert (len(first.requests), len(other.requests)) == (int(is_there), 1)


def test_a_namenode_whose_certificate_is_not_trusted_leaves_it_to_the_other(tmp_path: Path) -> None:
    """As any that cannot be reached: one of a pair may be set up wrongly."""
    context = make_certificates(str(tmp_path)).server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connected, _ = listener.accept()
            with suppress(OSError), connected:
                context.wrap_socket(connected, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client = WebHdfsClient([address], user="ada", timeout_s=5.0, tls=True)
        with pytest.raises(Unavailable, match="not trusted"):
            client.status("/x")
        thread.join()


def test_renames_leave_few_connections() -> None:
    with namenode(lambda *_: (200, b"{}")) as server, client_of(server.address) as client:
        for number in range(20):
            client.rename(f"/x{number}", "/y", overwrite=False)
        wait_until(lambda: server.ended >= 20 - MAX_IDLE, 10)
        assert len(client._http._idle) == MAX_IDLE


def test_addresses_of_ipv6() -> None:
    with client_of("::1:9") as client, pytest.raises(Unavailable, match=r"webhdfs://::1:9/x: ::1:9: "):
        client.status("/x")  # nobody is there, and maybe no IPv6: in any case the next NameNode can be asked
    if not os.path.exists("/proc/net/if_inet6"):
        return
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.recv(4096)
                connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(OK) + OK)

        for address in (f"::1:{port}", f"[::1]:{port}"):
            thread = threading.Thread(target=serve)
            thread.start()
            with client_of(address) as client:
                assert client.status("/x").size == 7
            thread.join()


def test_calls_in_the_queue_begin_when_those_before_them_are_abandoned() -> None:
    has_begun, is_over = threading.Semaphore(0), threading.Event()

    def answer(line: str, _connection: int, _count: int) -> tuple[int, bytes]:
        if "hang" in line:
            has_begun.release()
            is_over.wait(20)
        return 200, OK

    with namenode(answer) as server, client_of(server.address, timeout_s=30.0) as client:
        web = WebHdfs(client, timeout_s=30.0)

        async def ask() -> None:
            hung = [asyncio.ensure_future(web.status("/hang")) for _ in range(CALL_THREADS)]
            for _ in hung:
                assert await asyncio.to_thread(has_begun.acquire, True, 10)
            queued = [asyncio.ensure_future(web.status("/x")) for _ in range(3)]
            await asyncio.sleep(0)
            for task in hung:
                task.cancel()
            async with asyncio.timeout(10):
                assert [(await task).size for task in queued] == [7, 7, 7]

        asyncio.run(ask())
        is_over.set()


def test_a_frozen_namenode_leaves_time_for_the_other() -> None:
    is_over = threading.Event()

    def freeze(_line: str, _connection: int, _count: int) -> None:
        is_over.wait(20)

    with (
        namenode(freeze) as frozen,
        namenode(lambda *_: (200, OK)) as active,
        client_of(frozen.address, active.address, timeout_s=1.0) as client,
    ):
        web = WebHdfs(client, timeout_s=1.0)
        assert asyncio.run(web.status("/x")).size == 7
        assert asyncio.run(web.status("/x")).size == 7
        assert len(frozen.requests) == 1, "the one that answered is remembered"
        is_over.set()


def test_an_answer_that_breaks_off_is_unavailable_not_invalid() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.recv(4096)
                connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + OK[:20])

        thread = threading.Thread(target=serve)
        thread.start()
        with (
            client_of(f"127.0.0.1:{listener.getsockname()[1]}") as client,
            pytest.raises(Unavailable, match="ended"),
        ):
            client.status("/x")
        thread.join()


def test_many_calls_need_few_threads_and_few_connections() -> None:
    most = 0
    others = set(threading.enumerate())

    def answer(_line: str, _connection: int, _count: int) -> tuple[int, bytes]:
        nonlocal most
        ours = set(threading.enumerate()) - others
        most = max(most, sum(thread.name.startswith("bootseer-namenode") for thread in ours))
        return 200, OK

    with namenode(answer) as server, client_of(server.address) as client:
        web = WebHdfs(client, timeout_s=20.0)

        async def ask() -> list[int]:
            found = await aio.map_bounded(web.status, [f"/{number}" for number in range(200)], width=64)
            return [each.size for each in found]

        assert asyncio.run(ask()) == [7] * 200
        assert server.connections <= CALL_THREADS
        assert 0 < most <= CALL_THREADS
        web.close()


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "timed_out"])
def test_a_call_that_nobody_waits_for_ends_at_once(is_cancelled: bool) -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    def hang(_line: str, _connection: int, _count: int) -> tuple[int, bytes]:
        has_begun.set()
        is_over.wait(20)
        return 200, OK

    with namenode(hang) as server, client_of(server.address, timeout_s=30.0) as client:
        web = WebHdfs(client, timeout_s=20.0 if is_cancelled else 0.3)

        async def ask() -> None:
            task = asyncio.ensure_future(web.status("/x"))
            await asyncio.to_thread(has_begun.wait, 10)
            if is_cancelled:
                task.cancel()
            await task

        with pytest.raises(asyncio.CancelledError if is_cancelled else StorageTimeout):
            asyncio.run(ask())
        # Its socket has a deadline of 30 s: only the cut can end its thread sooner.
        began_s = time.monotonic()
        wait_until(lambda: web._pool.abandoned == 0, 10)
        assert time.monotonic() - began_s < 10
        is_over.set()


def test_a_forked_child_makes_its_own_connections_and_threads() -> None:
    with namenode(lambda *_: (200, OK)) as server, client_of(server.address) as client:
        web = WebHdfs(client, timeout_s=10.0)
        asyncio.run(web.status("/x"))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if asyncio.run(web.status("/x")).size == 7 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert asyncio.run(web.status("/x")).size == 7
        assert server.connections == 2
        web.close()


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port}")
    with namenode(lambda *_: (200, OK)) as server, client_of(server.address) as client:
        assert client.status("/x").size == 7
