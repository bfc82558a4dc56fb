"""PURE: the watch over a job's ranks, at its coordinator. In: samples of all nodes. Out: queries and findings.

When the detector sees a hang, every node is queried for the stacks of its ranks. When all have answered, or after
a moment, the finding goes out: the stuck ranks, the time, how the ranks differ. If some ranks are busy, the nodes
are queried a few times, each time with several samples (stack_collector.py): a rank that evaluates alone moves
through its code, a rank that spins does not. If all are busy, as ranks that wait for an accelerator are, only
their calls of torch.distributed, or the activity of the accelerators, show whether they wait. The user decides the
reaction (--on-hang): a report alone, or a restart. The watch never ends a job by a failure of its own.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.collectives.accelerators import DeviceUse, describe_uses, find_awaited_ranks, unpack_uses
from launcher.monitor.hang.detector import HangDetector
from launcher.monitor.hang.places import COMMUNICATES, describe_places
from launcher.monitor.hang.settings import STACKS_S, HangSettings
from launcher.monitor.hang.waiting import (
    AbsentRanks,
    all_sleep,
    find_absent,
    find_awaited,
    is_in_backward,
    is_in_collective,
)
from launcher.monitor.samples.stacks import (
    MAX_CHILDREN,
    ChildProcess,
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
from launcher.monitor.slow import FACTOR as SLOW_FACTOR
from launcher.monitor.slow import ROUNDS as SLOW_ROUNDS
from launcher.monitor.slow import SlowDetector, SlowSteps, StackRounds, round_s

if TYPE_CHECKING:
    from bootseer.hangs.calls import RankTrace
    from bootseer.hangs.stuck import Cause

STOPPED_STATES = ("T", "t")
MAX_CAUSES = 8
SAMPLE_S = 2.0  # between two samples of a node's ranks
NEAR_S = 8.0  # without a step: from then on sampling is more frequent
NEAR_SAMPLE_S, NEAR_PART = 0.5, 0.03  # the interval then, or as this part of the silence
MIN_JUDGE_S = 0.25  # between two judgements
NODES_A_SECOND = 250  # limit of messages a second to the coordinator: nodes of a large job sample more rarely
# Queries and samples if some ranks are busy: a rank that evaluates is in the same call at times.
ROUNDS, ROUND_S, ENOUGH_SAMPLES = 10, 0.15, 90
EARLY_ROUNDS = 3
EARLY_KINDS = (HangKind.NOT_STARTED, HangKind.NOT_ENDED)
SURE_KINDS = (
    HangKind.FROZEN,
    HangKind.STUCK_IN_KERNEL,
    HangKind.SLOW,
    HangKind.ALL_SPIN,
    *EARLY_KINDS,
)  # confirmed by more than one round
MAX_SAMPLES = 1000  # for one query
TRACE_ADVICE = "rerun with --trace-collectives to name the first stuck rank"
MAX_STACKS_BYTES = 4 << 20  # of a node, unpacked
MAX_TEXT_CHARACTERS = 12_000
DIFFERENT_STACKS = "the stacks of these ranks differ from those of the other ranks"
MAX_FRAMES = 64  # of a stack
MAX_CHILD_FRAMES = 24  # of that of a child process
MAX_NOTE_CHARACTERS = 300
MAX_PATH_CHARACTERS = 4096


def sample_interval_s(nodes: int, silence_s: float = 0.0) -> float:
    """Return the seconds between two samples of a node in a job of this many nodes.

    After a while without a step they are closer together, so that a hang is noticed soon after its limit.
    """
    usual_s = max(SAMPLE_S, nodes / NODES_A_SECOND)
    if silence_s < NEAR_S:
        return usual_s
    return min(usual_s, max(NEAR_SAMPLE_S, nodes / NODES_A_SECOND, NEAR_PART * silence_s))


class StackQuery(NamedTuple):
    """A query to all nodes for the stacks of their ranks."""

    number: int


class HangFinding(NamedTuple):
    """The facts about a hang of the job."""

    number: int
    line: str  # for all nodes
    text: str  # for users, complete
    data: bytes  # zlib of JSON


WatchMessage = StackQuery | HangFinding
Calls = tuple[tuple[str, str], ...]  # file and function of each frame, innermost first


class _OpenQuery(NamedTuple):
    """A hang about which nodes have been queried."""

    hang: Hang
    began_s: float
    wanted: int  # nodes
    ask: int  # the newest query
    rounds: int = 1  # of queries
    next_ask_s: float | None = None  # when another one is due
    slow: SlowSteps | None = None  # set if the query is about slow steps, not a hang
    stacks_s: float = STACKS_S

    @property
    def until_s(self) -> float:
        """When it is judged by the answers received so far."""
        lasts_s = (
            0.0 if self.slow is None else sum(round_s(each, self.slow.takes_s) for each in range(SLOW_ROUNDS))
        )
        return self.began_s + lasts_s + self.stacks_s


class _AwaitedSpinning(NamedTuple):
    """The ranks that spinning ranks wait for."""

    ranks: tuple[int, ...]  # () where none is apart
    what: str  # the evidence
    is_by_devices: bool  # there is no other evidence


class _DeferredHang(NamedTuple):
    """A suspected hang whose ranks still move through their code."""

    hang: Hang
    again_s: float


class HangWatch:
    """The watch over one job. Every method returns the messages to send."""

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings._replace(asks_busy=True)
        self._detector: HangDetector | None = None
        self._facts: dict[int, RankFacts] = {}
        self._nodes = 0
        self._next_look_s: float | None = None
        self._looked_s = 0.0
        self._received_of: set[int] = set()  # nodes that have sent samples since the last judgement
        self._ranks: dict[int, tuple[int, ...]] = {}  # of each node
        self._number = 0  # of the next finding
        self._ask = 0  # of the next query
        self._open: _OpenQuery | None = None
        self._held: _DeferredHang | None = None
        self._pending: Hang | None = None  # was found while another query was open
        self._was_late = False  # nodes were late, so that the finding was deferred once
        self._reported_early: set[HangKind] = set()  # in this attempt
        self._calls: dict[int, Calls] = {}  # of each rank, at the previous query
        self._looks: dict[int, int] = {}  # samples of each rank by now
        self._slow = SlowDetector()
        self._rounds = StackRounds()  # of stacks, if steps take long
        self._stacks: dict[int, RankStacks] = {}
        self._answers: set[int] = set()
        self._traces: list[bytes] = []  # packed
        self._devices: dict[int, list[DeviceUse]] = {}  # by node
        self._layout = ""  # as a node has sent it
        self.last: Hang | None = None  # the reported hang, while it lasts

    def attempt_began(self, world_size: int, nodes: int, now_s: float) -> None:
        """Begin an attempt with new ranks; keep the learned gaps of the job."""
        if self._detector is None:
            self._detector = HangDetector(world_size, self._settings)
        self._detector.new_attempt(now_s, world_size)
        self._slow.new_attempt()
        self._nodes = nodes
        self._next_look_s = now_s + sample_interval_s(nodes)
        self._facts.clear()
        self._received_of.clear()
        self._ranks.clear()
        self._forget()

    def attempt_over(self) -> None:
        """Stop watching until the next attempt."""
        self._next_look_s = None
        self._forget()

    def deadline_s(self) -> float | None:
        """Return the time at which `tick` has work to do."""
        moments = [self._next_look_s]
        if self._open is not None:
            moments += [self._open.until_s, self._open.next_ask_s]
        return min((moment for moment in moments if moment is not None), default=None)

    def looked(self, node: int, facts: Iterable[RankFacts], now_s: float) -> list[WatchMessage]:
        """Take a node's sample of its ranks; judge when all nodes have sent one, or when the time has come."""
        new = {each.rank: each for each in facts}
        self._facts.update(new)
        self._ranks[node] = tuple(new)
        self._received_of.add(node)
        if len(self._received_of) >= self._nodes and self._next_look_s is not None:
            self._next_look_s = max(min(now_s, self._next_look_s), self._looked_s + MIN_JUDGE_S)
        return self.tick(now_s)

    def newest(self) -> list[tuple[int, RankFacts]]:
        """Return the newest facts of each rank that is watched, with the number of its node, by rank."""
        nodes = {rank: node for node, ranks in self._ranks.items() for rank in ranks}
        return [(nodes[rank], self._facts[rank]) for rank in sorted(nodes)]

    def node_ended(self, node: int) -> None:
        """Note that all ranks of a node have succeeded and are not waited for any more."""
        if self._detector is not None:
            for rank in self._ranks.get(node, ()):
                self._detector.ended(rank)
        self._received_of.discard(node)
        self._nodes -= self._ranks.pop(node, None) is not None
        if self._open is not None:
            self._open = self._open._replace(wanted=min(self._open.wanted, self._nodes))

    def answered(
        self, node: int, number: int, data: bytes, traces: bytes = b"", layout: str = "", devices: str = ""
    ) -> list[WatchMessage]:
        """Take a node's answer: stacks, calls of collectives, the layout of parallel groups, accelerator use."""
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
        return self._received(self._open) if len(self._answers) >= self._open.wanted else []

    def tick(self, now_s: float) -> list[WatchMessage]:
        """Act on the time: judge, query again, conclude."""
        said: list[WatchMessage] = []
        if self._open is not None and now_s >= self._open.until_s:
            said += self._conclude_late(self._open)
        elif self._open is not None and self._open.next_ask_s is None and len(self._answers) >= self._open.wanted:
            said += self._received(self._open)  # the missing node has ended
        elif self._open is not None and self._open.next_ask_s is not None and now_s >= self._open.next_ask_s:
            said.append(self._ask_again(self._open._replace(rounds=self._open.rounds + 1)))
        if self._detector is None or self._next_look_s is None or now_s < self._next_look_s:
            return said
        self._next_look_s, self._looked_s = now_s + sample_interval_s(self._nodes), now_s
        self._received_of.clear()
        facts = list(self._facts.values())
        hang = self._detector.look(facts, now_s)
        if self.last is not None and not self._lasts(self.last):
            self.last = None
        if hang is not None and self._is_told(hang):
            hang = None
        if hang is not None and hang.kind not in self._reported_early:
            if self._open is None or self._open.slow is not None:
                said.append(self._begin(hang, now_s))
            else:
                self._pending = hang  # it is reported once, so it must not be lost
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

    def _begin(self, hang: Hang, now_s: float, slow: SlowSteps | None = None) -> StackQuery:
        self._stacks.clear()
        self._calls.clear()
        self._looks.clear()
        self._rounds = StackRounds()
        if hang.kind not in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            self._held = None  # a held finding is examined again
        return self._ask_again(
            _OpenQuery(hang, now_s, self._nodes, 0, slow=slow, stacks_s=self._settings.stacks_s)
        )

    def _ask_again(self, opened: _OpenQuery) -> StackQuery:
        self._answers.clear()
        self._traces.clear()
        self._devices.clear()
        self._open = opened._replace(ask=self._ask, next_ask_s=None)
        self._ask += 1
        return StackQuery(self._open.ask)

    def _received(self, opened: _OpenQuery) -> list[WatchMessage]:
        """Evaluate all answers. Query busy ranks repeatedly: a computing rank moves through its code."""
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
        # Evaluated once before the rounds, and once at their end: for many ranks it takes a second.
        if hang.kind is HangKind.ALL_SPIN and opened.rounds == 1 and self._find_waited_for(self._causes()) is None:
            self._hold_spinning(opened, opened.began_s)
            return []
        came_along = False
        for rank, stacks in self._stacks.items():
            self._looks[rank] = self._looks.get(rank, 0) + stacks.looks
            calls = calls_of(stacks.main)
            # A rank that waits for others may poll for them repeatedly.
            counts = bool(calls) and not (hang.kind in EARLY_KINDS and is_in_collective(stacks))
            came_along |= counts and (stacks.comes_along or self._calls.get(rank, calls) != calls)
            self._calls[rank] = calls
        if came_along and silence_s < self._settings.busy_s:
            self._open, self._held = None, _DeferredHang(hang, opened.began_s + max(SAMPLE_S, silence_s))
            return []
        busy = self._stacks if hang.is_doubtful or hang.kind is HangKind.ALL_SPIN else hang.ranks
        looks = min((self._looks.get(rank, 0) for rank in busy), default=0)
        rounds, enough = (EARLY_ROUNDS, inf) if hang.kind in EARLY_KINDS else (ROUNDS, ENOUGH_SAMPLES)
        if opened.rounds < rounds and looks < enough:
            self._open = opened._replace(next_ask_s=opened.began_s + opened.rounds * ROUND_S)
            return []
        return self._conclude()

    def _is_told(self, hang: Hang) -> bool:
        """Return whether stacks or calls led to a report before the ranks' resource use did."""
        last = self.last
        by_more = last is not None and (last.kind is HangKind.ALL_SPIN or last.is_doubtful)
        return by_more and hang.kind in (HangKind.ALL_BUSY, HangKind.ALL_IDLE, HangKind.ONE_APART)

    def _hold_spinning(self, opened: _OpenQuery, now_s: float) -> None:
        """Query all busy ranks again later, if that can ever show more."""
        again = _DeferredHang(opened.hang, now_s + max(SAMPLE_S, now_s - opened.hang.since_s))
        can_tell = self._traces or any(self._devices.values()) or len(self._answers) < opened.wanted
        self._open, self._held = None, again if can_tell else None

    def _causes(self) -> list[Cause]:
        return find_causes_in(self._traces, self._stacks) if self._traces else []

    def _find_waited_for(self, causes: Sequence[Cause]) -> _AwaitedSpinning | None:
        """Find the ranks that spinning ranks wait for, and the evidence; None: they compute, or no evidence."""
        uses = [use for each in self._devices.values() for use in each]
        if any(use.computes for use in uses):
            return None
        if causes and causes[0].sure.value != "unsure" and causes[0].kind.value != "not-traced":
            ranks = causes[0].ranks
            return _AwaitedSpinning(ranks, f"by their calls, the others wait for {name_ranks(ranks)}", False)
        if len(self._devices) < self._nodes or not all(self._devices.values()) or len(self._facts) < 2:
            return None
        apart = find_awaited_ranks(uses)
        if apart is None:
            return None
        what = f", and those of {name_ranks(apart)} run none" if apart else ""
        return _AwaitedSpinning(
            apart, f"accelerators run kernels that use no memory, like waiting collectives{what}", True
        )

    def _look_again(self, now_s: float) -> list[WatchMessage]:
        """Query again about a deferred finding, if it still lasts."""
        held = self._held
        if held is None or self._open is not None or now_s < held.again_s:
            return []
        self._held = None
        return [self._begin(_as_of(held.hang, now_s), now_s)] if self._lasts(held.hang) else []

    def _conclude_late(self, opened: _OpenQuery) -> list[WatchMessage]:
        """Conclude without all answers. Busy ranks may compute: too few samples show nothing, the first time."""
        few = opened.rounds < EARLY_ROUNDS and not self._was_late
        comes_along = any(each.comes_along for each in self._stacks.values())
        silence_s = opened.began_s - opened.hang.since_s
        if opened.hang.kind is HangKind.ALL_SPIN:  # a rank that does not answer may be the one that works
            self._hold_spinning(opened, opened.until_s)
            return []
        if opened.hang.is_doubtful:
            self._open, self._held = None, _DeferredHang(opened.hang, opened.until_s + SAMPLE_S)
            return []
        is_one_apart = opened.hang.kind is HangKind.ONE_APART
        if is_one_apart and (few or comes_along) and silence_s < self._settings.busy_s:
            self._was_late = True
            self._open, self._held = None, _DeferredHang(opened.hang, opened.until_s + SAMPLE_S)
            return []
        return self._conclude()

    def _conclude(self) -> list[WatchMessage]:
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
            # Slow transfers use hardly any memory either: accelerators alone never end an attempt.
            hang = found.hang._replace(ranks=waits.ranks, is_early=waits.is_by_devices)
            found = found._replace(hang=hang._replace(why=f"{hang.why}; {waits.what}"))
        self._was_late = False
        hang = blame_by_stacks(found.hang, group_stacks(self._stacks), find_absent(self._stacks, len(self._facts)))
        self.last = hang = blame_by_calls(hang, causes, found.hang.why)
        groups = find_groups_in(self._traces, self._layout)
        self._number += 1
        devices = [use for node in sorted(self._devices) for use in self._devices[node]]
        advice = "" if self._traces or len(self._facts) < 2 else TRACE_ADVICE
        return [describe(self._number - 1, hang, self._stacks, self._facts, causes, groups, devices, advice)]

    def _judge_early(self, found: _OpenQuery) -> Hang | None:
        """Name the ranks waited for before the first step, or at the end, if that is certain enough."""
        hang, silence_s = found.hang, found.began_s - found.hang.since_s
        if not self._lasts(hang):
            return None
        waits = {rank: facts.wait for rank, facts in self._facts.items()}
        why = f"no rank has done anything for {silence_s:.0f} s, and "
        again_s = found.began_s + max(SAMPLE_S, silence_s / 2)
        if hang.kind is HangKind.NOT_ENDED:
            left = tuple(self._detector.running()) if self._detector is not None else ()
            with_peers = [rank for rank in left if rank in self._stacks and is_in_collective(self._stacks[rank])]
            apart = tuple(rank for rank in left if rank not in with_peers)
            if not left or not all_sleep(apart, waits):
                return None
            self._reported_early.add(hang.kind)
            ended = tuple(sorted(set(self._facts) - set(left)))
            why += f"{len(ended)} of {len(self._facts)} have ended; "
            if apart:
                return hang._replace(ranks=apart, why=f"{why}{name_ranks(apart)} sleep{'s' * (len(apart) == 1)}")
            waiting = f"{name_ranks(with_peers)} wait{'s' * (len(with_peers) == 1)} in torch.distributed"
            return hang._replace(ranks=ended, why=f"{why}{waiting}, for {name_ranks(ended)}")
        awaited = find_awaited(self._stacks, waits, len(self._facts))
        if awaited is None or not awaited.sleeps:  # a socket, a pipe or a lock may be served late
            self._held = _DeferredHang(hang, again_s)
            return None
        self._reported_early.add(hang.kind)
        why += f"none has made a step yet; {name_ranks(awaited.by)} wait{'s' * (len(awaited.by) == 1)} for "
        return hang._replace(ranks=awaited.ranks, why=why + name_ranks(awaited.ranks))

    def _forget(self) -> None:
        self._open = self._held = self.last = self._pending = None
        self._was_late = False
        self._reported_early.clear()
        self._stacks.clear()
        self._answers.clear()
        self._traces.clear()
        self._devices.clear()
        self._layout = ""


def _as_of(hang: Hang, now_s: float) -> Hang:
    """Return the deferred finding with its present duration."""
    lasts = f" for {now_s - hang.since_s:.0f} s; "
    return hang._replace(why=re.sub(r" for \d+ s; ", lasts, hang.why, count=1))


def _as_hang(slow: SlowSteps) -> Hang:
    """Return slow steps as a finding to report; no job is ended for it."""
    why = f"a step takes {slow.takes_s:.2g} s, {slow.usual_s:.2g} s before"
    return Hang(HangKind.SLOW, slow.since_s, (), SLOW_FACTOR * slow.usual_s, slow.usual_s, why, is_early=True)


def blame_by_stacks(hang: Hang, groups: Sequence[StackGroup], absent: AbsentRanks | None = None) -> Hang:
    """Choose the ranks to name: those elsewhere in the code than all that may wait, or than most; else by CPU use.

    Ranks that wait for others use different amounts of CPU, by threads that poll. A process state is certain.
    """
    odd = find_odd(groups)
    elsewhere = odd if absent is None else absent.ranks
    blamed = tuple(rank for rank in elsewhere if rank in hang.ranks) or elsewhere or hang.ranks
    if hang.kind in SURE_KINDS and (hang.kind is not HangKind.ALL_SPIN or hang.ranks):
        return hang
    # Without a majority, the others may as well wait for these: work.wait() and loss.item() wait out of sight.
    is_guess = not odd if absent is not None else _are_waiting(odd, groups)
    why = hang.why
    if absent is not None and is_guess:
        evidence = (
            f"the other ranks are in backward ({COMMUNICATES}), and this is no proof that they wait"
            if absent.is_guess
            else "the other ranks are in torch.distributed, and no stack is that of most ranks"
        )
        # First: a long line may be shortened.
        why = f"guess: {name_ranks(absent.by)} wait{'s' * (len(absent.by) == 1)} for {name_ranks(blamed)}; {why}"
    elif elsewhere:
        evidence = DIFFERENT_STACKS
        if is_guess:
            evidence += ", but these may wait for the others"
        if blamed != hang.ranks:
            why += f"; apart by their stacks: {name_ranks(blamed)}"
    elif blamed:
        evidence = "these ranks use the CPU or the kernel in another way than the other ranks"
    elif not groups:
        evidence = "no stacks were received"
    else:
        evidence = (
            "no rank differs" if len(groups) == 1 else f"no stack is that of most ranks ({len(groups)} stacks)"
        )
    return hang._replace(ranks=blamed, why=why, evidence=evidence, is_guess=is_guess or not blamed)


def _are_waiting(odd: Sequence[int], groups: Sequence[StackGroup]) -> bool:
    """Return whether some of the odd ranks may wait for the rest, which does not wait."""
    waits = [is_in_collective(group.example) or is_in_backward(group.example) for group in groups]
    return bool(odd) and not waits[0] and any(waits)


def blame_by_calls(hang: Hang, causes: Sequence[Cause], why: str) -> Hang:
    """Name the ranks that the traced calls show, if nothing better than a guess names others.

    Args: why: without the ranks that stacks have suggested.
    """
    if not hang.is_guess or not causes or hang.kind is HangKind.SLOW:
        return hang
    if causes[0].sure.value == "unsure" or causes[0].kind.value == "not-traced":
        return hang
    evidence = "their calls of torch.distributed show it"
    return hang._replace(ranks=causes[0].ranks, why=why, evidence=evidence, is_guess=False)


def find_causes_in(traces: Iterable[bytes], stacks: Mapping[int, RankStacks]) -> list[Cause]:
    """Find what the ranks wait for, by their calls of torch.distributed. Args: traces: of nodes, packed."""
    from bootseer.hangs.flight import fill_members
    from bootseer.hangs.stuck import find_causes

    found = _unpack(traces, {rank: each.state in STOPPED_STATES for rank, each in stacks.items()})
    try:
        return find_causes(fill_members(found.values()))
    except (LookupError, ValueError, TypeError, RecursionError):
        return []  # impossible calls, sent by a node


def find_mismatch(traces: Iterable[bytes]) -> str:
    """Find the rank of a failed attempt that called something else than the rest of its group; "" for none."""
    from bootseer.hangs.stuck import find_mismatches

    try:
        found = find_mismatches(_unpack(traces, {}).values())
    except (LookupError, ValueError, TypeError, RecursionError):
        return ""  # impossible calls, sent by a node
    return found[0].line if found else ""


def _unpack(traces: Iterable[bytes], stopped: Mapping[int, bool]) -> dict[int, RankTrace]:
    from launcher.monitor.collectives.ring import unpack_rings

    return {rank: trace for data in traces for rank, trace in unpack_rings(data, stopped).items()}


def find_groups_in(traces: Iterable[bytes], line: str) -> Mapping[str, Sequence[Sequence[int]]]:
    """Return the parallel groups of the job, as it declared them, else by names of process groups."""
    if not line and not traces:
        return {}
    from bootseer.hangs.flight import fill_members
    from bootseer.hangs.layout import groups_of, groups_of_calls, parse_layout

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
    advice: str = "",
) -> HangFinding:
    """Make the finding as a line, as text and for programs; the root cause first, if calls were traced.

    Args: advice: the last line of the text, if the ranks are named by no more than a guess.
    """
    groups = group_stacks(stacks)
    what = "has become slow" if hang.kind is HangKind.SLOW else f"hangs ({hang.kind.value})"
    places = "" if hang.kind in (HangKind.SLOW, HangKind.FROZEN) else describe_places(groups, hang.ranks)
    why = f"{places}; {hang.why}" if places else hang.why
    line = f"the job {what}: {why}"
    told: list[str] = []
    listed: list[dict[str, Any]] = []
    if causes and hang.kind is not HangKind.SLOW:
        from bootseer.hangs.stuck import as_record
        from bootseer.hangs.stuck import describe as describe_causes

        line = f"the job {what}: {causes[0].line}; {why}"
        told = [*describe_causes(causes), *name_place(causes[0].ranks, layout or {})]
        listed = [as_record(each) for each in causes[:MAX_CAUSES]]
    text = "\n".join([line, *told, *format_groups(groups, layout), *describe_uses(devices), ""])
    if len(text) > MAX_TEXT_CHARACTERS:
        text = text[:MAX_TEXT_CHARACTERS] + "\n...\n"
    if advice and hang.is_guess and hang.kind not in SURE_KINDS:
        text += advice + "\n"
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
    return HangFinding(number, line, text, zlib.compress(json.dumps(record).encode()))


def pack_stacks(stacks: Mapping[int, RankStacks], max_bytes: int) -> bytes:
    """Serialize the main threads' stacks of a node's ranks; shorten deep stacks until it fits."""
    most = MAX_FRAMES
    while True:
        data = zlib.compress(json.dumps([_as_record(each, most) for each in stacks.values()]).encode())
        if len(data) <= max_bytes:
            return data
        if not most:
            return zlib.compress(b"[]")
        most //= 2


def unpack_stacks(data: bytes) -> dict[int, RankStacks]:
    """Parse the same; return none for invalid data."""
    try:
        found = json.loads(zlib.decompressobj().decompress(data, MAX_STACKS_BYTES))
        return {each.rank: each for each in map(_from_record, found)}
    except (zlib.error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def _as_record(stacks: RankStacks, max_frames: int = MAX_FRAMES) -> dict[str, Any]:
    return {
        "rank": stacks.rank,
        "pid": stacks.pid,
        "source": stacks.source.value,
        "frames": [list(frame) for frame in stacks.main[:max_frames]],
        "state": stacks.state,
        "kernel": list(stacks.kernel[:max_frames]),
        "note": stacks.note[:MAX_NOTE_CHARACTERS],
        **({"looks": stacks.looks, "comes_along": stacks.comes_along} if stacks.looks > 1 else {}),
        **({"children": [_child_record(each, max_frames) for each in stacks.children]} if stacks.children else {}),
    }


def _child_record(child: ChildProcess, max_frames: int) -> dict[str, Any]:
    frames = [list(frame) for frame in child.main[: min(max_frames, MAX_CHILD_FRAMES)]]
    return {"pid": child.pid, "name": child.name, "state": child.state, "wait": child.wait, "frames": frames}


def _from_record(record: dict[str, Any]) -> RankStacks:
    frames = _frames(record["frames"])
    children = tuple(
        ChildProcess(
            int(each["pid"]),
            str(each["name"])[:MAX_NOTE_CHARACTERS],
            str(each["state"])[:1],
            str(each["wait"])[:MAX_NOTE_CHARACTERS],
            _frames(each["frames"]),
        )
        for each in record.get("children", [])[:MAX_CHILDREN]
    )
    return RankStacks(
        int(record["rank"]),
        int(record["pid"]),
        Source(record["source"]),
        main=frames,
        state=str(record["state"])[:1],
        kernel=tuple(str(each)[:MAX_NOTE_CHARACTERS] for each in record["kernel"][:MAX_FRAMES]),
        note=str(record["note"])[:MAX_NOTE_CHARACTERS],
        looks=min(max(1, int(record.get("looks", 1))), MAX_SAMPLES),
        comes_along=record.get("comes_along") is True,
        children=children,
    )


def _frames(listed: list[Any]) -> tuple[Frame, ...]:
    return tuple(
        Frame(str(file)[:MAX_PATH_CHARACTERS], int(line), str(function)[:MAX_NOTE_CHARACTERS])
        for file, line, function in listed[:MAX_FRAMES]
    )
