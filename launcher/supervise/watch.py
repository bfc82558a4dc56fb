"""PURE: the watch over a job's ranks, at its coordinator: looks of all nodes in, questions and findings out.

A standstill that the detector sees is asked about: every node sends the stacks of its ranks. When all have, or
after a moment, the finding goes out: what stands still, since when, how the ranks differ. Where some ranks are
busy, three times: who evaluates alone comes along in its code, who spins does not. What is done about it is the
user's word (--on-hang): a report alone, or a restart. It never ends a job by a failure of its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.supervise.facts import Hang, HangKind, RankFacts
from launcher.supervise.hang import HangDetector, HangSettings
from launcher.supervise.stacks import (
    Frame,
    RankStacks,
    Source,
    StackGroup,
    find_odd,
    find_shared,
    format_groups,
    group_stacks,
    name_place,
    name_ranks,
)

if TYPE_CHECKING:
    from bootseer.diagnose.stuck import Cause

STOPPED_STATES = ("T", "t")
MOST_CAUSES = 8
LOOK_S = 2.0  # between two looks at a node's ranks
NODES_A_SECOND = 250  # of a large job each node looks more rarely: so many messages a second reach the coordinator
STACKS_S = 6.0  # for all nodes to send what their ranks do
ROUNDS, ROUND_S = 3, 0.5  # of questions, where some ranks are busy
MOST_STACKS_BYTES = 4 << 20  # of a node, unpacked
MOST_TEXT_CHARACTERS = 12_000
MOST_FRAMES = 64  # of a stack
MOST_NOTE_CHARACTERS = 300


def look_s(nodes: int) -> float:
    """Seconds between two looks of a node of a job with so many."""
    return max(LOOK_S, nodes / NODES_A_SECOND)


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


class _Held(NamedTuple):
    """What looks like a standstill, but ranks come along in their code."""

    hang: Hang
    again_s: float


class HangWatch:
    """Of one job. Every method returns what is to be said."""

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings
        self._detector: HangDetector | None = None
        self._facts: dict[int, RankFacts] = {}
        self._nodes = 0
        self._next_look_s: float | None = None
        self._number = 0  # of the next finding
        self._ask = 0  # of the next question
        self._open: _Open | None = None
        self._held: _Held | None = None
        self._calls: dict[int, Calls] = {}  # of each rank, when it was asked before
        self._stacks: dict[int, RankStacks] = {}
        self._answers: set[int] = set()
        self._traces: list[bytes] = []  # packed
        self._layout = ""  # as a node has it
        self.last: Hang | None = None  # that was told, while it lasts

    def attempt_began(self, world_size: int, nodes: int, now_s: float) -> None:
        """Other ranks; what was learned of the job's gaps stays."""
        if self._detector is None:
            self._detector = HangDetector(world_size, self._settings)
        self._detector.new_attempt(now_s, world_size)
        self._nodes = nodes
        self._next_look_s = now_s + look_s(nodes)
        self._facts.clear()
        self._forget()

    def attempt_over(self) -> None:
        """Nothing is watched until the next one."""
        self._next_look_s = None
        self._forget()

    def deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        moments = [self._next_look_s]
        if self._open is not None:
            moments += [self._open.began_s + STACKS_S, self._open.next_ask_s]
        return min((moment for moment in moments if moment is not None), default=None)

    def looked(self, facts: Iterable[RankFacts]) -> None:
        """What a node has seen of its ranks."""
        self._facts.update((each.rank, each) for each in facts)

    def answered(self, node: int, number: int, data: bytes, traces: bytes = b"", layout: str = "") -> list[Said]:
        """The stacks of a node's ranks, the collectives they have called, and how ranks lie in parallel groups."""
        if self._open is None or number != self._open.ask or self._open.next_ask_s is not None:
            return []
        self._answers.add(node)
        self._stacks.update(unpack_stacks(data))
        if traces:
            self._traces.append(traces)
        self._layout = self._layout or layout
        return self._heard(self._open) if len(self._answers) >= self._open.wanted else []

    def tick(self, now_s: float) -> list[Said]:
        """The time has come."""
        said: list[Said] = []
        if self._open is not None and now_s >= self._open.began_s + STACKS_S:
            said += self._conclude()
        elif self._open is not None and self._open.next_ask_s is not None and now_s >= self._open.next_ask_s:
            said.append(self._ask_again(self._open._replace(rounds=self._open.rounds + 1)))
        if self._detector is None or self._next_look_s is None or now_s < self._next_look_s:
            return said
        self._next_look_s = now_s + look_s(self._nodes)
        hang = self._detector.look(list(self._facts.values()), now_s)
        if hang is not None and self._open is None:
            said.append(self._begin(hang, now_s))
        return said or self._look_again(now_s, self._detector)

    def _begin(self, hang: Hang, now_s: float) -> Ask:
        self._stacks.clear()
        self._calls.clear()
        return self._ask_again(_Open(hang, now_s, self._nodes, 0))

    def _ask_again(self, opened: _Open) -> Ask:
        self._answers.clear()
        self._traces.clear()
        self._held = None
        self._open = opened._replace(ask=self._ask, next_ask_s=None)
        self._ask += 1
        return Ask(self._open.ask)

    def _heard(self, opened: _Open) -> list[Said]:
        """All have answered. Where some are busy, they are asked more than once: who computes comes along."""
        hang = opened.hang
        if hang.kind is not HangKind.ONE_APART:
            return self._conclude()
        came_along = False
        for rank, stacks in self._stacks.items():
            calls = tuple((frame.file, frame.function) for frame in stacks.main)
            came_along |= bool(calls) and self._calls.get(rank, calls) != calls
            self._calls[rank] = calls
        silence_s = opened.began_s - hang.since_s
        if came_along and silence_s < self._settings.busy_s:
            self._open, self._held = None, _Held(hang, opened.began_s + max(LOOK_S, silence_s))
            return []
        if opened.rounds < ROUNDS:
            self._open = opened._replace(next_ask_s=opened.began_s + opened.rounds * ROUND_S)
            return []
        return self._conclude()

    def _look_again(self, now_s: float, detector: HangDetector) -> list[Said]:
        """What was held back is asked about anew, if it is still so."""
        held = self._held
        if held is None or self._open is not None or now_s < held.again_s:
            return []
        self._held = None
        return [self._begin(held.hang, now_s)] if detector.lasts else []

    def _conclude(self) -> list[Said]:
        found, self._open = self._open, None
        if found is None:
            return []
        self.last = hang = blame_by_stacks(found.hang, group_stacks(self._stacks))
        causes = find_causes_in(self._traces, self._stacks) if self._traces else []
        groups = find_groups_in(self._traces, self._layout)
        self._number += 1
        return [describe(self._number - 1, hang, self._stacks, self._facts, causes, groups)]

    def _forget(self) -> None:
        self._open = self._held = self.last = None
        self._stacks.clear()
        self._answers.clear()
        self._traces.clear()
        self._layout = ""


def blame_by_stacks(hang: Hang, groups: Sequence[StackGroup]) -> Hang:
    """The ranks to name: where a few are elsewhere in the code than most, those, whatever they use.

    Ranks that wait for others use unlike amounts of CPU, by threads that poll. A process' state is certain.
    """
    odd = find_odd(groups)
    blamed = tuple(rank for rank in odd if rank in hang.ranks) or odd or hang.ranks
    if hang.kind in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL) or blamed == hang.ranks:
        return hang
    return hang._replace(ranks=blamed, why=f"{hang.why}; apart by their stacks: {name_ranks(blamed)}")


def find_causes_in(traces: Iterable[bytes], stacks: Mapping[int, RankStacks]) -> list[Cause]:
    """What the ranks wait for, by their calls of torch.distributed. Args: traces: of nodes, packed."""
    from bootseer.diagnose.flight import fill_members
    from bootseer.diagnose.stuck import find_causes
    from launcher.supervise.ring import unpack_rings

    stopped = {rank: each.state in STOPPED_STATES for rank, each in stacks.items()}
    found = {rank: trace for data in traces for rank, trace in unpack_rings(data, stopped).items()}
    try:
        return find_causes(fill_members(found.values()))
    except (LookupError, ValueError, TypeError, RecursionError):
        return []  # calls that cannot be: a node has sent them


def find_groups_in(traces: Iterable[bytes], line: str) -> Mapping[str, Sequence[Sequence[int]]]:
    """The parallel groups of the job, by its own words, else by names of process groups. Args: see `answered`."""
    if not line and not traces:
        return {}
    from bootseer.diagnose.flight import fill_members
    from bootseer.diagnose.layout import groups_of, groups_of_calls, parse_layout
    from launcher.supervise.ring import unpack_rings

    if (layout := parse_layout(line)) is not None:
        return groups_of(layout)
    ranks = fill_members(trace for data in traces for trace in unpack_rings(data, {}).values())
    return groups_of_calls({call.group for trace in ranks for call in trace.calls})


def describe(
    number: int,
    hang: Hang,
    stacks: Mapping[int, RankStacks],
    facts: Mapping[int, RankFacts],
    causes: Sequence[Cause] = (),
    layout: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Finding:
    """The finding as a line, as text and for programs; the root cause first, where calls were traced."""
    groups = group_stacks(stacks)
    line = f"the job stands still ({hang.kind.value}): {hang.why}"
    told: list[str] = []
    listed: list[dict[str, Any]] = []
    if causes:
        from bootseer.diagnose.stuck import as_record
        from bootseer.diagnose.stuck import describe as describe_causes

        line = f"the job stands still ({hang.kind.value}): {causes[0].line}; {hang.why}"
        told = [*describe_causes(causes), *name_place(causes[0].ranks, layout or {})]
        listed = [as_record(each) for each in causes[:MOST_CAUSES]]
    text = "\n".join([line, *told, *format_groups(groups, layout), ""])
    if len(text) > MOST_TEXT_CHARACTERS:
        text = text[:MOST_TEXT_CHARACTERS] + "\n...\n"
    record = {
        **({"causes": listed} if listed else {}),
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
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
    }


def _from_record(record: dict[str, Any]) -> RankStacks:
    frames = tuple(Frame(str(file), int(line), str(function)) for file, line, function in record["frames"])
    return RankStacks(
        int(record["rank"]),
        int(record["pid"]),
        Source(record["source"]),
        main=frames[:MOST_FRAMES],
        state=str(record["state"])[:1],
        kernel=tuple(str(each)[:MOST_NOTE_CHARACTERS] for each in record["kernel"][:MOST_FRAMES]),
        note=str(record["note"])[:MOST_NOTE_CHARACTERS],
    )
