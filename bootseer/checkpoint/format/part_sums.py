"""CRC32C of a unit from the checksums of its parts, read in any order. Pure.

A reader that takes a file span by span reads some units in two parts. Their checksums are kept until they make up
the unit; then it is verified like a unit that is read whole. How: appending n zero bytes is a linear map of the
checksum's 32 bits, so sum(A + B) = map(sum(A)) xor sum(B). Source: zlib, crc32_combine.
"""

from __future__ import annotations

from bisect import bisect
from functools import cache
from typing import NamedTuple

POLYNOMIAL = 0x82F63B78  # of CRC32C, lowest bit first
MAX_PARTS = 64  # of a unit: smaller reads belong to no span


class _Part(NamedTuple):
    start: int  # bytes, in the unit
    end: int
    crc: int


class PartSums:
    """The checksums of units that are not fully read yet."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], list[_Part]] = {}

    def add(self, path: str, unit: int, offset: int, length: int, crc: int, unit_length: int) -> int | None:
        """Record a part; return the checksum of the unit once its parts make it up. A part that overlaps a known
        one is ignored, so that no byte counts twice."""
        parts = self._parts.setdefault((path, unit), [])
        at = bisect(parts, _Part(offset, 0, 0))
        start, end = offset, offset + length
        if (at and parts[at - 1].end > start) or (at < len(parts) and parts[at].start < end):
            return None
        if at < len(parts) and parts[at].start == end:
            following = parts.pop(at)
            crc, end = combine(crc, following.crc, following.end - following.start), following.end
        if at and parts[at - 1].end == start:
            before = parts.pop(at - 1)
            crc, start = combine(before.crc, crc, end - start), before.start
            at -= 1
        if end - start == unit_length:
            del self._parts[path, unit]
            return crc
        parts.insert(at, _Part(start, end, crc))
        if len(parts) > MAX_PARTS:
            parts.pop(0)
        return None

    def forget(self, path: str, unit: int) -> None:
        """Drop the parts of a unit that was read whole."""
        self._parts.pop((path, unit), None)


def combine(first: int, second: int, second_length: int) -> int:
    """Return the checksum of two consecutive pieces from their checksums."""
    bit = 0
    while second_length:
        if second_length & 1:
            first = _apply(_zeros(bit), first)
        second_length >>= 1
        bit += 1
    return first ^ second


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the map of 2**power zero bytes, as the images of the 32 bits."""
    if not power:
        images = []
        for bit in range(32):
            value = 1 << bit
            for _ in range(8):
                value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
            images.append(value)
        return tuple(images)
    half = _zeros(power - 1)
    return tuple(_apply(half, image) for image in half)


def _apply(images: tuple[int, ...], value: int) -> int:
    found = 0
    for image in images:
        if value & 1:
            found ^= image
        value >>= 1
        if not value:
            break
    return found
