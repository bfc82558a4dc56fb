"""The status of the job on this node, made on request from the agent's state.

In: agent, node, the watch over the ranks. Out: a dict ready for JSON. Unknown values are None. Without a watch,
the ranks are sampled twice, half a second apart, to get rates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from bootseer.errors import ConfigError
from launcher.agent.agent import Agent, State
from launcher.base.facts import RankFacts
from launcher.base.loop import EventLoop
from launcher.monitor.node_watch import NodeWatch
from launcher.monitor.samples.processes import read
from launcher.monitor.samples.sampler import Sampler
from launcher.ranks.group import Rank, RankGroup, RankState
from launcher.ranks.stats_page import StatsPage, read_page
from launcher.spec import LaunchSpec
from launcher.status.job_ranks import make_columns
from launcher.status.rates import Rates, find_rates

FORMAT = 1
BETWEEN_LOOKS_S = 0.5
MAX_RANKS = 4096
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Reported(NamedTuple):
    attempt: int
    line: str
    at_s: float  # of the loop's time


class JobInterface(Protocol):
    """What the coordinator knows of the job; elsewhere nothing."""

    def statistics(self) -> dict[str, int | str]: ...
    def newest_facts(self) -> list[tuple[str, RankFacts]]: ...


class NodeInterface(Protocol):
    """Interface of the node (node.py) that the status uses."""

    @property
    def host(self) -> str: ...
    @property
    def watch(self) -> NodeWatch | None: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def last_page(self) -> str: ...
    @property
    def reported_hang(self) -> Reported | None: ...
    @property
    def checks(self) -> tuple[str, ...]: ...
    @property
    def unready(self) -> str: ...
    @property
    def step(self) -> str: ...
    @property
    def events_dir(self) -> str: ...
    @property
    def job(self) -> JobInterface | None: ...


class NodeStatus:
    """See the module's docstring."""

    def __init__(
        self, loop: EventLoop, spec: LaunchSpec, agent: Agent, around: NodeInterface, began_ns: int
    ) -> None:
        self._loop, self._spec, self._agent, self._around = loop, spec, agent, around
        self._began_ns = began_ns

    def answer(self, then: Callable[[dict[str, Any] | Exception], object]) -> None:
        """Call `then` with the status, now or a moment later; in the latter case also with an error."""
        group, watch = self._agent.group, self._around.watch
        if group is None or self._agent.state not in (State.RUNNING, State.STOPPING):
            then(self._made({}))
        elif watch is not None:
            then(self._made(find_rates(list(watch.looks), watch.sample_now())))
        else:
            sampler = Sampler(group.ranks)
            first = sampler.look(self._loop.time())
            self._loop.call_later(BETWEEN_LOOKS_S, partial(self._answer_later, sampler, first, then))

    def answer_ranks(self, then: Callable[[dict[str, Any] | Exception], object]) -> None:
        """Call `then` with the newest facts about all ranks of the job; with an error where they are unknown."""
        group, job = self._agent.group, self._around.job
        if job is None or not job.statistics():
            then(ConfigError("only the node of the coordinator knows all ranks: ask there"))
            return
        attempt = None if group is None else group.world.attempt
        then(make_columns(attempt, job.newest_facts(), self._loop.time()))

    def _answer_later(
        self, sampler: Sampler, first: list[RankFacts], then: Callable[[dict[str, Any] | Exception], object]
    ) -> None:
        found: dict[str, Any] | Exception
        try:
            found = self._made(find_rates([first], sampler.look(self._loop.time())))
        except Exception as error:  # the loop would end the job
            found = error
        finally:
            sampler.close()
        then(found)

    def _made(self, rates: dict[int, Rates]) -> dict[str, Any]:
        agent, spec, around = self._agent, self._spec, self._around
        group, stop = agent.group, agent.last_stop
        ranks = [] if group is None else _ranks(group, rates, self._loop.time())
        statistics = {} if around.job is None else around.job.statistics()
        return {
            "format": FORMAT,
            "run_id": spec.run_id,
            "endpoint": None if spec.is_single else f"{spec.endpoint[0]}:{spec.endpoint[1]}",
            "script": spec.entry.target,
            "pid": os.getpid(),
            "host": around.host,
            "runs_s": round((time.monotonic_ns() - self._began_ns) / 1e9, 3),
            "state": agent.state.value,
            "waits_for": _waits_for(agent, around, spec),
            "attempt": None if group is None else group.world.attempt,
            "attempt_runs_s": None if group is None else _runs_s(group),
            "nodes": statistics.get("nodes") if group is None else group.world.group_world_size,
            "least_nodes": spec.min_nodes,
            "node_rank": None if group is None else group.world.group_rank,
            "world_size": None if group is None else group.world.world_size,
            "restarts": None if group is None else group.world.restart_count,
            "most_restarts": spec.max_restarts,
            "last_end": None if stop is None else {"attempt": stop.attempt, "reason": stop.reason},
            "last_page": around.last_page or None,
            "standstill": _hang(around.reported_hang, group, rates.values()),
            "checks": list(around.checks),
            "coordinator": statistics or None,
            "logs": around.run_dir or None,
            "events": around.events_dir or None,
            "ranks": ranks[:MAX_RANKS],
            "ranks_left_out": max(0, len(ranks) - MAX_RANKS),
        }


def _waits_for(agent: Agent, around: NodeInterface, spec: LaunchSpec) -> str:
    """Return what the job waits for; "" while ranks run."""
    group, stop = agent.group, agent.last_stop
    if around.step:
        return f"a step of the escalation ladder: {around.step}"
    if agent.state is State.WAITING:
        if not agent.is_member:
            return f"the coordinator at {spec.endpoint[0]}:{spec.endpoint[1]}"
        if agent.is_spare:
            return "a place in the job: this node is a spare"
        if group is None and around.unready:
            return around.unready
        return "a pause before the restart" if spec.is_single else "other nodes, or a pause before a restart"
    if agent.state is State.RUNNING and group is not None:
        if not group.spawn_began_ns:
            return around.unready or "the fork server"
        return "ranks to start" if any(rank.state is RankState.STARTING for rank in group.ranks) else ""
    return {
        State.SUCCEEDED: "other nodes: all ranks here have succeeded",
        State.STOPPING: f"ranks to end: {stop.reason}" if stop is not None else "ranks to end",
        State.ENDING: "the last output",
    }.get(agent.state, "")


def _hang(told: Reported | None, group: RankGroup | None, rates: Iterable[Rates]) -> str | None:
    """Return the line of a hang while it lasts: until a rank makes a step after its report."""
    if told is None or group is None or told.attempt != group.world.attempt:
        return None
    is_over = any(each.facts.step_at_s > told.at_s for each in rates)
    return None if is_over else told.line


def _runs_s(group: RankGroup) -> float | None:
    started = [rank.started_ns for rank in group.ranks if rank.started_ns]
    return round((time.monotonic_ns() - max(started)) / 1e9, 3) if started else None


def _ranks(group: RankGroup, rates: dict[int, Rates], now_s: float) -> Sequence[dict[str, Any]]:
    return [_rank(rank, rates.get(rank.rank), now_s) for rank in group.ranks]


def _rank(rank: Rank, found: Rates | None, now_s: float) -> dict[str, Any]:
    page = _page(rank)
    facts = None if found is None else found.facts
    step_s = None if page is None or not page.step_ns else page.step_ns / 1e9
    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "pid": rank.pid or None,
        "state": rank.state.value,
        "process": (facts.state if facts is not None else "") or None,
        "waits_in": (facts.wait if facts is not None else "") or None,
        "steps": page.steps if page is not None and page.counts else None,
        "step": None if page is None else page.step,
        "steps_per_s": None if found is None else found.steps_per_s,
        "since_step_s": None if step_s is None else round(max(0.0, now_s - step_s), 3),
        "cores": None if found is None else found.cores,
        "rss_bytes": _rss_bytes(rank if page is None else page) if rank.state is RankState.RUNNING else None,
    }


def _page(rank: Rank) -> StatsPage | None:
    if not rank.page_file:
        return None
    try:
        fd = os.open(rank.page_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return read_page(fd)
    finally:
        os.close(fd)


def _rss_bytes(process: Rank | StatsPage) -> int | None:
    fields = read(f"/proc/{process.pid}/statm").split() if process.pid else []
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else None
