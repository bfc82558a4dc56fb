"""PURE: an analysis as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

Each node is a process, each rank a thread. The agent is thread 0, and further threads where its stages overlap:
slices of one thread have to nest. Times are microseconds since the job's first event.
Source: Trace Event Format, kinds X (slice), B (slice that never ended), i (instant), M (names).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bootseer.report.analysis import Analysis
from bootseer.report.starts import FIRST_STEP, SPAWN, NodeStart, RankStart, Span

MAX_ATTR_CHARS = 200


def trace_json(found: Analysis) -> bytes:
    start = found.start
    record = {
        "traceEvents": list(_events(found)),
        "displayTimeUnit": "ms",
        "otherData": {
            "run_id": start.run_id,
            "attempt": start.attempt,
            "clock": "job" if start.is_clocked else "each node begins at its own first event",
            "error_s": start.error_ns / 1e9,
        },
    }
    return msgspec.json.encode(record)


def _events(found: Analysis) -> Iterator[dict[str, Any]]:
    for node in found.start.nodes:
        pid = node.place + 1
        yield _name("process_name", pid, 0, node.name)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": node.place}}
        yield from _node(node, pid)
        for rank in node.ranks:
            yield from _rank(rank, pid, 1000 + rank.rank)
    critical = len(found.start.nodes) + 1
    if found.path:
        yield _name("process_name", critical, 0, "critical path")
        yield {"ph": "M", "name": "process_sort_index", "pid": critical, "tid": 0, "args": {"sort_index": -1}}
        for step in found.path:
            where = step.node if step.rank is None else f"rank {step.rank} on {step.node}"
            yield _slice(step.label, step.label, critical, 0, step.begin_ns, step.end_ns, {"where": where})


def _node(node: NodeStart, pid: int) -> Iterator[dict[str, Any]]:
    reached: list[int] = []  # end of the last slice, by thread of the agent
    for span in sorted([*node.spans, *node.others], key=lambda span: span.begin_ns):
        end_ns = span.end_ns
        thread = next((each for each, until_ns in enumerate(reached) if until_ns <= span.begin_ns), len(reached))
        if thread == len(reached):
            reached.append(0)
            yield _name("thread_name", pid, thread, "agent" if not thread else f"agent ({thread + 1})")
        reached[thread] = 2**63 if end_ns is None else end_ns
        yield _span(span, pid, thread)


def _rank(rank: RankStart, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", pid, tid, f"rank {rank.rank}")
    spawn_ns, script_ns, step_ns = rank.spawn_ns, rank.script_ns, rank.first_step_ns
    if spawn_ns is not None and script_ns is not None and spawn_ns <= script_ns:
        yield _slice(SPAWN, SPAWN, pid, tid, spawn_ns, script_ns, {"how": rank.how})
    if script_ns is not None and step_ns is not None and script_ns <= step_ns:
        yield _slice("script until the first step", FIRST_STEP, pid, tid, script_ns, step_ns, {})
    for span in rank.spans:
        yield _span(span, pid, tid)
    if step_ns is not None:
        yield _instant("first step", pid, tid, step_ns, {"seen by": rank.first_step})
    if rank.exit_ns is not None:
        yield _instant("exit", pid, tid, rank.exit_ns, {"status": rank.status})


def _span(span: Span, pid: int, tid: int) -> dict[str, Any]:
    args = {
        str(name)[:MAX_ATTR_CHARS]: value[:MAX_ATTR_CHARS] if isinstance(value, str) else value
        for name, value in span.attrs.items()
        if isinstance(value, str | int | float)
    }
    if span.error:
        args["error"] = span.error
    name = span.stage if span.name == span.stage else f"{span.stage}: {span.name}"
    if span.end_ns is not None:
        return _slice(name, span.stage, pid, tid, span.begin_ns, span.end_ns, args)
    args["open"] = "it never ended"
    return {
        "ph": "B",
        "name": name,
        "cat": span.stage,
        "pid": pid,
        "tid": tid,
        "ts": span.begin_ns / 1e3,
        "args": args,
    }


def _slice(
    name: str, stage: str, pid: int, tid: int, begin_ns: int, end_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": stage, "pid": pid, "tid": tid,
        "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3, "args": args,
    }  # fmt: skip


def _instant(name: str, pid: int, tid: int, at_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": at_ns / 1e3, "args": args}


def _name(what: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}
