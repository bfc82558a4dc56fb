"""PURE: the events of a job -> its starts, one an attempt: nodes and ranks with their spans on one time axis.

Times are nanoseconds since the job's first event of the attempt. Nodes whose events have the coordinator's time
are put on its clock by one offset a node, so durations stay those of the node's own clock. Other nodes begin at
zero by their own first event, and `is_clocked` is False. Values without an event stay None.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bootseer.events import RANK_EXITED, RANK_STARTED, SCRIPT, Event, Kind, Stage
from bootseer.report.intervals import Interval

ORDER = {stage.value: place for place, stage in enumerate(Stage)}
SPAWN, FIRST_STEP, RENDEZVOUS = Stage.SPAWN.value, Stage.FIRST_STEP.value, Stage.RENDEZVOUS.value
BACKOFF = Stage.BACKOFF.value
OTHER = "other"  # a span of an unknown stage
_BEGIN, _END, _INSTANT, _SCALAR = (kind.value for kind in (Kind.BEGIN, Kind.END, Kind.INSTANT, Kind.SCALAR))
MAX_ERROR_NS = 2**60  # with a larger error a clock counts as unknown


class Span(NamedTuple):
    """A stage, or a part of one, on a node or in a rank."""

    stage: str
    name: str
    begin_ns: int
    end_ns: int | None  # None: it never closed
    error: str | None
    attrs: Mapping[str, Any]


class RankStart:
    """The facts about one rank in one attempt."""

    __slots__ = (
        "exit_ns", "first_step", "first_step_ns", "how", "last_ns", "node", "rank", "script_ns", "spans",
        "spawn_ns", "started_ns", "status", "unseen",
    )  # fmt: skip

    def __init__(self, node: NodeStart, rank: int) -> None:
        self.node = node
        self.rank = rank
        self.spans: list[Span] = []
        self.spawn_ns: int | None = None  # when its agent began to start ranks
        self.started_ns: int | None = None
        self.script_ns: int | None = None
        self.first_step_ns: int | None = None
        self.first_step = ""  # name of the event that reported it
        self.exit_ns: int | None = None
        self.status: int | None = None
        self.how = ""  # fork or exec
        self.unseen = ""  # why its first step cannot be observed
        self.last_ns = 0

    def finished(self) -> list[tuple[Span, int]]:
        """Return the closed spans that count to its start, each with its end."""
        high_ns = self.first_step_ns
        return [
            (each, each.end_ns)
            for each in self.spans
            if each.end_ns is not None and (high_ns is None or each.begin_ns < high_ns)
        ]


class NodeStart:
    """The facts about one node in one attempt."""

    __slots__ = ("has_agent", "is_clocked", "name", "others", "place", "ranks", "scalars", "spans", "zero_ns")

    def __init__(self, name: str, place: int) -> None:
        self.name = name
        self.place = place  # index in the order of names
        self.ranks: list[RankStart] = []
        self.spans: list[Span] = []  # of the agent, without those of SPAWN
        self.others: list[Span] = []  # of no stage
        self.scalars: list[Event] = []
        self.zero_ns = 0  # its first event
        self.is_clocked = False
        self.has_agent = False


class Start(NamedTuple):
    """One attempt of a job."""

    run_id: str
    attempt: int
    wall_ns: int  # of its first event, for display
    nodes: list[NodeStart]  # by name
    ranks: list[RankStart]  # by number
    is_clocked: bool  # all nodes are on the coordinator's clock, or there is only one
    error_ns: int  # bound of the error between two nodes, 0 for one node
    older: int  # earlier starts of the same attempt in the same files, left out
    world_size: int  # ranks of the job, as its nodes report; 0: not reported
    instants: list[Event]  # with an error


def split_runs(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return events by run, the newest run last: a directory may have been used for several."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event.run_id].append(event)
    if len(found) < 2:
        return dict(found)
    begun = {run_id: min(event.wall_ns for event in own) for run_id, own in found.items()}
    return {run_id: found[run_id] for run_id in sorted(found, key=lambda run_id: (begun[run_id], run_id))}


def list_attempts(events: Iterable[Event]) -> list[int]:
    """Return the attempts that have ranks; without any, all attempts."""
    seen: set[int] = set()
    with_ranks: set[int] = set()
    for event in events:
        if event.attempt is not None and event.attempt not in with_ranks:
            seen.add(event.attempt)
            if event.rank is not None:
                with_ranks.add(event.attempt)
    return sorted(with_ranks or seen)


def split_attempts(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Return events by attempt; the begin of a span without an attempt belongs to that of its end."""
    found: dict[int, list[Event]] = defaultdict(list)
    unknown: dict[tuple[str, int | None, str | None], Event] = {}
    for event in events:
        if event.attempt is None:
            if event.kind == _BEGIN:
                unknown[event.node, event.rank, event.span] = event
            continue
        if event.kind == _END and unknown:
            begin = unknown.pop((event.node, event.rank, event.span), None)
            if begin is not None and begin.mono_ns <= event.mono_ns:
                found[event.attempt].append(begin)
        found[event.attempt].append(event)
    return dict(found)


def make_start(events: Iterable[Event], attempt: int) -> Start:
    """Build the start from the events of one attempt. Args: events: by node and time, of this attempt only."""
    by_node: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_node[event.node].append(event)
    older = 0
    for name, own in by_node.items():
        by_node[name], dropped = _latest(own)
        older = max(older, dropped)
    nodes = [NodeStart(name, place) for place, name in enumerate(sorted(by_node))]
    offsets, error_ns = _place_clocks(by_node)
    bases: dict[str, int] = {}
    for node in nodes:
        first_ns = min(event.mono_ns for event in by_node[node.name])
        node.is_clocked = node.name in offsets
        bases[node.name] = first_ns if not node.is_clocked else -offsets[node.name]
        node.zero_ns = 0 if not node.is_clocked else first_ns + offsets[node.name]
    clocked = [node for node in nodes if node.is_clocked]
    if clocked:
        begin_ns = min(node.zero_ns for node in clocked)
        for node in clocked:
            bases[node.name] += begin_ns
            node.zero_ns -= begin_ns
    instants: list[Event] = []
    for node in nodes:
        _fill(node, by_node[node.name], bases[node.name], instants)
    ranks = sorted((rank for node in nodes for rank in node.ranks), key=lambda rank: (rank.rank, rank.node.place))
    everything = [event for own in by_node.values() for event in own]
    return Start(
        run_id=max((event.run_id for event in everything), default=""),
        attempt=attempt,
        wall_ns=min((event.wall_ns for event in everything), default=0),
        nodes=nodes,
        ranks=ranks,
        is_clocked=len(nodes) == 1 or len(clocked) == len(nodes),
        error_ns=error_ns if len(nodes) > 1 else 0,
        older=older,
        world_size=max(map(_world_size, everything), default=0),
        instants=instants,
    )


def _world_size(event: Event) -> int:
    """PURE: the world size that a node's spawn event reports; 0 for other events."""
    found = event.attrs.get("world_size", 0) if event.stage == SPAWN and event.kind == _BEGIN else 0
    return found if isinstance(found, int) else 0


def _latest(events: list[Event]) -> tuple[list[Event], int]:
    """Return the events of the last start of the attempt in these files, and the number of earlier starts."""
    started = Counter(event.rank for event in events if event.name == RANK_STARTED and event.kind == _INSTANT)
    if not started or max(started.values()) < 2:
        return events, 0  # several agents of one host start different ranks
    spawns = [
        event.mono_ns for event in events if event.kind == _BEGIN and event.stage == SPAWN and event.rank is None
    ]
    if len(spawns) < 2:
        return events, 0
    begins = [
        event.mono_ns
        for event in events
        if event.kind == _BEGIN and event.stage == RENDEZVOUS and event.mono_ns <= spawns[-1]
    ]
    # A restart with backoff has a rendezvous before it, and one after it.
    low_ns = min([begin_ns for begin_ns in begins if begin_ns > spawns[-2]], default=spawns[-2] + 1)
    return [event for event in events if event.mono_ns >= low_ns], len(spawns) - 1


def _place_clocks(by_node: Mapping[str, list[Event]]) -> tuple[dict[str, int], int]:
    """Return each node's offset to the job's clock, from its most exact event, and the largest error of two."""
    offsets: dict[str, int] = {}
    errors = [0, 0]
    for name, own in by_node.items():
        best: Event | None = None
        for event in own:
            error = event.job_error_ns
            if event.job_ns is None or error is None or error >= MAX_ERROR_NS:
                continue
            if best is None or error < (best.job_error_ns or 0):
                best = event
        if best is not None and best.job_ns is not None and best.job_error_ns is not None:
            offsets[name] = best.job_ns - best.mono_ns
            errors.append(best.job_error_ns)
    return offsets, sum(sorted(errors)[-2:])


def _fill(node: NodeStart, events: list[Event], base_ns: int, instants: list[Event]) -> None:
    ranks: dict[int, RankStart] = {}
    begun: dict[tuple[int | None, str | None], deque[Event]] = {}
    spawns: list[int] = []
    for event in events:
        at_ns = event.mono_ns - base_ns
        kind = event.kind
        rank: RankStart | None = None
        if event.rank is None:
            node.has_agent = True
            spans = node.spans
        else:
            rank = ranks.get(event.rank)
            if rank is None:
                rank = ranks[event.rank] = RankStart(node, event.rank)
            rank.last_ns = max(rank.last_ns, at_ns)
            spans = rank.spans
        if kind == _BEGIN:
            if event.stage == SPAWN and rank is None:
                spawns.append(at_ns)
            begun.setdefault((event.rank, event.span), deque()).append(event)
        elif kind == _END:
            waiting = begun.get((event.rank, event.span))
            begin = waiting.popleft() if waiting else None
            if begin is not None:
                attrs = {**begin.attrs, **event.attrs} if begin.attrs else event.attrs
                error = event.error or begin.error
                target = spans if begin.stage is not None else node.others
                target.append(Span(*_stage(begin), begin.mono_ns - base_ns, at_ns, error, attrs))
        elif kind == _SCALAR:
            if event.stage is not None and rank is None:
                node.scalars.append(event)
        elif kind == _INSTANT:
            if rank is not None:
                _note(rank, event, at_ns)
            if event.error is not None:
                instants.append(event)
    for (number, _), waiting in begun.items():
        target = node.spans if number is None else ranks[number].spans
        target += [_open(begin, base_ns) for begin in waiting if begin.stage is not None]
    for rank in ranks.values():
        first_ns = rank.started_ns if rank.started_ns is not None else rank.script_ns
        known = [each for each in spawns if first_ns is None or each <= first_ns]
        rank.spawn_ns = max(known, default=None)  # with several agents on one host most likely its own
    for spans in (node.spans, *(rank.spans for rank in ranks.values())):
        spans.sort(key=lambda span: (span.begin_ns, span.end_ns is None, span.end_ns or 0, span.stage, span.name))
    node.ranks = [ranks[number] for number in sorted(ranks)]


def _note(rank: RankStart, event: Event, at_ns: int) -> None:
    if event.name == RANK_STARTED:
        rank.started_ns = at_ns
        rank.how = str(event.attrs.get("how", ""))[:20]
    elif event.name == RANK_EXITED:
        rank.exit_ns = at_ns
        status = event.attrs.get("status")
        rank.status = status if isinstance(status, int) and not isinstance(status, bool) else None
    elif event.name == SCRIPT:
        rank.script_ns = at_ns
    elif event.name == "not_observed":
        rank.unseen = event.error or "reason unknown"
    elif event.stage == FIRST_STEP and (rank.first_step_ns is None or at_ns < rank.first_step_ns):
        rank.first_step_ns = at_ns
        rank.first_step = event.name


def _open(begin: Event, base_ns: int) -> Span:
    return Span(*_stage(begin), begin.mono_ns - base_ns, None, begin.error, begin.attrs)


def _stage(begin: Event) -> tuple[str, str]:
    """Return stage and name of a span; an unknown stage becomes OTHER, with its name kept."""
    if begin.stage is None or begin.stage in ORDER:
        return begin.stage or "-", begin.name
    return OTHER, f"{begin.stage}: {begin.name}"


def closed(spans: Iterable[Span]) -> list[Interval]:
    return [(each.begin_ns, each.end_ns) for each in spans if each.end_ns is not None]
