"""PURE: a rate limiter for bytes per second."""

from __future__ import annotations

MIN_PIECE_BYTES = 1 << 20
PIECE_S = 0.02


class RateLimiter:
    """The limiter of a group of readers or senders. Times are seconds of any one clock."""

    def __init__(self, bytes_per_s: float | None, burst_s: float = 0.0) -> None:
        """Args: bytes_per_s: None: no limit. burst_s: seconds' worth of bytes granted at once after a pause."""
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"{bytes_per_s} bytes/s")
        self._bytes_per_s, self._burst_s = bytes_per_s, burst_s
        self._free_s = float("-inf")  # when all granted bytes will have had their time

    def wait_s(self, count: int, now_s: float) -> float:
        """Grant `count` bytes, and return the wait before they may move. First come, first served."""
        if self._bytes_per_s is None:
            return 0.0
        begin_s = max(self._free_s, now_s - self._burst_s)
        self._free_s = begin_s + count / self._bytes_per_s
        return max(0.0, begin_s - now_s)

    def piece_bytes(self, most: int) -> int:
        """Return how much to grant at once, for reads of `most` bytes: bytes of one grant move at full speed."""
        if self._bytes_per_s is None:
            return most
        pieces = max(1, int(self._bytes_per_s * PIECE_S) // MIN_PIECE_BYTES)
        return min(most, pieces * MIN_PIECE_BYTES)  # whole ones: direct reads need aligned offsets
