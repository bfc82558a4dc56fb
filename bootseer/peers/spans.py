"""PURE: assignment of the byte ranges of an object to the nodes that fetch them from the store.

An object is divided into spans of equal length. A row is as many spans as there are nodes. In each row every node
owns one span, by an order of nodes that is hashed for the row. The owner fetches the span for all; the next nodes
of the order replace it if needed. Every node computes this from the same list. (Rendezvous hashing of single spans
moves fewer of them when nodes change, but is uneven: for 100 MB, one node of six had to send 1.5x as much as the
others, and all waited for it. Remaining nodes have their bytes in caches anyway.)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

# Smaller spans are spread more evenly and cost more: at 1 MiB a GB takes twice the processor time of 4 MiB.
SPAN_BYTES = 2 << 20
# All nodes of a group read the same data at the same time, a few spans each. The owners of those spans serve this
# many nodes at once. Each further group fetches its own copy.
MAX_GROUP = 64
_WEIGHT_BYTES = 8


class ObjectName(NamedTuple):
    """The name of bytes that never change: another version has another etag, or another path."""

    origin: str  # id of the store
    path: str
    etag: str = ""

    def encode(self) -> bytes:
        return "\0".join(self).encode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """A byte range in one span."""

    span: int
    offset: int  # in the object, bytes
    length: int  # bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


def cut(offset: int, length: int, span_bytes: int = SPAN_BYTES) -> list[Part]:
    """Divide a range of an object by spans."""
    parts = []
    end = offset + length
    while offset < end:
        span = offset // span_bytes
        stop = min(end, (span + 1) * span_bytes)
        parts.append(Part(span, offset, stop - offset))
        offset = stop
    return parts


def owners(nodes: Sequence[str], name: ObjectName, span: int, count: int = 1) -> list[str]:
    """Return the first `count` nodes of the span's order. The order of `nodes` does not matter."""
    row, place = divmod(span, len(nodes))
    key = blake2b(b"%d\0%b" % (row, name.encode()), digest_size=32).digest()
    order = sorted(nodes, key=lambda node: (_weight(node, key), node))
    return [order[(place + step) % len(order)] for step in range(min(count, len(order)))]


def group_of(nodes: Sequence[str], own: str, most: int = MAX_GROUP) -> list[str]:
    """Return the nodes that share one copy with `own`, including itself; at most `most`."""
    ordered = sorted(nodes)
    groups = -(-len(ordered) // most)
    place = ordered.index(own) * groups // len(ordered)
    return [node for number, node in enumerate(ordered) if number * groups // len(ordered) == place]


def _weight(node: str, key: bytes) -> bytes:
    return blake2b(node.encode("utf-8", "surrogateescape"), key=key, digest_size=_WEIGHT_BYTES).digest()
