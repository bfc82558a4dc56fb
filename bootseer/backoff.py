"""PURE: the waits between retries, an exponential backoff with jitter.

In: the number of failures in a row, and a random number. Out: seconds. Callers decide when to give up.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_DOUBLINGS = 10


class Backoff(NamedTuple):
    """Waits that double with each failure, up to a maximum."""

    first_s: float
    max_s: float

    def wait_s(self, failures: int, jitter: float = 1.0) -> float:
        """Return the wait after so many failures in a row. `jitter`: a number from 0 to 1."""
        return jitter * min(self.max_s, self.first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
