"""A made-up job of any size with planted stragglers, as event files: what `bench report` and tests read.

The course is that of a real start: nodes meet, an image is opened and an environment restored meanwhile, ranks
are started, import, wait for each other, load a checkpoint, wait again, make their first step. The clocks of nodes
have nothing in common. The same seed gives the same files.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bootseer.events import RUN_EVENTS_NAME, safe_name

S = 10**9
ERROR_NS = 150_000
WALL_NS = 1_764_000_000 * S


class Planted(NamedTuple):
    """Something that takes `seconds` longer."""

    stage: str  # late, image, env, import, checkpoint
    seconds: float
    node: int
    local_rank: int | None = None  # None: all of the node


class Plan(NamedTuple):
    """A job."""

    nodes: int = 4
    ranks: int = 2  # a node
    planted: tuple[Planted, ...] = ()
    stages: Mapping[str, float] = {"image": 2.0, "env": 7.0, "caches": 0.3, "import": 5.0, "checkpoint": 3.0}
    seed: int = 1
    run_id: str = "job-17"
    heartbeats: int = 3
    exits: bool = True
    clocked: bool = True
    attempt: int = 0
    name: str = "node{:04d}"


def write_job(directory: str, plan: Plan, *, run_file: bool = True, own_files: bool = False) -> str:
    """Writes the events folder of a run and returns the run's folder."""
    events = os.path.join(directory, f"{plan.run_id}_made", "events")
    os.makedirs(events, exist_ok=True)
    lines = sorted(make_lines(plan), key=lambda line: line["job_ns"])
    if run_file:
        shown = lines if plan.clocked else [_without_clock(line) for line in lines]
        _write(os.path.join(events, RUN_EVENTS_NAME), shown)
    if own_files:
        files: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            node = safe_name(line["node"])
            is_agents = line["rank"] is None or line["name"] in ("rank_started", "rank_exited")
            name = (
                f"agent-{node}.jsonl" if is_agents else f"rank-{line['rank']}-attempt-{plan.attempt}-{node}.jsonl"
            )
            files.setdefault(name, []).append(_without_clock(line))
        for name, own in files.items():
            _write(os.path.join(events, name), own)
    return os.path.dirname(events)


def make_lines(plan: Plan) -> Iterator[dict[str, Any]]:
    """Every event of the job, with the coordinator's time."""
    chance = random.Random(plan.seed)
    bases = [chance.randrange(10**6, 10**15) for _ in range(plan.nodes)]
    job_base = 77 * 10**12
    begins = [chance.uniform(0, 0.2) + _extra(plan, "late", node, None) for node in range(plan.nodes)]
    begins[0] = min(begins[0], 0.01) if not _extra(plan, "late", 0, None) else begins[0]
    met = max(begins) + 0.05
    took = [
        {stage: _vary(chance, seconds) + _extra(plan, stage, node, None) for stage, seconds in plan.stages.items()}
        for node in range(plan.nodes)
    ]
    ready = []
    for node in range(plan.nodes):
        env = begins[node] + 0.05 + took[node].get("env", 0)
        image = begins[node] + 0.02 + took[node].get("image", 0)
        ready.append(max(env + took[node].get("caches", 0), image, met) + 0.01)
    scripts, imports, loads = {}, {}, {}
    for node in range(plan.nodes):
        for local in range(plan.ranks):
            scripts[node, local] = ready[node] + _vary(chance, 0.25)
            own = plan.stages.get("import", 0)
            imports[node, local] = _vary(chance, own) + _extra(plan, "import", node, local)
            loads[node, local] = _vary(chance, plan.stages.get("checkpoint", 0)) + _extra(
                plan, "checkpoint", node, local
            )
    together = max(scripts[key] + 0.01 + imports[key] for key in scripts) + 0.2
    step = max(together + load for load in loads.values()) + 1.5
    for node in range(plan.nodes):
        name = plan.name.format(node)

        def line(
            at_s: float,
            rank: int | None,
            stage: str | None,
            kind: str,
            event: str,
            node: int = node,
            name: str = name,
            **more: Any,
        ) -> dict[str, Any]:
            at_ns = round(at_s * S)
            return {
                "v": 1, "wall_ns": WALL_NS + at_ns, "mono_ns": bases[node] + at_ns, "run_id": plan.run_id,
                "node": name, "rank": rank, "attempt": plan.attempt, "stage": stage, "kind": kind, "name": event,
                **more, "job_ns": job_base + at_ns, "job_error_ns": ERROR_NS if node else 0,
            }  # fmt: skip

        def span(
            low_s: float, high_s: float, rank: int | None, stage: str, event: str, **attrs: Any
        ) -> Iterator[dict[str, Any]]:
            yield line(low_s, rank, stage, "begin", event, span=f"{event}-{plan.attempt}")
            more: dict[str, Any] = {"attrs": attrs} if attrs else {}
            yield line(high_s, rank, stage, "end", event, span=f"{event}-{plan.attempt}", **more)

        begin, own_took = begins[node], took[node]
        yield from span(begin, met, None, "rendezvous", "rendezvous")
        if "image" in own_took:
            size = round(1e8 * _vary(chance, 1.0))
            yield from span(begin + 0.02, begin + 0.02 + own_took["image"], None, "image", "image", how="mounted")
            yield line(step, None, "image", "scalar", "image_read_bytes", value=size, unit="bytes")
            yield line(step, None, "image", "scalar", "image_blocked_s", value=own_took["image"] / 4, unit="s")
        if "env" in own_took:
            env = begin + 0.05 + own_took["env"]
            yield from span(begin + 0.05, env, None, "env", "setup", how="mount", hit=True, setup_s=90.0)
            if "caches" in own_took:
                yield from span(
                    env, env + own_took["caches"], None, "caches", "caches", files=120, bytes=40_000_000
                )
        yield from span(ready[node], ready[node] + 0.02, None, "spawn", "spawn")
        for local in range(plan.ranks):
            rank, key = node * plan.ranks + local, (node, local)
            started = ready[node] + 0.002 * local
            yield line(
                started, rank, "spawn", "instant", "rank_started", attrs={"pid": 1000 + rank, "how": "fork"}
            )
            yield line(scripts[key], rank, "spawn", "instant", "script")
            if imports[key]:
                low = scripts[key] + 0.01
                yield from span(low, low + imports[key], rank, "import", "torch")
            if loads[key]:
                yield from span(together, together + loads[key], rank, "checkpoint", "load", bytes=10**9)
            done = step + chance.uniform(0, 0.004)
            yield line(done, rank, "first_step", "instant", "optimizer_step")
            for beat in range(plan.heartbeats):
                yield line(done + 1 + beat, rank, None, "scalar", "heartbeat", value=beat + 2, attrs={"loss": 1.5})
            if plan.exits:
                end = step + 2 + plan.heartbeats
                yield line(end, rank, None, "instant", "rank_exited", attrs={"status": 0, "cpu_s": 10.0})


def _extra(plan: Plan, stage: str, node: int, local: int | None) -> float:
    """Planted there. Stages of nodes are asked without a rank, those of ranks with one."""
    is_ranks = stage in ("import", "checkpoint")
    if is_ranks != (local is not None):
        return 0.0
    return sum(
        each.seconds
        for each in plan.planted
        if each.stage == stage and each.node == node and each.local_rank in (None, local)
    )


def _vary(chance: random.Random, seconds: float) -> float:
    return seconds * chance.uniform(0.93, 1.07)


def _without_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("job_ns", "job_error_ns")}


def _write(path: str, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
