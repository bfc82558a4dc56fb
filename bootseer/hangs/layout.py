"""The parallel groups of a job's ranks: as the job declares them, or by the names of its process groups. Pure.

A layout is a grid of ranks with a name for each dimension, as torch's DeviceMesh: the last one varies fastest. A
group of a dimension has the ranks that differ in that one only. For pipelines there are also the stages: all ranks
with one place in it. Its text form is a line: NAMES;SIZES;RANKS, the ranks as START:COUNT:STEP,...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from bootseer.hangs.calls import Group

MAX_DIMENSIONS = 8
MAX_RANKS = 1 << 20
MAX_NAME = 32
MAX_LINE = 16 << 10
PIPELINES = ("pp", "pipe", "pipeline")
STAGE = "pipeline stage"
_NAMELESS = ("", "undefined", "default_pg")  # torch's names for groups without a name

Groups = dict[str, list[tuple[int, ...]]]  # of each dimension


class Layout(NamedTuple):
    """A grid of ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]  # in the grid's order


def make_layout(sizes: Mapping[str, int], ranks: Iterable[int] | None = None) -> Layout:
    """Make a layout. Args: sizes: by name, slowest first; ranks: in the grid's order, None: 0, 1, 2, ...

    Raises: ValueError for an invalid grid.
    """
    names = tuple(sizes)
    if not names or len(names) > MAX_DIMENSIONS:
        raise ValueError(f"a layout has 1 to {MAX_DIMENSIONS} dimensions, not {len(names)}")
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            raise ValueError(f"the size of {name!r} is {size!r}, not a whole number of at least 1")
        if not name.replace("_", "").isalnum() or len(name) > MAX_NAME:
            raise ValueError(f"{name[:MAX_NAME]!r} is no name of a dimension: use letters, digits and _")
    count = prod(sizes.values())
    if count > MAX_RANKS:
        raise ValueError(f"{count} ranks are more than {MAX_RANKS}")
    placed = tuple(range(count) if ranks is None else ranks)
    if len(placed) != count or len(set(placed)) != count or min(placed) < 0:
        raise ValueError(f"{len(placed)} ranks do not fill a grid of {count}, each once")
    return Layout(names, tuple(sizes.values()), placed)


def format_layout(layout: Layout) -> str:
    """Return the layout as a line; "" where it would be too long."""
    line = ";".join((",".join(layout.names), ",".join(map(str, layout.sizes)), format_runs(layout.ranks)))
    return line if len(line) <= MAX_LINE else ""


def parse_layout(line: str) -> Layout | None:
    """Return the layout in a line; None for an invalid line."""
    try:
        names, sizes, runs = line[:MAX_LINE].split(";")
        listed = names.split(",")
        by_name = dict(zip(listed, map(int, sizes.split(",")), strict=True))
        return make_layout(by_name, parse_runs(runs, MAX_RANKS)) if len(by_name) == len(listed) else None
    except ValueError:
        return None


def groups_of(layout: Layout) -> Groups:
    """Return the groups of each dimension with more than one place, and the stages of a pipeline."""
    strides = [prod(layout.sizes[place + 1 :]) for place in range(len(layout.sizes))]
    found: Groups = {}
    for place, name in enumerate(layout.names):
        size, stride = layout.sizes[place], strides[place]
        if size < 2:
            continue
        others = [range(each) for other, each in enumerate(layout.sizes) if other != place]
        rest = [each for other, each in enumerate(strides) if other != place]
        starts = [sum(map(int.__mul__, at, rest)) for at in product(*others)]
        found[name] = [tuple(layout.ranks[start + stride * each] for each in range(size)) for start in starts]
        if name.lower() in PIPELINES:
            found[STAGE] = [tuple(layout.ranks[start + stride * each] for start in starts) for each in range(size)]
    return found


def groups_of_calls(groups: Iterable[Group]) -> Groups:
    """Return groups by the names of process groups; only names that are used more than once."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for group in groups:
        name = group.label.removeprefix("mesh_")
        if name not in _NAMELESS and len(group.ranks) > 1:
            found.setdefault(name, set()).add(group.ranks)
    return {name: sorted(members) for name, members in sorted(found.items()) if len(members) > 1}


def format_runs(ranks: Sequence[int]) -> str:
    """Return ranks as START:COUNT:STEP, separated by commas."""
    found = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found.append(f"{ranks[at]}:{end - at}:{step}")
        at = end
    return ",".join(found)


def parse_runs(text: str, most: int) -> tuple[int, ...]:
    """Return the ranks of START:COUNT:STEP,... Raises: ValueError, also for more than `most`."""
    ranks: list[int] = []
    for run in text.split(",") if text else ():
        start, count, step = map(int, run.split(":"))
        if count > most - len(ranks):
            raise ValueError(run)
        ranks += [start + step * each for each in range(count)]
    return tuple(ranks)
