"""The exposition: read by Prometheus' own parser, named by its conventions, bounded however large a job is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from bootseer.histogram import TimeHistogram
from launcher.serve.jobs import AgentAnswer, JobView
from launcher.serve.metrics import JobFacts, MountTimes, StepTimes, expose
from launcher.serve.views import make_detail
from tests.unit.launcher.serve.made_jobs import make_columns, make_status

TREE = {
    "ready_s": 1.5,
    "blocks": {"peer_bytes": 100, "store_bytes": 50, "blocked_s": 0.25, "waits": 3},
    "device": {"requests": 9, "bytes": 4096, "errors": 0},
}
STAGES = [{"stage": "import", "median_s": 2.0, "max_s": 3.5}]
EVENTS = {("fell_back", "image"): 2, ("hang", ""): 1, ("rank_started", "spawn"): 8}


def facts(ranks: int = 2, columns: dict[str, Any] | None = None, **more: Any) -> JobFacts:
    view = JobView("run7", "run7", (AgentAnswer("/s", make_status(ranks=ranks, **more), columns, "", 9.0),))
    return JobFacts(make_detail(view), EVENTS, STAGES, StepTimes())


def exposed(jobs: Sequence[JobFacts], **options: bool) -> dict[str, Metric]:
    text, kind = expose("1.2.3", jobs, [("ab" * 32, TREE)], **options)
    assert "text/plain" in kind
    return {family.name: family for family in parse(text.decode())}


def value(families: dict[str, Metric], family: str, **labels: str) -> float:
    (found,) = (sample.value for sample in families[family].samples if labels.items() <= sample.labels.items())
    return float(found)


def test_what_is_known_is_exposed() -> None:
    found = exposed([facts(restarts=2, standstill="the job hangs")])
    assert value(found, "bootseer_jobs") == 1
    assert value(found, "bootseer_job_restarts", run_id="run7") == 2
    assert value(found, "bootseer_job_hang") == 1
    assert value(found, "bootseer_job_hangs") == 1
    assert value(found, "bootseer_job_fallbacks", stage="image") == 2
    assert value(found, "bootseer_start_stage_seconds", stage="import", statistic="max") == 3.5
    assert value(found, "bootseer_ranks", state="running") == 2
    assert value(found, "bootseer_rank_since_step_seconds", rank="1") == 0.3
    assert value(found, "bootseer_rank_resident_memory_bytes", rank="0") == 1 << 30
    assert value(found, "bootseer_tree_fetched_bytes", source="peer") == 100
    assert value(found, "bootseer_tree_reader_blocked_seconds") == 0.25
    assert value(found, "bootseer_build_info", version="1.2.3") == 1


def test_what_is_not_known_has_no_sample() -> None:
    status = make_status(ranks=0, restarts=None, runs_s=None, attempt=None)
    view = JobView("run7", "run7", (AgentAnswer("/s", status, None, "it may be stopped", 9.0),))
    found = exposed([JobFacts(make_detail(view), {}, [], StepTimes())])
    assert value(found, "bootseer_job_up") == 0
    assert not {"bootseer_job_restarts", "bootseer_job_attempt", "bootseer_rank_steps"} & found.keys()


def test_an_ended_job_is_not_up_and_has_no_ranks() -> None:
    view = JobView("run7", "run7", (AgentAnswer("/s", make_status(), None, "", 9.0),), 10.0)
    found = exposed([JobFacts(make_detail(view), {}, [], StepTimes())])
    assert (value(found, "bootseer_jobs"), value(found, "bootseer_job_up")) == (0, 0)
    assert "bootseer_ranks" not in found


@pytest.mark.parametrize(("ranks", "is_all", "labelled"), [(64, False, 64), (65, False, 0), (8000, True, 8000)])
def test_labels_are_bounded(ranks: int, is_all: bool, labelled: int) -> None:
    found = exposed([facts(2, make_columns(ranks, 8))], labels_all_ranks=is_all)
    own = found["bootseer_rank_steps"].samples if "bootseer_rank_steps" in found else []
    assert len(own) == labelled
    assert value(found, "bootseer_ranks_steps_max") == 10
    assert value(found, "bootseer_ranks", state="running") == ranks


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming, as promtool checks them."""
    steps = StepTimes()
    for at, now_s in enumerate((0.0, 10.0)):
        steps.look(0, {"rank": [0], "steps": [at * 5], "since_step_s": [0.0]}, now_s)
    text, kind = expose("1", [facts()._replace(steps=steps)], [("ab", TREE)], as_openmetrics=True)
    assert "openmetrics-text" in kind
    families = list(parse_openmetrics(text.decode()))
    assert len(families) == len({family.name for family in families}) > 20
    for family in families:
        assert family.name.startswith("bootseer_")
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_total", "_ms", "_gib", "_percent", "_count", "_sum", "_info"))
        units = [part for part in family.name.split("_") if part in ("seconds", "bytes")]
        assert len(units) <= 1, family.name
        for sample in family.samples:
            assert len(sample.labels) <= 3, sample


def test_times_of_steps_are_a_histogram() -> None:
    steps = StepTimes()
    looks = [
        (0, [0, 100], [0.5, None], 10.0),
        (0, [4, 100], [0.5, None], 12.0),  # four steps of 0.5 s
        (0, [4, 100], [2.5, None], 14.0),  # none
        (0, [5, 101], [0.5, 0.5], 20.0),  # one of 8 s; the first time of rank 1 is known
        (1, [1, 1], [0.5, 0.5], 30.0),  # another attempt
    ]
    for attempt, counts, since_s, now_s in looks:
        steps.look(attempt, {"rank": [0, 1], "steps": counts, "since_step_s": since_s}, now_s)
    assert (steps.histogram.sum_s, sum(steps.histogram.counts)) == (10.0, 5.0)
    found = exposed([facts()._replace(steps=steps)])
    assert value(found, "bootseer_step_seconds", le="1.0") == 4.0
    assert (
        value(found, "bootseer_step_seconds", le="10.0") == value(found, "bootseer_step_seconds", le="+Inf") == 5.0
    )


def test_times_of_trees_are_histograms() -> None:
    times, mounts = TimeHistogram((0.1, 1.0)), MountTimes()
    for took_s in (0.05, 0.1, 0.5, 7.0):
        times.add(took_s)
    status = {**TREE, "histograms": {"waits": times.record(), "requests": TimeHistogram().record()}}
    trees = [("ab" * 32, status), ("cd" * 32, {**status, "histograms": {"waits": {"counts": [1]}}})]
    for _ in range(3):
        mounts.look(trees)
    text, _ = expose("1", [], json.loads(json.dumps(trees)), mounts=mounts)
    found = {family.name: family for family in parse(text.decode())}
    waits = "bootseer_tree_reader_wait_seconds"
    assert [value(found, waits, le=le) for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert [sample.value for sample in found[waits].samples if sample.name.endswith("_sum")] == [7.65]
    assert "bootseer_tree_store_request_seconds" not in found, "there were none"
    assert value(found, "bootseer_mount_seconds", le="+Inf") == 2, "each once"


def test_labels_of_any_text_are_escaped() -> None:
    view = JobView('a"\n\\', "", (AgentAnswer("/s", make_status('a"\n\\'), None, "", 9.0),))
    found = exposed([JobFacts(make_detail(view), {}, [], StepTimes())])
    assert value(found, "bootseer_job_up", run_id='a"\n\\') == 1


def test_no_series_occurs_twice() -> None:
    """prometheus_client exposes it without a word, and readers keep one of the values, or both."""
    long = "x" * 300
    events = {("fell_back", stage): 1 for stage in ("image", "", "unknown", "also unknown")}
    views = [
        JobView(name, "none", (AgentAnswer("/s", make_status("none"), None, "", 9.0),))
        for name in ("none", "none~7", f"{long}a", f"{long}b")
    ]
    jobs = [JobFacts(make_detail(view), events, STAGES, StepTimes()) for view in views]
    text, _ = expose("1", jobs, [("ab" * 32, TREE), ("cd" * 32, TREE)])
    series = [
        (sample.name, *sorted(sample.labels.items()))
        for family in parse(text.decode())
        for sample in family.samples
    ]
    assert len(series) == len(set(series)) > 100
    assert text.count(b'stage="other"') == len(jobs)
