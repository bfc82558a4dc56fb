"""The final report of a job that failed: which rank failed first, where, and what it said.

In go the ordered failures, out comes text for the console or a dict for JSON; pure. The box and the names of the
fields are torchrun's, for the tools that look for them. Widths, lengths and counts are bounded, and what ranks
said is shown without control characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from bootseer.counted import counted
from launcher.ranks.exits import Kind, classify, describe_end, find_sign, signal_name
from launcher.ranks.failure_class import CERTAIN, FailureClass, classify_failure, how_sure, mount_line, where
from launcher.rendezvous.messages import Failure

MOST_WIDTH = 60
MOST_LINE_CHARACTERS = 400
MOST_ALIKE = 64  # failures that are compared
MOST_LISTED = 16  # failures shown beside the first
FIRST_LINES = 120  # of the traceback of the first failure
OTHER_LINES = 24
_NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def format_report(
    script: str,
    failures: Sequence[Failure],
    unsure: Sequence[int] = (),
    attempt: int = 0,
    lost_nodes: Sequence[str] = (),
    page: str = "",
    world_size: int = 0,
) -> str:
    """The report as text that ends with a newline.

    Args: failures: the first failure first; page: the path of the failure's page, "" for none; world_size: of the
    attempt; 0: not known.
    """
    told = [failure for failure in failures if not failure.stopped_by_us]
    stopped = [failure.rank for failure in failures if failure.stopped_by_us]
    shown = told[: 1 + MOST_LISTED]
    listed = [_format_failure(index, f, attempt, OTHER_LINES) for index, f in enumerate(shown) if index]
    hidden = [failure.rank for failure in told[1 + MOST_LISTED :]]
    notes = []
    if hidden:
        notes.append(f"  and {len(hidden)} more: ranks {format_ranks(hidden)}")
    if stopped:
        plural = "s" if len(stopped) > 1 else ""
        notes.append(f"  stopped by bootrun after that: rank{plural} {format_ranks(stopped)}")
    root = (
        [_format_failure(0, told[0], attempt, FIRST_LINES, page)]
        if told
        else ["  <NONE: bootrun stopped all ranks>"]
    )
    doubts = []
    if not lost_nodes and (alike := find_alike(failures, world_size)):
        doubts.append(f"  ranks {format_ranks(alike)} failed alike: all there are")
    elif len(unsure) == 1:
        doubts.append(f"  cannot tell whether rank {unsure[0]} was first")
    elif unsure:
        doubts.append(f"  cannot tell which of ranks {format_ranks(unsure)} was first")
    if lost_nodes:
        doubts.append(
            f"  lost node{'s' if len(lost_nodes) > 1 else ''} that may have failed first: {', '.join(lost_nodes)}"
        )
    title = f"{script} FAILED"
    blocks = [title, *root, *listed]
    width = min(MOST_WIDTH, max(len(line) for block in blocks for line in block.split("\n")))
    section = "-" * width
    lines = [
        "=" * width,
        title,
        section,
        "Failures:",
        *(listed or ["  <NO_OTHER_FAILURES>"]),
        *notes,
        section,
        "Root Cause (first observed failure):",
        *doubts,
        *root,
        "=" * width,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def describe_first(failures: Sequence[Failure], unsure: Sequence[int] = (), world_size: int = 0) -> str:
    """The first failure of an attempt in a line, with its class; "" where bootrun stopped all ranks."""
    first = next((failure for failure in failures if not failure.stopped_by_us), None)
    if first is None:
        return ""
    class_ = f"class {_describe_class(first)}"
    if alike := find_alike(failures, world_size):
        return f"ranks {format_ranks(alike)} failed alike, all there are; {class_}"
    if unsure:
        return f"ranks {format_ranks(unsure)} failed first, in which order is not known; {class_}"
    how = signal_name(first.status) or f"exit status {first.status}"
    return f"rank {first.rank} on {clean(first.node)} failed first ({how}); {class_}"


def find_alike(failures: Sequence[Failure], world_size: int) -> tuple[int, ...]:
    """All ranks, where each has failed by the same exception at the same line: none of them is the cause.

    Only where nobody was stopped by bootrun: such a rank may have been well. Of many, some are compared.
    """
    if world_size < 2 or len(failures) < world_size or any(failure.stopped_by_us for failure in failures):
        return ()
    compared = failures[:: len(failures) // MOST_ALIKE + 1]
    place = where(compared[0])
    if not place or any(where(failure) != place for failure in compared[1:]):
        return ()
    return tuple(sorted(failure.rank for failure in failures))


def machine_report(
    script: str,
    status: int,
    reason: str,
    failures: Sequence[Failure],
    unsure: Sequence[int] = (),
    attempt: int = 0,
    lost_nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """The same for programs, ready for JSON."""
    return {
        "script": script,
        "exit_status": status,
        "reason": reason,
        "attempt": attempt,
        "first": [failure.rank for failure in failures[:1]] if not unsure else sorted(unsure),
        "sure": not unsure and not lost_nodes,
        "lost_nodes": list(lost_nodes),
        "failures": [_as_dict(failure) for failure in failures],
    }


def format_ranks(ranks: Iterable[int]) -> str:
    """`0, 2-5, 9`, at most a line of it."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [
        str(low) if low == high else f"{low}, {high}" if high == low + 1 else f"{low}-{high}"
        for low, high in spans
    ]
    if len(texts) > 24:
        texts = [*texts[:24], "..."]
    return ", ".join(texts)


def _as_dict(failure: Failure) -> dict[str, Any]:
    sign = find_sign(failure)
    verdict = classify_failure(failure)
    return {
        "class": verdict.kind.value,
        "why": verdict.why,
        "class_is_sure": verdict.is_sure,
        "where": where(failure),
        "kind": classify(failure).name.lower(),
        "consequence_of": sign.what if sign is not None else "",
        "signal": signal_name(failure.status),
        "how": describe_end(failure),
        **failure._asdict(),
        "stderr_tail": list(failure.stderr_tail),
        "kernel": list(failure.kernel),
        "mounts": [mount_line(fault) for fault in failure.mounts],
    }


# ---- one failure ---------------------------------------------------------------------------------------------


def _format_failure(index: int, failure: Failure, attempt: int, most_lines: int, page: str = "") -> str:
    name = signal_name(failure.status)
    lines = [
        f"[{index}]:",
        f"  time      : {_format_time(failure)}",
        f"  host      : {failure.node}",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.status} (pid: {failure.pid}) {f' ({name})' if name else ''}",
        f"  error_file: {failure.error_file or '<N/A>'}",
        f"  attempt   : {attempt} (node {failure.group_rank})",
    ]
    sign = find_sign(failure) if classify(failure) is Kind.CONSEQUENCE else None
    if sign is not None:
        what = "waited in vain for another rank" if sign.weak else "consequence of another rank's end"
        lines.append(f"  kind      : {what} ({sign.what})")
        if failure.early:
            lines.append(f"  class     : {_describe_class(failure)}")
    else:
        lines.append(f"  class     : {_describe_class(failure)}")
    lines += [f"  kernel    : {clean(line)}" for line in failure.kernel]
    lines += [f"  mount     : {clean(mount_line(fault))}" for fault in failure.mounts]
    if page:  # the traceback comes last, for those that read torchrun's report
        lines.append(f"  page      : {clean(page)}")
    said = failure.traceback or failure.message
    if not said:
        said = _describe_silence(failure)
    lines.append(f"  traceback : {_indent(said, most_lines)}")
    if failure.stderr_tail and not failure.traceback:
        lines.append(f"  stderr    : (its last lines)\n  {_indent(chr(10).join(failure.stderr_tail), most_lines)}")
    return "\n".join(lines)


def _describe_class(failure: Failure) -> str:
    verdict = classify_failure(failure)
    place = where(failure) if verdict.kind is FailureClass.USER and not failure.early else ""
    sure, _ = how_sure(failure, verdict)
    return f"{verdict.kind.value}{'' if sure == CERTAIN else ', ' + sure} ({clean(place or verdict.why)})"


def _describe_silence(failure: Failure) -> str:
    name = signal_name(failure.status)
    if name:
        hint = describe_end(failure).partition(" (")[2].removesuffix(")")
        text = f"Signal {-failure.status} ({name}) received by PID {failure.pid}"
        return f"{text}; {hint}" if hint else text
    return "<N/A>" if failure.stderr_tail else _NO_TRACEBACK


def _format_time(failure: Failure) -> str:
    try:
        text = datetime.fromtimestamp(failure.wall_s).isoformat(sep="_", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        text = "<N/A>"
    if failure.error_ns:
        text += f" (its order among nodes is known to {failure.error_ns / 1e6:.3g} ms)"
    return text


def _indent(text: str, most_lines: int) -> str:
    lines = [clean(line) for line in text.rstrip().splitlines()]
    if len(lines) > most_lines:
        head = most_lines // 3
        left_out = len(lines) - most_lines
        lines = [*lines[:head], f"... {counted(left_out, 'line')} left out ...", *lines[head + left_out :]]
    return "\n  ".join(lines)


def clean(line: str) -> str:
    """No control characters, which could change the terminal, and no endless line."""
    if len(line) > MOST_LINE_CHARACTERS:
        line = f"{line[:MOST_LINE_CHARACTERS]}... ({counted(len(line) - MOST_LINE_CHARACTERS, 'more character')})"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
