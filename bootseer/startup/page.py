"""An analysis as one HTML page that needs nothing else: no network, no other file.

In: an analysis and its report. Out: the page. Its script and style are page.js and page.css, its body page.html;
data go in as JSON in which nothing can close the element around it, and reach the document as text only. A policy
in the page lets nothing run but that one script. The size is bounded: of very many ranks those that stand out are
shown.
"""

from __future__ import annotations

import html
from string import Template
from typing import Any

import msgspec

from bootseer.startup.analysis import Analysis
from bootseer.startup.page_frame import asset, framed
from bootseer.startup.pieces import LABELS, Piece, node_times
from bootseer.startup.report import Report
from bootseer.startup.slow_words import has_failed
from bootseer.startup.starts import NodeStart, RankStart
from bootseer.startup.text import report_text

TICK_NS = 100_000
MOST_RANKS = 20_000
MOST_NODES = 10_000
MOST_PIECES = 64  # of one rank; more are joined to what is longest beside them
MOST_SPANS = 64  # of one agent
MOST_LIST = 200
MOST_CHARS = 160  # of a text from outside
_HAS_STEP, _IS_SLOW, _HAS_FAILED = 1, 2, 4


def make_page(found: Analysis, report: Report) -> bytes:
    """The page as UTF-8."""
    title = f"Start of {report.run_id or 'a job'}"
    if len(report.attempts) > 1 or report.attempt:
        title += f", attempt {report.attempt}"
    shown = html.escape(title[:MOST_CHARS])
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
    if len(ranks) > MOST_RANKS:
        kept = set(sorted(ranks, key=weight, reverse=True)[:MOST_RANKS])
        notes.append(
            f"the page shows {MOST_RANKS:,} of {len(ranks):,} ranks: those that stand out, and the last ones"
        )
        ranks = [rank for rank in ranks if rank in kept]
    nodes = start.nodes
    if len(nodes) > MOST_NODES:
        needed = {rank.node.name for rank in ranks if weight(rank)[0]}
        nodes = sorted(nodes, key=lambda node: node.name not in needed)[:MOST_NODES]
        notes.append(f"the page shows {MOST_NODES:,} of {len(start.nodes):,} nodes: those that stand out")
    places = {node.name: place for place, node in enumerate(nodes)}
    names: dict[str, int] = {}
    record = msgspec.to_builtins(report)
    return {
        "title": title[:MOST_CHARS],
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
            "every": record["attempts"][:MOST_LIST],
            "path": record["path"][:MOST_LIST],
            "open": record["open"][:MOST_LIST],
            "failed": record["failed"][:MOST_LIST],
            "fallbacks": [each.line for each in report.fallbacks[:MOST_LIST]],
            "rules": [each.line for each in report.rules[:MOST_LIST]],
            "checks": [each.line for each in report.checks[:MOST_LIST]],
            "facts": record["facts"][:MOST_LIST],
            "ways": record["ways"][:MOST_LIST],
            "notes": notes[:MOST_LIST],
        },
        "nodes": [_node(found, node, names, node.name in slow_nodes) for node in nodes],
        "ranks": [
            _rank(rank, found.pieces[rank], places[rank.node.name], (rank.node.name, rank.rank) in slow_ranks)
            for rank in ranks
            if rank.node.name in places
        ],
        "names": [name[:MOST_CHARS] for name in names],
    }  # fmt: skip


def _node(found: Analysis, node: NodeStart, names: dict[str, int], is_slow: bool) -> list[Any]:
    """Name, begin, whether it is slow; its spans: label, name, begin, end (-1: open), failed; times by label."""
    spans: list[int] = []
    longest = sorted(node.spans, key=lambda span: (span.end_ns or span.begin_ns) - span.begin_ns, reverse=True)
    kept = set(map(id, longest[:MOST_SPANS]))
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
        node.name[:MOST_CHARS],
        _ticks(node.zero_ns),
        int(is_slow),
        spans,
        [part for stage, seconds in times.items() for part in (LABELS.index(stage), _ticks(round(seconds * 1e9)))],
    ]


def _rank(rank: RankStart, pieces: list[Piece], place: int, is_slow: bool) -> list[Any]:
    """Rank, place of its node, flags, and its pieces: label, end."""
    flags = _HAS_STEP if rank.first_step_ns is not None else 0
    flags |= _IS_SLOW if is_slow else 0
    flags |= _HAS_FAILED if has_failed(rank) else 0
    shown: list[int] = []
    for piece in _fewer(pieces):
        shown += [LABELS.index(piece.label), _ticks(piece.end_ns)]
    return [rank.rank, place, flags, shown]


def _fewer(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) <= MOST_PIECES:
        return pieces
    longest = sorted(range(len(pieces)), key=lambda place: pieces[place].begin_ns - pieces[place].end_ns)
    kept = sorted({*longest[: MOST_PIECES - 1], len(pieces) - 1})
    found: list[Piece] = []
    reached = 0
    for place in kept:
        found.append(pieces[place]._replace(begin_ns=reached))
        reached = pieces[place].end_ns
    return found


def _ticks(time_ns: int) -> int:
    return round(time_ns / TICK_NS)


def _safe_json(record: dict[str, Any]) -> str:
    """JSON in which no text can end the element that it stands in."""
    text = msgspec.json.encode(record).decode("utf-8")
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
