"""Finds the code blocks of README.md and docs/guide, and the marks of those that no test runs.

A block is fenced, or indented by four spaces after an empty line. The comment `<!-- not run: REASON -->` above it
marks it; only empty lines may be in between.
"""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MARK = re.compile(r"<!-- not run: (?P<reason>.*?) -->", re.DOTALL)
_INDENT = "    "


class Block(NamedTuple):
    """A code block of a page."""

    page: str  # README.md, or the name below docs/guide
    line: int
    text: str
    reason: str  # of its mark; empty: a test runs it

    @property
    def start(self) -> str:
        """The first line, by which tests name the block."""
        return self.text.partition("\n")[0]

    @property
    def is_toml(self) -> bool:
        """Whether it is a TOML document with at least one table."""
        try:
            return any(isinstance(value, dict | list) for value in tomllib.loads(self.text).values())
        except tomllib.TOMLDecodeError:
            return False


class Page(NamedTuple):
    """The blocks of a page, and the lines of marks that mark nothing."""

    blocks: list[Block]
    idle_marks: list[int]


def page_names() -> list[str]:
    guide = sorted(os.path.basename(path) for path in glob.glob(os.path.join(TOP, "docs", "guide", "*.md")))
    return ["README.md", *guide]


def read_page(name: str) -> Page:
    path = os.path.join(TOP, name) if name == "README.md" else os.path.join(TOP, "docs", "guide", name)
    with open(path, encoding="utf-8") as file:
        return parse_page(name, file.read())


def parse_page(name: str, text: str) -> Page:
    lines = text.split("\n")
    marks = {
        1 + text.count("\n", 0, found.end()): (1 + text.count("\n", 0, found.start()), found["reason"])
        for found in _MARK.finditer(text)
    }  # by their last line
    blocks = []
    for first, body in _spans(lines):
        above = first - 1
        while above > 0 and not lines[above - 1].strip():
            above -= 1
        _, reason = marks.pop(above, (0, ""))
        blocks.append(Block(name, first, body, " ".join(reason.split())))
    return Page(blocks, sorted(line for line, _ in marks.values()))


def _spans(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The first line of each block, from 1, and its text."""
    place = 0
    while place < len(lines):
        end = place + 1
        if lines[place].startswith("```"):
            while end < len(lines) and not lines[end].startswith("```"):
                end += 1
            yield place + 1, "\n".join(lines[place + 1 : end])
            place = end + 1
        elif lines[place].startswith(_INDENT) and (place == 0 or not lines[place - 1].strip()):
            while end < len(lines) and (lines[end].startswith(_INDENT) or not lines[end].strip()):
                end += 1
            yield place + 1, "\n".join(line.removeprefix(_INDENT) for line in lines[place:end]).rstrip()
            place = end
        else:
            place = end
