"""A report as a file of metrics for the textfile collector of Prometheus' node exporter.

prometheus_client formats it, writes a temporary file and renames it; it is loaded on demand.
"""

from __future__ import annotations

from bootseer.errors import ConfigError
from bootseer.report.report import Report


def write_metrics(report: Report, path: str) -> None:
    """Write gauges of one start, labelled by the run, its attempt and the stage.

    Raises: ConfigError without prometheus_client, or if the file cannot be written.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ModuleNotFoundError as error:
        raise ConfigError("--prometheus needs prometheus-client: pip install 'bootseer[fleet]'") from error
    registry = CollectorRegistry()
    run = {"run_id": report.run_id, "attempt": str(report.attempt)}

    def gauge(name: str, text: str, value: float | None, **more: str) -> None:
        if value is not None:
            known = gauges.get(name)
            if known is None:
                known = gauges[name] = Gauge(f"bootseer_start_{name}", text, [*run, *more], registry=registry)
            known.labels(**run, **more).set(value)

    gauges: dict[str, Gauge] = {}
    gauge("ranks", "Ranks of the attempt.", report.ranks)
    gauge("nodes", "Nodes of the attempt.", report.nodes)
    gauge("first_steps", "Ranks whose first step was observed.", report.first_steps)
    gauge("first_event_timestamp_seconds", "Start time of the attempt.", report.first_event_unix_s)
    gauge("first_step_seconds", "First event of the job to the first step of the last rank.", report.first_step_s)
    for stage in report.stages:
        text = "Time of a stage over nodes or ranks."
        gauge("stage_seconds", text, stage.median_s, stage=stage.stage, statistic="median")
        gauge("stage_seconds", text, stage.max_s, stage=stage.stage, statistic="max")
        gauge("stage_observed", "Nodes or ranks observed in a stage.", stage.observed, stage=stage.stage)
    if report.lost.ranks:
        for name, value in report.lost.by_stage.items():
            gauge("lost_accelerator_seconds", "Sum over ranks until their first step.", value, stage=name)
        gauge("straggler_seconds", "Time by which the critical path exceeds the medians.", report.lost.straggler_s)
    try:
        write_to_textfile(path, registry)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
