"""PURE: which faults there are, what must be said of each, and when and where each is injected.

In: the text of faults.toml, a seed. Out: `Fault`s, and `Injection`s in the order in which they are tried.
Detectors never see either.
"""

from __future__ import annotations

import random
from typing import Any, Literal, NamedTuple

import msgspec

from bench.record import BenchError

STEPS_S = (0.05, 2.0, 15.0)
MIN_STEPS, MAX_STEPS = 20, 60  # before a fault that comes later
MAX_WARM_S = 120.0  # of them, at slow cadences
NODES, RANKS_OF_NODE = 2, 2

Where = Literal["rank", "node", "job", "coordinator"]
Class = Literal[
    "", "user", "resource", "platform", "accelerator", "network", "killed", "hang", "slow", "numeric", "node"
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As in faults.toml, which says what each field means."""

    name: str
    what: str
    where: Where
    by: Literal["script", "outside"]
    do: str
    arguments: dict[str, Any] = msgspec.field(name="with", default_factory=dict)
    steps: tuple[float, ...] = (0.05,)
    first: Literal["start", "later", "end"]
    class_: Class = msgspec.field(name="class")
    culprit: Literal["", "rank", "node", "job"]
    action: Literal["", "restart", "give-up", "exclude", "report"]
    policy: tuple[str, ...] = ()
    is_held_out: bool = False

    @property
    def is_harmless(self) -> bool:
        """Nothing may be said of it."""
        return not self.class_


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: tuple[Fault, ...]


class Injection(NamedTuple):
    """A fault at a cadence, with what was drawn."""

    fault: Fault
    step_s: float
    node: int  # that is hit; of a rank: its node
    rank: int  # that is hit; -1 where it is no single one
    at_step: int  # 0: before the first; -1: after the last
    offset: float  # within that step, as a share of it

    @property
    def key(self) -> str:
        """Tells it from the others."""
        return f"{self.fault.name}@{self.step_s:g}"


def read_faults(text: str | bytes, where: str) -> tuple[Fault, ...]:
    """Raises: BenchError for what cannot be."""
    try:
        faults = msgspec.toml.decode(text, type=_File).fault
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BenchError(f"{where}: {error}") from error
    names = [fault.name for fault in faults]
    for fault in faults:
        if names.count(fault.name) > 1:
            raise BenchError(f"{where}: {fault.name} is there twice")
        if not set(fault.steps) <= set(STEPS_S) or not fault.steps:
            raise BenchError(f"{where}: {fault.name}: steps are of {STEPS_S}")
        if fault.is_harmless != (fault.culprit == "") or fault.is_harmless != (fault.action == ""):
            raise BenchError(f"{where}: {fault.name}: class, culprit and action are empty together")
        if fault.where == "job" and fault.culprit not in ("", "job"):
            raise BenchError(f"{where}: {fault.name}: a fault of the whole job has no culprit but the job")
    return faults


def draw(faults: tuple[Fault, ...], seed: int) -> list[Injection]:
    """Each fault at each of its cadences. What is drawn for one does not depend on the others."""
    return [_draw(fault, step_s, seed) for fault in faults for step_s in fault.steps]


def _draw(fault: Fault, step_s: float, seed: int) -> Injection:
    chance = random.Random(f"{seed} {fault.name} {step_s:g}")
    rank = chance.randrange(NODES * RANKS_OF_NODE)
    node = 0 if fault.where == "coordinator" else rank // RANKS_OF_NODE
    if fault.by == "outside" and fault.do in ("node", "link"):
        node = NODES - 1  # the coordinator's end is a fault of its own
    most = max(MIN_STEPS + 1, min(MAX_STEPS, int(MAX_WARM_S / step_s)))
    at_step = {"start": 0, "later": chance.randint(MIN_STEPS, most), "end": -1}[fault.first]
    if step_s * MIN_STEPS > MAX_WARM_S and at_step > 0:
        at_step = max(4, int(MAX_WARM_S / step_s))
    is_single = fault.where == "rank"
    return Injection(fault, step_s, node, rank if is_single else -1, at_step, chance.random())
