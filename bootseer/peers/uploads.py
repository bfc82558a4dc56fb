"""PURE: how much of its link a node gives to others: bytes a second, with a little that may be had at once."""

from __future__ import annotations

BURST_S = 0.05


class Uploads:
    """Turns of whoever sends; `bytes_per_s` None: no limit. Times are seconds of any one clock."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"{bytes_per_s} bytes/s")
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")  # when all that was granted will have been sent

    def wait_s(self, count: int, now_s: float) -> float:
        """Grants `count` bytes; they may be sent after so long. First come, first served."""
        if self._bytes_per_s is None:
            return 0.0
        begin_s = max(self._free_s, now_s - BURST_S)
        self._free_s = begin_s + count / self._bytes_per_s
        return max(0.0, begin_s - now_s)
