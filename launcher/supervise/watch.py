"""PURE: the watch over a job's ranks, at its coordinator: looks of all nodes in, questions and findings out.

A standstill that the detector sees is asked about: every node sends the stacks of its ranks. When all have, or
after a moment, the finding goes out: what stands still, since when, how the ranks differ. Where some ranks are
busy, a few times, and each time these more than once (collector.py): who evaluates alone comes along in its code,
who spins does not. Where all are busy, as those are that wait for an accelerator, only what they have called of
torch.distributed, or what the accelerators do, tells whether they wait. What is done about it is the user's word
(--on-hang): a report alone, or a restart. It never ends a job by a failure of its own.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.supervise.accelerators import DeviceUse, describe_uses, unpack_uses, waited_for
from launcher.supervise.facts import Hang, HangKind, RankFacts
from launcher.supervise.hang import HangDetector, HangSettings
from launcher.supervise.slow import FACTOR as SLOW_FACTOR
from launcher.supervise.slow import ROUNDS as SLOW_ROUNDS
from launcher.supervise.slow import Rounds, Slow, SlowDetector, round_s
from launcher.supervise.stacks import (
    Frame,
    RankStacks,
    Source,
    StackGroup,
    calls_of,
    find_odd,
    find_shared,
    format_groups,
    group_stacks,
    name_place,
    name_ranks,
)
from launcher.supervise.waiting import do_sleep, find_awaited, is_with_peers

if TYPE_CHECKING:
    from bootseer.diagnose.calls import RankTrace
    from bootseer.diagnose.stuck import Cause

STOPPED_STATES = ("T", "t")
MOST_CAUSES = 8
LOOK_S = 2.0  # between two looks at a node's ranks
NEAR_S = 8.0  # without a step: from then on it is looked more often
NEAR_LOOK_S, NEAR_PART = 0.5, 0.03  # and so often, or as this part of the silence
LEAST_LOOK_S = 0.25  # between two judgements
NODES_A_SECOND = 250  # of a large job each node looks more rarely: so many messages a second reach the coordinator
STACKS_S = 6.0  # for all nodes to send what their ranks do
# Questions and looks, where some ranks are busy: who evaluates is in the same call at times.
ROUNDS, ROUND_S, ENOUGH_LOOKS = 10, 0.15, 90
EARLY_ROUNDS = 3
EARLY_KINDS = (HangKind.NOT_STARTED, HangKind.NOT_ENDED)
SURE_KINDS = (
    HangKind.FROZEN,
    HangKind.STUCK_IN_KERNEL,
    HangKind.SLOW,
    HangKind.ALL_SPIN,
    *EARLY_KINDS,
)  # by more than one round
MOST_LOOKS = 1000  # for one question
MOST_STACKS_BYTES = 4 << 20  # of a node, unpacked
MOST_TEXT_CHARACTERS = 12_000
MOST_FRAMES = 64  # of a stack
MOST_NOTE_CHARACTERS = 300
MOST_PATH_CHARACTERS = 4096


def look_s(nodes: int, silence_s: float = 0.0) -> float:
    """Seconds between two looks of a node of a job with so many.

    After a while without a step they come closer: what is over its limit should not wait for the next one.
    """
    usual_s = max(LOOK_S, nodes / NODES_A_SECOND)
    if silence_s < NEAR_S:
        return usual_s
    return min(usual_s, max(NEAR_LOOK_S, nodes / NODES_A_SECOND, NEAR_PART * silence_s))


class Ask(NamedTuple):
    """Have all nodes send the stacks of their ranks."""

    number: int


class Finding(NamedTuple):
    """The job stands still, and this is what is known."""

    number: int
    line: str  # for everybody
    text: str  # for people, whole
    data: bytes  # zlib of JSON


Said = Ask | Finding
Calls = tuple[tuple[str, str], ...]  # file and function of each frame, innermost first


class _Open(NamedTuple):
    """A standstill about which nodes have been asked."""

    hang: Hang
    began_s: float
    wanted: int  # nodes
    ask: int  # the newest question
    rounds: int = 1  # of questions
    next_ask_s: float | None = None  # another one is due then
    slow: Slow | None = None  # what is asked about is not a standstill

    @property
    def until_s(self) -> float:
        """When it is judged by the answers that have come."""
        lasts_s = (
            0.0 if self.slow is None else sum(round_s(each, self.slow.takes_s) for each in range(SLOW_ROUNDS))
        )
        return self.began_s + lasts_s + STACKS_S


class _Waits(NamedTuple):
    """For whom ranks that spin wait."""

    ranks: tuple[int, ...]  # () where none is apart
    what: str  # tells it
    is_by_devices: bool  # and nothing else


class _Held(NamedTuple):
    """What looks like a standstill, but ranks come along in their code."""

    hang: Hang
    again_s: float


class HangWatch:
    """Of one job. Every method returns what is to be said."""

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings._replace(asks_busy=True)
        self._detector: HangDetector | None = None
        self._facts: dict[int, RankFacts] = {}
        self._nodes = 0
        self._next_look_s: float | None = None
        self._looked_s = 0.0
        self._heard_of: set[int] = set()  # nodes that have told of their ranks since it was judged
        self._ranks: dict[int, tuple[int, ...]] = {}  # of each node
        self._number = 0  # of the next finding
        self._ask = 0  # of the next question
        self._open: _Open | None = None
        self._held: _Held | None = None
        self._pending: Hang | None = None  # was found while another one was asked about
        self._was_late = False  # nodes have not answered in time, so that it was held back once
        self._told_early: set[HangKind] = set()  # in this attempt
        self._calls: dict[int, Calls] = {}  # of each rank, when it was asked before
        self._looks: dict[int, int] = {}  # at each rank by now
        self._slow = SlowDetector()
        self._rounds = Rounds()  # of stacks, where steps take long
        self._stacks: dict[int, RankStacks] = {}
        self._answers: set[int] = set()
        self._traces: list[bytes] = []  # packed
        self._devices: dict[int, list[DeviceUse]] = {}  # by node
        self._layout = ""  # as a node has it
        self.last: Hang | None = None  # that was told, while it lasts

    def attempt_began(self, world_size: int, nodes: int, now_s: float) -> None:
        """Other ranks; what was learned of the job's gaps stays."""
        if self._detector is None:
            self._detector = HangDetector(world_size, self._settings)
        self._detector.new_attempt(now_s, world_size)
        self._slow.new_attempt()
        self._nodes = nodes
        self._next_look_s = now_s + look_s(nodes)
        self._facts.clear()
        self._heard_of.clear()
        self._ranks.clear()
        self._forget()

    def attempt_over(self) -> None:
        """Nothing is watched until the next one."""
        self._next_look_s = None
        self._forget()

    def deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        moments = [self._next_look_s]
        if self._open is not None:
            moments += [self._open.until_s, self._open.next_ask_s]
        return min((moment for moment in moments if moment is not None), default=None)

    def looked(self, node: int, facts: Iterable[RankFacts], now_s: float) -> list[Said]:
        """What a node has seen of its ranks: judged as soon as all have told, or when the time has come."""
        new = {each.rank: each for each in facts}
        self._facts.update(new)
        self._ranks[node] = tuple(new)
        self._heard_of.add(node)
        if len(self._heard_of) >= self._nodes and self._next_look_s is not None:
            self._next_look_s = max(min(now_s, self._next_look_s), self._looked_s + LEAST_LOOK_S)
        return self.tick(now_s)

    def node_ended(self, node: int) -> None:
        """All ranks of a node have ended well: they are waited for no more."""
        if self._detector is not None:
            for rank in self._ranks.get(node, ()):
                self._detector.ended(rank)
        self._heard_of.discard(node)
        self._nodes -= self._ranks.pop(node, None) is not None
        if self._open is not None:
            self._open = self._open._replace(wanted=min(self._open.wanted, self._nodes))

    def answered(
        self, node: int, number: int, data: bytes, traces: bytes = b"", layout: str = "", devices: str = ""
    ) -> list[Said]:
        """The stacks of a node's ranks, the collectives they have called, how ranks lie in parallel groups, and
        what their accelerators do."""
        if self._open is None or number != self._open.ask or self._open.next_ask_s is not None:
            return []
        if node in self._answers:
            return []
        self._answers.add(node)
        own = self._ranks.get(node, ())
        self._stacks.update((rank, each) for rank, each in unpack_stacks(data).items() if rank in own)
        if traces:
            self._traces.append(traces)
        self._layout = self._layout or layout
        self._devices[node] = unpack_uses(devices, own)
        return self._heard(self._open) if len(self._answers) >= self._open.wanted else []

    def tick(self, now_s: float) -> list[Said]:
        """The time has come."""
        said: list[Said] = []
        if self._open is not None and now_s >= self._open.until_s:
            said += self._conclude_late(self._open)
        elif self._open is not None and self._open.next_ask_s is None and len(self._answers) >= self._open.wanted:
            said += self._heard(self._open)  # the node that was missing has ended
        elif self._open is not None and self._open.next_ask_s is not None and now_s >= self._open.next_ask_s:
            said.append(self._ask_again(self._open._replace(rounds=self._open.rounds + 1)))
        if self._detector is None or self._next_look_s is None or now_s < self._next_look_s:
            return said
        self._next_look_s, self._looked_s = now_s + look_s(self._nodes), now_s
        self._heard_of.clear()
        facts = list(self._facts.values())
        hang = self._detector.look(facts, now_s)
        if self.last is not None and not self._lasts(self.last):
            self.last = None
        if hang is not None and self._is_told(hang):
            hang = None
        if hang is not None and hang.kind not in self._told_early:
            if self._open is None or self._open.slow is not None:
                said.append(self._begin(hang, now_s))
            else:
                self._pending = hang  # it is told once, so not to be lost
        slow = self._slow.look(facts, now_s)
        if self._open is None and self._pending is not None:
            pending, self._pending = self._pending, None
            if self._lasts(pending) and not self._is_told(pending):
                said.append(self._begin(pending, now_s))
        if slow is not None and self._open is None and self._held is None:
            said.append(self._begin(_as_hang(slow), now_s, slow))
        return said or self._look_again(now_s)

    @property
    def has_stepped(self) -> bool:
        """Whether steps were counted in this attempt."""
        return self._detector is not None and self._detector.has_stepped

    def _lasts(self, hang: Hang) -> bool:
        if hang.kind is HangKind.SLOW:
            return self._slow.is_slow()
        return self._detector is not None and self._detector.lasts(hang)

    def _begin(self, hang: Hang, now_s: float, slow: Slow | None = None) -> Ask:
        self._stacks.clear()
        self._calls.clear()
        self._looks.clear()
        self._rounds = Rounds()
        if hang.kind not in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            self._held = None  # what is held meanwhile is looked at again
        return self._ask_again(_Open(hang, now_s, self._nodes, 0, slow=slow))

    def _ask_again(self, opened: _Open) -> Ask:
        self._answers.clear()
        self._traces.clear()
        self._devices.clear()
        self._open = opened._replace(ask=self._ask, next_ask_s=None)
        self._ask += 1
        return Ask(self._open.ask)

    def _heard(self, opened: _Open) -> list[Said]:
        """All have answered. Where some are busy, they are asked more than once: who computes comes along."""
        hang = opened.hang
        if opened.slow is not None:
            self._rounds.take(self._stacks)
            if self._rounds.count >= SLOW_ROUNDS:
                return self._conclude()
            takes_s, asked = opened.slow.takes_s, range(self._rounds.count)
            next_s = opened.began_s + sum(round_s(each, takes_s) for each in asked)
            self._open = opened._replace(next_ask_s=next_s)
            return []
        if not (hang.is_doubtful or hang.kind in (HangKind.ONE_APART, HangKind.ALL_SPIN, *EARLY_KINDS)):
            return self._conclude()
        silence_s = opened.began_s - hang.since_s
        # Looked at once before the rounds, and once at their end: of many ranks it takes a second.
        if hang.kind is HangKind.ALL_SPIN and opened.rounds == 1 and self._find_waited_for(self._causes()) is None:
            self._hold_spinning(opened, opened.began_s)
            return []
        came_along = False
        for rank, stacks in self._stacks.items():
            self._looks[rank] = self._looks.get(rank, 0) + stacks.looks
            calls = calls_of(stacks.main)
            # Who waits for others may look for them again and again.
            counts = bool(calls) and not (hang.kind in EARLY_KINDS and is_with_peers(stacks))
            came_along |= counts and (stacks.comes_along or self._calls.get(rank, calls) != calls)
            self._calls[rank] = calls
        if came_along and silence_s < self._settings.busy_s:
            self._open, self._held = None, _Held(hang, opened.began_s + max(LOOK_S, silence_s))
            return []
        busy = self._stacks if hang.is_doubtful or hang.kind is HangKind.ALL_SPIN else hang.ranks
        looks = min((self._looks.get(rank, 0) for rank in busy), default=0)
        rounds, enough = (EARLY_ROUNDS, inf) if hang.kind in EARLY_KINDS else (ROUNDS, ENOUGH_LOOKS)
        if opened.rounds < rounds and looks < enough:
            self._open = opened._replace(next_ask_s=opened.began_s + opened.rounds * ROUND_S)
            return []
        return self._conclude()

    def _is_told(self, hang: Hang) -> bool:
        """Whether it was told, by stacks or calls, before it showed by what ranks use."""
        last = self.last
        by_more = last is not None and (last.kind is HangKind.ALL_SPIN or last.is_doubtful)
        return by_more and hang.kind in (HangKind.ALL_BUSY, HangKind.ALL_IDLE, HangKind.ONE_APART)

    def _hold_spinning(self, opened: _Open, now_s: float) -> None:
        """All that are busy are asked again, if that can ever tell more."""
        again = _Held(opened.hang, now_s + max(LOOK_S, now_s - opened.hang.since_s))
        can_tell = self._traces or any(self._devices.values()) or len(self._answers) < opened.wanted
        self._open, self._held = None, again if can_tell else None

    def _causes(self) -> list[Cause]:
        return find_causes_in(self._traces, self._stacks) if self._traces else []

    def _find_waited_for(self, causes: Sequence[Cause]) -> _Waits | None:
        """Of ranks that all spin: for whom they wait, and what tells; None: they compute, or nothing tells."""
        uses = [use for each in self._devices.values() for use in each]
        if any(use.computes for use in uses):
            return None
        if causes and causes[0].sure.value != "unsure" and causes[0].kind.value != "not-traced":
            ranks = causes[0].ranks
            return _Waits(ranks, f"by their calls the others wait for {name_ranks(ranks)}", False)
        if len(self._devices) < self._nodes or not all(self._devices.values()) or len(self._facts) < 2:
            return None
        apart = waited_for(uses)
        if apart is None:
            return None
        what = f", and those of {name_ranks(apart)} none" if apart else ""
        return _Waits(
            apart, f"accelerators run kernels that use no memory, as collectives that wait do{what}", True
        )

    def _look_again(self, now_s: float) -> list[Said]:
        """What was held back is asked about anew, if it is still so."""
        held = self._held
        if held is None or self._open is not None or now_s < held.again_s:
            return []
        self._held = None
        return [self._begin(_as_of(held.hang, now_s), now_s)] if self._lasts(held.hang) else []

    def _conclude_late(self, opened: _Open) -> list[Said]:
        """Not all have answered. Who was busy may only compute: too few looks tell nothing, the first time."""
        few = opened.rounds < EARLY_ROUNDS and not self._was_late
        comes_along = any(each.comes_along for each in self._stacks.values())
        silence_s = opened.began_s - opened.hang.since_s
        if opened.hang.kind is HangKind.ALL_SPIN:  # who does not answer may be the one that works
            self._hold_spinning(opened, opened.until_s)
            return []
        if opened.hang.is_doubtful:
            self._open, self._held = None, _Held(opened.hang, opened.until_s + LOOK_S)
            return []
        is_one_apart = opened.hang.kind is HangKind.ONE_APART
        if is_one_apart and (few or comes_along) and silence_s < self._settings.busy_s:
            self._was_late = True
            self._open, self._held = None, _Held(opened.hang, opened.until_s + LOOK_S)
            return []
        return self._conclude()

    def _conclude(self) -> list[Said]:
        found, self._open = self._open, None
        if found is None:
            return []
        if found.slow is not None:
            ranks = self._rounds.find_slow(len(self._facts)) if self._slow.is_slow() else ()
            self._slow.judged(bool(ranks), found.until_s)
            if not ranks:
                return []
            rest = set(self._facts) - set(ranks)
            why = f"{found.hang.why}; {name_ranks(rest)} wait{'s' * (len(rest) == 1)} for {name_ranks(ranks)}"
            found = found._replace(hang=found.hang._replace(ranks=ranks, why=why))
        if found.hang.kind in EARLY_KINDS:
            early = self._judge_early(found)
            if early is None:
                return []
            found = found._replace(hang=early)
        causes = self._causes()
        if found.hang.kind is HangKind.ALL_SPIN:
            waits = self._find_waited_for(causes)
            if waits is None:
                self._hold_spinning(found, found.began_s)
                return []
            # Slow transfers use no memory to speak of either: by accelerators alone no attempt is ended.
            hang = found.hang._replace(ranks=waits.ranks, is_early=waits.is_by_devices)
            found = found._replace(hang=hang._replace(why=f"{hang.why}; {waits.what}"))
        self._was_late = False
        self.last = hang = blame_by_stacks(found.hang, group_stacks(self._stacks))
        groups = find_groups_in(self._traces, self._layout)
        self._number += 1
        devices = [use for node in sorted(self._devices) for use in self._devices[node]]
        return [describe(self._number - 1, hang, self._stacks, self._facts, causes, groups, devices)]

    def _judge_early(self, found: _Open) -> Hang | None:
        """Before the first step, or at the end: who is waited for, when that is certain enough by now."""
        hang, silence_s = found.hang, found.began_s - found.hang.since_s
        if not self._lasts(hang):
            return None
        waits = {rank: facts.wait for rank, facts in self._facts.items()}
        why = f"no rank has done anything for {silence_s:.0f} s, and "
        again_s = found.began_s + max(LOOK_S, silence_s / 2)
        if hang.kind is HangKind.NOT_ENDED:
            left = tuple(self._detector.running()) if self._detector is not None else ()
            with_peers = [rank for rank in left if rank in self._stacks and is_with_peers(self._stacks[rank])]
            apart = tuple(rank for rank in left if rank not in with_peers)
            if not left or not do_sleep(apart, waits):
                return None
            self._told_early.add(hang.kind)
            ended = tuple(sorted(set(self._facts) - set(left)))
            why += f"{len(ended)} of {len(self._facts)} have ended; "
            if apart:
                return hang._replace(ranks=apart, why=f"{why}{name_ranks(apart)} sleep{'s' * (len(apart) == 1)}")
            waiting = f"{name_ranks(with_peers)} wait{'s' * (len(with_peers) == 1)} in torch.distributed"
            return hang._replace(ranks=ended, why=f"{why}{waiting}, for {name_ranks(ended)}")
        awaited = find_awaited(self._stacks, waits, len(self._facts))
        if awaited is None or not awaited.sleeps:  # who waits for a socket, a pipe, a lock may be served late
            self._held = _Held(hang, again_s)
            return None
        self._told_early.add(hang.kind)
        why += f"none has made a step yet; {name_ranks(awaited.by)} wait{'s' * (len(awaited.by) == 1)} for "
        return hang._replace(ranks=awaited.ranks, why=why + name_ranks(awaited.ranks))

    def _forget(self) -> None:
        self._open = self._held = self.last = self._pending = None
        self._was_late = False
        self._told_early.clear()
        self._stacks.clear()
        self._answers.clear()
        self._traces.clear()
        self._devices.clear()
        self._layout = ""


def _as_of(hang: Hang, now_s: float) -> Hang:
    """The same after it was held back: it lasts longer by now."""
    lasts = f" for {now_s - hang.since_s:.0f} s; "
    return hang._replace(why=re.sub(r" for \d+ s; ", lasts, hang.why, count=1))


def _as_hang(slow: Slow) -> Hang:
    """The same as what is told; no job is ended for it."""
    why = f"a step takes {slow.takes_s:.2g} s, {slow.usual_s:.2g} s before"
    return Hang(HangKind.SLOW, slow.since_s, (), SLOW_FACTOR * slow.usual_s, slow.usual_s, why, is_early=True)


def blame_by_stacks(hang: Hang, groups: Sequence[StackGroup]) -> Hang:
    """The ranks to name: where a few are elsewhere in the code than most, those, whatever they use.

    Ranks that wait for others use unlike amounts of CPU, by threads that poll. A process' state is certain.
    """
    odd = find_odd(groups)
    blamed = tuple(rank for rank in odd if rank in hang.ranks) or odd or hang.ranks
    is_sure = hang.kind in SURE_KINDS and (hang.kind is not HangKind.ALL_SPIN or hang.ranks)
    if is_sure or blamed == hang.ranks:
        return hang
    return hang._replace(ranks=blamed, why=f"{hang.why}; apart by their stacks: {name_ranks(blamed)}")


def find_causes_in(traces: Iterable[bytes], stacks: Mapping[int, RankStacks]) -> list[Cause]:
    """What the ranks wait for, by their calls of torch.distributed. Args: traces: of nodes, packed."""
    from bootseer.diagnose.flight import fill_members
    from bootseer.diagnose.stuck import find_causes

    found = _unpack(traces, {rank: each.state in STOPPED_STATES for rank, each in stacks.items()})
    try:
        return find_causes(fill_members(found.values()))
    except (LookupError, ValueError, TypeError, RecursionError):
        return []  # calls that cannot be: a node has sent them


def find_mismatch(traces: Iterable[bytes]) -> str:
    """Of an attempt that has failed: who called something else than the rest of its group; "" where nobody did."""
    from bootseer.diagnose.stuck import find_mismatches

    try:
        found = find_mismatches(_unpack(traces, {}).values())
    except (LookupError, ValueError, TypeError, RecursionError):
        return ""  # calls that cannot be: a node has sent them
    return found[0].line if found else ""


def _unpack(traces: Iterable[bytes], stopped: Mapping[int, bool]) -> dict[int, RankTrace]:
    from launcher.supervise.ring import unpack_rings

    return {rank: trace for data in traces for rank, trace in unpack_rings(data, stopped).items()}


def find_groups_in(traces: Iterable[bytes], line: str) -> Mapping[str, Sequence[Sequence[int]]]:
    """The parallel groups of the job, by its own words, else by names of process groups. Args: see `answered`."""
    if not line and not traces:
        return {}
    from bootseer.diagnose.flight import fill_members
    from bootseer.diagnose.layout import groups_of, groups_of_calls, parse_layout

    if (layout := parse_layout(line)) is not None:
        return groups_of(layout)
    ranks = fill_members(_unpack(traces, {}).values())
    return groups_of_calls({call.group for trace in ranks for call in trace.calls})


def describe(
    number: int,
    hang: Hang,
    stacks: Mapping[int, RankStacks],
    facts: Mapping[int, RankFacts],
    causes: Sequence[Cause] = (),
    layout: Mapping[str, Sequence[Sequence[int]]] | None = None,
    devices: Sequence[DeviceUse] = (),
) -> Finding:
    """The finding as a line, as text and for programs; the root cause first, where calls were traced."""
    groups = group_stacks(stacks)
    what = "has become slow" if hang.kind is HangKind.SLOW else f"stands still ({hang.kind.value})"
    line = f"the job {what}: {hang.why}"
    told: list[str] = []
    listed: list[dict[str, Any]] = []
    if causes and hang.kind is not HangKind.SLOW:
        from bootseer.diagnose.stuck import as_record
        from bootseer.diagnose.stuck import describe as describe_causes

        line = f"the job {what}: {causes[0].line}; {hang.why}"
        told = [*describe_causes(causes), *name_place(causes[0].ranks, layout or {})]
        listed = [as_record(each) for each in causes[:MOST_CAUSES]]
    text = "\n".join([line, *told, *format_groups(groups, layout), *describe_uses(devices), ""])
    if len(text) > MOST_TEXT_CHARACTERS:
        text = text[:MOST_TEXT_CHARACTERS] + "\n...\n"
    record = {
        **({"causes": listed} if listed else {}),
        **({"accelerators": [use._asdict() for use in devices[:1024]]} if devices else {}),
        "kind": hang.kind.value,
        "why": hang.why,
        "ranks": list(hang.ranks),
        "shared": [
            {"name": each.name, "number": each.number, "ranks": list(each.ranks[:1024])}
            for each in find_shared(causes[0].ranks if causes else hang.ranks, layout or {})
        ],
        "since_s": hang.since_s,
        "limit_s": hang.limit_s,
        "longest_gap_s": hang.longest_gap_s,
        "groups": [{"ranks": list(group.ranks), "does": _as_record(group.example)} for group in groups[:64]],
        "seen": [facts[rank]._asdict() for rank in sorted(facts)[:1024]],
    }
    return Finding(number, line, text, zlib.compress(json.dumps(record).encode()))


def pack_stacks(stacks: Mapping[int, RankStacks], most_bytes: int) -> bytes:
    """What the ranks of a node do, for the way: the main threads; of deep stacks less, until it fits."""
    most = MOST_FRAMES
    while True:
        data = zlib.compress(json.dumps([_as_record(each, most) for each in stacks.values()]).encode())
        if len(data) <= most_bytes:
            return data
        if not most:
            return zlib.compress(b"[]")
        most //= 2


def unpack_stacks(data: bytes) -> dict[int, RankStacks]:
    """The same as they came; what is no such thing is none."""
    try:
        found = json.loads(zlib.decompressobj().decompress(data, MOST_STACKS_BYTES))
        return {each.rank: each for each in map(_from_record, found)}
    except (zlib.error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def _as_record(stacks: RankStacks, most_frames: int = MOST_FRAMES) -> dict[str, Any]:
    return {
        "rank": stacks.rank,
        "pid": stacks.pid,
        "source": stacks.source.value,
        "frames": [list(frame) for frame in stacks.main[:most_frames]],
        "state": stacks.state,
        "kernel": list(stacks.kernel[:most_frames]),
        "note": stacks.note[:MOST_NOTE_CHARACTERS],
        **({"looks": stacks.looks, "comes_along": stacks.comes_along} if stacks.looks > 1 else {}),
    }


def _from_record(record: dict[str, Any]) -> RankStacks:
    frames = tuple(
        Frame(str(file)[:MOST_PATH_CHARACTERS], int(line), str(function)[:MOST_NOTE_CHARACTERS])
        for file, line, function in record["frames"][:MOST_FRAMES]
    )
    return RankStacks(
        int(record["rank"]),
        int(record["pid"]),
        Source(record["source"]),
        main=frames,
        state=str(record["state"])[:1],
        kernel=tuple(str(each)[:MOST_NOTE_CHARACTERS] for each in record["kernel"][:MOST_FRAMES]),
        note=str(record["note"])[:MOST_NOTE_CHARACTERS],
        looks=min(max(1, int(record.get("looks", 1))), MOST_LOOKS),
        comes_along=record.get("comes_along") is True,
    )
