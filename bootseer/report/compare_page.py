"""PURE: a comparison of two runs as one HTML page that loads nothing and needs no script.

Bars are SVG with their lengths as attributes, so the page's policy can forbid all styles but its own. Texts are
untrusted and escaped.
"""

from __future__ import annotations

import html
from string import Template

from bootseer.counted import counted
from bootseer.report.compare import Comparison, StageChange
from bootseer.report.page_frame import asset, framed
from bootseer.report.report import Report
from bootseer.report.slow_words import seconds
from bootseer.report.text import comparison_text

MAX_CHARS = 160  # of an untrusted text
_LABEL, _BARS, _AMOUNT = 130, 620, 250  # widths
_BAR, _GAP, _BETWEEN = 14, 3, 16  # heights


def make_comparison_page(found: Comparison) -> bytes:
    before, after = _named(found.before), _named(found.after)
    title = _text(f"{before} and {after}")
    body = Template(asset("compare_page.html")).substitute(
        TITLE=title,
        LINE=_text(found.line),
        BEFORE=_text(f"before: {before}"),
        AFTER=_text(f"after: {after}"),
        CHART=_chart(found.stages),
        TABLE=_table(found.stages),
        SLOW=_slow(found),
        TEXT=html.escape(comparison_text(found)),
    )
    return framed(title, body, style="compare_page.css")


def _chart(stages: list[StageChange]) -> str:
    longest_s = max((value for each in stages for value in _maxima(each)), default=0.0) or 1.0
    height = len(stages) * (2 * _BAR + _GAP + _BETWEEN)
    parts = [
        f'<svg viewBox="0 0 {_LABEL + _BARS + _AMOUNT} {height}" role="img" aria-label="Stages before and after">'
    ]
    for number, each in enumerate(stages):
        top = number * (2 * _BAR + _GAP + _BETWEEN)
        parts.append(f'<text x="0" y="{top + _BAR + 5}">{_text(each.stage)}</text>')
        rows = (
            ("then", each.before_median_s, each.before_max_s),
            ("now", each.after_median_s, each.after_max_s),
        )
        for row, (kind, median_s, max_s) in enumerate(rows):
            y = top + row * (_BAR + _GAP)
            if median_s is None or max_s is None:
                parts.append(f'<text class="amount" x="{_LABEL}" y="{y + 11}">not observed</text>')
                continue
            width, reach = (max(1.0, value / longest_s * _BARS) for value in (median_s, max_s))
            parts.append(f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>')
            middle = y + _BAR / 2
            parts.append(f'<rect class="{kind}" x="{_LABEL}" y="{middle - 1:g}" width="{reach:.1f}" height="2"/>')
            amount = f"{seconds(median_s)}, at most {seconds(max_s)}"
            parts.append(f'<text class="amount" x="{_LABEL + reach + 8:.1f}" y="{y + 11}">{amount}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _maxima(change: StageChange) -> list[float]:
    return [value for value in (change.before_max_s, change.after_max_s) if value is not None]


def _table(stages: list[StageChange]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in (
        "stage", "median before", "after", "change", "", "slowest before", "after", "change", "",
    ))  # fmt: skip
    rows = []
    for each in stages:
        cells = [
            f'<th scope="row">{_text(each.stage)}</th>',
            *_pair(each.before_median_s, each.after_median_s, each.median_change_s, each.median_ratio),
            *_pair(each.before_max_s, each.after_max_s, each.max_change_s, each.max_ratio),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _pair(before_s: float | None, after_s: float | None, change_s: float | None, ratio: float | None) -> list[str]:
    kind = (
        "" if change_s is None or ratio is None or 0.95 < ratio < 1.05 else "worse" if change_s > 0 else "better"
    )
    sign = "" if change_s is None else "+" if change_s >= 0 else "-"
    return [
        f"<td>{'' if before_s is None else seconds(before_s)}</td>",
        f"<td>{'' if after_s is None else seconds(after_s)}</td>",
        f'<td class="{kind}">{"" if change_s is None else sign + seconds(abs(change_s))}</td>',
        f'<td class="{kind}">{"" if ratio is None else f"x {ratio:.2f}"}</td>',
    ]


def _slow(found: Comparison) -> str:
    lines = [
        f"<li>{_text(f'{when}: {line}', 400)}</li>"
        for when, report in (("before", found.before), ("after", found.after))
        for line in report.slow
    ]
    if not lines:
        return ""
    head = '<section aria-labelledby="slow-title"><h2 id="slow-title">What is slow</h2>'
    return f"{head}<ul>{''.join(lines)}</ul></section>"


def _named(report: Report) -> str:
    attempt = f", attempt {report.attempt}" if len(report.attempts) > 1 or report.attempt else ""
    return f"{report.run_id or 'a job'}{attempt} ({counted(report.ranks, 'rank')})"


def _text(text: str, most: int = MAX_CHARS) -> str:
    return html.escape(text[:most])
