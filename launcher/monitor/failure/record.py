"""PURE: the failure record: class, place, time, certainty, actions, and the duration of each stage.

In: failures of one attempt in their order, or a hang. Out: a record ready for JSON, the same as text, and both
packed for the node that keeps them. Facts that were not observed are None, and are marked so. The size is bounded
however much ranks have printed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from launcher.ranks.exits import FailureOrigin, classify, describe_end, find_sign
from launcher.ranks.failure_class import (
    CERTAIN,
    GUESS,
    LIKELY,
    certainty_of,
    classify_failure,
    describe_early_end,
    error_location,
    mount_line,
)
from launcher.ranks.rank_list import format_ranks
from launcher.ranks.report import clean

if TYPE_CHECKING:
    from launcher.base.facts import Hang
    from launcher.ranks.cause import OrderedFailures
    from launcher.rendezvous.messages import Failure

FORMAT = 1
MAX_PACKED_BYTES = 60 << 10  # limit of a message
MAX_RECORD_BYTES = 1 << 20  # unpacked
MAX_OTHERS = 16
MAX_TEXT_CHARACTERS = 12_000  # of one text in a record
MAX_LINE_CHARACTERS = 2_000
MAX_LINES = 200
# The stages of the recovery, in order: name in the record, name for users.
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
OPTIONAL_STAGES = {"post_mortem_s", "checks_s", "rollback_s", "replay_s"}  # absent unless requested
NOT_OBSERVED = "not observed"
# Lines that torch appends to each CUDA error.
_ADVICE = (
    "Search for `cudaError",
    "CUDA kernel errors might be",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking was not enabled",
)


def describe_failures(ordered: OrderedFailures) -> dict[str, Any]:
    """Describe the failures of an attempt; the record is about the first."""
    told = [failure for failure in ordered.failures if not failure.stopped_by_us]
    if not told or (ordered.nodes and not ordered.unsure):
        return _describe_loss(ordered, told)
    first = told[0]
    verdict = classify_failure(first)
    sure, why = certainty_of(first, verdict)
    whose, whose_why = _how_sure_whose(first, ordered)
    return {
        "class": verdict.kind.value,
        "why": verdict.why,
        "where": error_location(first),
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


def describe_hang(hang: Hang, line: str) -> dict[str, Any]:
    is_seen = hang.kind.value in ("frozen", "stuck-in-kernel")
    apart = "the stacks of these ranks differ from those of the other ranks" if hang.ranks else "no rank differs"
    is_slow = hang.kind.value == "slow"
    if is_slow:
        apart = "in most rounds of stacks they were not in the calls where the other ranks wait"
    nothing_for = f"no progress for longer than {hang.limit_s:.0f} s, which was learned from the job"
    return {
        "class": "slow" if is_slow else "hang",
        "why": hang.kind.value,
        "message": line,
        "class_sure": CERTAIN if is_seen else LIKELY,
        "class_sure_why": "the state of the process shows it"
        if is_seen
        else f"steps take longer than {hang.limit_s:.2g} s, which was learned from the job"
        if is_slow
        else nothing_for,
        "ranks": list(hang.ranks)[:1024],
        "rank": hang.ranks[0] if len(hang.ranks) == 1 else None,
        "culprit_sure": CERTAIN if is_seen else LIKELY if hang.ranks and not hang.is_guess else GUESS,
        "culprit_sure_why": "the state of the process shows it" if is_seen else hang.evidence or apart,
        "since_s": hang.since_s,
    }


def describe_broken_rule(
    kind: str, line: str, rank: int, reported_s: float, ordered: OrderedFailures
) -> dict[str, Any]:
    """Describe an attempt that a log rule has ended, and the ranks that failed then.

    Args: rank: that printed the line; -1: none in particular; ordered: failures of ranks.
    """
    told = [failure for failure in ordered.failures if not failure.stopped_by_us]
    return {
        "class": kind,
        "why": "a log rule",
        "message": line,
        "class_sure": CERTAIN,
        "class_sure_why": "the rule defines it",
        "ranks": [rank] if rank >= 0 else [],
        "rank": rank if rank >= 0 else None,
        "culprit_sure": GUESS,
        "culprit_sure_why": "it has printed the matching line" if rank >= 0 else "the rule is about no rank",
        "since_s": reported_s,
        **_describe_rest(ordered, told),
    }


def pack(record: Mapping[str, Any]) -> bytes:
    """Serialize the record; shorten long texts until it fits."""
    most, lines = MAX_TEXT_CHARACTERS, MAX_LINES
    while True:
        data = zlib.compress(json.dumps(_cut(record, most, lines)).encode())
        if len(data) <= MAX_PACKED_BYTES:
            return data
        most, lines = most // 2, lines // 2


def unpack(data: bytes) -> dict[str, Any] | None:
    """Parse a serialized record; None for other data."""
    try:
        found = json.loads(zlib.decompressobj().decompress(data, MAX_RECORD_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


# ---- how sure ------------------------------------------------------------------------------------------------


def _how_sure_whose(failure: Failure, ordered: OrderedFailures) -> tuple[str, str]:
    if ordered.unsure:
        among = f"ranks {format_ranks(ordered.unsure)}"
        return GUESS, f"cannot determine which of {among} was first: their times are too close"
    if ordered.nodes:
        return GUESS, f"a lost node may have failed earlier: {', '.join(ordered.nodes[:4])}"
    if failure.early:
        return LIKELY, f"it reports that a rank was gone, no other has failed, and {describe_early_end(failure)}"
    if classify(failure) is FailureOrigin.CONSEQUENCE:
        sign = find_sign(failure)
        return GUESS, f"it reports that a rank was gone ({sign.what if sign else ''}), and no other has failed"
    told = sum(not each.stopped_by_us for each in ordered.failures)
    return CERTAIN, "it ended by itself, before all others" if told > 1 else "it ended by itself, and no other did"


def _describe_loss(ordered: OrderedFailures, told: Sequence[Failure]) -> dict[str, Any]:
    hosts = ", ".join(ordered.nodes[:4])
    return {
        "class": "lost-node",
        "why": "a node sent nothing more",
        "message": "",
        "class_sure": CERTAIN,
        "class_sure_why": "its connection has ended, or was silent for too long; the reason is unknown",
        "ranks": [],
        "node": hosts,
        "culprit_sure": CERTAIN if len(ordered.nodes) == 1 else GUESS,
        "culprit_sure_why": "no other node was lost, and no rank failed before"
        if len(ordered.nodes) == 1
        else "several nodes were lost",
        **_describe_rest(ordered, told),
    }


def _describe_rest(ordered: OrderedFailures, others: Sequence[Failure]) -> dict[str, Any]:
    return {
        "others": [_describe_other(failure) for failure in others[:MAX_OTHERS]],
        "others_left_out": max(0, len(others) - MAX_OTHERS),
        "stopped_ranks": [failure.rank for failure in ordered.failures if failure.stopped_by_us][:1024],
        "lost_nodes": list(ordered.nodes)[:MAX_OTHERS],
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
    """Return the most informative line: of the exception, else the last one that the rank wrote."""
    said = failure.message or failure.traceback or "\n".join(failure.stderr_tail)
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return clean(lines[-1].strip()) if lines else ""


# ---- bounds --------------------------------------------------------------------------------------------------


def _cut(value: Any, most: int, lines: int) -> Any:
    if isinstance(value, str):
        # The end of a rank's text is the most informative part.
        return value if len(value) <= most else "..." + value[len(value) - most :]
    if isinstance(value, Mapping):
        return {name: _cut(each, most, lines) for name, each in value.items()}
    if isinstance(value, list | tuple):
        longest = min(most, MAX_LINE_CHARACTERS)
        if value and isinstance(value[0], str):
            value = value[-lines:] if lines else []
        return [_cut(each, longest, lines) for each in value]
    return value


# ---- as text -------------------------------------------------------------------------------------------------


def format_record(record: Mapping[str, Any]) -> str:
    """Format the record for users; show values of any type."""
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
        lines.append(f"hang       {text('standstill')}")
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
        lines.append("stacks     none: they are taken from ranks that hang, not from ranks that have ended")
    return lines


def _stage_lines(record: Mapping[str, Any]) -> list[str]:
    given = record.get("stages")
    found = given if isinstance(given, Mapping) else {}
    stages = [(name, shown) for name, shown in STAGES if name in found or name not in OPTIONAL_STAGES]
    values = [_seconds(found.get(name)) for name, _ in stages]
    lines = [
        f"  {shown:<16} {NOT_OBSERVED if value is None else f'{value:.3f} s'}"
        for (_, shown), value in zip(stages, values, strict=True)
    ]
    known = [value for value in values if value is not None]
    of_what = "" if len(known) == len(stages) else ", of the observed stages"
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
    return clean(", ".join(parts)) if parts else "no rank is named"


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
