"""PURE: the next step of the escalation ladder: an action besides the restart, or the end of the job.

In: the class of each failure and what is known about it. Out: a step, with its reason. Steps go from cheap to
expensive, as in ByteRobust (section 5 of its paper: eviction at once, stop-time checks, reattempt, rollback,
dual-phase replay). Each expensive step is taken once in a row of failures. Steps that were not requested are
skipped: without any, the job restarts until the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from bootseer.tuning import DEFAULTS

CALM_S = DEFAULTS.launcher.calm_s  # Bootseer's choice: an attempt that ran so long begins a new row
MAX_HOSTS_NAMED = 64


class Step(Enum):
    """The action after a failure."""

    IN_PLACE = "restart-in-place"  # on the same nodes, as they are
    REATTEMPT = "reattempt"  # the same, after a failure that may be temporary
    EVICT = "evict"  # a node is excluded
    CHECKS = "stop-time-checks"  # of all nodes, before the start
    ROLLBACK = "rollback"  # the user's command
    REPLAY = "replay"  # the user's command, which may find a faulty machine
    GIVE_UP = "give-up"


EXPENSIVE = (Step.CHECKS, Step.ROLLBACK, Step.REPLAY)  # in this order
TRANSIENT = frozenset({"network", "platform"})  # classes of failures that are often temporary
OF_BOOTSEER = "mount"  # class of failures of Bootseer's mounts: the next attempt uses a fallback
# Classes of failures that machines cause without an error message: checked at once, if checks were requested.
SILENT = frozenset({"numeric", "accelerator", "hang", "crash"})


class Fault(NamedTuple):
    """A failure that ended an attempt."""

    kind: str  # of FailureClass; hang; crash: a signal in native code
    is_code: bool = False  # certainly not caused by a machine, but by the code or bootrun
    is_evicted: bool = False  # a node is excluded for it
    hopeless: str = ""  # why another attempt alone would also fail
    is_last: bool = False  # no restart is left


class Decision(NamedTuple):
    """The step, and why."""

    step: Step
    why: str

    @property
    def ends(self) -> bool:
        return self.step is Step.GIVE_UP


class Ladder:
    """The escalation ladder of one job."""

    def __init__(self, steps: Collection[Step] = (), calm_s: float = CALM_S) -> None:
        """Args: steps: the expensive steps that were requested."""
        self._calm_s = calm_s
        self._steps = frozenset(steps)
        self._taken: set[Step] = set()  # in this row
        self._passed: set[str] = set()  # classes that had their reattempt
        self._in_a_row = 0
        self._is_code = False  # the code has certainly caused the last failure
        self._has_evicted = False  # in this row

    @property
    def may_be_a_machine(self) -> bool:
        """Whether failures repeat, and their cause is unknown."""
        return self._in_a_row > 1 and not (self._is_code or self._has_evicted or Step.REPLAY in self._taken)

    def after_failure(self, fault: Fault, lived_s: float) -> Decision:
        """Choose the step after a failure. Args: lived_s: how long the attempt has run."""
        if lived_s >= self._calm_s:
            self._taken.clear()
            self._passed.clear()
            self._in_a_row, self._has_evicted = 0, False
        self._is_code = fault.is_code
        is_killed = fault.kind == "killed" and not fault.hopeless
        self._in_a_row += not is_killed and fault.kind != OF_BOOTSEER
        if fault.is_last:
            return Decision(Step.GIVE_UP, fault.hopeless or "no restart is left")
        if fault.is_evicted:
            self._has_evicted = True
            return Decision(Step.EVICT, "its machine has caused the failure")
        if is_killed:
            return Decision(Step.REATTEMPT, "a signal from outside has ended it")
        if not fault.hopeless:
            if fault.kind == OF_BOOTSEER:
                return Decision(Step.REATTEMPT, "the next attempt uses a fallback for unreadable files")
            if fault.kind in TRANSIENT and fault.kind not in self._passed:
                self._passed.add(fault.kind)
                return Decision(Step.REATTEMPT, f"failures of class {fault.kind} are often temporary")
            if self._in_a_row == 1 and fault.kind not in SILENT:
                return Decision(Step.IN_PLACE, "the first failure in a row")
        step = next((step for step in EXPENSIVE if self._suits(step, fault)), None)
        if step is not None:
            self._taken.add(step)
            return Decision(step, fault.hopeless or self._why_expensive(fault))
        if fault.hopeless:
            return Decision(Step.GIVE_UP, fault.hopeless)
        return Decision(Step.IN_PLACE, "no other step is left" if self._steps else "no other step was requested")

    def evicted(self) -> None:
        """Record that a node was excluded after the step was chosen."""
        self._has_evicted = True

    def _suits(self, step: Step, fault: Fault) -> bool:
        if step not in self._steps or step in self._taken:
            return False
        return step is Step.ROLLBACK or not fault.is_code

    def _why_expensive(self, fault: Fault) -> str:
        if self._in_a_row > 1:
            return f"{self._in_a_row} failures in a row"
        return f"a machine may cause failures of class {fault.kind} without an error message"


def advise_replay(ladder: Ladder, hosts: Collection[str]) -> str:
    """Return a replay command that finds the faulty machine of a failed job; "" if that is unlikely."""
    if len(hosts) < 2 or not ladder.may_be_a_machine:
        return ""
    count = len(hosts)
    named = ",".join(hosts) if count <= MAX_HOSTS_NAMED else f"FILE (its {count} machines, one a line)"
    return (
        "if a machine is faulty, a group replay finds it: "
        f"bootseer replay --hosts {named} --group-size {group_size(count)} --run COMMAND"
    )


def group_size(machines: int) -> int:
    """Return the largest size for which two rounds always identify one machine (bootseer/hangs/replay.py)."""
    return max(1, math.isqrt(machines))
