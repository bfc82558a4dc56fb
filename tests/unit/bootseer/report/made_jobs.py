"""Jobs of `bench.report_job` and events by hand, analysed without a file in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.report_job import Plan, make_lines
from bootseer.events import Event
from bootseer.report.analysis import Analysis, Job, analyse_job
from bootseer.report.reading import _order

S = 10**9
CLOCKS = {"a": 1000 * S, "b": 5 * S, "c": 77 * S}


def to_event(line: dict[str, Any]) -> Event:
    """A line as an event."""
    return Event(**{name: line[name] for name in Event._fields if name in line})


def in_order(events: Iterable[Event]) -> list[Event]:
    """As a reader gives them."""
    return sorted(events, key=_order)


def job_of(plan: Plan) -> Job:
    """A made-up job."""
    events = map(to_event, make_lines(plan))
    if not plan.clocked:
        events = (event._replace(job_ns=None, job_error_ns=None) for event in events)
    return analyse_job(in_order(events))


def analysis_of(plan: Plan) -> Analysis:
    """Its one attempt."""
    return job_of(plan).attempts[plan.attempt]


def event(
    at_s: float,
    stage: str | None,
    kind: str,
    name: str,
    rank: int | None = None,
    node: str = "a",
    attempt: int | None = 0,
    is_clocked: bool = True,
    **more: Any,
) -> Event:
    """One event, at a time of the job."""
    at_ns = round(at_s * S)
    clock = {"job_ns": 9 * S + at_ns, "job_error_ns": 1000} if is_clocked else {}
    return Event(
        wall_ns=10**18 + at_ns, mono_ns=CLOCKS[node] + at_ns, run_id="run", node=node, rank=rank, attempt=attempt,
        stage=stage, kind=kind, name=name, **clock, **more,
    )  # fmt: skip


def span(
    stage: str, low_s: float, high_s: float | None, rank: int | None = None, node: str = "a", **more: Any
) -> list[Event]:
    """Both ends of a span; without its end where `high_s` is None."""
    name = f"{stage}-{low_s}"
    found = [event(low_s, stage, "begin", stage, rank, node, span=name, **more)]
    if high_s is not None:
        found.append(event(high_s, stage, "end", stage, rank, node, span=name, **more))
    return found


def started(
    rank: int, spawn_s: float, script_s: float, step_s: float | None = None, node: str = "a", **more: Any
) -> list[Event]:
    """A rank's instants."""
    found = [
        event(spawn_s, "spawn", "instant", "rank_started", rank, node, attrs={"how": "exec"}, **more),
        event(script_s, "spawn", "instant", "script", rank, node, **more),
    ]
    if step_s is not None:
        found.append(event(step_s, "first_step", "instant", "optimizer_step", rank, node, **more))
    return found
