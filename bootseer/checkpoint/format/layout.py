"""Where the bytes of a striped file are. Pure arithmetic.

A file of `size` bytes is split into units of `unit_bytes`; unit i is in stripe file i mod `stripes`, at offset
(i div stripes) * unit_bytes. With one stripe the stripe file is the file itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """Contiguous bytes of one stripe file that are contiguous in the file as well."""

    stripe: int
    stripe_offset: int  # bytes
    offset: int  # bytes, in the file
    length: int  # bytes


class Layout(NamedTuple):
    """How one file is striped."""

    size: int  # bytes
    unit_bytes: int
    stripes: int

    @property
    def units(self) -> int:
        return -(-self.size // self.unit_bytes)

    def unit_length(self, unit: int) -> int:
        """Return the bytes of a unit; only the last one is shorter."""
        return min(self.unit_bytes, self.size - unit * self.unit_bytes)

    def stripe_size(self, stripe: int) -> int:
        """Return the bytes of a stripe file."""
        full, last = divmod(self.size, self.unit_bytes)
        whole = max(0, -(-(full - stripe) // self.stripes))
        return whole * self.unit_bytes + (last if full % self.stripes == stripe else 0)

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """Yield the pieces of a range of the file, in order; joined if they follow each other in a stripe file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of a file of {self.size}")
        if self.stripes == 1:
            if length:
                yield Piece(0, offset, offset, length)
            return
        end = offset + length
        while offset < end:
            unit, within = divmod(offset, self.unit_bytes)
            count = min(self.unit_bytes - within, end - offset)
            row, stripe = divmod(unit, self.stripes)
            yield Piece(stripe, row * self.unit_bytes + within, offset, count)
            offset += count
