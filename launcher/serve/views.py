"""PURE: a job as the page and the API show it. In: the answers of its bootruns. Out: plain values, bounded.

The ranks are columns: one list a field, in the order of ranks. What is not known is None. Answers come from
processes of the same user, but may be of another version: a value of another type counts as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.serve.jobs import AgentAnswer, JobView
from launcher.status.job_ranks import number
from launcher.status.text import PROCESS

FORMAT = 1
MAX_RANKS = 100_000
_TEXTS = ("script", "host", "state", "waits_for", "logs", "last_page")
_NUMBERS = (
    "pid", "runs_s", "attempt", "attempt_runs_s", "nodes", "least_nodes", "node_rank", "world_size", "restarts",
    "most_restarts",
)  # fmt: skip
_NAMES = {"least_nodes": "min_nodes", "most_restarts": "max_restarts"}  # in the answer
_OF_RANK = ("state", "step", "steps_per_s", "cores", "rss_bytes", "pid")  # what only the rank's own node knows


def make_summary(view: JobView) -> dict[str, Any]:
    """Return the facts of a job without its ranks."""
    status, first = view.status, view.agents[0]
    found: dict[str, Any] = {
        "format": FORMAT,
        "name": view.name,
        "run_id": view.run_id,
        "is_running": view.ended_s is None,
    }
    for name in _TEXTS:
        value = status.get(name)
        found[name] = value if isinstance(value, str) and value else None
    for name in _NUMBERS:
        found[_NAMES.get(name, name)] = number(status.get(name))
    # The node of rank 0 reports a hang; it need not be the coordinator's.
    hangs = [agent.status.get("standstill") for agent in view.agents]
    found["hang"] = next((hang for hang in hangs if isinstance(hang, str) and hang), None)
    last = status.get("last_end")
    found["last_end"] = dict(last) if isinstance(last, Mapping) else None
    found["checks"] = sorted({line for agent in view.agents for line in _lines(agent.status.get("checks"))})
    found["has_events"] = isinstance(status.get("events"), str)
    found["why"] = first.why or None  # why there is no newer answer
    found["answer_age_s"] = round(view.looked_s - first.at_s, 1) if first.why and first.status else None
    return found


def make_detail(view: JobView) -> dict[str, Any]:
    """Return all facts of a job."""
    return {**make_summary(view), "agents": [_agent(agent) for agent in view.agents], "ranks": make_ranks(view)}


def make_ranks(view: JobView) -> dict[str, list[Any]]:
    """Return the columns of all known ranks: those of the whole job where they are known, else of this node."""
    own = {
        rank["rank"]: (str(agent.status.get("host") or ""), rank)
        for agent in view.agents
        for rank in _mappings(agent.status.get("ranks"))
        if isinstance(rank.get("rank"), int)
    }
    columns = view.ranks or {}
    numbers = [each for each in _list(columns, "rank") if isinstance(each, int)]
    if len(numbers) != len(_list(columns, "rank")) or not numbers:
        columns, numbers = {}, sorted(own)
    ranks = numbers[:MAX_RANKS]
    nodes, places = _list(columns, "nodes"), _list(columns, "node")
    found: dict[str, list[Any]] = {"rank": ranks, "node": []}
    for name in ("steps", "since_step_s", "process"):
        known = _list(columns, name)
        found[name] = [
            known[at] if at < len(known) else own.get(rank, ("", {}))[1].get(name) for at, rank in enumerate(ranks)
        ]
    for name in _OF_RANK:
        found[name] = [own.get(rank, ("", {}))[1].get(name) for rank in ranks]
    for at, rank in enumerate(ranks):
        place = places[at] if at < len(places) and isinstance(places[at], int) else -1
        node = nodes[place] if 0 <= place < len(nodes) else own.get(rank, ("", {}))[0]
        found["node"].append(str(node))
    takes, cores = _list(columns, "step_takes_s"), _list(columns, "cores")
    for at in range(len(ranks)):
        if found["steps_per_s"][at] is None and at < len(takes) and (number(takes[at]) or 0) > 0:
            found["steps_per_s"][at] = round(1 / takes[at], 4)
        if found["cores"][at] is None and at < len(cores):
            found["cores"][at] = cores[at]
        process = PROCESS.get(str(found["process"][at]))
        state = found["state"][at] or "running"
        found["state"][at] = process if process and state == "running" else state
    del found["process"]
    return found


def _agent(agent: AgentAnswer) -> dict[str, Any]:
    status = agent.status
    return {
        "host": status.get("host"),
        "pid": status.get("pid"),
        "node_rank": status.get("node_rank"),
        "state": status.get("state"),
        "waits_for": status.get("waits_for") or None,
        "why": agent.why or None,
    }


def _list(columns: Mapping[str, Any], name: str) -> list[Any]:
    value = columns.get(name)
    return value if isinstance(value, list) else []


def _mappings(value: object) -> Sequence[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _lines(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
