"""PURE: how often and how soon a job is restarted after failures.

There is one budget and one count for the whole job. The count (TORCHELASTIC_RESTART_COUNT) never decreases. The
budget can be refilled after a long enough time without a failure.
"""

from __future__ import annotations

from bootseer.light_typing import Iterable, NamedTuple


class StepLimits(NamedTuple):
    """Time limits in seconds of the steps of the escalation ladder (escalation.py); 0: the step is disabled."""

    post_mortem_s: float = 0.0
    checks_s: float = 0.0
    checks_always: bool = False  # before each restart; else when the ladder reaches them
    rollback_s: float = 0.0
    replay_s: float = 0.0


class SameError:
    """Detects an error of the user's code at the same place in two consecutive attempts."""

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()

    def after_failure(self, errors: Iterable[str]) -> str:
        """Record the errors of an attempt. Args: errors: certain errors of the code, with their places. Returns:
        an error that the previous attempt had too, else ""."""
        found = frozenset(errors)
        again = min(found & self._last, default="")
        self._last = found
        return again


class NoProgress:
    """Detects consecutive attempts that fail without progress.

    Progress is the highest step number of a heartbeat. Without numbers only an attempt without any step has made
    no progress, since the count of steps restarts in each attempt. That requires an earlier attempt with steps: a
    job without an optimizer never counts steps, and can still progress.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._makes_steps = False
        self._best: int | None = None
        self._in_a_row = 0

    def after_failure(self, steps: int, number: int | None) -> str:
        """Record a failed attempt. Args: steps: the most that a rank has made in this attempt, -1 if not counted;
        number: the highest step number in a heartbeat. An unknown value counts neither for nor against progress.

        Returns: the message if too many consecutive attempts have made no progress, else "".
        """
        self._makes_steps |= steps > 0
        if steps < 0 or not self._makes_steps or (steps > 0 and number is None and self._best is not None):
            return ""
        if steps > 0 and (number is None or self._best is None or number > self._best):
            self._best, self._in_a_row = number, 0
            return ""
        self._in_a_row += 1
        if self._in_a_row < self._max_in_a_row:
            return ""
        where = "made a step" if self._best is None else f"got beyond step {self._best}"
        return f"none of the last {self._in_a_row} attempts has {where}"


class MembershipChanges:
    """Counts membership changes that restart the job, and limits them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_host: dict[str, int] = {}
        self.count = 0  # that were followed by a restart

    def of_host(self, host: str) -> None:
        """Record that a node on this host has joined or left."""
        self._by_host[host] = self._by_host.get(host, 0) + 1

    def after_attempt(self) -> str:
        """Record that a change has ended an attempt. Returns: why the job ends, "" if it may continue."""
        self.count += 1
        if self.count <= self._limit:
            return ""
        host, times = max(self._by_host.items(), key=lambda item: item[1], default=("", 0))
        who = f"; {host} joined and left {times} times: check that node" if times > 1 else ""
        return f"{self.count} membership changes, more than max_membership_changes={self._limit}{who}"


class RestartPolicy:
    """The restart budget, and the backoff before a restart."""

    def __init__(self, max_restarts: int, early_s: float, backoff_s: float, refill_s: float | None = None) -> None:
        self._max_restarts = max_restarts
        self._early_s = early_s  # an attempt that fails sooner is retried with backoff
        self._backoff_s = backoff_s  # 0: no backoff
        self._refill_s = refill_s
        self.used = 0  # of the budget
        self.count = 0  # failures so far that were followed by a restart
        self.early_in_a_row = 0

    def has_left(self, lived_s: float) -> bool:
        """Return whether `after_failure` would allow a restart."""
        is_refilled = self._refill_s is not None and lived_s >= self._refill_s
        return self._max_restarts > (0 if is_refilled else self.used)

    def after_failure(self, lived_s: float, max_backoff_s: float) -> float | None:
        """Return the pause before the restart in seconds; None if the budget is used up."""
        if not self.has_left(lived_s):
            return None
        if self._refill_s is not None and lived_s >= self._refill_s:
            self.used = 0
        self.used += 1
        self.count += 1
        self.early_in_a_row = self.early_in_a_row + 1 if lived_s < self._early_s else 0
        if self.early_in_a_row < 2:
            return 0.0  # the first early failure may be chance
        return min(max_backoff_s, self._backoff_s * 2.0 ** min(self.early_in_a_row - 2, 10))
