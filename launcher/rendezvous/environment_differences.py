"""PURE: the environments of a job's nodes, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.rendezvous.messages import Distributions

MAX_LINES = 40


def group_by_digest(digests: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Group nodes by digest, the largest group first; omit nodes whose environment is unknown."""
    groups: dict[str, list[int]] = {}
    for node, digest in digests.items():
        if digest:
            groups.setdefault(digest, []).append(node)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))


def difference_table(groups: Sequence[tuple[str, Distributions]]) -> str:
    """Return the differences between groups of nodes, each with its title; a line for each distribution."""
    titles = [title for title, _ in groups]
    rows: list[tuple[str, ...]] = []
    interpreters = [environment.interpreter for _, environment in groups]
    if len(set(interpreters)) > 1:
        rows.append(("interpreter", *interpreters))
    versions = [dict(_split(name) for name in environment.names) for _, environment in groups]
    for name in sorted(set().union(*versions)):
        row = [each.get(name, "-") for each in versions]
        if len(set(row)) > 1:
            rows.append((name, *row))
    left_out = len(rows) - MAX_LINES
    table = [("", *titles), *rows[:MAX_LINES]]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles) + 1)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    if left_out > 0:
        lines.append(f"and {left_out} more")
    return "\n".join(lines)


def _split(name: str) -> tuple[str, str]:
    distribution, _, version = name.partition("==")
    return distribution, version
