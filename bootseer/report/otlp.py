"""A start as a trace, sent to an OpenTelemetry collector over OTLP/HTTP.

It uses opentelemetry-sdk and its exporter, loaded on demand. One span is the start. Below it is one for each node
with its stages, and one for each rank with its pieces. Of more than MAX_RANKS ranks only outliers are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from bootseer.errors import ConfigError, Unavailable
from bootseer.formats import one_line
from bootseer.report.analysis import Analysis
from bootseer.report.pieces import Piece, end_of, spawn_of
from bootseer.report.slow_words import slow_lines
from bootseer.report.starts import RankStart

MAX_RANKS = 4000
BATCH = 512  # spans per request
TIMEOUT_S = 10
_PATH = "/v1/traces"


def send_trace(found: Analysis, url: str) -> int:
    """Send the trace and return the number of spans.

    Args: url: of the collector, such as http://localhost:4318; with a path it is used unchanged.
    Raises: ConfigError without the libraries or for another URL; Unavailable if the collector refuses the trace.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otlp {one_line(url)}: give the URL of a collector, such as http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ModuleNotFoundError as error:
        raise ConfigError("--otlp needs opentelemetry: pip install 'bootseer[otlp]'") from error
    spans = make_spans(found)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are reported once, below
    endpoint = url if parts.path.strip("/") else url.rstrip("/") + _PATH
    exporter: Any = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
    try:
        for low in range(0, len(spans), BATCH):
            if exporter.export(spans[low : low + BATCH]) is not SpanExportResult.SUCCESS:
                raise Unavailable(f"{one_line(url)}: the collector did not accept the trace")
    finally:
        exporter.shutdown()
    return len(spans)


def make_spans(found: Analysis) -> list[Any]:
    """Return the spans of a start as finished spans of the SDK."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    start = found.start
    resource = Resource({"service.name": "bootseer", "bootseer.run_id": start.run_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("bootseer.report")

    def add(name: str, begin_ns: int, end_ns: int, parent: Any, error: str | None = None, **more: Any) -> Any:
        attributes = {f"bootseer.{key}": value for key, value in more.items() if value is not None}
        span = tracer.start_span(name, parent, attributes=attributes, start_time=start.wall_ns + begin_ns)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(start.wall_ns + end_ns)
        return trace.set_span_in_context(span)

    end_ns = round(found.start_s * 1e9)
    top = add(
        "start", 0, end_ns, None, attempt=start.attempt, ranks=len(start.ranks), nodes=len(start.nodes),
        first_step_s=found.first_step_s, slow=slow_lines(found), lost_s=found.lost.total_s,
    )  # fmt: skip
    nodes: dict[str, Any] = {}
    for node in start.nodes:
        last_ns = max([end_of(rank) for rank in node.ranks], default=end_ns)
        nodes[node.name] = add(f"node {node.name}", node.zero_ns, max(last_ns, node.zero_ns), top, node=node.name)
        for span in node.spans:
            until_ns = span.begin_ns if span.end_ns is None else span.end_ns
            add(
                span.stage, span.begin_ns, until_ns, nodes[node.name], span.error, stage=span.stage,
                what=span.name, is_open=span.end_ns is None or None,
            )  # fmt: skip
    for rank in _chosen(found):
        begin_ns = spawn_of(rank)
        parent = add(
            f"rank {rank.rank}", begin_ns, end_of(rank), nodes[rank.node.name], rank=rank.rank, status=rank.status,
            has_first_step=rank.first_step_ns is not None,
        )  # fmt: skip
        for piece in _of_rank(found.pieces[rank], begin_ns):
            add(piece.label, piece.begin_ns, piece.end_ns, parent, stage=piece.label, rank=rank.rank)
    return list(kept.get_finished_spans())


def _of_rank(pieces: list[Piece], begin_ns: int) -> Iterator[Piece]:
    """Return the pieces that a rank does not share with its node."""
    return (piece for piece in pieces if piece.begin_ns >= begin_ns)


def _chosen(found: Analysis) -> list[RankStart]:
    ranks = found.start.ranks
    if len(ranks) <= MAX_RANKS:
        return ranks
    slow = {node for each in found.stragglers for node, _ in each.places} | {step.node for step in found.path}
    first = sorted(
        ranks, key=lambda rank: (rank.node.name not in slow and rank.first_step_ns is not None, rank.rank)
    )
    return sorted(first[:MAX_RANKS], key=lambda rank: rank.rank)
