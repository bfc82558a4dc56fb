"""`bootseer serve` and `bootrun --dashboard` as processes: real jobs, what is shared, refused, how they end."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import support
from tests.unit.launcher.serve.test_metrics import parse
from tests.unit.launcher.serve.test_otlp_metrics import collector

Script = Callable[..., str]
BOOTSEER = os.path.join(support.SCRIPTS, "bootseer")
STEPS = """
import os, sys, time
beat = sys.modules["_bootseer_rank"].heartbeat
for step in range(100_000):
    beat(1000 + step, {})
    time.sleep(0.02)
    if os.path.exists("end"):
        break
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    return {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}


def get(url: str, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: bytes = answer.read()
        return found


@contextmanager
def serving(program: support.Programs, environ: dict[str, str | None], *args: object) -> Iterator[str]:
    """The URL of a server that runs meanwhile; it ends by a signal, with 0."""
    server = program.start(BOOTSEER, "serve", *args, env=environ)
    support.wait_until(lambda: "://" in server.stderr or server.process.poll() is not None, 30)
    assert server.stderr.startswith("bootseer serve: http"), server.stderr
    yield server.stderr.split()[2].rstrip("/")
    server.signal(signal.SIGTERM)
    assert server.wait().status == 0, server.stderr


def servers() -> list[support.Process]:
    """The servers that bootruns of this test have started."""
    mark = os.environ[support.MARK]
    return [each for each in support.marked_processes(mark) if "launcher.serve.process" in each.command]


def test_a_job_as_json_metrics_and_events(
    bootrun: support.Programs, program: support.Programs, script: Script, environ: dict[str, str | None]
) -> None:
    words = ("--standalone", "--nproc-per-node", 2, "--log-dir", "logs", "--rdzv-id", "run7")
    bootrun.start(*words, script(STEPS), env=environ)
    with serving(program, environ, "0") as url:
        support.wait_until(lambda: json.loads(get(f"{url}/api/v1/jobs"))["jobs"], 30, "the job")
        (job,) = json.loads(get(f"{url}/api/v1/jobs"))["jobs"]
        shown = program(BOOTSEER, "status", "--json", env=environ)
        assert json.loads(shown.stdout)["jobs"][0].keys() == job.keys()
        run_id = job["run_id"]
        columns = json.loads(get(f"{url}/api/v1/jobs/{run_id}"))["ranks"]
        assert columns["rank"] == [0, 1]
        assert all(step > 1000 for step in columns["step"])
        assert all(memory > 1 << 20 for memory in columns["rss_bytes"])
        report = json.loads(get(f"{url}/api/v1/jobs/{run_id}/report"))
        assert report["first_steps"] == 2

        def metrics() -> dict[str, float]:
            text = get(f"{url}/metrics").decode()
            return {
                f"{sample.name}{sample.labels.get('stage', '')}": sample.value
                for family in parse(text)
                for sample in family.samples
            }

        assert metrics()["bootseer_job_up"] == 1
        assert metrics()["bootseer_start_stage_secondsspawn"] > 0
        support.wait_until(lambda: metrics().get("bootseer_step_seconds_count", 0) > 10, 30, "times of steps")
        found = metrics()
        assert 0.015 < found["bootseer_step_seconds_sum"] / found["bootseer_step_seconds_count"] < 2.0
        with urllib.request.urlopen(f"{url}/api/v1/jobs/{run_id}/events", timeout=20) as stream:
            names = []
            while "rank_started" not in names:
                line = stream.readline()
                if line.startswith(b"data: ") and b'"kind"' in line:
                    names.append(json.loads(line[6:])["name"])
        Path(bootrun.dir, "end").touch()
        support.wait_until(lambda: not json.loads(get(f"{url}/api/v1/jobs"))["jobs"], 30, "its end")
        assert metrics()["bootseer_job_up"] == 0


def test_jobs_share_the_dashboard_that_the_first_one_starts(
    bootrun: support.Programs, script: Script, environ: dict[str, str | None]
) -> None:
    port = support.find_free_port()
    file = script(STEPS)
    words = ("--standalone", "--nproc-per-node", 1, "--log-dir", "logs", "--dashboard", port, file)
    first = bootrun.start(*words, env={**environ, "BOOTSEER_SECRET": "a-secret-of-the-job"})
    url = f"http://127.0.0.1:{port}"
    support.wait_until(lambda: f"dashboard: {url}/" in first.stderr, 30, "the first one's line")
    second = bootrun.start(*words, env=environ)
    support.wait_until(lambda: f"dashboard: {url}/ (shared with other jobs)" in second.stderr, 30, "the second's")
    support.wait_until(lambda: len(json.loads(get(f"{url}/api/v1/jobs"))["jobs"]) == 2, 30, "both jobs")
    (server,) = servers()
    own = Path(f"/proc/{server.pid}/environ").read_bytes()
    assert b"a-secret-of-the-job" not in own
    assert os.getpriority(os.PRIO_PROCESS, server.pid) == 19
    Path(bootrun.dir, "end").touch()
    assert (first.wait().status, second.wait().status) == (0, 0)
    support.wait_until(lambda: not json.loads(get(f"{url}/api/v1/jobs"))["jobs"], 30, "their ends")
    assert [each.pid for each in servers()] == [server.pid], "it outlives them, for the next ones"
    os.kill(server.pid, signal.SIGTERM)
    support.wait_until(lambda: not servers(), 30, "its end")


def test_a_dashboard_that_cannot_be_started_harms_no_job(
    bootrun: support.Programs, script: Script, environ: dict[str, str | None]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        job = bootrun.start(
            "--standalone", "--nproc-per-node", 1, "--dashboard", address, script(STEPS), env=environ
        )
        warning = f"warning: --dashboard: {address}: cannot listen: address already in use"
        support.wait_until(lambda: warning in job.stderr, 30, "its line")
    Path(bootrun.dir, "end").touch()
    assert job.wait().status == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--dashboard", "a:b"), "'a:b': 'b' is not a port"),
        (("--dashboard", ":8484"), "other machines can reach it, so give --dashboard-token-file FILE"),
        (("--dashboard-token-file", "token"), "--dashboard-token-file needs --dashboard"),
    ],
)
def test_a_wrong_dashboard_ends_bootrun_at_once(
    bootrun: support.Programs, script: Script, words: tuple[str, ...], error: str
) -> None:
    ended = bootrun(*words, script(""))
    assert (ended.status, len(ended.stderr.splitlines())) == (2, 1)
    assert error in ended.stderr


def test_it_ends_when_no_job_runs(program: support.Programs, environ: dict[str, str | None]) -> None:
    ended = program(BOOTSEER, "serve", "0", "--until-idle", 1, env=environ)
    assert (ended.status, ended.stdout) == (0, "")


def test_what_is_refused_at_the_start(
    program: support.Programs, environ: dict[str, str | None], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("sixteen-bytes-or-more\n")
    token.chmod(0o644)
    (tmp_path / "empty").touch(mode=0o600)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for words, status, error in (
            ((port,), 1, f"127.0.0.1:{port}: cannot listen: address already in use; another process listens"),
            ((port, "--share"), 1, "cannot listen: address already in use"),
            (("192.0.2.7:0", "--token-file", tmp_path / "own"), 1, "this node has no such address"),
            ((":0",), 2, "0.0.0.0:0: other machines can reach this address, so --token-file FILE is required"),
            (("0", "--token-file", token), 2, "can be read by others (mode 0644): chmod 600"),
            (("0", "--token-file", tmp_path / "empty"), 2, "is empty"),
            (("0", "--token-file", tmp_path / "none"), 2, "No such file"),
            (("0", "--tls-cert", token), 2, "--tls-cert and --tls-key belong together"),
            (("0", "--tls-cert", token, "--tls-key", token), 2, "cannot be used"),
            (("a:b",), 2, "is not a port; give HOST:PORT"),
            (("0", "--until-idle", 0), 2, "give 1 to"),
        ):  # fmt: skip
            (tmp_path / "own").write_text("sixteen-bytes-or-more\n")
            (tmp_path / "own").chmod(0o600)
            ended = program(BOOTSEER, "serve", *words, env=environ)
            assert (ended.status, len(ended.stderr.splitlines())) == (status, 1), (words, ended)
            assert error in ended.stderr


def test_https_and_a_token(program: support.Programs, environ: dict[str, str | None], tmp_path: Path) -> None:
    certificate, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    token.write_text("sixteen-bytes-or-more\n")
    token.chmod(0o600)
    tls = ("--tls-cert", certificate, "--tls-key", key, "--token-file", token)
    with serving(program, environ, "localhost:0", *tls) as url:
        assert url.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=os.fspath(certificate))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/api/v1/jobs", context=context, timeout=20)
        password = base64.b64encode(b"any:sixteen-bytes-or-more").decode()
        for header in ("Bearer sixteen-bytes-or-more", f"Basic {password}"):
            request = urllib.request.Request(f"{url}/api/v1/jobs", headers={"Authorization": header})
            with urllib.request.urlopen(request, context=context, timeout=20) as answer:
                assert json.loads(answer.read()) == {"jobs": []}


def test_metrics_reach_a_collector_that_the_environment_names(
    bootrun: support.Programs, program: support.Programs, script: Script, environ: dict[str, str | None]
) -> None:
    bootrun.start("--standalone", "--nproc-per-node", 2, "--rdzv-id", "run7", script(STEPS), env=environ)
    with collector() as taker:
        exports = {"OTEL_EXPORTER_OTLP_ENDPOINT": taker.url, "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
        with serving(program, {**environ, **exports}, "0"):
            support.wait_until(lambda: b"bootseer_rank_steps" in b"".join(data for _, data in taker.taken), 30)
        assert {path for path, _ in taker.taken} == {"/v1/metrics"}
