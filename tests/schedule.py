"""A plugin: which tests a worker of xdist gets next: whole files, those that take longest first.

So no worker is left alone with a long file at the end. Times of a file are those recorded of its tests
(durations.py). Files that share a server are one piece of work: each worker would start one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import durations

HDFS = frozenset(f"tests/integration/test_{name}.py" for name in ("hdfs", "ckpt_hdfs", "env_hdfs", "trust"))


class Schedule(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Used with `--dist loadfile`."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid.partition("::")[0])


def piece_of(path: str) -> str:
    """The piece of work that a file belongs to."""
    return "hdfs" if path in HDFS else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule | None:
    return Schedule(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # by then nothing is there that is not to be run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)


def put_in_order(items: list[pytest.Item]) -> None:
    """Pieces of work as they are to be begun; within one nothing changes."""
    places = places_of((item.nodeid for item in items), durations.load_table())
    items.sort(key=lambda item: places[piece_of(item.nodeid.partition("::")[0])])


def places_of(nodeids: Iterable[str], table: durations.Table) -> dict[str, int]:
    """For each piece of these tests: which one it is."""
    seconds: dict[str, float] = {}
    for nodeid in nodeids:
        piece = piece_of(nodeid.partition("::")[0])
        seconds[piece] = seconds.get(piece, 0.0) + durations.expected_s(nodeid, table)
    ordered = sorted(seconds, key=lambda piece: (-round(seconds[piece], 3), piece))
    return {piece: place for place, piece in enumerate(ordered)}
