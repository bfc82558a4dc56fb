"""Reports as text, JSON, trace and page; comparisons; fleets: that they say what the analysis found."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from bench.report_job import Plan, Planted, make_lines
from bootseer.errors import ConfigError, Unavailable
from bootseer.report import page, page_frame
from bootseer.report.analysis import analyse_job
from bootseer.report.chrome import trace_json
from bootseer.report.compare import compare
from bootseer.report.compare_page import make_comparison_page
from bootseer.report.fleet import FleetMaker, fleet_text
from bootseer.report.page import make_page
from bootseer.report.report import Report, encode, make_report
from bootseer.report.text import comparison_text, report_text
from tests.unit.bootseer.report.made_jobs import event, in_order, job_of, span, started, to_event

SLOW = Plan(nodes=4, ranks=2, planted=(Planted("env", 36, 2),))
ATTACK = '</script><img src=x onerror=alert(1)><!--\u2028"&'


class Parsed(HTMLParser):
    """Elements and what is in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._is_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[-1] += data


def page_of(plan: Plan) -> str:
    job = job_of(plan)
    return make_page(job.attempts[0], make_report(job, 0)).decode()


def test_the_text_has_the_figures() -> None:
    job = job_of(SLOW)
    report = make_report(job, 0)
    text = report_text(report)
    lines = text.splitlines()
    assert lines[0].startswith("job-17, attempt 0: 8 ranks on 4 nodes, begun 2025-")
    assert (
        f"first step of all ranks after {report.first_step_s:.1f} s; clocks of nodes agree within 0.3 ms" in text
    )
    row = next(line for line in lines if line.strip().startswith("env ") and "of 4 nodes" in line)
    env = next(each for each in report.stages if each.stage == "env")
    assert row.split()[1:6] == [f"{env.median_s:.1f}", "s", f"{env.max_s:.1f}", "s", f"{env.max_over_median:.2f}"]
    assert "node0002" in row
    assert "\x1b" not in text
    assert max(map(len, lines)) < 160
    assert "stragglers: 6" in text


def test_sums_of_the_report_agree() -> None:
    report = make_report(job_of(SLOW), 0)
    assert sum(report.lost.by_stage.values()) == pytest.approx(report.lost.total_s)
    assert report.lost.total_s == pytest.approx(sum(row.first_step_s or 0 for row in report.rank_rows))
    assert report.path[0].begin_s == 0
    assert report.path[-1].end_s == report.first_step_s
    assert all(low.end_s == high.begin_s for low, high in zip(report.path, report.path[1:], strict=False))
    for row in report.stages:
        values = [each.stages[row.stage] for each in report.rank_rows if row.stage in each.stages]
        if row.places == "ranks":
            assert max(values) == row.max_s
            assert sum(row.max_s - value for value in values) == pytest.approx(row.behind_s)


def test_json_is_what_the_documents_say(tmp_path: Path) -> None:
    report = make_report(job_of(SLOW), 0)
    data = encode(report)
    assert msgspec.json.decode(data, type=Report) == report
    record = json.loads(data)
    path = os.path.join(os.path.dirname(__file__), "../../../../docs/guide/report.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for key in record:
        assert f"`{key}`" in text, f"docs/guide/report.md says nothing of {key}"


def test_the_trace_nests_and_names() -> None:
    job = job_of(SLOW)
    trace = json.loads(trace_json(job.attempts[0]))
    events = trace["traceEvents"]
    names = {(each["pid"], each["args"]["name"]) for each in events if each["name"] == "process_name"}
    assert {name for _, name in names} == {"node0000", "node0001", "node0002", "node0003", "critical path"}
    ranks = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {f"rank {number}" for number in range(8)} <= ranks
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in events:
        if each["ph"] == "X":
            assert each["dur"] >= 0
            slices.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for own in slices.values():  # of one thread: beside or inside each other
        open_until: list[float] = []
        for begin, end in sorted(own, key=lambda pair: (pair[0], -pair[1])):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)
    env = next(each for each in events if each["name"] == "env: setup" and each["dur"] > 40e6)
    assert env["args"]["how"] == "mount"


def test_an_open_span_is_open_in_the_trace_and_on_the_page() -> None:
    events = [*span("spawn", 1, 1.1), *started(0, 1, 2), *span("import", 3, None, rank=0)]
    events.append(event(9, None, "instant", "rank_exited", 0, attrs={"status": 1}))
    job = analyse_job(in_order(events))
    (begin,) = [each for each in json.loads(trace_json(job.attempts[0]))["traceEvents"] if each["ph"] == "B"]
    assert begin["name"] == "import"
    report = make_report(job, 0)
    assert [(each.stage, each.begin_s, each.end_s) for each in report.open] == [("import", 2.0, None)]
    assert "Open: begun and never ended\n  import (import) of rank 0 on a, begun at 2.00 s" in report_text(report)
    assert "did not leave import" in make_page(job.attempts[0], report).decode()


def test_the_page_needs_nothing_else() -> None:
    parsed = Parsed(page_of(SLOW))
    policy = next(attrs["content"] for tag, attrs in parsed.tags if "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert not {"src", "href", "srcset", "style"} & set(attrs)
        assert not any(name.startswith("on") for name in attrs)
    assert len(parsed.scripts) == 2
    assert "://" not in parsed.scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", parsed.scripts[1])


def test_texts_from_outside_stay_texts() -> None:
    plan = Plan(nodes=2, run_id=ATTACK, name=ATTACK + "{}", planted=(Planted("env", 30, 1),))
    parsed = Parsed(page_of(plan))
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in parsed.tags]
    data = json.loads(parsed.scripts[0])
    assert data["report"]["run_id"] == ATTACK.replace("\u2028", " ") or data["report"]["run_id"] == ATTACK
    assert data["nodes"][0][0] == ATTACK + "0"
    assert "<" not in parsed.scripts[0]


def test_the_page_has_every_rank_and_its_time() -> None:
    job = job_of(SLOW)
    data = json.loads(Parsed(page_of(SLOW)).scripts[0])
    assert [rank[0] for rank in data["ranks"]] == list(range(8))
    for rank, shown in zip(job.attempts[0].start.ranks, data["ranks"], strict=True):
        assert rank.first_step_ns is not None
        assert shown[3][-1] * data["tickS"] == pytest.approx(rank.first_step_ns / 1e9, abs=1e-4)
        ends = shown[3][1::2]
        assert ends == sorted(ends)
    assert [node[0] for node in data["nodes"] if node[2]] == ["node0002"]


def test_the_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_RANKS", 6)
    monkeypatch.setattr(page, "MAX_NODES", 5)
    plan = Plan(nodes=12, ranks=2, planted=(Planted("import", 30, 9, 1), Planted("env", 60, 3)))
    data = json.loads(Parsed(page_of(plan)).scripts[0])
    assert {19, 6, 7} <= {rank[0] for rank in data["ranks"]}
    assert len(data["ranks"]) <= 6
    assert len(data["nodes"]) <= 5
    assert any("6 of 24 ranks" in note for note in data["report"]["notes"])


def test_eight_thousand_ranks_are_a_page_of_a_megabyte_or_two() -> None:
    assert len(page_of(Plan(nodes=1000, ranks=8, heartbeats=0))) < 2_500_000


def test_comparison() -> None:
    before, after = (make_report(job_of(plan), 0) for plan in (SLOW, SLOW._replace(planted=())))
    found = compare(before, after)
    env = next(each for each in found.stages if each.stage == "env")
    assert env.max_change_s == pytest.approx(-36, abs=0.5)
    assert env.median_ratio == pytest.approx(1, abs=0.1)
    assert found.first_step_ratio is not None
    assert found.first_step_ratio < 0.5
    text = comparison_text(found)
    assert "times faster" in text
    assert re.search(r"^env +6\.\d s +6\.\d s .* 42\.\d s +6\.\d s +-3\d\.\d s +x0\.1\d$", text, re.MULTILINE)
    assert "about as long" in compare(before, before).line
    assert "times slower" in compare(after, before).line


def test_stages_of_one_run_only_are_compared_with_nothing() -> None:
    stages = dict(SLOW.stages)
    del stages["image"]
    found = compare(make_report(job_of(SLOW), 0), make_report(job_of(SLOW._replace(stages=stages)), 0))
    image = next(each for each in found.stages if each.stage == "image")
    assert image.before_max_s is not None
    assert (image.after_max_s, image.max_change_s, image.max_ratio) == (None, None, None)
    assert comparison_text(found)


def test_a_fleet() -> None:
    maker = FleetMaker()
    plans = [
        Plan(nodes=2, ranks=2, run_id="small", heartbeats=100),
        Plan(nodes=20, ranks=8, run_id="large", planted=(Planted("env", 30, 3),)),
        Plan(nodes=20, ranks=8, run_id="again", planted=(Planted("import", 30, 3),), seed=2),
    ]
    rows = [maker.add(job_of(plan), f"/logs/{plan.run_id}") for plan in plans]
    fleet = maker.finish(["/logs/x: nothing there"])
    assert fleet.jobs == 3
    assert fleet.lost_s == pytest.approx(sum(row.lost_s for row in rows))
    assert sum(each.lost_s for each in fleet.stages) == pytest.approx(fleet.lost_s)
    assert sum(each.share_of_lost for each in fleet.stages) == pytest.approx(1)
    assert [(size.ranks_from, size.jobs) for size in fleet.sizes] == [(1, 1), (64, 2)]
    assert [(node.node, node.slow_jobs, node.jobs) for node in fleet.nodes] == [("node0003", 2, 2)]
    assert sorted(fleet.nodes[0].stages) == ["env", "import"]
    small = next(row for row in fleet.job_rows if row.run_id == "small")
    assert small.share is not None
    assert small.share == pytest.approx(small.lost_s / (small.lost_s + 4 * 102), abs=0.01)
    text = fleet_text(fleet)
    assert "node0003" in text
    assert "/logs/x: nothing there" in text


def test_time_of_ranks_nobody_knows_is_not_counted_as_lost() -> None:
    events = [*span("spawn", 0, 0.1), *started(0, 0, 1), event(5000, None, "instant", "rank_exited", 0)]
    maker = FleetMaker()
    row = maker.add(analyse_job(in_order(events)), "x")
    assert (row.lost_s, row.total_s, row.share, row.unknown_s) == (0, 0, None, 5000)
    assert fleet_text(maker.finish())


def test_parquet_has_one_row_a_rank_and_stage(tmp_path: Path) -> None:
    from pyarrow import parquet

    from bootseer.report.parquet_rows import COLUMNS, ParquetRows

    path = tmp_path / "starts.parquet"
    job = job_of(SLOW)
    with ParquetRows(os.fspath(path)) as rows:
        rows.add(job, "/logs/a")
        rows.add(job_of(SLOW._replace(run_id="other")), "/logs/b")
    table: Any = parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    records = table.to_pylist()
    own = [each for each in records if each["run_id"] == "job-17"]
    assert len(own) * 2 == len(records) == rows.rows
    assert sum(each["lost_s"] or 0 for each in own) == pytest.approx(job.attempts[0].lost.total_s)
    (env,) = [
        each for each in own if each["stage"] == "env" and each["node"] == "node0002" and each["rank"] is None
    ]
    assert env["seconds"] > 40
    with pytest.raises(RuntimeError), ParquetRows(os.fspath(tmp_path / "half.parquet")):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["starts.parquet"]


def test_metrics_of_a_start(tmp_path: Path) -> None:
    from prometheus_client import parser

    from bootseer.report.prometheus_file import write_metrics

    report = make_report(job_of(SLOW._replace(run_id='a "job"\n')), 0)
    path = tmp_path / "start.prom"
    write_metrics(report, os.fspath(path))
    samples = [
        sample for family in parser.text_string_to_metric_families(path.read_text()) for sample in family.samples
    ]
    by_name = {(each.name, each.labels.get("stage"), each.labels.get("statistic")): each for each in samples}
    step = by_name["bootseer_start_first_step_seconds", None, None]
    assert step.value == pytest.approx(report.first_step_s)
    assert step.labels["run_id"] == report.run_id
    assert by_name["bootseer_start_stage_seconds", "env", "max"].value > 40


class Collector(BaseHTTPRequestHandler):
    """Takes what it is sent."""

    taken: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.taken.append(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_a_trace_for_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from bootseer.report.otlp import send_trace

    found = job_of(SLOW).attempts[0]
    Collector.taken.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            count = send_trace(found, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    requests = [ExportTraceServiceRequest.FromString(data) for data in Collector.taken]
    spans = [
        span for request in requests for each in request.resource_spans for scope in each.scope_spans
        for span in scope.spans
    ]  # fmt: skip
    assert len(spans) == count
    by_id = {span.span_id: span for span in spans}
    (top,) = [span for span in spans if not span.parent_span_id]
    assert top.name == "start"
    assert (top.end_time_unix_nano - top.start_time_unix_nano) / 1e9 == pytest.approx(found.first_step_s)
    assert {by_id[span.parent_span_id].name for span in spans if span.name == "env"} == {
        f"node node000{number}" for number in range(4)
    }
    assert {span.name for span in spans if span.name.startswith("rank ")} == {f"rank {each}" for each in range(8)}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)


def test_a_collector_that_takes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    from bootseer.report import otlp

    found = job_of(SLOW).attempts[0]
    with pytest.raises(ConfigError, match="give the URL of a collector"):
        otlp.send_trace(found, "localhost:4318")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # knows no POST
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(Unavailable, match="did not accept the trace"):
                otlp.send_trace(found, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_made_events_are_those_of_the_lines() -> None:
    assert all(to_event(line).run_id == "job-17" for line in make_lines(SLOW))


def test_two_runs_as_a_page_that_needs_no_script() -> None:
    before = make_report(job_of(SLOW._replace(run_id=ATTACK)), 0)
    after = make_report(job_of(SLOW._replace(planted=())), 0)
    found = compare(before, after)
    text = make_comparison_page(found).decode()
    parsed = Parsed(text)
    names = [name for name, _ in parsed.tags]
    assert not {"script", "img"} & set(names) and names.count("svg") == 1
    assert not any({"style", "onerror"} & set(attrs) for _, attrs in parsed.tags)
    (policy,) = [attrs["content"] or "" for name, attrs in parsed.tags if name == "meta" and "http-equiv" in attrs]
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert f"style-src 'sha256-{page_frame.checksum(style)}'" in policy and "default-src 'none'" in policy
    widths = {
        kind: [
            float(attrs["width"] or 0) for name, attrs in parsed.tags if name == "rect" and attrs["class"] == kind
        ]
        for kind in ("then", "now")
    }
    assert len(widths["then"]) == len(widths["now"]) == 2 * len(found.stages)
    env = [each.stage for each in found.stages].index("env")
    assert widths["then"][2 * env + 1] == 620, "nothing took longer than the slow node"
    assert widths["now"][2 * env + 1] < widths["then"][2 * env + 1]
    assert page.html.escape(found.line) in text and "better" in text
