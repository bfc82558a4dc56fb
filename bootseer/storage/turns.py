"""PURE: at most so many bytes a second, in turns."""

from __future__ import annotations

LEAST_PIECE_BYTES = 1 << 20
PIECE_S = 0.02


class Turns:
    """Of whoever reads or sends. Times are seconds of any one clock."""

    def __init__(self, bytes_per_s: float | None, burst_s: float = 0.0) -> None:
        """Args: bytes_per_s: None: no limit. burst_s: who comes after a pause has so much of it at once."""
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"{bytes_per_s} bytes/s")
        self._bytes_per_s, self._burst_s = bytes_per_s, burst_s
        self._free_s = float("-inf")  # when all that was granted will have had its time

    def wait_s(self, count: int, now_s: float) -> float:
        """Grants `count` bytes; they may move after so long. First come, first served."""
        if self._bytes_per_s is None:
            return 0.0
        begin_s = max(self._free_s, now_s - self._burst_s)
        self._free_s = begin_s + count / self._bytes_per_s
        return max(0.0, begin_s - now_s)

    def piece_bytes(self, most: int) -> int:
        """What should be granted at once, of reads of `most` bytes: a turn's bytes come as fast as they can."""
        if self._bytes_per_s is None:
            return most
        pieces = max(1, int(self._bytes_per_s * PIECE_S) // LEAST_PIECE_BYTES)
        return min(most, pieces * LEAST_PIECE_BYTES)  # whole ones: direct reads ask for aligned offsets
