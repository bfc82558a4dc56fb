"""`python -m bench picture FILE...`: what `bench start` has measured as a picture of bars (SVG).

In: its JSON, values recomputed from their samples. Out: one bar for each way of a start, its median from launch to
first step, a line from the smallest to the largest that encloses it, and how often it goes into that of `plain`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from bench.check import recompute
from bench.record import BenchError, format_number

WAYS = {
    "plain": "layers unpacked, pip, torchrun, plain read",
    "tuned": "zstd layers side by side, uv with a warm cache, mmap",
    "first": "bootrun, nothing known anywhere",
    "cold": "bootrun, another node has run the job",
    "second": "bootrun, the same node again",
    "warmed": "bootrun, after bootseer warm",
}
WIDTH, LEFT, RIGHT, ROW, TOP = 900, 390, 130, 26, 34
_TOTAL = re.compile(r"start\.nodes([0-9]+)_([a-z]+)_s")
_STYLE = """\
text{font:13px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}.s{fill:#57606a;font-size:11px}
.peer{fill:#8c959f}.ours{fill:#0969da}.range{stroke:#24292f}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.peer{fill:#6e7681}.ours{fill:#4493f8}
.range{stroke:#e6edf3}}"""


class Bar(NamedTuple):
    """One way of a start. Seconds."""

    way: str
    median: float
    low: float
    high: float


def draw_documents(paths: Sequence[str]) -> str:
    """The picture of these files, nodes in descending number. Raises: BenchError."""
    groups: dict[int, list[Bar]] = {}
    footers: list[str] = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
        for count, bars in bars_of(document, path).items():
            groups[count] = bars
        machine = document["machine"]
        command = f"python -m bench {' '.join(_leave_out(document['argv']))}"
        footers.append(f"{command} ({machine['cores']} cores, {machine['cpu']})")
    if not groups:
        raise BenchError(f"{', '.join(paths)}: no times of starts; it takes the JSON of bench start")
    return draw(groups, footers)


def bars_of(document: Mapping[str, Any], where: str) -> dict[int, list[Bar]]:
    """By the number of nodes, in the order of WAYS. Raises: BenchError."""
    found: dict[int, dict[str, Bar]] = {}
    for name, stated in document["figures"].items():
        matched = _TOTAL.fullmatch(name)
        if matched is None or matched[2] not in WAYS:
            continue
        problem, made = recompute(stated)
        if problem or made is None:
            raise BenchError(f"{where}: {name}: {problem}")
        found.setdefault(int(matched[1]), {})[matched[2]] = Bar(matched[2], made.value, made.low, made.high)
    return {count: [bars[way] for way in WAYS if way in bars] for count, bars in found.items()}


def draw(groups: Mapping[int, Sequence[Bar]], footers: Sequence[str]) -> str:
    """PURE: SVG. Lengths are seconds, on one scale for all groups."""
    scale = (WIDTH - LEFT - RIGHT) / max(bar.high for bars in groups.values() for bar in bars)
    parts: list[str] = []
    y = TOP
    for count in sorted(groups, reverse=True):
        parts.append(_text(8, y, f"{count} node{'s' * (count != 1)}: launch to first step, seconds", "h"))
        y += 12
        plain = next((bar.median for bar in groups[count] if bar.way == "plain"), None)
        for bar in groups[count]:
            parts += _row(bar, y, scale, plain)
            y += ROW
        y += 28
    for footer in footers:
        parts.append(_text(8, y - 8, footer, "s"))
        y += 16
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
    return "\n".join([head, *parts, "</svg>\n"])


def _row(bar: Bar, y: int, scale: float, plain: float | None) -> list[str]:
    kind = "peer" if bar.way in ("plain", "tuned") else "ours"
    end = LEFT + bar.high * scale
    said = format_number(bar.median)
    if plain is not None and kind == "ours":
        shorter = bar.median < plain
        said += f"  (1/{plain / bar.median:.1f})" if shorter else f"  ({bar.median / plain:.2f} of plain)"
    middle = y + ROW / 2
    return [
        _text(8, y + 18, WAYS[bar.way]),
        f'<rect class="{kind}" x="{LEFT}" y="{y + 5}" width="{bar.median * scale:.1f}" height="{ROW - 10}"/>',
        f'<line class="range" x1="{LEFT + bar.low * scale:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>',
        _text(end + 8, y + 18, said),
    ]


def _leave_out(argv: Sequence[str]) -> list[str]:
    """The words of a command without where its files went and which ways it took."""
    hidden = ("--json", "--page", "--way")
    before = ["", *argv]
    return [word for word, last in zip(argv, before, strict=False) if word not in hidden and last not in hidden]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.1f}" y="{y}">{escape(text)}</text>'
