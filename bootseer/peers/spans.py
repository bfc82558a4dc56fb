"""PURE: which node of a job brings which bytes of an object out of the store.

An object is cut into spans at multiples of their length. Of as many spans in a row as there are nodes each has
another owner, by an order of the nodes that is hashed for each row: the owner brings the span out of the store for
all, the next ones of the order stand in for it. Every node works this out for itself from the same list.
(Rendezvous hashing of single spans moves fewer of them when nodes change, but is uneven: of 100 MB one node of six
had to send half as much again as the others, and all waited for it. Who stays has its bytes in its caches anyway.)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

# Smaller ones are spread more evenly and cost more: at 1 MiB a GB takes twice the processor time of 4 MiB.
SPAN_BYTES = 2 << 20
# All nodes of a group read the same things at the same time, a few spans each: so many are served by those spans'
# owners at once. Beyond it each group brings a copy of its own.
MOST_GROUP = 64
_WEIGHT_BYTES = 8


class ObjectName(NamedTuple):
    """Bytes that never change: another version has another etag, or another path."""

    origin: str  # id of the store
    path: str
    etag: str = ""

    def encode(self) -> bytes:
        return "\0".join(self).encode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """Bytes of one span."""

    span: int
    offset: int  # in the object, bytes
    length: int  # bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


def cut(offset: int, length: int, span_bytes: int = SPAN_BYTES) -> list[Part]:
    """A range of an object, span by span."""
    parts = []
    end = offset + length
    while offset < end:
        span = offset // span_bytes
        stop = min(end, (span + 1) * span_bytes)
        parts.append(Part(span, offset, stop - offset))
        offset = stop
    return parts


def owners(nodes: Sequence[str], name: ObjectName, span: int, count: int = 1) -> list[str]:
    """The first `count` of the span's order of nodes. The order of `nodes` makes no difference."""
    row, place = divmod(span, len(nodes))
    key = blake2b(b"%d\0%b" % (row, name.encode()), digest_size=32).digest()
    order = sorted(nodes, key=lambda node: (_weight(node, key), node))
    return [order[(place + step) % len(order)] for step in range(min(count, len(order)))]


def group_of(nodes: Sequence[str], own: str, most: int = MOST_GROUP) -> list[str]:
    """The nodes that share one copy with `own`, itself among them; all of them up to `most`."""
    ordered = sorted(nodes)
    groups = -(-len(ordered) // most)
    place = ordered.index(own) * groups // len(ordered)
    return [node for number, node in enumerate(ordered) if number * groups // len(ordered) == place]


def _weight(node: str, key: bytes) -> bytes:
    return blake2b(node.encode("utf-8", "surrogateescape"), key=key, digest_size=_WEIGHT_BYTES).digest()
