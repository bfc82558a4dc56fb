"""PURE: selection and batching of event lines for the coordinator, and unpacking of a batch.

Heartbeats have their own rate limit, so that a rank that writes many of them costs neither the network nor the
events of a start. A received batch is unpacked within fixed bounds, regardless of its declared sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bootseer.events import BEAT_MARK
from launcher.rendezvous.codec import MAX_EVENT_LINES, MAX_EVENTS_BYTES, MAX_RAW_EVENTS_BYTES
from launcher.rendezvous.messages import EventsDropped

KIB = 1024
MIB = 1024 * KIB
MAX_LINE_BYTES = 16 * KIB  # without its end
AIM_BYTES = 256 * KIB  # of a batch, before compression
_FAST = 1  # level of zlib
# Of a node: lines of starts and failures ...
BURST_BYTES = 4 * MIB
RATE_BYTES_S = 64 * KIB
# ... and heartbeats, whose rate all nodes share.
HEARTBEATS_BURST_BYTES = 64 * KIB
HEARTBEATS_RATE_BYTES_S = 256 * KIB
MIN_HEARTBEATS_RATE_BYTES_S = 256
# The start of each line of bootstrap.py and bootseer.events.
_START = b'{"v":'


class TokenBucket:
    """A rate limiter: a burst of bytes, then a rate a second. Bytes taken beyond that are owed."""

    __slots__ = ("_burst", "_left", "_seen_s", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self._burst = burst
        self._left = burst
        self._seen_s = now_s

    def left(self, now_s: float) -> float:
        """Return the bytes that may pass now; at most 0 if none may."""
        self._left = min(self._burst, self._left + max(0.0, now_s - self._seen_s) * self.rate)
        self._seen_s = max(self._seen_s, now_s)
        return self._left

    def take(self, size: float) -> None:
        """Count bytes that have passed."""
        self._left -= size


class DropCounts:
    """Counters of event lines that a node does not send; shared by all that may drop lines."""

    __slots__ = ("long", "rate", "torn", "unread")

    def __init__(self) -> None:
        self.rate = self.long = self.unread = self.torn = 0

    def told(self) -> EventsDropped:
        return EventsDropped(self.rate, self.long, self.unread, self.torn)


class EventRateLimits:
    """The rate limits of a node's lines; `nodes` share the rate of heartbeats."""

    def __init__(self, nodes: int, drops: DropCounts, now_s: float) -> None:
        self._drops = drops
        self._lines = TokenBucket(RATE_BYTES_S, BURST_BYTES, now_s)
        self._heartbeats = TokenBucket(0, HEARTBEATS_BURST_BYTES, now_s)
        self.set_nodes(nodes)

    def set_nodes(self, nodes: int) -> None:
        """Set the number of nodes that share the rate."""
        self._heartbeats.rate = max(MIN_HEARTBEATS_RATE_BYTES_S, HEARTBEATS_RATE_BYTES_S / max(1, nodes))

    def has_room(self, now_s: float) -> bool:
        """Return whether more lines may be read; if not, they wait in their files."""
        return self._lines.left(now_s) > 0

    def select_lines(self, lines: Sequence[bytes], now_s: float) -> list[bytes]:
        kept = []
        lines_bytes = beats_bytes = 0
        heartbeats_left = self._heartbeats.left(now_s)
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                self._drops.long += 1
            elif not line.startswith(_START):
                self._drops.torn += 1
            elif BEAT_MARK not in line:
                lines_bytes += len(line) + 1
                kept.append(line)
            elif beats_bytes + len(line) < heartbeats_left:
                beats_bytes += len(line) + 1
                kept.append(line)
            else:
                self._drops.rate += 1
        self._lines.take(lines_bytes)
        self._heartbeats.take(beats_bytes)
        return kept


class Packed(NamedTuple):
    """The first `lines` of some lines, as they are sent."""

    data: bytes
    raw_bytes: int
    lines: int


def pack(lines: Sequence[bytes]) -> Packed:
    """Pack the first lines, as many as fit in one batch: none only if there are none."""
    import zlib

    count, raw_bytes = 0, 0
    for line in lines:
        raw_bytes += len(line) + 1
        if count == MAX_EVENT_LINES or (count and raw_bytes > AIM_BYTES):
            break
        count += 1
    while count:
        raw = b"\n".join(lines[:count]) + b"\n"
        data = zlib.compress(raw, _FAST)
        if len(data) <= MAX_EVENTS_BYTES:
            return Packed(data, len(raw), count)
        count //= 2  # a single line always fits, even without compression
    return Packed(b"", 0, 0)


def unpack(data: bytes, raw_bytes: int, lines: int) -> list[bytes] | None:
    """Return the lines of a batch; None if `pack` did not make it. Memory use is bounded."""
    import zlib

    if not data:
        return [] if not raw_bytes and not lines else None
    if not (0 < raw_bytes <= MAX_RAW_EVENTS_BYTES and 0 < lines <= MAX_EVENT_LINES):
        return None
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, raw_bytes + 1)
    except zlib.error:
        return None
    if not inflater.eof or inflater.unused_data or len(raw) != raw_bytes:
        return None
    if not raw.endswith(b"\n") or raw.count(b"\n") != lines:
        return None
    return raw[:-1].split(b"\n")
