"""PURE: the page as HTML that can be read as it is; app.js keeps it up to date where there is JavaScript.

All texts come from outside and are escaped. The page's files are beside this one: page.html, app.js, app.css.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import quote

from bootseer.counted import counted
from launcher.serve.jobs import JobView
from launcher.serve.views import make_detail
from launcher.status.job_ranks import number
from launcher.status.text import format_ago, format_size, format_span

MAX_ROWS = 64  # of the table of ranks
MAX_CHARS = 300
COLUMNS = ("rank", "node", "state", "steps", "step", "steps/s", "last step", "cores", "memory")
_HIDDEN = " hidden"


def make_page(views: Sequence[JobView], shown: JobView | None) -> str:
    """Return the page. Args: views: all jobs; shown: the one that it is about."""
    template = Template(resources.files(__package__).joinpath("page.html").read_text("utf-8"))
    detail = make_detail(shown) if shown is not None else None
    title = f"Job {shown.name[:80]}" if shown is not None else "Jobs of this node"
    ranks = detail["ranks"] if detail is not None else {"rank": []}
    left = len(ranks["rank"]) - MAX_ROWS
    return template.substitute(
        TITLE=_text(title),
        JOB=html.escape(shown.name if shown is not None else ""),
        SUBTITLE=_text(_subtitle(detail) if detail is not None else counted(len(views), "job")),
        JOBS=_jobs(views, shown) if shown is None or len(views) > 1 else "",
        CARDS="".join(f"<div class=card><b>{_text(value)}</b><span>{_text(what)}</span></div>"
                      for value, what in (_cards(detail) if detail is not None else ())),
        HANG=_text(str(detail["hang"])) if detail is not None and detail["hang"] else "",
        HANG_HIDDEN="" if detail is not None and detail["hang"] else _HIDDEN,
        RANKS=_ranks(ranks) if ranks["rank"] else "",
        RANKS_HIDDEN="" if ranks["rank"] else _HIDDEN,
        RANKS_NOTE=f"and {counted(left, 'more rank')}" if left > 0 else "",
        CHECKS="".join(f"<li>{_text(line)}</li>" for line in (detail["checks"] if detail is not None else ())),
        CHECKS_HIDDEN="" if detail is not None and detail["checks"] else _HIDDEN,
        SCRIPT='<script src="/static/app.js"></script>' if shown is not None else "",
    )  # fmt: skip


def _subtitle(detail: dict[str, Any]) -> str:
    parts = [str(detail["script"] or ""), f"bootrun {detail['pid']} on {detail['host']}"]
    if detail["waits_for"]:
        parts.append(f"waits for {detail['waits_for']}")
    if detail["why"]:
        parts.append(str(detail["why"]))
    return " · ".join(part for part in parts if part)


def _cards(detail: dict[str, Any]) -> list[tuple[str, str]]:
    ranks = detail["ranks"]
    steps = [found for value in ranks["steps"] if (found := number(value)) is not None]
    since = [found for value in ranks["since_step_s"] if (found := number(value)) is not None]
    attempt = "-" if detail["attempt"] is None else str(detail["attempt"])
    state = str(detail["state"]) if detail["is_running"] else "ended"
    return [
        (state, f"attempt {attempt}"),
        (str(len(ranks["rank"])), f"ranks on {counted(int(detail['nodes'] or 0), 'node')}"),
        (f"{max(steps):,.0f}" if steps else "-", "steps of the first rank in this attempt"),
        (format_span(max(since)) if since else "-", "since the last step of the slowest rank"),
        (str(detail["restarts"] or 0), f"restarts of {detail['max_restarts']}"),
    ]


def _jobs(views: Sequence[JobView], shown: JobView | None) -> str:
    if not views:
        return (
            "<section><p>No job of this user runs on this node. A job appears 2 s after its start.</p></section>"
        )
    rows = []
    for view in views:
        detail = make_detail(view)
        state = str(detail["state"] or detail["why"]) if view.ended_s is None else "ended"
        current = ' aria-current="page"' if view is shown else ""
        rows.append(
            f'<tr><td class="left"><a href="/jobs/{quote(view.name, safe="")}"{current}>{_text(view.name)}</a>'
            f'<td class="left">{_text(str(detail["script"] or ""))}<td>{_text(state)}<td>{detail["attempt"]}'
            f"<td>{len(detail['ranks']['rank'])}</tr>"
        )
    head = "".join(f'<th scope="col">{name}' for name in ("job", "script", "state", "attempt", "ranks"))
    return (
        '<section aria-labelledby="jobs-title"><h2 id="jobs-title">Jobs</h2><div class="scroll" tabindex="0" '
        'role="region" aria-label="Table of jobs">'
        f"<table><thead><tr>{head}<tbody>{''.join(rows)}</table></div></section>"
    )


def _ranks(ranks: dict[str, list[Any]]) -> str:
    head = "".join(f'<th scope="col">{name}' for name in COLUMNS)
    rows = []
    for at in range(min(MAX_ROWS, len(ranks["rank"]))):
        cells = (
            ranks["rank"][at], ranks["node"][at], ranks["state"][at], _plain(ranks["steps"][at]),
            _plain(ranks["step"][at]), _plain(ranks["steps_per_s"][at]),
            format_ago(ranks["since_step_s"][at]), _plain(ranks["cores"][at]), format_size(ranks["rss_bytes"][at]),
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{_text(str(cell))}" for cell in cells))
    return f"<thead><tr>{head}<tbody>{''.join(rows)}"


def _plain(value: object) -> str:
    found = number(value)
    return "-" if found is None else f"{found:,.3g}" if isinstance(found, float) else f"{found:,}"


def _text(value: str) -> str:
    return html.escape(value[:MAX_CHARS])
