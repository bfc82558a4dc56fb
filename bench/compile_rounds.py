"""The parts of `bench compile`: a model cold, restored and after a crash; an extension; two models in one store.

Each part has a folder of its own, with a store and with nodes that are named after their users.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import NamedTuple

from bench.compile_job import Model, Node, Steps, files_of
from bench.record import BenchError, note


class Trained(NamedTuple):
    """The model's part of a round."""

    cold: Steps
    restored: Steps
    seed_s: float  # of `restored`
    size: int  # bytes that were put there
    crashed: Steps  # on a fresh node after the crash
    finished: int  # files that were finished when the rank was killed
    lost: int  # of these, those that the fresh node did not get
    plain: Steps  # cold, without compile caches


class Restored(NamedTuple):
    """A model's first steps, seconds."""

    cold_s: float
    restored_s: float
    misses: int  # of the restored one


class Built(NamedTuple):
    """The extension's part."""

    cold_s: float
    restored_s: float
    seed_s: float
    is_rebuilt: bool


def train(place: str, keys: str, model: Model, share: float, is_plain_first: bool = True) -> Trained:
    """The model, without caches, cold, restored, and after a crash.

    Args: share: of what is compiled, when a rank is killed; is_plain_first: or after the cold one.
    """
    store = os.path.join(place, "store")
    plain = train_plain(place, keys, model) if is_plain_first else None
    first = Node(os.path.join(place, "ada"), store, keys)
    first.seed()
    cold = first.train(model)
    compiled = len(objects_of(first))
    first.capture()
    first.close()
    if plain is None:
        plain = train_plain(place, keys, model)
    second = Node(os.path.join(place, "bob"), store, keys)
    seeded = second.caches.seed()
    restored = second.train(model)
    second.close()

    store = os.path.join(place, "crashed", "store")
    third = Node(os.path.join(place, "eve"), store, keys)
    third.seed()
    finished: dict[str, str] = {}

    def is_time() -> bool:
        finished.update(finished_of(third))
        return len(finished) >= max(1, share * compiled)

    third.train(model, kill=is_time)
    third.capture()
    third.close()
    fourth = Node(os.path.join(place, "kim"), store, keys)
    fourth.seed()
    there = {path: digest_of(os.path.join(inductor_of(fourth), path)) for path in objects_of(fourth)}
    lost = sum(there.get(path) != digest for path, digest in finished.items())
    crashed = fourth.train(model)
    fourth.close()
    if cold is None or restored is None or crashed is None:
        raise BenchError("a job that nobody killed has no result")
    if not cold.misses or not seeded.files:
        raise BenchError(f"a cold start found caches, or a restored one none: {cold}, {seeded}")
    if not plain.losses == cold.losses == restored.losses == crashed.losses:
        found = (plain.losses, cold.losses, restored.losses, crashed.losses)
        raise BenchError(f"caches changed the losses: {found}")
    return Trained(cold, restored, seeded.took_s, seeded.size, crashed, len(finished), lost, plain)


def train_plain(place: str, keys: str, model: Model) -> Steps:
    """The model on a node that has nothing, as it is without Bootseer's caches."""
    node = Node(os.path.join(place, "tom"), os.path.join(place, "unused"), keys)
    found = node.train(model, keeps=False)
    node.close()
    if found is None or not found.misses:
        raise BenchError(f"a start without caches has no result, or found some: {found}")
    return found


def train_and_restore(place: str, keys: str, model: Model) -> Restored:
    """A model cold, and restored on a fresh node."""
    store = os.path.join(place, "store")
    found = []
    for name in ("ada", "bob"):
        node = Node(os.path.join(place, name), store, keys)
        node.seed()
        steps = node.train(model)
        if steps is None:
            raise BenchError("a job that nobody killed has no result")
        found.append(steps)
        if name == "ada":
            node.capture()
        node.close()
    cold, restored = found
    if not cold.misses or cold.losses != restored.losses:
        raise BenchError(f"a cold start found caches, or they changed the losses: {cold}, {restored}")
    return Restored(cold.first_s, restored.first_s, restored.misses)


def build(place: str, keys: str) -> Built:
    """The extension on one node, and on another one that has the same paths: there alone it may be used again."""
    store, directory = os.path.join(place, "store"), os.path.join(place, "ada")
    first = Node(directory, store, keys)
    first.seed()
    cold = first.build_extension()
    first.capture()
    first.close()
    shutil.rmtree(directory)
    second = Node(directory, store, keys)
    seed_s = second.seed()
    restored = second.build_extension()
    second.close()
    is_rebuilt = restored["mtime_ns"] != cold["mtime_ns"] or restored["file"] != cold["file"]
    return Built(cold["took_s"], restored["took_s"], seed_s, is_rebuilt)


def merge(directory: str, keys: str, first: Model, second: Model) -> tuple[list[int], list[float]]:
    """Two jobs that knew nothing of each other, then both on one fresh node: misses, and cold over restored."""
    place = os.path.join(directory, "merged")
    store = os.path.join(place, "store")
    nodes = [Node(os.path.join(place, name), store, keys) for name in ("ada", "bob")]
    cold = []
    for node, model in zip(nodes, (first, second), strict=True):
        node.seed()
        cold.append(node.train(model))
    generations = [node.capture() for node in nodes]
    for node in nodes:
        node.close()
    fresh = Node(os.path.join(place, "eve"), store, keys)
    fresh.seed()
    restored = [fresh.train(model) for model in (first, second)]
    fresh.close()
    misses, ratios = [], []
    for before, after in zip(cold, restored, strict=True):
        if before is None or after is None or not before.misses or before.losses != after.losses:
            raise BenchError(f"two jobs with one store: {before}, {after}")
        misses.append(after.misses)
        ratios.append(before.first_s / after.first_s)
    note(f"merged in generation {generations[-1]}: misses {misses}, ratios {ratios}")
    return misses, ratios


# ---- what a compiler has finished --------------------------------------------------------------------------


def inductor_of(node: Node) -> str:
    return node.caches.variables["TORCHINDUCTOR_CACHE_DIR"]


def objects_of(node: Node) -> list[str]:
    """Shared objects that were compiled, or are being compiled."""
    return [path for path in files_of(inductor_of(node)) if path.endswith(".so")]


def finished_of(node: Node) -> dict[str, str]:
    """Those that no compiler writes to any more, with their digests."""
    paths = objects_of(node)  # before the look at processes: who has ended by then has finished
    commands = b"".join(_command(name) for name in os.listdir("/proc") if name.isdigit())
    return {
        path: digest_of(os.path.join(inductor_of(node), path))
        for path in paths
        if os.path.basename(path).encode() not in commands
    }


def digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _command(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
