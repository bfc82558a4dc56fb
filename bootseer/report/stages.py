"""Events of one attempt's start -> its duration and the times of its stages. Pure.

Times are differences of CLOCK_MONOTONIC on one node. Clocks of two nodes are never compared: a job's figure is
that of its slowest node. Values without an event stay None.
"""

from __future__ import annotations

from bootseer.counted import counted
from bootseer.events import RANK_STARTED, SCRIPT, Event, Kind, Stage
from bootseer.light_typing import Iterable, NamedTuple
from bootseer.report.intervals import Interval, union_ns

_ORDER = {stage.value: place for place, stage in enumerate(Stage)}
_SPAWN, _FIRST_STEP = Stage.SPAWN.value, Stage.FIRST_STEP.value


class StageTime(NamedTuple):
    """One stage in the place where it took longest."""

    stage: str
    seconds: float
    node: str
    rank: int | None  # None: of the whole node


class StartSummary(NamedTuple):
    """A start; seconds count from the node's first event of the attempt."""

    ranks: int
    nodes: int
    running_s: float | None  # until the last rank ran its script (or was started, without hooks)
    first_step_s: float | None  # until the last rank had made its first step; None unless all were observed
    first_steps: int  # ranks with an observed first step
    hooked: int  # ranks that wrote events of their own
    stages: tuple[StageTime, ...]  # each stage once, in the order of a start

    @property
    def longest(self) -> StageTime | None:
        """Return the stage that took most time."""
        return max(self.stages, key=lambda each: each.seconds, default=None)


class _Rank:
    """The facts about one rank."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.started_ns: int | None = None
        self.script_ns: int | None = None
        self.first_step_ns: int | None = None


def summarise_start(events: Iterable[Event], attempt: int | None = None) -> StartSummary:
    """Summarise the start from `events` of agents and ranks, of one `attempt` only if it is given."""
    chosen = _of_attempt(list(events), attempt)
    ranks = _find_ranks(chosen)
    spans = _find_spans(chosen)
    zero_ns: dict[str, int] = {}
    spawn_ns: dict[str, int] = {}
    for event in chosen:
        if event.rank is None:
            zero_ns[event.node] = min(event.mono_ns, zero_ns.get(event.node, event.mono_ns))
            if event.stage == _SPAWN and event.kind == Kind.BEGIN.value:
                spawn_ns.setdefault(event.node, event.mono_ns)
    return StartSummary(
        ranks=len(ranks),
        nodes=len({event.node for event in chosen}),
        running_s=_last_s(ranks, zero_ns, [rank.script_ns or rank.started_ns for rank in ranks.values()]),
        first_step_s=_last_s(ranks, zero_ns, [rank.first_step_ns for rank in ranks.values()]),
        first_steps=sum(rank.first_step_ns is not None for rank in ranks.values()),
        hooked=sum(rank.script_ns is not None for rank in ranks.values()),
        stages=_longest_of_each(_measure(ranks, spans, spawn_ns)),
    )


def start_line(summary: StartSummary) -> str:
    """Return the line that is printed at the end of a start."""
    who = f"{counted(summary.ranks, 'rank')} on {counted(summary.nodes, 'node')}"
    if summary.first_step_s is not None:
        parts = [f"{who} started in {_seconds(summary.first_step_s)} to the first step"]
    elif summary.running_s is not None:
        parts = [f"{who} running after {_seconds(summary.running_s)}"]
    else:
        parts = [f"{who} started, its duration was not observed"]
    longest = summary.longest
    if longest is not None:
        where = [] if longest.rank is None else [f"rank {longest.rank}"]
        where += [f"on {longest.node}"] if summary.nodes > 1 else []
        place = f" ({' '.join(where)})" if where else ""
        parts.append(f"longest stage: {longest.stage} {_seconds(longest.seconds)}{place}")
    if summary.first_step_s is None:
        parts.append(_not_observed(summary))
    return "; ".join(parts)


def _not_observed(summary: StartSummary) -> str:
    if summary.first_steps:
        return f"first step observed on {summary.first_steps} of {counted(summary.ranks, 'rank')} only"
    if not summary.hooked:
        return "first step not observed (no events of the ranks)"
    return "first step not observed (no torch optimizer step, no bootseer.heartbeat)"


# ---- facts ---------------------------------------------------------------------------------------------------


def _of_attempt(events: list[Event], attempt: int | None) -> list[Event]:
    """Return the attempt's events, with unnumbered begins of spans that end in it (as of rendezvous)."""
    if attempt is None:
        return events
    ended = {
        (event.node, event.rank, event.span)
        for event in events
        if event.attempt == attempt and event.kind == Kind.END.value
    }
    return [
        event
        for event in events
        if event.attempt == attempt
        or (
            event.attempt is None
            and event.kind == Kind.BEGIN.value
            and (event.node, event.rank, event.span) in ended
        )
    ]


def _find_ranks(events: list[Event]) -> dict[int, _Rank]:
    ranks: dict[int, _Rank] = {}
    for event in events:
        if event.rank is None:
            continue
        rank = ranks.setdefault(event.rank, _Rank(event.node))
        if event.kind != Kind.INSTANT.value:
            continue
        if event.name == RANK_STARTED:
            rank.started_ns = event.mono_ns
        elif event.name == SCRIPT:
            rank.script_ns = event.mono_ns
        elif event.stage == _FIRST_STEP:
            rank.first_step_ns = min(event.mono_ns, rank.first_step_ns or event.mono_ns)
    return ranks


def _find_spans(events: list[Event]) -> dict[tuple[str, int | None], dict[str, list[Interval]]]:
    """Return finished spans by (node, rank) and stage; a span without an end has no duration."""
    spans: dict[tuple[str, int | None], dict[str, list[Interval]]] = {}
    begun: dict[tuple[str, int | None, str | None], Event] = {}
    for event in events:
        key = (event.node, event.rank, event.span)
        if event.kind == Kind.BEGIN.value:
            begun[key] = event
        elif event.kind == Kind.END.value and key in begun:
            begin = begun.pop(key)
            if begin.stage in _ORDER and event.mono_ns >= begin.mono_ns:
                stages = spans.setdefault((event.node, event.rank), {})
                stages.setdefault(begin.stage, []).append((begin.mono_ns, event.mono_ns))
    return spans


def _measure(
    ranks: dict[int, _Rank],
    spans: dict[tuple[str, int | None], dict[str, list[Interval]]],
    spawn_ns: dict[str, int],
) -> list[StageTime]:
    times: list[StageTime] = []
    for (node, number), stages in spans.items():
        times += [StageTime(stage, _total_s(found), node, number) for stage, found in stages.items()]
    for number, rank in ranks.items():
        if rank.script_ns is None:
            continue
        begin_ns = spawn_ns.get(rank.node)
        if begin_ns is not None and begin_ns <= rank.script_ns:
            # the interpreter's own start belongs to it
            times.append(StageTime(_SPAWN, (rank.script_ns - begin_ns) / 1e9, rank.node, number))
        if rank.first_step_ns is not None and rank.first_step_ns >= rank.script_ns:
            own = [span for found in spans.get((rank.node, number), {}).values() for span in found]
            rest_s = (rank.first_step_ns - rank.script_ns) / 1e9
            rest_s -= _total_s(own, rank.script_ns, rank.first_step_ns)
            times.append(StageTime(_FIRST_STEP, rest_s, rank.node, number))
    return times


def _longest_of_each(times: list[StageTime]) -> tuple[StageTime, ...]:
    longest: dict[str, StageTime] = {}
    for each in times:
        if each.stage not in longest or each.seconds > longest[each.stage].seconds:
            longest[each.stage] = each
    return tuple(sorted(longest.values(), key=lambda each: _ORDER[each.stage]))


def _total_s(spans: list[Interval], low_ns: int | None = None, high_ns: int | None = None) -> float:
    """Return the time inside at least one of `spans`, between the limits."""
    return union_ns(spans, low_ns, high_ns) / 1e9


def _last_s(ranks: dict[int, _Rank], zero_ns: dict[str, int], times_ns: list[int | None]) -> float | None:
    """Return the largest time since a rank's node began; None unless it is known for every rank."""
    last: float | None = None
    for rank, time_ns in zip(ranks.values(), times_ns, strict=True):
        begin_ns = zero_ns.get(rank.node)
        if time_ns is None or begin_ns is None:
            return None
        last = max(last or 0.0, (time_ns - begin_ns) / 1e9)
    return last


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
