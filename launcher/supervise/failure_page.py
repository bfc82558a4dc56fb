"""PURE: the page of a failure: what, where, since when, how sure, what was done, and how long each stage took.

In: failures of one attempt in their order, or a standstill. Out: a record ready for JSON, the same as text, and
both packed for the way to the node that keeps them. What was not observed is None, and is said to be so. Bounded
however much ranks have said.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from launcher.ranks.exits import Kind, classify, describe_end, find_sign
from launcher.ranks.failure_class import (
    CERTAIN,
    GUESS,
    LIKELY,
    classify_failure,
    early_end,
    how_sure,
    mount_line,
    where,
)
from launcher.ranks.report import clean, format_ranks

if TYPE_CHECKING:
    from launcher.ranks.cause import Ordered
    from launcher.rendezvous.messages import Failure
    from launcher.supervise.facts import Hang

FORMAT = 1
MOST_PACKED_BYTES = 60 << 10  # what the wire takes
MOST_RECORD_BYTES = 1 << 20  # unpacked
MOST_OTHERS = 16
MOST_TEXT_CHARACTERS = 12_000  # of one text in it
MOST_LINE_CHARACTERS = 2_000
MOST_LINES = 200
# What the recovery is made of, in order: name in the record, name for people.
STAGES = (
    ("seen_s", "seen"),
    ("post_mortem_s", "post-mortem"),
    ("ranks_stopped_s", "ranks stopped"),
    ("checks_s", "checks"),
    ("rollback_s", "rollback"),
    ("replay_s", "replay"),
    ("backoff_s", "backoff"),
    ("rendezvous_s", "rendezvous"),
    ("spawn_s", "ranks started"),
    ("first_step_s", "first step"),
)
WHERE_ASKED_FOR = {"post_mortem_s", "checks_s", "rollback_s", "replay_s"}  # not there else
NOT_OBSERVED = "not observed"
# What torch appends to each error of CUDA.
_ADVICE = (
    "Search for `cudaError",
    "CUDA kernel errors might be",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking was not enabled",
)


def describe_failures(ordered: Ordered) -> dict[str, Any]:
    """What is known of the failures of an attempt, the first of which is the page's."""
    told = [failure for failure in ordered.failures if not failure.stopped_by_us]
    if not told or (ordered.nodes and not ordered.unsure):
        return _describe_loss(ordered, told)
    first = told[0]
    verdict = classify_failure(first)
    sure, why = how_sure(first, verdict)
    whose, whose_why = _how_sure_whose(first, ordered)
    return {
        "class": verdict.kind.value,
        "why": verdict.why,
        "where": where(first),
        "message": _last_words(first),
        "how": describe_end(first),
        "status": first.status,
        "class_sure": sure,
        "class_sure_why": why,
        "ranks": [first.rank],
        "rank": first.rank,
        "local_rank": first.local_rank,
        "node": first.node,
        "node_rank": first.group_rank,
        "pid": first.pid,
        "culprit_sure": whose,
        "culprit_sure_why": whose_why,
        "since_s": first.time_ns / 1e9,
        "since_wall_s": first.wall_s,
        "oom": first.oom,
        "kernel": list(first.kernel),
        "checks": list(first.checks),
        "mounts": [mount_line(fault) for fault in first.mounts],
        "traceback": first.traceback,
        "stderr": list(first.stderr_tail),
        **_describe_rest(ordered, told[1:]),
    }


def describe_standstill(hang: Hang, line: str) -> dict[str, Any]:
    """What is known of a standstill."""
    is_seen = hang.kind.value in ("frozen", "stuck-in-kernel")
    apart = "the stacks of these ranks differ from those of the rest" if hang.ranks else "no rank differs"
    is_slow = hang.kind.value == "slow"
    if is_slow:
        apart = "in most rounds of stacks they were not where the rest waits"
    nothing_for = f"nothing came for longer than {hang.limit_s:.0f} s, which was learned from the job"
    return {
        "class": "slow" if is_slow else "hang",
        "why": hang.kind.value,
        "message": line,
        "class_sure": CERTAIN if is_seen else LIKELY,
        "class_sure_why": "the state of the process says so"
        if is_seen
        else f"steps take longer than {hang.limit_s:.2g} s, which was learned from the job"
        if is_slow
        else nothing_for,
        "ranks": list(hang.ranks)[:1024],
        "rank": hang.ranks[0] if len(hang.ranks) == 1 else None,
        "culprit_sure": CERTAIN if is_seen else LIKELY if hang.ranks else GUESS,
        "culprit_sure_why": "the state of the process says so" if is_seen else apart,
        "since_s": hang.since_s,
    }


def describe_broken_rule(kind: str, line: str, rank: int, told_s: float, ordered: Ordered) -> dict[str, Any]:
    """What is known where a rule over what ranks print has ended the attempt; of ranks that failed then, too.

    Args: rank: that has printed it; -1: none in particular; ordered: failures of ranks.
    """
    told = [failure for failure in ordered.failures if not failure.stopped_by_us]
    return {
        "class": kind,
        "why": "a rule over what ranks print",
        "message": line,
        "class_sure": CERTAIN,
        "class_sure_why": "the rule says so",
        "ranks": [rank] if rank >= 0 else [],
        "rank": rank if rank >= 0 else None,
        "culprit_sure": GUESS,
        "culprit_sure_why": "it has printed what the rule is about" if rank >= 0 else "the rule is of no rank",
        "since_s": told_s,
        **_describe_rest(ordered, told),
    }


def pack(record: Mapping[str, Any]) -> bytes:
    """The record for the way; of long texts less, until it fits."""
    most, lines = MOST_TEXT_CHARACTERS, MOST_LINES
    while True:
        data = zlib.compress(json.dumps(_cut(record, most, lines)).encode())
        if len(data) <= MOST_PACKED_BYTES:
            return data
        most, lines = most // 2, lines // 2


def unpack(data: bytes) -> dict[str, Any] | None:
    """None for what is no page."""
    try:
        found = json.loads(zlib.decompressobj().decompress(data, MOST_RECORD_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


# ---- how sure ------------------------------------------------------------------------------------------------


def _how_sure_whose(failure: Failure, ordered: Ordered) -> tuple[str, str]:
    if ordered.unsure:
        among = f"ranks {format_ranks(ordered.unsure)}"
        return GUESS, f"cannot tell which of {among} was first: their times are too near to each other"
    if ordered.nodes:
        return GUESS, f"a lost node may have failed before: {', '.join(ordered.nodes[:4])}"
    if failure.early:
        return LIKELY, f"it says that another rank was gone, no other has failed, and {early_end(failure)}"
    if classify(failure) is Kind.CONSEQUENCE:
        sign = find_sign(failure)
        return GUESS, f"it says that another rank was gone ({sign.what if sign else ''}), and no other has failed"
    told = sum(not each.stopped_by_us for each in ordered.failures)
    return CERTAIN, "it ended by itself, before all others" if told > 1 else "it ended by itself, and no other did"


def _describe_loss(ordered: Ordered, told: Sequence[Failure]) -> dict[str, Any]:
    hosts = ", ".join(ordered.nodes[:4])
    return {
        "class": "lost-node",
        "why": "nothing more was heard of a node",
        "message": "",
        "class_sure": CERTAIN,
        "class_sure_why": "its connection has ended, or was silent for too long; why is not known",
        "ranks": [],
        "node": hosts,
        "culprit_sure": CERTAIN if len(ordered.nodes) == 1 else GUESS,
        "culprit_sure_why": "no other node was lost, and no rank failed before"
        if len(ordered.nodes) == 1
        else "several nodes were lost",
        **_describe_rest(ordered, told),
    }


def _describe_rest(ordered: Ordered, others: Sequence[Failure]) -> dict[str, Any]:
    return {
        "others": [_describe_other(failure) for failure in others[:MOST_OTHERS]],
        "others_left_out": max(0, len(others) - MOST_OTHERS),
        "stopped_ranks": [failure.rank for failure in ordered.failures if failure.stopped_by_us][:1024],
        "lost_nodes": list(ordered.nodes)[:MOST_OTHERS],
    }


def _describe_other(failure: Failure) -> dict[str, Any]:
    sign = find_sign(failure)
    return {
        "rank": failure.rank,
        "node": failure.node,
        "pid": failure.pid,
        "how": describe_end(failure),
        "consequence_of": sign.what if sign is not None else "",
        "message": _last_words(failure)[:300],
    }


def _last_words(failure: Failure) -> str:
    """The line that tells most: of the exception, else the last one that it wrote."""
    said = failure.message or failure.traceback or "\n".join(failure.stderr_tail)
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return clean(lines[-1].strip()) if lines else ""


# ---- bounds --------------------------------------------------------------------------------------------------


def _cut(value: Any, most: int, lines: int) -> Any:
    if isinstance(value, str):
        # The end of what a rank said tells most.
        return value if len(value) <= most else "..." + value[len(value) - most :]
    if isinstance(value, Mapping):
        return {name: _cut(each, most, lines) for name, each in value.items()}
    if isinstance(value, list | tuple):
        longest = min(most, MOST_LINE_CHARACTERS)
        if value and isinstance(value[0], str):
            value = value[-lines:] if lines else []
        return [_cut(each, longest, lines) for each in value]
    return value


# ---- as text -------------------------------------------------------------------------------------------------


def format_page(record: Mapping[str, Any]) -> str:
    """The record for people; any values in it are shown, whatever they are."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> list[str]:
    def text(name: str) -> str:
        value = record.get(name)
        return "" if value is None else clean(str(value))

    title = f"failure {text('number')} of job {text('run_id')}, in attempt {text('attempt')}"
    why = f" ({text('why')})" if text("why") else ""
    lines = [title, f"what       {text('class')}{why}"]
    lines += [f"           {each}" for each in (text("where"), text("message"), text("collectives")) if each]
    lines += [
        f"           {text('class_sure')}: {text('class_sure_why')}",
        f"where      {_describe_place(record)}",
        f"           {text('culprit_sure')}: {text('culprit_sure_why')}",
        f"since      {_format_time(record.get('since_wall_s'))}",
    ]
    if text("how"):
        lines.append(f"how        {text('how')}")
    lines += [f"kernel     {clean(str(line))}" for line in _list(record, "kernel")]
    lines += [f"check      {clean(str(line))}" for line in _list(record, "checks")]
    lines += [f"mount      {clean(str(line))}" for line in _list(record, "mounts")]
    rule = f" ({text('rule')})" if text("rule") else ""
    lines.append(f"done       {text('action') or NOT_OBSERVED}{rule}")
    if text("step"):
        lines.append(f"           {text('step')}: {text('step_why')}")
    lines += [f"           {clean(str(line))}" for line in _list(record, "steps_done")]
    lines += ["recovery", *_stage_lines(record)]
    if record.get("standstill"):
        lines.append(f"standstill {text('standstill')}")
    for other in _list(record, "others"):
        if isinstance(other, Mapping):
            of = f"; consequence of another: {other.get('consequence_of')}" if other.get("consequence_of") else ""
            said = f": {other.get('message')}" if other.get("message") else ""
            shown = f"rank {other.get('rank')} on {other.get('node')} (pid {other.get('pid')}): {other.get('how')}"
            lines.append(f"also       {clean(shown + of + said)}")
    if record.get("others_left_out"):
        lines.append(f"also       {text('others_left_out')} more ranks")
    stopped = [rank for rank in _list(record, "stopped_ranks") if isinstance(rank, int)]
    if stopped:
        lines.append(
            f"stopped    by bootrun after that: rank{'s' if len(stopped) > 1 else ''} {format_ranks(stopped)}"
        )
    for name in ("collectives", "stacks", "traceback"):
        block = record.get(name)
        if isinstance(block, str) and block.strip():
            lines += [f"{name}:", *(f"  {clean(line)}" for line in block.rstrip().splitlines())]
    stderr = _list(record, "stderr")
    if stderr and not record.get("traceback"):
        lines += ["stderr (its last lines):", *(f"  {clean(str(line))}" for line in stderr)]
    if not record.get("stacks"):
        lines.append("stacks     none: they are taken of ranks that stand still, not of those that have ended")
    return lines


def _stage_lines(record: Mapping[str, Any]) -> list[str]:
    given = record.get("stages")
    found = given if isinstance(given, Mapping) else {}
    stages = [(name, shown) for name, shown in STAGES if name in found or name not in WHERE_ASKED_FOR]
    values = [_seconds(found.get(name)) for name, _ in stages]
    lines = [
        f"  {shown:<16} {NOT_OBSERVED if value is None else f'{value:.3f} s'}"
        for (_, shown), value in zip(stages, values, strict=True)
    ]
    known = [value for value in values if value is not None]
    of_what = "" if len(known) == len(stages) else ", of what was observed"
    return [*lines, f"  {'together':<16} {sum(known):.3f} s{of_what}"]


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e10 else None


def _describe_place(record: Mapping[str, Any]) -> str:
    rank, ranks = record.get("rank"), [each for each in _list(record, "ranks") if isinstance(each, int)]
    parts = []
    if isinstance(rank, int):
        local = record.get("local_rank")
        parts.append(f"rank {rank}" + (f" (local rank {local})" if isinstance(local, int) else ""))
    elif ranks:
        parts.append(f"ranks {format_ranks(ranks)}")
    if record.get("node"):
        number = record.get("node_rank")
        parts.append(f"node {record['node']}" + (f" (node rank {number})" if isinstance(number, int) else ""))
    if record.get("pid"):
        parts.append(f"pid {record['pid']}")
    return clean(", ".join(parts)) if parts else "no rank differs from the others"


def _format_time(wall_s: object) -> str:
    if not isinstance(wall_s, int | float):
        return NOT_OBSERVED
    try:
        return datetime.fromtimestamp(wall_s).isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return NOT_OBSERVED


def _list(record: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = record.get(name)
    return value if isinstance(value, list | tuple) else ()
