"""The server as clients of all sorts meet it: what it answers, and what a bad one costs others."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.serve import app, connections, feed, jobs
from tests.support import wait_until
from tests.unit.launcher.serve.made_jobs import MadeJob, Served, made_job, make_columns, make_status, served
from tests.unit.launcher.serve.test_event_log import append, line

TOKEN = b"sixteen-bytes-or-more"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rt").mkdir(mode=0o700)
    (tmp_path / "events").mkdir()
    return {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}


@pytest.fixture
def job(environ: dict[str, str], tmp_path: Path) -> Iterator[MadeJob]:
    status = make_status(events=os.fspath(tmp_path / "events"), logs=os.fspath(tmp_path))
    with made_job(environ, status, make_columns(4)) as made:
        yield made


@pytest.fixture
def server(environ: dict[str, str], job: MadeJob) -> Iterator[Served]:
    with served(environ) as made:
        yield made


def error(answer: tuple[int, bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["error"]


def test_the_api(server: Served, job: MadeJob, tmp_path: Path) -> None:
    assert json.loads(server.get("/api/v1/jobs")[1]) == {"jobs": [job.status]}
    status, body = server.get("/api/v1/jobs/run7")
    assert (status, json.loads(body)["ranks"]["rank"]) == (200, [0, 1, 2, 3])
    assert json.loads(server.get("/api/v1/jobs/77")[1])["run_id"] == "run7"
    assert server.get("/healthz") == server.get("/readyz") == (200, b"ok\n")
    assert b"bootseer_job_up" in server.get("/metrics")[1]
    assert isinstance(json.loads(server.get("/api/v1/warm")[1]), dict)
    (tmp_path / "standstill-0.txt").write_text("rank 2 is in backward\n")
    assert server.get("/api/v1/jobs/run7/hangs/standstill-0.txt") == (200, b"rank 2 is in backward\n")
    assert error(server.get("/api/v1/jobs/run7/hangs/standstill-1.txt"))[0] == 404
    page = server.get("/")[1].decode()
    assert "<h1" in page
    assert page == server.get("/jobs/run7")[1].decode()
    assert server.get("/static/app.js")[1].startswith(b'"use strict"')


def test_the_report_of_a_start(server: Served, tmp_path: Path) -> None:
    assert error(server.get("/api/v1/jobs/run7/report")) == (404, "job run7: its events hold no start yet")
    for kind, mono_ns in (("begin", 10**9), ("end", 3 * 10**9)):
        append(
            tmp_path / "events/agent-a.jsonl",
            line("spawn", kind=kind, stage="spawn", span="1", mono_ns=mono_ns, wall_ns=time.time_ns()) + b"\n",
        )
    wait_until(lambda: server.get("/api/v1/jobs/run7/report")[0] == 200, 20)
    found = json.loads(server.get("/api/v1/jobs/run7/report")[1])
    assert found["stages"][0]["max_s"] == 2.0
    assert error(server.get("/api/v1/jobs/run7/report?attempt=5"))[0] == 404
    assert error(server.get("/api/v1/jobs/run7/report?attempt=x")) == (400, "attempt: give a number, or last")
    assert b'stage="spawn"' in server.get("/metrics")[1]


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/app.py",
        "/api/v1/jobs/nothing",
        "/api/v1/jobs/..%2f..%2fetc",
        "/api/v1/jobs/run7/hangs/..%2fstandstill-0.txt",
        "/api/v1/jobs/run7/hangs/%2fetc%2fpasswd",
        "/api/v1/jobs/run7/hangs/events",
        "/api/v1/jobs/run7/hangs/standstill-0.txt%00",
    ],
)
def test_nothing_else_is_found(server: Served, path: str, tmp_path: Path) -> None:
    (tmp_path / "standstill-0.txt").write_text("here")
    status, why = error(server.get(path))
    assert status == 404
    assert why


def test_a_report_of_a_hang_is_a_regular_file(server: Served, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "standstill-0.txt")
    assert error(server.get("/api/v1/jobs/run7/hangs/standstill-0.txt"))[0] == 404


def test_names_origins_and_tokens(server: Served, environ: dict[str, str]) -> None:
    assert error(server.get("/", Host="evil.example"))[0] == 421
    assert error(server.get("/api/v1/jobs", Origin="http://evil.example"))[0] == 403
    with served(environ, TOKEN) as guarded:
        for path in ("/", "/api/v1/jobs", "/metrics", "/static/app.js", "/api/v1/jobs/run7/events", "/nothing"):
            assert error(guarded.get(path))[0] == 401, path
            assert error(guarded.get(path, Authorization="Bearer wrong-and-of-some-length"))[0] == 401
        assert guarded.get("/metrics", Authorization=f"Bearer {TOKEN.decode()}")[0] == 200
        assert guarded.get("/healthz", Host="10.0.0.1")[0] == 200, "a probe has no token"


def test_every_answer_forbids_what_the_page_does_not_need(server: Served) -> None:
    for path in ("/", "/api/v1/jobs", "/nothing"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = connection.makefile("rb").read().decode().lower()
        assert "content-security-policy: default-src 'none'" in head
        assert "x-content-type-options: nosniff" in head


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_is_read_only(server: Served, method: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        request = (
            f"{method} /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(request.encode())
        assert b" 405 " in connection.makefile("rb").readline()


def test_events_are_streamed_and_resumed(server: Served, tmp_path: Path) -> None:
    now_ns = time.time_ns()
    append(tmp_path / "events/agent-a.jsonl", line("first", wall_ns=now_ns) + b"\n")

    def read(last: str) -> tuple[str, str]:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            more = f"Last-Event-ID: {last}\r\n" if last else ""
            connection.sendall(f"GET /api/v1/jobs/run7/events HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
            file = connection.makefile("rb")
            id_ = ""
            for got in file:
                if got.startswith(b"id: "):
                    id_ = got[4:].decode().strip()
                if got.startswith(b"data: ") and b'"name"' in got and b'"ranks"' not in got:
                    return id_, str(json.loads(got[6:])["name"])
        raise AssertionError("the stream has ended")

    first, name = read("")
    assert name == "first"
    append(tmp_path / "events/agent-a.jsonl", line("second", wall_ns=now_ns) + b"\n")
    assert read(first)[1] == "second"


def test_a_head_of_a_megabyte_is_refused(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n"
        try:
            connection.sendall(head)
            answer = connection.recv(100)
        except ConnectionError:
            answer = b""
    assert b" 200 " not in answer
    assert server.get("/healthz")[0] == 200


def test_idle_and_slow_clients_are_cut_off_and_others_served(
    environ: dict[str, str], job: MadeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 4.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with served(environ) as server, ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(1000)]
            dripping = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert server.get("/api/v1/jobs")[0] == 200, "beside a thousand that do nothing"
            began_s = time.monotonic()
            try:
                for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\n" * 20:
                    dripping.sendall(bytes([byte]))
                    time.sleep(0.05)
                raise AssertionError("a head that never ends was waited for")
            except ConnectionError:
                assert time.monotonic() - began_s < 15.0
            for each in idle:
                each.settimeout(20)
                try:
                    assert each.recv(1) == b""
                except ConnectionError:
                    pass
            wait_until(lambda: server.server.connections.count == 0, 20, "the end of all connections")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_connections_are_refused(
    environ: dict[str, str], job: MadeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    with served(environ) as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: server.server.connections.count == 3, 20)
        one_more = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        try:
            assert one_more.recv(1) == b""
        except ConnectionError:
            pass
        assert server.server.connections.refused == 1
    assert job.asked == 0


def test_a_client_that_does_not_read_is_cut_off(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.5)
    with made_job(environ, make_status(), make_columns(30_000)) as job, served(environ) as server:
        with slow_client(server, "/api/v1/jobs/run7"):
            wait_until(lambda: job.asked, 20, "the request")
            wait_until(lambda: server.server.connections.count == 0, 20, "its end")
        assert server.get("/healthz")[0] == 200


def test_a_stream_that_is_not_read_is_cut_off(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By states alone, of which a newer one replaces an older one."""
    monkeypatch.setattr(app, "WRITE_S", 0.5)
    monkeypatch.setattr(feed, "STATE_S", 0.05)
    monkeypatch.setattr(jobs, "RANKS_PER_S", 10**9)
    columns = make_columns(30_000)
    with (
        made_job(environ, make_status(), columns) as job,
        served(environ) as server,
        slow_client(server, "/api/v1/jobs/run7/events"),
    ):
        wait_until(lambda: job.asked, 20, "the request")

        def is_cut() -> bool:
            job.columns = {**columns, "steps": [time.monotonic_ns()] * 30_000}
            return server.server.connections.count == 0

        wait_until(is_cut, 30, "its end")


def slow_client(server: Served, path: str) -> socket.socket:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    slow.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return slow


def test_a_token_is_asked_for_in_the_order_that_browsers_need(environ: dict[str, str], job: MadeJob) -> None:
    with served(environ, TOKEN) as guarded, socket.create_connection(("127.0.0.1", guarded.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head = connection.makefile("rb").read().decode()
    asked = [line for line in head.splitlines() if line.startswith("WWW-Authenticate")]
    assert asked == ['WWW-Authenticate: Basic realm="bootseer"', "WWW-Authenticate: Bearer"]


def test_bad_requests_leave_no_line(server: Served, capfd: pytest.CaptureFixture[str]) -> None:
    for head in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head)
            assert b" 200 " not in connection.makefile("rb").readline()
    assert capfd.readouterr() == ("", "")


def test_another_job_under_an_old_name_ends_the_streams(environ: dict[str, str], tmp_path: Path) -> None:
    """A page that stays open comes back, and gets the events of the new job alone."""
    status = make_status(events=os.fspath(tmp_path / "events"))
    append(tmp_path / "events/agent-a.jsonl", line("first", wall_ns=time.time_ns()) + b"\n")
    with served(environ) as server, socket.socket() as connection:
        with made_job(environ, status):
            wait_until(lambda: server.get("/api/v1/jobs/run7")[0] == 200, 20)
            connection.settimeout(30)
            connection.connect(("127.0.0.1", server.port))
            head = b"GET /api/v1/jobs/run7/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(head)
            file = connection.makefile("rb")
            assert any(b'"name":"first"' in got for got in iter(file.readline, b""))
        with made_job(environ, {**status, "pid": 78}):
            assert not file.read().endswith(b'"pid":78'), "the stream ends; the next one has the new job's state"
            wait_until(lambda: json.loads(server.get("/api/v1/jobs/run7")[1])["pid"] == 78, 20)


def test_a_job_that_ends_stays_for_a_while(environ: dict[str, str], tmp_path: Path) -> None:
    with served(environ) as server:
        with made_job(environ, make_status()):
            wait_until(lambda: b"run7" in server.get("/")[1], 20)
        wait_until(lambda: not json.loads(server.get("/api/v1/jobs/run7")[1])["is_running"], 20)
        assert json.loads(server.get("/api/v1/jobs")[1]) == {"jobs": []}
        assert b"ended" in server.get("/jobs/run7")[1]
