"""The final report of a failed job: which rank failed first, where, and its error text.

In: the ordered failures. Out: text for the console or a dict for JSON; pure. The box and the names of the fields
are torchrun's, for the tools that search for them. Widths, lengths and counts are bounded, and text from ranks is
shown without control characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from bootseer.counted import counted
from launcher.ranks.exits import FailureOrigin, classify, describe_end, find_sign, signal_name
from launcher.ranks.failure_class import (
    CERTAIN,
    FailureClass,
    certainty_of,
    classify_failure,
    error_location,
    mount_line,
)
from launcher.ranks.rank_list import format_ranks
from launcher.rendezvous.messages import Failure

MAX_WIDTH = 60
MAX_LINE_CHARACTERS = 400
MAX_ALIKE = 64  # failures that are compared
MAX_LISTED = 16  # failures shown beside the first
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
    """Return the report as text that ends with a newline.

    Args: failures: the first failure first; page: the path of the failure record, "" for none; world_size: of the
    attempt; 0: not known.
    """
    told = [failure for failure in failures if not failure.stopped_by_us]
    stopped = [failure.rank for failure in failures if failure.stopped_by_us]
    shown = told[: 1 + MAX_LISTED]
    listed = [_format_failure(index, f, attempt, OTHER_LINES) for index, f in enumerate(shown) if index]
    hidden = [failure.rank for failure in told[1 + MAX_LISTED :]]
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
    if not lost_nodes and (alike := find_identical_failures(failures, world_size)):
        doubts.append(f"  ranks {format_ranks(alike)} failed alike: all ranks of the job")
    elif len(unsure) == 1:
        doubts.append(f"  cannot determine whether rank {unsure[0]} was first")
    elif unsure:
        doubts.append(f"  cannot determine which of ranks {format_ranks(unsure)} was first")
    if lost_nodes:
        doubts.append(
            f"  lost node{'s' if len(lost_nodes) > 1 else ''} that may have failed first: {', '.join(lost_nodes)}"
        )
    title = f"{script} FAILED"
    blocks = [title, *root, *listed]
    width = min(MAX_WIDTH, max(len(line) for block in blocks for line in block.split("\n")))
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
    """Return a line about the first failure of an attempt, with its class; "" if bootrun stopped all ranks."""
    first = next((failure for failure in failures if not failure.stopped_by_us), None)
    if first is None:
        return ""
    class_ = f"class {_describe_class(first)}"
    if alike := find_identical_failures(failures, world_size):
        return f"ranks {format_ranks(alike)} failed alike, all ranks of the job; {class_}"
    if unsure:
        return f"ranks {format_ranks(unsure)} failed first, in an unknown order; {class_}"
    how = signal_name(first.status) or f"exit status {first.status}"
    return f"rank {first.rank} on {clean(first.node)} failed first ({how}); {class_}"


def find_identical_failures(failures: Sequence[Failure], world_size: int) -> tuple[int, ...]:
    """Return all ranks, if each failed with the same exception at the same line: none of them is the cause.

    Only if bootrun stopped no rank: a stopped rank may have been healthy. Of many failures, some are compared.
    """
    if world_size < 2 or len(failures) < world_size or any(failure.stopped_by_us for failure in failures):
        return ()
    compared = failures[:: len(failures) // MAX_ALIKE + 1]
    place = error_location(compared[0])
    if not place or any(error_location(failure) != place for failure in compared[1:]):
        return ()
    return tuple(sorted(failure.rank for failure in failures))


# ---- one failure ---------------------------------------------------------------------------------------------


def _format_failure(index: int, failure: Failure, attempt: int, max_lines: int, page: str = "") -> str:
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
    sign = find_sign(failure) if classify(failure) is FailureOrigin.CONSEQUENCE else None
    if sign is not None:
        what = "waited in vain for another rank" if sign.weak else "consequence of another rank's end"
        lines.append(f"  kind      : {what} ({sign.what})")
        if failure.early:
            lines.append(f"  class     : {_describe_class(failure)}")
    else:
        lines.append(f"  class     : {_describe_class(failure)}")
    lines += [f"  kernel    : {clean(line)}" for line in failure.kernel]
    lines += [f"  mount     : {clean(mount_line(fault))}" for fault in failure.mounts]
    if page:  # the traceback comes last, as in torchrun's report
        lines.append(f"  record    : {clean(page)}")
    said = failure.traceback or failure.message
    if not said:
        said = _describe_silence(failure)
    lines.append(f"  traceback : {_indent(said, max_lines)}")
    if failure.stderr_tail and not failure.traceback:
        lines.append(f"  stderr    : (its last lines)\n  {_indent(chr(10).join(failure.stderr_tail), max_lines)}")
    return "\n".join(lines)


def _describe_class(failure: Failure) -> str:
    verdict = classify_failure(failure)
    place = error_location(failure) if verdict.kind is FailureClass.USER and not failure.early else ""
    sure, _ = certainty_of(failure, verdict)
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


def _indent(text: str, max_lines: int) -> str:
    lines = [clean(line) for line in text.rstrip().splitlines()]
    if len(lines) > max_lines:
        head = max_lines // 3
        left_out = len(lines) - max_lines
        lines = [*lines[:head], f"... {counted(left_out, 'line')} left out ...", *lines[head + left_out :]]
    return "\n  ".join(lines)


def clean(line: str) -> str:
    """Escape control characters, which could change the terminal, and truncate a long line."""
    if len(line) > MAX_LINE_CHARACTERS:
        line = f"{line[:MAX_LINE_CHARACTERS]}... ({counted(len(line) - MAX_LINE_CHARACTERS, 'more character')})"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
