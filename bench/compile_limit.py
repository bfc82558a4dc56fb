"""Many models, one after another, on a node with a limit for its compile caches: sizes, and who has to go."""

from __future__ import annotations

import os
from typing import NamedTuple

from bench.compile_job import Model, Node, files_of
from bench.record import BenchError, note

LIMIT_RUNS = 50
_MODELS = 4  # that have room at once
_MIN_WIDTH = 8


class Limited(NamedTuple):
    """What came of it."""

    runs: int
    limit_bytes: int
    store_share: float  # of the limit, the most that a generation had
    node_share: float  # of the limit, the most that the node had when a job began
    evicted: int  # files


def run_limited(directory: str, keys: str, runs: int) -> Limited:
    """Trains `runs` models, each another one. Raises: BenchError, also when the limit was never reached."""
    store, place = os.path.join(directory, "store"), os.path.join(directory, "ada")
    limit_bytes, store_share, node_share, evicted = 0, 0.0, 0.0, 0
    for number in range(runs):
        node = Node(place, store, keys, limit_bytes=limit_bytes)
        try:
            node.seed()
            seeded = size_of(node)
            found = node.train_alone(Model(0, _MIN_WIDTH + number))
            if not found.misses:
                raise BenchError(f"model {number} is none of its own: nothing was compiled")
            done = node.caches.capture()
            if not done.generation:
                raise BenchError(f"nothing was kept: {done.line}; {node.caches.notes}")
        finally:
            node.close()
        if not limit_bytes:
            limit_bytes = done.size * _MODELS
        store_share = max(store_share, done.size / limit_bytes)
        node_share = max(node_share, seeded / limit_bytes)
        evicted += done.evicted
        if number % 10 == 9:
            note(f"limit: {number + 1} models of {runs}, {store_share:.2f} of the limit, {evicted} files went")
    check_reached(runs, evicted)
    check_last(os.path.join(directory, "bob"), store, keys, Model(0, _MIN_WIDTH + runs - 1))
    return Limited(runs, limit_bytes, store_share, node_share, evicted)


def check_reached(runs: int, evicted: int) -> None:
    """Raises: BenchError when enough models were trained, and nothing had to go."""
    if runs > 2 * _MODELS and not evicted:
        raise BenchError(f"{runs} models never reached the limit, so it was not tried")


def check_last(place: str, store: str, keys: str, model: Model) -> None:
    """A fresh node finds the last model. Raises: BenchError."""
    node = Node(place, store, keys)
    try:
        node.seed()
        found = node.train_alone(model)
    finally:
        node.close()
    if found.misses:
        raise BenchError(f"of the last model {found.misses} things had to be compiled again")


def size_of(node: Node) -> int:
    """Bytes of all caches of a node."""
    return sum(sum(files_of(place.path).values()) for place in node.caches.places)
