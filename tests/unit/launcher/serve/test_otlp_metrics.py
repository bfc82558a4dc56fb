"""Metrics for an OpenTelemetry collector: the numbers that Prometheus gets, decoded from what is really sent."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.core import Metric

from bootseer.errors import UsageError
from launcher.base.listen_address import parse_address
from launcher.serve.access import Access
from launcher.serve.metrics import StepTimes, collect
from launcher.serve.options import Options, OtlpOptions, find_otlp
from launcher.serve.otlp_metrics import OtlpExport, SeriesStarts
from launcher.serve.server import Server
from tests.unit.launcher.serve.test_metrics import TREE, facts

URL = "http://collector:4318"


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent; answers with `status`."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self.status = 200
        self.has_come = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        data = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        self.server.taken.append((self.path, data))
        self.send_response(self.server.status)
        self.end_headers()
        self.server.has_come.set()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


async def known() -> Sequence[Metric]:
    steps = StepTimes()
    for now_s, made in ((1.0, 10), (2.0, 30)):
        steps.look(0, {"rank": [0], "steps": [made], "since_step_s": [0.0]}, now_s)
    return collect("1.2.3", [facts(restarts=2)._replace(steps=steps)], [("ab" * 32, TREE)])


def sent_once(server: Collector) -> dict[str, Any]:
    """The metrics of one export at the end, by name."""

    async def export() -> None:
        made = OtlpExport(OtlpOptions(f"{server.url}/v1/metrics", 3600.0, True), known)
        await made.close()

    asyncio.run(export())
    ((path, data),) = server.taken
    assert path == "/v1/metrics"
    request = ExportMetricsServiceRequest.FromString(data)
    (resource,) = request.resource_metrics
    assert {each.key: each.value.string_value for each in resource.resource.attributes}[
        "service.name"
    ] == "bootseer"
    return {each.name: each for each in resource.scope_metrics[0].metrics}


def labels_of(point: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


def test_a_collector_gets_what_prometheus_gets() -> None:
    with collector() as server:
        found = sent_once(server)
    families = asyncio.run(known())
    names = {family.name: family.name + ("_info" if family.type == "info" else "") for family in families}
    assert set(found) == set(names.values())
    for family in families:
        metric = found[names[family.name]]
        kind = {"counter": "sum", "histogram": "histogram"}.get(family.type, "gauge")
        assert metric.WhichOneof("data") == kind
        assert metric.description == family.documentation
        points = getattr(metric, kind).data_points
        if kind != "histogram":
            got = sorted((sorted(labels_of(point).items()), point.as_double) for point in points)
            assert got == sorted((sorted(each.labels.items()), float(each.value)) for each in family.samples)
    restarts = found["bootseer_job_restarts"].sum
    assert (restarts.is_monotonic, restarts.aggregation_temporality) == (True, 2)  # cumulative
    assert found["bootseer_rank_since_step_seconds"].unit == "s"
    assert found["bootseer_tree_fetched_bytes"].unit == "By"


def test_a_histogram_has_counts_of_its_own_buckets() -> None:
    with collector() as server:
        (point,) = sent_once(server)["bootseer_step_seconds"].histogram.data_points
    assert (point.count, sum(point.bucket_counts)) == (20, 20)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert point.bucket_counts[list(point.explicit_bounds).index(0.1)] == 20  # of 0.05 s each
    assert point.sum == pytest.approx(1.0)
    assert labels_of(point) == {"run_id": "run7"}
    assert not point.HasField("min")


def test_it_sends_again_and_again_and_says_once_that_it_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    async def export(server: Collector) -> None:
        made = OtlpExport(OtlpOptions(f"{server.url}/v1/metrics?key=secret", 0.05, True), known)
        while len(server.taken) < 3:
            server.has_come.clear()
            await asyncio.to_thread(server.has_come.wait, 20)
        await made.close()

    with collector() as server:
        server.status = 400  # the exporter does not try again by itself
        asyncio.run(export(server))
    text = capfd.readouterr().err
    assert text.count("did not accept the metrics; trying again each 0.05 s") == 1
    assert "secret" not in text


def test_a_job_that_cannot_be_asked_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def fail() -> Sequence[Metric]:
        raise OSError("gone")

    async def export(url: str) -> None:
        await OtlpExport(OtlpOptions(url, 3600.0, True), fail).close()

    with collector() as server:
        asyncio.run(export(server.url))
        assert server.taken == []
    assert "did not accept" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        ("", {}, None),
        (URL, {}, f"{URL}/v1/metrics"),
        (f"{URL}/", {}, f"{URL}/v1/metrics"),
        (f"{URL}?key=1", {}, f"{URL}/v1/metrics?key=1"),
        (f"{URL}/own/path", {}, f"{URL}/own/path"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{URL}/base"}, f"{URL}/base/v1/metrics"),
        (
            "",
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{URL}/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://y"},
            f"{URL}/x",
        ),
        (URL, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://y"}, f"{URL}/v1/metrics"),
        (URL, {"OTEL_SDK_DISABLED": "true"}, f"{URL}/v1/metrics"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_SDK_DISABLED": "True"}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_METRICS_EXPORTER": "none"}, None),
    ],
)
def test_where_it_sends(option: str, environ: dict[str, str], expected: str | None) -> None:
    found, warning = find_otlp(option, environ)
    assert ((found and found.endpoint), warning) == (expected, "")
    if found is not None:
        assert (found.every_s, found.is_asked) == (60.0, bool(option))


def test_the_interval_is_that_of_opentelemetry() -> None:
    for text, every_s in (("5000", 5.0), ("1m", 60.0), ("10", 60.0)):
        found, _ = find_otlp(URL, {"OTEL_METRIC_EXPORT_INTERVAL": text})
        assert found is not None
        assert found.every_s == every_s


@pytest.mark.parametrize("option", ["collector:4318", "http://", "http://[::1", "http://h:99999", "unix:///x"])
def test_a_flag_that_is_no_url_is_an_error(option: str) -> None:
    with pytest.raises(UsageError, match=r"--otlp .*: give the URL of a collector"):
        find_otlp(option, {})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317: no URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "PROTOCOL=grpc: only http"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_METRIC_EXPORT_INTERVAL": "1m"},
            "INTERVAL=1m: give milliseconds",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_METRIC_EXPORT_INTERVAL": "10"}, "from 1000 on"),
    ],
)
def test_variables_of_other_programs_are_no_error(environ: dict[str, str], words: str) -> None:
    found, warning = find_otlp("", environ)
    assert found is None
    assert words in warning


def test_no_sum_falls_without_a_new_start() -> None:
    starts = SeriesStarts(100)
    assert starts.find("restarts", {"run_id": "a"}, 5.0) == 100
    starts.end_export(200)
    assert starts.find("restarts", {"run_id": "a"}, 7.0) == 100
    assert starts.find("restarts", {"run_id": "b"}, 1.0) == 200, "its job began after the last export"
    starts.end_export(300)
    assert starts.find("restarts", {"run_id": "a"}, 0.0) == 300, "a new job of that name"
    starts.end_export(400)
    assert starts.find("restarts", {"run_id": "a"}, 0.0) == 300
    assert starts.find("restarts", {"run_id": "b"}, 1.0) == 400, "it was gone meanwhile"


def test_an_exporter_that_cannot_be_made_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "of_nobody")

    async def serve() -> None:
        address = parse_address("0")
        otlp, _ = find_otlp(URL, {})
        options = Options(address, Access(address, None), None, None, False, True, False, otlp)
        server = await Server.start(options, {"BOOTSEER_RUNTIME": "/nowhere"})
        await server.close()

    asyncio.run(serve())
    assert "metrics are not sent by OTLP: RuntimeError" in capfd.readouterr().err
