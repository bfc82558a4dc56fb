"""An analysis as one HTML page that needs nothing else: no network, no other file.

In: an analysis and its report. Out: the page. Its script is page.js, its style page.css, its body page.html.
Data are embedded as JSON that cannot close the element around it, and reach the document as text only. A policy
in the page lets only that script run. The size is bounded: of more than MAX_RANKS ranks only outliers are shown.
"""

from __future__ import annotations

import html
from string import Template
from typing import Any

import msgspec

from bootseer.report.analysis import Analysis
from bootseer.report.page_frame import asset, framed
from bootseer.report.pieces import LABELS, Piece, node_times
from bootseer.report.report import Report
from bootseer.report.slow_words import has_failed
from bootseer.report.starts import NodeStart, RankStart
from bootseer.report.text import report_text

TICK_NS = 100_000
MAX_RANKS = 20_000
MAX_NODES = 10_000
MAX_PIECES = 64  # of one rank; further ones are joined to their longest neighbour
MAX_SPANS = 64  # of one agent
MAX_LIST = 200
MAX_CHARS = 160  # of an untrusted text
_HAS_STEP, _IS_SLOW, _HAS_FAILED = 1, 2, 4


def make_page(found: Analysis, report: Report) -> bytes:
    title = f"Start of {report.run_id or 'a job'}"
    if len(report.attempts) > 1 or report.attempt:
        title += f", attempt {report.attempt}"
    shown = html.escape(title[:MAX_CHARS])
    body = Template(asset("page.html")).substitute(TITLE=shown, TEXT=html.escape(report_text(report)))
    return framed(shown, body, style="page.css", script="page.js", data=_safe_json(_data(found, report, title)))


def _data(found: Analysis, report: Report, title: str) -> dict[str, Any]:
    start = found.start
    slow_nodes = {node for each in found.stragglers if each.is_whole for node, _ in each.places}
    slow_ranks = {(node, rank) for each in found.stragglers for node, ranks in each.places for rank in ranks}
    on_path = {(step.node, step.rank) for step in found.path}

    def weight(rank: RankStart) -> tuple[bool, int]:
        is_marked = (
            rank.node.name in slow_nodes
            or (rank.node.name, rank.rank) in slow_ranks
            or (rank.node.name, rank.rank) in on_path
            or rank.first_step_ns is None
        )
        return is_marked, rank.first_step_ns or rank.last_ns

    ranks = start.ranks
    notes = list(report.notes)
    if len(ranks) > MAX_RANKS:
        kept = set(sorted(ranks, key=weight, reverse=True)[:MAX_RANKS])
        notes.append(
            f"the page shows {MAX_RANKS:,} of {len(ranks):,} ranks: outliers, and those with the last first steps"
        )
        ranks = [rank for rank in ranks if rank in kept]
    nodes = start.nodes
    if len(nodes) > MAX_NODES:
        needed = {rank.node.name for rank in ranks if weight(rank)[0]}
        nodes = sorted(nodes, key=lambda node: node.name not in needed)[:MAX_NODES]
        notes.append(f"the page shows {MAX_NODES:,} of {len(start.nodes):,} nodes: those of outliers first")
    places = {node.name: place for place, node in enumerate(nodes)}
    names: dict[str, int] = {}
    record = msgspec.to_builtins(report)
    return {
        "title": title[:MAX_CHARS],
        "labels": LABELS,
        "tickS": TICK_NS / 1e9,
        "endS": found.start_s,
        "report": {
            **{key: record[key] for key in (
                "run_id", "attempt", "first_event_unix_s", "nodes", "ranks", "first_step_s", "first_steps",
                "start_s", "clock", "slow", "stages", "lost",
            )},
            "stragglers": len(report.stragglers),
            "attempts": len(report.attempts),
            "every": record["attempts"][:MAX_LIST],
            "path": record["path"][:MAX_LIST],
            "open": record["open"][:MAX_LIST],
            "failed": record["failed"][:MAX_LIST],
            "fallbacks": [each.line for each in report.fallbacks[:MAX_LIST]],
            "hangs": [f"attempt {each.attempt}: {each.line}" for each in report.hangs[:MAX_LIST]],
            "rules": [each.line for each in report.rules[:MAX_LIST]],
            "checks": [each.line for each in report.checks[:MAX_LIST]],
            "facts": record["facts"][:MAX_LIST],
            "ways": record["ways"][:MAX_LIST],
            "notes": notes[:MAX_LIST],
        },
        "nodes": [_node(found, node, names, node.name in slow_nodes) for node in nodes],
        "ranks": [
            _rank(rank, found.pieces[rank], places[rank.node.name], (rank.node.name, rank.rank) in slow_ranks)
            for rank in ranks
            if rank.node.name in places
        ],
        "names": [name[:MAX_CHARS] for name in names],
    }  # fmt: skip


def _node(found: Analysis, node: NodeStart, names: dict[str, int], is_slow: bool) -> list[Any]:
    """Return name, begin, is_slow; spans: label, name, begin, end (-1: open), failed; times by label."""
    spans: list[int] = []
    longest = sorted(node.spans, key=lambda span: (span.end_ns or span.begin_ns) - span.begin_ns, reverse=True)
    kept = set(map(id, longest[:MAX_SPANS]))
    for span in node.spans:
        if id(span) in kept:
            end = -1 if span.end_ns is None else _ticks(span.end_ns)
            name = names.setdefault(span.name, len(names))
            spans += [LABELS.index(span.stage), name, _ticks(span.begin_ns), end, int(span.error is not None)]
    times = dict(node_times(node))
    for rank in node.ranks:
        for stage, seconds in found.times_of(rank).items():
            times[stage] = max(seconds, times.get(stage, 0.0))
    return [
        node.name[:MAX_CHARS],
        _ticks(node.zero_ns),
        int(is_slow),
        spans,
        [part for stage, seconds in times.items() for part in (LABELS.index(stage), _ticks(round(seconds * 1e9)))],
    ]


def _rank(rank: RankStart, pieces: list[Piece], place: int, is_slow: bool) -> list[Any]:
    """Return rank, index of its node, flags, and pieces: label, end."""
    flags = _HAS_STEP if rank.first_step_ns is not None else 0
    flags |= _IS_SLOW if is_slow else 0
    flags |= _HAS_FAILED if has_failed(rank) else 0
    shown: list[int] = []
    for piece in _fewer(pieces):
        shown += [LABELS.index(piece.label), _ticks(piece.end_ns)]
    return [rank.rank, place, flags, shown]


def _fewer(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) <= MAX_PIECES:
        return pieces
    longest = sorted(range(len(pieces)), key=lambda place: pieces[place].begin_ns - pieces[place].end_ns)
    kept = sorted({*longest[: MAX_PIECES - 1], len(pieces) - 1})
    found: list[Piece] = []
    reached = 0
    for place in kept:
        found.append(pieces[place]._replace(begin_ns=reached))
        reached = pieces[place].end_ns
    return found


def _ticks(time_ns: int) -> int:
    return round(time_ns / TICK_NS)


def _safe_json(record: dict[str, Any]) -> str:
    """Return JSON in which no text can close the element around it."""
    text = msgspec.json.encode(record).decode("utf-8")
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
