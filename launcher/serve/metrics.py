"""The metrics of this node's jobs and mounted trees, in Prometheus' text format.

In: details of jobs (views.py), counts of their events, reports of their starts, answers of tree daemons. Out: the
exposition. Names, units and types follow https://prometheus.io/docs/practices/naming. Labels are bounded: ranks
have labels of their own only in jobs of at most MAX_LABELLED_RANKS, unless that is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from bootseer.events import Stage
from bootseer.histogram import TimeHistogram
from launcher.status.job_ranks import number

MAX_LABELLED_RANKS = 64
MAX_JOBS = 64
MAX_LABEL = 200  # characters
STEP_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
MAX_BOUNDS = 32
MAX_MOUNTS = 10_000
RANK_STATES = ("starting", "running", "stopped", "traced", "in the kernel", "lingering", "succeeded", "failed")
STAGES = frozenset(stage.value for stage in Stage)


class JobFacts(NamedTuple):
    """What is known of one job."""

    detail: Mapping[str, Any]  # of views.make_detail
    events: Mapping[tuple[str, str], int]  # by name and stage
    stages: Sequence[Mapping[str, Any]]  # rows of the start's report
    steps: StepTimes


class StepTimes:
    """Times of steps as a histogram, from the counts of two looks: n steps in a time are n of their mean."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}  # steps, and when the last was made, of each rank
        self._attempt: object = None
        self.histogram = TimeHistogram(STEP_BOUNDS_S)

    def look(self, attempt: object, ranks: Mapping[str, Sequence[Any]], now_s: float) -> None:
        """Add the steps since the last look."""
        if attempt != self._attempt:
            self._attempt, self._before = attempt, {}
        for rank, steps, since_s in zip(ranks["rank"], ranks["steps"], ranks["since_step_s"], strict=True):
            if number(steps) is None or number(since_s) is None:
                continue
            at_s = now_s - since_s
            before = self._before.get(rank)
            if before is not None and steps > before[0] and at_s > before[1]:
                made = steps - before[0]
                self.histogram.add((at_s - before[1]) / made, made)
            if before is None or steps > before[0]:
                self._before[rank] = steps, at_s


class MountTimes:
    """Times until trees were mounted, each counted once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, float]] = set()
        self.histogram = TimeHistogram()

    def look(self, trees: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Add the mounts that were not seen before."""
        for digest, status in trees:
            took_s = number(status.get("ready_s"))
            if took_s is not None and (digest, took_s) not in self._seen and len(self._seen) < MAX_MOUNTS:
                self._seen.add((digest, took_s))
                self.histogram.add(took_s)


def collect(
    version: str,
    jobs: Sequence[JobFacts],
    trees: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    mounts: MountTimes | None = None,
    labels_all_ranks: bool = False,
) -> list[Metric]:
    """Return all families. Args: trees: digest and status of each mounted tree."""
    found = [*_collect(version, jobs[:MAX_JOBS], labels_all_ranks), *_collect_trees(trees)]
    if mounts is not None:
        times = HistogramMetricFamily("bootseer_mount_seconds", "Time until a tree was mounted.", labels=[])
        found += _with(times, [], mounts.histogram.record())
    return found


def expose(
    version: str,
    jobs: Sequence[JobFacts],
    trees: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    mounts: MountTimes | None = None,
    labels_all_ranks: bool = False,
    as_openmetrics: bool = False,
) -> tuple[bytes, str]:
    """Return the exposition and its content type. Args: trees: digest and status of each mounted tree."""
    collector = _Collector(collect(version, jobs, trees, mounts=mounts, labels_all_ranks=labels_all_ranks))
    if as_openmetrics:
        body: bytes = generate_openmetrics(collector)  # type: ignore[no-untyped-call]
        return body, OPENMETRICS
    return generate_latest(collector), CONTENT_TYPE_LATEST


class _Collector:
    """What prometheus_client takes for a registry."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        return iter(self._found)


class _Families:
    """Metrics in the order of their first sample."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def gauge(self, name: str, text: str, value: object, **labels: object) -> None:
        """Add a sample, if there is a value."""
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: object, **labels: object) -> None:
        """The same of a number that only grows; its name gets `_total`."""
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(self, family: Any, name: str, text: str, value: object, labels: Mapping[str, object]) -> None:
        found = number(value)
        if found is None:
            return
        made = self.made.get(name)
        if made is None:
            made = self.made[name] = family(name, text, labels=list(labels))
        made.add_metric([_label(each) for each in labels.values()], found)


def _collect(version: str, jobs: Sequence[JobFacts], labels_all_ranks: bool) -> list[Metric]:
    made = _Families()
    made.gauge("bootseer_jobs", "Running jobs of this user on this node.", sum(_runs(job) for job in jobs))
    step_times = HistogramMetricFamily(
        "bootseer_step_seconds", "Time of training steps, from the mean between two looks.", labels=["run_id"]
    )
    for job in jobs:
        run_id = str(job.detail["name"])
        _add_job(made, run_id, job)
        ranks = job.detail["ranks"]
        if _runs(job):
            _add_ranks(made, run_id, ranks, labels_all_ranks or len(ranks["rank"]) <= MAX_LABELLED_RANKS)
        _with(step_times, [_label(run_id)], job.steps.histogram.record())
    about = InfoMetricFamily("bootseer_build", "Version of bootseer.", value={"version": version})
    return [about, *made.made.values(), *([step_times] if step_times.samples else [])]


def _add_job(made: _Families, run_id: str, job: JobFacts) -> None:
    detail, events = job.detail, job.events
    gauge, counter = made.gauge, made.counter
    gauge("bootseer_job_up", "Whether the job runs, and answers.", int(_runs(job) and not detail["why"]),
          run_id=run_id)  # fmt: skip
    gauge("bootseer_job_ended", "Whether the job has ended.", int(not _runs(job)), run_id=run_id)
    gauge("bootseer_job_runtime_seconds", "Time since bootrun began.", detail["runs_s"], run_id=run_id)
    gauge("bootseer_job_attempt", "Starts of the job so far, from 0.", detail["attempt"], run_id=run_id)
    gauge("bootseer_job_nodes", "Nodes that take part.", detail["nodes"], run_id=run_id)
    gauge("bootseer_job_world_size", "Ranks of the job.", detail["world_size"], run_id=run_id)
    counter("bootseer_job_restarts", "Restarts of the ranks.", detail["restarts"], run_id=run_id)
    gauge("bootseer_job_hang", "Whether a reported hang lasts.", int(_runs(job) and bool(detail["hang"])),
          run_id=run_id)  # fmt: skip
    gauge("bootseer_job_checks_failed", "Faults that health checks have found here.", len(detail["checks"]),
          run_id=run_id)  # fmt: skip
    counter("bootseer_job_hangs", "Hangs that were reported.", _count(events, "hang"), run_id=run_id)
    counter("bootseer_job_rules_broken", "Log rules that were broken.", _count(events, "rule_broken"),
            run_id=run_id)  # fmt: skip
    counter("bootseer_job_mount_faults", "Mounts that could not be read.", _count(events, "mount_fault"),
            run_id=run_id)  # fmt: skip
    fallbacks: dict[str, int] = {}
    for (name, stage), count in events.items():
        if name == "fell_back":
            label = stage if stage in STAGES else "other"
            fallbacks[label] = fallbacks.get(label, 0) + count
    for stage, count in sorted(fallbacks.items()):
        counter("bootseer_job_fallbacks", "Optimizations that failed, and were done without.", count,
                run_id=run_id, stage=stage)  # fmt: skip
    for row in job.stages:
        for statistic, value in (("median", row.get("median_s")), ("max", row.get("max_s"))):
            gauge("bootseer_start_stage_seconds", "Time of a stage of the newest start, over nodes or ranks.",
                  value, run_id=run_id, stage=row.get("stage"), statistic=statistic)  # fmt: skip


def _add_ranks(made: _Families, run_id: str, ranks: Mapping[str, Sequence[Any]], is_labelled: bool) -> None:
    states: dict[str, int] = {}
    for state in ranks["state"]:
        name = state if state in RANK_STATES else "other"
        states[name] = states.get(name, 0) + 1
    for state in (*RANK_STATES, "other"):
        made.gauge("bootseer_ranks", "Ranks in a state.", states.get(state, 0), run_id=run_id, state=state)
    columns = (
        ("steps", "bootseer_rank_steps", "Steps of a rank in this attempt."),
        ("since_step_s", "bootseer_rank_since_step_seconds", "Time since the last step of a rank."),
        ("cores", "bootseer_rank_cpu_cores", "CPU cores that a rank uses."),
        ("rss_bytes", "bootseer_rank_resident_memory_bytes", "Resident memory of a rank."),
    )
    for column, name, text in columns:
        known = [found for value in ranks[column] if (found := number(value)) is not None]
        job_name = name.replace("_rank_", "_ranks_")
        if known:
            made.gauge(f"{job_name}_min", f"{text[:-1]}: the least.", min(known), run_id=run_id)
            made.gauge(f"{job_name}_max", f"{text[:-1]}: the most.", max(known), run_id=run_id)
        if is_labelled:
            for rank, value in zip(ranks["rank"], ranks[column], strict=True):
                made.gauge(name, text, value, run_id=run_id, rank=rank)


_TREE_SOURCES = (("peer_bytes", "peer"), ("store_bytes", "store"))


def _collect_trees(trees: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Metric]:
    made = _Families()
    waits = HistogramMetricFamily(
        "bootseer_tree_reader_wait_seconds", "Waits of reads of a mounted tree for blocks.", labels=["tree"]
    )
    requests = HistogramMetricFamily(
        "bootseer_tree_store_request_seconds", "Requests to stores for blocks of a tree.", labels=["tree"]
    )
    for digest, status in trees:
        tree = digest[:16]
        made.gauge(
            "bootseer_tree_ready_seconds", "Time until a tree was mounted.", status.get("ready_s"), tree=tree
        )
        blocks, device = status.get("blocks"), status.get("device")
        if isinstance(blocks, Mapping):
            for name, source in _TREE_SOURCES:
                made.counter("bootseer_tree_fetched_bytes", "Bytes of a tree by their source.", blocks.get(name),
                             tree=tree, source=source)  # fmt: skip
            made.counter("bootseer_tree_reader_blocked_seconds", "Time in which a reader waited for the store.",
                         blocks.get("blocked_s"), tree=tree)  # fmt: skip
            made.counter("bootseer_tree_reader_waits", "Reads that waited for the store.", blocks.get("waits"),
                         tree=tree)  # fmt: skip
        histograms = status.get("histograms")
        if isinstance(histograms, Mapping):
            _with(waits, [tree], histograms.get("waits"))
            _with(requests, [tree], histograms.get("requests"))
        if isinstance(device, Mapping):
            made.counter("bootseer_tree_read_bytes", "Bytes that were read from a mounted tree.",
                         device.get("bytes"), tree=tree)  # fmt: skip
            made.counter("bootseer_tree_read_errors", "Reads of a mounted tree that failed.", device.get("errors"),
                         tree=tree)  # fmt: skip
    return [*made.made.values(), *(each for each in (waits, requests) if each.samples)]


def _with(family: HistogramMetricFamily, labels: Sequence[str], record: object) -> list[Metric]:
    """Add the record of a TimeHistogram, if it is one and has counted something; return the family, or nothing."""
    if not isinstance(record, Mapping):
        return []
    bounds, counts, sum_s = record.get("bounds_s"), record.get("counts"), number(record.get("sum_s"))
    if not isinstance(bounds, list | tuple) or not isinstance(counts, list) or sum_s is None:
        return []
    is_whole = len(counts) == len(bounds) + 1 <= MAX_BOUNDS and all(
        number(each) is not None for each in (*bounds, *counts)
    )
    if not is_whole or not sum(counts):
        return []
    total, buckets = 0.0, []
    for upper, count in zip((*map(str, map(float, bounds)), "+Inf"), counts, strict=True):
        total += count
        buckets.append((upper, total))
    family.add_metric(labels, buckets, sum_s)
    return [family]


def _runs(job: JobFacts) -> bool:
    return bool(job.detail["is_running"])


def _count(events: Mapping[tuple[str, str], int], wanted: str) -> int:
    return sum(count for (name, _), count in events.items() if name == wanted)


def _label(value: object) -> str:
    """Return a text of bounded length. Different ones stay different: a series that occurs twice is lost."""
    text = str(value)
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]}~{zlib.crc32(text.encode()):08x}"
