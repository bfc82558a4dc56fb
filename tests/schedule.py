"""Which tests a worker of xdist gets next: whole files, long ones first, so that no worker is left alone with one.

Tests of real processes take nearly all the time and come before unit tests, which fill what is left at the end.
Files that share a server are one piece of work: each worker would start one of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

UNIT = ("tests/unit/", "tests/guards/")
HDFS = frozenset(f"tests/integration/test_{name}.py" for name in ("hdfs", "ckpt_hdfs", "env_hdfs", "trust"))


class Schedule(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Used with `--dist loadfile`."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid.partition("::")[0])


def piece_of(path: str) -> str:
    """The piece of work that a file belongs to."""
    return "hdfs" if path in HDFS else path


def put_in_order(items: list[pytest.Item]) -> None:
    """Pieces of work as they are to be begun; within one nothing changes."""
    names = [piece_of(item.nodeid.partition("::")[0]) for item in items]
    places = places_of(names)
    order = sorted(range(len(items)), key=lambda number: places[names[number]])
    items[:] = [items[number] for number in order]


def places_of(names: Sequence[str]) -> dict[str, int]:
    """For each piece, by the name of each of its tests: which one it is."""
    counts = Counter(names)
    ordered = sorted(counts, key=lambda name: (name.startswith(UNIT), -counts[name], name))
    return {name: place for place, name in enumerate(ordered)}
