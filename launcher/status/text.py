"""PURE: the status of a job as text. In: the dict of node_status.py, or any other. Out: lines, bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.counted import counted
from launcher.ranks.report import clean

MAX_RANKS = 64  # lines
_UNKNOWN = "-"
_COLUMNS = ("rank", "pid", "state", "steps", "step", "steps/s", "last step", "cores", "memory")
PROCESS = {"T": "stopped", "t": "traced", "D": "in the kernel", "Z": "ended", "X": "ended"}


def format_status(status: Mapping[str, Any]) -> list[str]:
    """Return the lines to print."""

    def text(name: str) -> str:
        value = status.get(name)
        return _UNKNOWN if value is None else clean(str(value))

    lines = [f"job {text('run_id')}: {text('script')} (bootrun {text('pid')} on {text('host')})"]
    runs = format_span(status.get("attempt_runs_s"))
    lines.append(f"  attempt     {text('attempt')}, {text('state')} for {runs}")
    nodes = f"{text('nodes')}, of which this is node rank {text('node_rank')}; {text('world_size')} ranks"
    if status.get("attempt") is None:
        nodes = f"{text('nodes')} here, at least {text('least_nodes')} required"
    lines.append(f"  nodes       {nodes}")
    lines.append(f"  restarts    {text('restarts')} (--max-restarts {text('most_restarts')})")
    if status.get("waits_for"):
        lines.append(f"  waits for   {text('waits_for')}")
    last = status.get("last_end")
    if isinstance(last, Mapping):
        page = f" ({text('last_page')})" if status.get("last_page") else ""
        lines.append(f"  last end    attempt {last.get('attempt')}: {clean(str(last.get('reason')))}{page}")
    checks = status.get("checks")
    lines += [f"  check       {clean(str(line))}" for line in (checks if isinstance(checks, list) else ())]
    if status.get("standstill"):
        lines.append(f"  HANG        {text('standstill')}")
    if status.get("logs"):
        lines.append(f"  logs        {text('logs')}")
    given = status.get("ranks")
    ranks = [rank for rank in given if isinstance(rank, Mapping)] if isinstance(given, list) else []
    if ranks:
        lines += [f"  {line}" for line in _table([_COLUMNS, *(_row(rank) for rank in ranks[:MAX_RANKS])])]
    left = len(ranks) - MAX_RANKS
    if left > 0:
        lines.append(f"  and {counted(left, 'more rank')} here: --json lists all")
    return lines


def _row(rank: Mapping[str, Any]) -> Sequence[str]:
    state = clean(str(rank.get("state")))
    process = PROCESS.get(str(rank.get("process")))
    return (
        _plain(rank.get("rank")),
        _plain(rank.get("pid")),
        f"{state}, {process}" if process else state,
        _plain(rank.get("steps")),
        _plain(rank.get("step")),
        _figure(rank.get("steps_per_s")),
        format_ago(rank.get("since_step_s")),
        _figure(rank.get("cores")),
        format_size(rank.get("rss_bytes")),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _plain(value: object) -> str:
    return _UNKNOWN if value is None else clean(str(value))[:24]


def _figure(value: object) -> str:
    return f"{value:.3g}" if _is_number(value) else _UNKNOWN


def format_ago(value: object) -> str:
    return f"{format_span(value)} ago" if _is_number(value) else _UNKNOWN


def format_span(value: object) -> str:
    if not isinstance(value, int | float) or not _is_number(value):
        return _UNKNOWN
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def format_size(value: object) -> str:
    if not isinstance(value, int | float) or not _is_number(value):
        return _UNKNOWN
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
