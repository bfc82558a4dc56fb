"""The metrics of `bootseer serve` for an OpenTelemetry collector, sent each minute over OTLP/HTTP.

In: the families that Prometheus is given too (metrics.py). Out: the same numbers as gauges, cumulative sums and
histograms of the SDK, which its exporter sends; that one reads OpenTelemetry's further variables itself, such as
OTEL_EXPORTER_OTLP_HEADERS. A collector that does not answer costs a line, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric

from bootseer import aio
from bootseer.formats import one_line
from bootseer.storage.paths import redact
from launcher.serve.options import OtlpOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

EXPORT_S = 15.0  # for one export
LAST_S = 3.0  # for the one at the end
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}  # by the end of a name

_Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
Collect = Callable[[], Awaitable[Sequence[Metric]]]


class OtlpExport:
    """Sends metrics until `close`."""

    def __init__(self, options: OtlpOptions, collect: Collect) -> None:
        """Raises: ModuleNotFoundError without the libraries."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are reported once, below
        self._exporter: Any = OTLPMetricExporter(endpoint=options.endpoint)
        self._endpoint, self._every_s, self._collect = options.endpoint, options.every_s, collect
        self._starts = SeriesStarts(time.time_ns())
        self._is_failing = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what is known at the end, briefly, and end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(LAST_S):
                await self._export()
        except TimeoutError:
            pass  # the process ends without it
        # It would wait for an export that hangs.
        await aio.run_abandonable(self._exporter.shutdown, 0, timeout_s=EXPORT_S)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._export()

    async def _export(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        try:
            data = to_otlp(await self._collect(), self._starts, time.time_ns())
            result = await aio.run_abandonable(self._exporter.export, data, timeout_s=EXPORT_S)
            has_failed = result is not MetricExportResult.SUCCESS
        except Exception:
            has_failed = True  # of jobs or of the library: the next one may succeed
        if has_failed and not self._is_failing:
            print(
                f"bootseer serve: warning: {one_line(redact(self._endpoint))} did not accept the metrics;"
                f" trying again each {self._every_s:g} s",
                file=sys.stderr,
                flush=True,
            )
        self._is_failing = has_failed


class SeriesStarts:
    """Since when each sum and histogram counts: since the export before it was first seen.

    A value that has fallen, as of a new job with the name of an earlier one, counts from the export before too. In
    OTLP none falls without a new start.
    """

    def __init__(self, began_ns: int) -> None:
        self._last_ns = began_ns
        self._seen: dict[_Series, tuple[int, float]] = {}
        self._next: dict[_Series, tuple[int, float]] = {}

    def find(self, name: str, labels: Mapping[str, str], value: float) -> int:
        """Return the start of a series, in ns."""
        series = name, tuple(sorted(labels.items()))
        start_ns, before = self._seen.get(series, (self._last_ns, 0.0))
        if value < before:
            start_ns = self._last_ns
        self._next[series] = start_ns, value
        return start_ns

    def end_export(self, now_ns: int) -> None:
        """Forget the series that were not looked for since the last call."""
        self._seen, self._next, self._last_ns = self._next, {}, now_ns


def to_otlp(families: Iterable[Metric], starts: SeriesStarts, now_ns: int) -> MetricsData:
    """Return the families as data of the SDK."""
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    made: list[sdk.Metric] = []
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    for family in families:
        data: Any
        if family.type == "histogram":
            data = sdk.Histogram(_histogram_points(family, starts, now_ns), cumulative)
        elif family.type == "counter":
            data = sdk.Sum([_point(family, sample, starts, now_ns) for sample in family.samples], cumulative, True)
        else:
            data = sdk.Gauge([_point(family, sample, None, now_ns) for sample in family.samples])
        name = f"{family.name}_info" if family.type == "info" else family.name
        unit = next((_UNITS[end] for end in _UNITS if name.endswith(f"_{end}")), "1")
        made.append(sdk.Metric(name, family.documentation, unit, data))
    starts.end_export(now_ns)
    scope = sdk.ScopeMetrics(InstrumentationScope("bootseer.serve"), made, "")
    resource = Resource({"service.name": "bootseer"})
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])


def _point(family: Metric, sample: Any, starts: SeriesStarts | None, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    value = float(sample.value)  # also where it is whole now: the type of a series must not change
    start_ns = 0 if starts is None else starts.find(family.name, sample.labels, value)
    return NumberDataPoint(dict(sample.labels), start_ns, now_ns, value)


def _histogram_points(family: Metric, starts: SeriesStarts, now_ns: int) -> list[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    points: list[Any] = []
    unknown: Any = None  # left out
    for key, found in buckets.items():
        found.sort()
        counts = [
            int(upto - before) for (_, upto), before in zip(found, (0.0, *(c for _, c in found)), strict=False)
        ]
        points.append(
            HistogramDataPoint(
                attributes=dict(key),
                start_time_unix_nano=starts.find(family.name, dict(key), sum(counts)),
                time_unix_nano=now_ns,
                count=sum(counts),
                sum=sums.get(key, 0.0),
                bucket_counts=counts,
                explicit_bounds=[upper for upper, _ in found[:-1]],
                min=unknown,
                max=unknown,
            )
        )
    return points
