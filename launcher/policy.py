"""PURE: how often and how soon a job is started again after failures.

One budget and one count for the whole job. The count (TORCHELASTIC_RESTART_COUNT) never falls; the budget can be
refilled after a long enough time without a failure.
"""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.light_typing import NamedTuple

MOST_BACKOFF_S = 30.0
MOST_WITHOUT_PROGRESS = 3  # attempts in a row


class StepLimits(NamedTuple):
    """How long what is done beside starting again may take (ladder.py), in seconds; 0: it was not asked for."""

    post_mortem_s: float = 0.0
    checks_s: float = 0.0
    checks_always: bool = False  # before each restart; else when the ladder comes to them
    rollback_s: float = 0.0
    replay_s: float = 0.0


class SameError:
    """Whether an error of the user's code has come at the same place in two attempts, one after the other."""

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()

    def after_failure(self, errors: Iterable[str]) -> str:
        """`errors`: of one attempt, with their places; those that are no certain errors of the code are not among
        them. Returns: one that the attempt before had too, else ""."""
        found = frozenset(errors)
        again = min(found & self._last, default="")
        self._last = found
        return again


class NoProgress:
    """Whether attempts fail, one after the other, without getting further than the job has been before.

    How far it has been is the highest number of a heartbeat. Without numbers only an attempt that made no step at
    all is known to have got nowhere: a count begins anew in each attempt, wherever the script goes on from. And
    that only after one that made some: a job that uses no optimizer never does, and may get on all the same.
    """

    def __init__(self) -> None:
        self._makes_steps = False
        self._best: int | None = None
        self._in_a_row = 0

    def after_failure(self, steps: int, number: int | None) -> str:
        """`steps`: the most that a rank has made in this attempt, -1 where nothing counts them; `number`: the
        highest that a rank has given with a heartbeat. What is not known counts neither way.

        Returns: what to say where too many in a row have got nowhere, else "".
        """
        self._makes_steps |= steps > 0
        if steps < 0 or not self._makes_steps or (steps > 0 and number is None and self._best is not None):
            return ""
        if steps > 0 and (number is None or self._best is None or number > self._best):
            self._best, self._in_a_row = number, 0
            return ""
        self._in_a_row += 1
        if self._in_a_row < MOST_WITHOUT_PROGRESS:
            return ""
        where = "made a step" if self._best is None else f"got beyond step {self._best}"
        return f"none of the last {self._in_a_row} attempts has {where}"


class RestartPolicy:
    """Restarts that are used and left."""

    def __init__(self, max_restarts: int, early_s: float, backoff_s: float, refill_s: float | None = None) -> None:
        self._max_restarts = max_restarts
        self._early_s = early_s  # an attempt that fails sooner is retried with backoff
        self._backoff_s = backoff_s  # 0: no backoff
        self._refill_s = refill_s
        self.used = 0  # of the budget
        self.count = 0  # failures so far that were followed by a restart
        self.early_in_a_row = 0

    def has_left(self, lived_s: float) -> bool:
        """Whether `after_failure` would allow a restart."""
        is_refilled = self._refill_s is not None and lived_s >= self._refill_s
        return self._max_restarts > (0 if is_refilled else self.used)

    def after_failure(self, lived_s: float) -> float | None:
        """How long to wait before the restart, 0 for not at all; None: there is none left."""
        if not self.has_left(lived_s):
            return None
        if self._refill_s is not None and lived_s >= self._refill_s:
            self.used = 0
        self.used += 1
        self.count += 1
        self.early_in_a_row = self.early_in_a_row + 1 if lived_s < self._early_s else 0
        if self.early_in_a_row < 2:
            return 0.0  # the first early failure may be chance
        return min(MOST_BACKOFF_S, self._backoff_s * 2.0 ** min(self.early_in_a_row - 2, 10))
