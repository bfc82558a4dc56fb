"""PURE: a report as text for a terminal: one fact a line, tables with aligned columns."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime

from bootseer.counted import counted, format_bytes
from bootseer.report.agent_reports import CheckRow, FactRow, FallbackRow, RuleRow
from bootseer.report.compare import Comparison
from bootseer.report.pieces import LATE, PEERS, UNSEEN, WAITING
from bootseer.report.report import PathRow, Report, StageRow
from bootseer.report.slow_words import join_some, seconds

MAX_LINES = 12  # of open spans, failures, notes
MAX_FACTS = 40
MIN_CHANGE_S = 0.0005
_LABEL_TEXTS = {
    PEERS: "for the last rank; inferred, as no rank continued before it arrived",
    WAITING: "nothing observed",
    LATE: "this node had not begun",
    UNSEEN: "in the script, first step not observed",
}


def report_text(report: Report) -> str:
    parts = [
        _head(report),
        _section("What is slow", report.slow),
        _section("Stages", stage_table(report.stages)),
        _section("Critical path", _path(report.path)),
        _section("Accelerator-seconds lost", _lost(report)),
        _section("Attempts", _attempts(report)) if len(report.attempts) > 1 else "",
        _section("Hangs", _hangs(report)) if report.hangs else "",
        _section("Ranks that failed", _ended(report)) if any(each.failed for each in report.attempts) else "",
        _section("Open: begun and never ended", _spans(report, is_open=True)) if report.open else "",
        _section("Failed", _spans(report, is_open=False)) if report.failed else "",
        _section("Fell back to the normal path", _lines(report.fallbacks)) if report.fallbacks else "",
        _section("Broken rules", _lines(report.rules)) if report.rules else "",
        _section("Health checks", _lines(report.checks)) if report.checks else "",
        _section("Reported by the nodes", _facts(report)) if report.facts or report.ways else "",
        _section("Not observed, left out", report.notes[:MAX_LINES]) if report.notes else "",
    ]
    return "\n\n".join(part for part in parts if part)


def comparison_text(found: Comparison) -> str:
    """Return the comparison of two runs."""
    rows = [
        (
            each.stage,
            *_pair(each.before_median_s, each.after_median_s),
            *_pair(each.before_max_s, each.after_max_s),
        )
        for each in found.stages
    ]
    head = ("stage", "median", "then", "change", "", "max", "then", "change", "")
    lines = [
        f"before: {_name(found.before)}",
        f"after:  {_name(found.after)}",
        "",
        *align([head, *rows]),
        "",
        found.line,
    ]
    for name, report in (("before", found.before), ("after", found.after)):
        lines += [f"{name}: {line}" for line in report.slow]
    return "\n".join(lines)


def align(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Align cells in columns, to the right except the columns of `left`."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def stage_table(rows: Sequence[StageRow]) -> list[str]:
    """Return the table of stages with median, maximum and slowest places."""
    if not rows:
        return ["no stage was observed"]
    table = [("stage", "median", "max", "max/median", "rank s lost", "observed", "slowest")]
    for row in rows:
        ratio = "" if row.max_over_median is None else f"{row.max_over_median:.2f}"
        lost = "-" if row.lost_s is None else f"{row.lost_s:,.1f}"
        slowest = [
            (f"rank {each.rank} on {each.node}" if each.rank is not None else each.node)
            + f" {seconds(each.seconds)}"
            for each in row.slowest[:2]
        ]
        table.append(
            (
                row.stage,
                seconds(row.median_s),
                seconds(row.max_s),
                ratio,
                lost,
                f"{row.observed:,} of {row.of:,} {row.places}",
                ", ".join(slowest) if row.observed > 1 else slowest[0],
            )
        )
    return align(table, (0, 6))


def hours(value_s: float) -> str:
    """Format accelerator-seconds, with hours from one hour on."""
    text = f"{value_s:,.1f}" if value_s < 1000 else f"{value_s:,.0f}"
    return f"{text} s ({value_s / 3600:,.1f} h)" if value_s >= 3600 else f"{text} s"


def _head(report: Report) -> str:
    when = datetime.fromtimestamp(min(report.first_event_unix_s, 2.5e11), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    size = f"{counted(report.ranks, 'rank')} on {counted(report.nodes, 'node')}"
    of = f" (of {len(report.attempts)} attempts)" if len(report.attempts) > 1 else ""
    lines = [f"{report.run_id or 'job'}, attempt {report.attempt}{of}: {size}, begun {when}"]
    if report.first_step_s is not None:
        lines.append(f"first step of all ranks after {seconds(report.first_step_s)}")
    elif report.first_steps:
        lines.append(
            f"first step of {report.first_steps:,} of {report.ranks:,} ranks after {seconds(report.start_s)};"
            " not observed for the others"
        )
    else:
        lines.append(f"no first step was observed; the last event of the start is after {seconds(report.start_s)}")
    if report.clock.kind == "job":
        lines[-1] += f"; clocks of nodes agree within {seconds(report.clock.error_s)}"
    return "\n".join(lines)


def _path(path: Sequence[PathRow]) -> list[str]:
    if not path:
        return ["none: no first step was observed"]
    rows = [("from", "to", "took", "what", "where")]
    for each in path:
        where = each.node if each.rank is None else f"rank {each.rank} on {each.node}"
        meaning = _LABEL_TEXTS.get(each.stage)
        rows.append(
            (
                f"{each.begin_s:.2f}",
                f"{each.end_s:.2f}",
                seconds(each.end_s - each.begin_s),
                each.stage + (f" ({meaning})" if meaning else ""),
                where,
            )
        )
    return align(rows, (3, 4))


def _lost(report: Report) -> list[str]:
    lost = report.lost
    if not lost.ranks:
        lines = ["until the first step: unknown, as none was observed"]
    else:
        who = counted(lost.ranks, "rank")
        lines = [f"{hours(lost.total_s)} by {who}, each from the job's first event to its own first step"]
        rows = [
            (
                stage,
                f"{value:,.1f} s",
                f"{value / lost.total_s:.1%}" if lost.total_s else "",
                _LABEL_TEXTS.get(stage, ""),
            )
            for stage, value in lost.by_stage.items()
        ]
        lines += ["  " + line for line in align(rows, (0, 3))]
        if lost.straggler_share is not None:
            lines.append(
                f"stragglers: {lost.straggler_share:.1%} of the start, {seconds(lost.straggler_s)},"
                f" {hours(lost.straggler_lost_s)} of all ranks,"
                " would be saved if each stage of the critical path took its median"
            )
    if lost.ranks_without_first_step:
        lines.append(
            f"{counted(lost.ranks_without_first_step, 'rank')} without a first step:"
            f" {hours(lost.without_first_step_s)} until they ended or were last seen"
        )
    return lines


def _attempts(report: Report) -> list[str]:
    rows = [("attempt", "ranks", "nodes", "first step", "rank s lost", "seen until")]
    for each in report.attempts:
        step = "-" if each.first_step_s is None else seconds(each.first_step_s)
        if each.first_step_s is None and each.first_steps:
            step = f"{each.first_steps:,} of {each.ranks:,}"
        rows.append(
            (
                f"{each.attempt}{' *' if each.attempt == report.attempt else ''}",
                f"{each.ranks:,}",
                f"{each.nodes:,}",
                step,
                f"{each.lost_s:,.1f}",
                seconds(each.end_s),
            )
        )
    return [*align(rows), "* is the one shown; --attempt N (or last) shows another"]


def _hangs(report: Report) -> list[str]:
    lines = []
    for each in report.hangs:
        kept = f" ({each.report})" if each.report else ""
        lines.append(f"attempt {each.attempt}: noticed after {seconds(each.after_s)}: {each.line}{kept}")
    return _first(lines)


def _ended(report: Report) -> list[str]:
    lines = [
        f"attempt {attempt.attempt}: rank {each.rank} on {each.node}: {status_text(each.status)}"
        f" after {seconds(each.after_s)}"
        for attempt in report.attempts
        for each in attempt.failed
    ]
    return _first(lines)


def status_text(status: int) -> str:
    """Return the name of an exit status, or of minus a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _spans(report: Report, *, is_open: bool) -> list[str]:
    spans = report.open if is_open else report.failed
    lines = []
    for each in spans:
        where = each.node if each.rank is None else f"rank {each.rank} on {each.node}"
        what = (
            f"{each.stage} ({each.name}) on {where}"
            if each.rank is None
            else f"{each.stage} ({each.name}) of {where}"
        )
        lines.append(f"{what}, begun at {each.begin_s:.2f} s" + (f": {each.error}" if each.error else ""))
    return _first(lines)


def _lines(rows: Iterable[FallbackRow | RuleRow | CheckRow]) -> list[str]:
    return _first([each.line for each in rows])


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {more:,} more"] if more > 0 else lines


def _facts(report: Report) -> list[str]:
    words: dict[tuple[str, str], list[str]] = {}
    for way in report.ways:
        words.setdefault((way.stage, way.name), []).append(f"{way.value} {way.count:,}")
    rows = [(stage, name, join_some(values)) for (stage, name), values in words.items()]
    lines = align(rows, (0, 1, 2)) if rows else []
    facts = report.facts[:MAX_FACTS]
    if facts:
        table = [("stage", "what", "nodes", "median", "max", "on", "total")]
        table += [
            (
                each.stage,
                each.name,
                f"{each.nodes:,}",
                amount(each, each.median),
                amount(each, each.max),
                each.max_node,
                amount(each, each.total),
            )
            for each in facts
        ]
        lines += ([""] if lines else []) + align(table, (0, 1, 5))
    if len(report.facts) > len(facts):
        lines.append(f"and {len(report.facts) - len(facts):,} more with --json")
    return lines


def amount(fact: FactRow, value: float) -> str:
    """Format a number with its unit."""
    if fact.unit == "s":
        return seconds(value)
    if fact.unit == "bytes":
        return format_bytes(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def _pair(before_s: float | None, after_s: float | None) -> tuple[str, str, str, str]:
    before = "-" if before_s is None else seconds(before_s)
    after = "-" if after_s is None else seconds(after_s)
    if before_s is None or after_s is None:
        return before, after, "", ""
    change_s = after_s - before_s
    if abs(change_s) < MIN_CHANGE_S:
        return before, after, "", ""
    ratio = f"x{after_s / before_s:.2f}" if before_s > 0 else ""
    return before, after, ("+" if change_s > 0 else "-") + seconds(abs(change_s)), ratio


def _name(report: Report) -> str:
    end = seconds(report.first_step_s) if report.first_step_s is not None else "first step not observed"
    return (
        f"{report.run_id or 'job'}, attempt {report.attempt}, {counted(report.ranks, 'rank')} on"
        f" {counted(report.nodes, 'node')}: {end}"
    )


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {line}" if line else "" for line in lines)])
