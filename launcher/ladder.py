"""PURE: which step of the restart ladder comes next: what is done beside starting again, or that it ends.

In: the class of each failure and what is known of it. Out: a step, with its reason. Steps go from cheap to dear,
as ByteRobust's do (section 5 of its paper: eviction at once, stop-time checks, reattempt, rollback, dual-phase
replay); each dear one is taken once in a row of failures. Those that nobody has asked for are passed over: without
any, all that is left is to start again until the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

CALM_S = 1800.0  # ours: an attempt that lived so long begins a new row
MOST_HOSTS_NAMED = 64


class Step(Enum):
    """What comes after a failure."""

    IN_PLACE = "restart-in-place"  # on the same nodes, as they are
    REATTEMPT = "reattempt"  # the same, of what may pass by itself
    EVICT = "evict"  # a node is left out
    CHECKS = "stop-time-checks"  # of all nodes, before the start
    ROLLBACK = "rollback"  # the user's command
    REPLAY = "replay"  # the user's command, which may find a machine
    GIVE_UP = "give-up"


DEAR = (Step.CHECKS, Step.ROLLBACK, Step.REPLAY)  # in this order
TRANSIENT = frozenset({"network", "platform"})  # classes of what often passes by itself
OF_OURS = "mount"  # class of what is no machine's and no code's matter: the next attempt has it in another way
# Classes of what machines do without a word of theirs: checked at the first time, where checks were asked for.
SILENT = frozenset({"numeric", "accelerator", "hang", "crash"})


class Fault(NamedTuple):
    """A failure that ended an attempt."""

    kind: str  # of FailureClass; hang; crash: a signal in native code
    is_code: bool = False  # certainly no machine's matter: the code's, or bootrun's own
    is_evicted: bool = False  # a node is left out for it
    hopeless: str = ""  # why another attempt alone would fail too
    is_last: bool = False  # no restart is left


class Decision(NamedTuple):
    """The step, and why."""

    step: Step
    why: str

    @property
    def ends(self) -> bool:
        """Whether the job is given up."""
        return self.step is Step.GIVE_UP


class Ladder:
    """Of one job."""

    def __init__(self, steps: Collection[Step] = ()) -> None:
        """Args: steps: the dear ones that were asked for."""
        self._steps = frozenset(steps)
        self._taken: set[Step] = set()  # in this row
        self._passed: set[str] = set()  # classes that had their reattempt
        self._in_a_row = 0
        self._is_code = False  # the last failure was certainly the code's
        self._has_evicted = False  # in this row

    @property
    def may_be_a_machine(self) -> bool:
        """Whether failures come again, and nothing has named whose matter they are."""
        return self._in_a_row > 1 and not (self._is_code or self._has_evicted or Step.REPLAY in self._taken)

    def after_failure(self, fault: Fault, lived_s: float) -> Decision:
        """Args: lived_s: how long the attempt has run."""
        if lived_s >= CALM_S:
            self._taken.clear()
            self._passed.clear()
            self._in_a_row, self._has_evicted = 0, False
        self._is_code = fault.is_code
        is_killed = fault.kind == "killed" and not fault.hopeless
        self._in_a_row += not is_killed and fault.kind != OF_OURS
        if fault.is_last:
            return Decision(Step.GIVE_UP, fault.hopeless or "no restart is left")
        if fault.is_evicted:
            self._has_evicted = True
            return Decision(Step.EVICT, "its machine is to blame")
        if is_killed:
            return Decision(Step.REATTEMPT, "somebody has ended it from outside")
        if not fault.hopeless:
            if fault.kind == OF_OURS:
                return Decision(Step.REATTEMPT, "what could not be read is had in another way")
            if fault.kind in TRANSIENT and fault.kind not in self._passed:
                self._passed.add(fault.kind)
                return Decision(Step.REATTEMPT, f"what is of class {fault.kind} often passes by itself")
            if self._in_a_row == 1 and fault.kind not in SILENT:
                return Decision(Step.IN_PLACE, "the first failure in a row")
        step = next((step for step in DEAR if self._suits(step, fault)), None)
        if step is not None:
            self._taken.add(step)
            return Decision(step, fault.hopeless or self._why_dear(fault))
        if fault.hopeless:
            return Decision(Step.GIVE_UP, fault.hopeless)
        return Decision(Step.IN_PLACE, "no dearer step is left" if self._steps else "no dearer step was asked for")

    def evicted(self) -> None:
        """A node is left out for what was found after the step was chosen."""
        self._has_evicted = True

    def _suits(self, step: Step, fault: Fault) -> bool:
        if step not in self._steps or step in self._taken:
            return False
        return step is Step.ROLLBACK or not fault.is_code

    def _why_dear(self, fault: Fault) -> str:
        if self._in_a_row > 1:
            return f"{self._in_a_row} failures in a row"
        return f"a failure of class {fault.kind} may be a machine's that does not say so"


def advise_replay(ladder: Ladder, hosts: Collection[str]) -> str:
    """What finds the machine of a job that is given up; "" where no machine is likely to be it."""
    if len(hosts) < 2 or not ladder.may_be_a_machine:
        return ""
    count = len(hosts)
    named = ",".join(hosts) if count <= MOST_HOSTS_NAMED else f"FILE (its {count} machines, one a line)"
    return (
        "should one machine be at fault, a group replay finds it: "
        f"bootseer replay --hosts {named} --group-size {group_size(count)} --run COMMAND"
    )


def group_size(machines: int) -> int:
    """The largest with which two rounds of groups are sure to name one machine (bootseer/diagnose/replay.py)."""
    return max(1, math.isqrt(machines))
