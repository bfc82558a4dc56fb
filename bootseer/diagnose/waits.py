"""Who waits for whom in calls of torch.distributed that do not end: a graph of ranks and calls. Pure.

A rank points to the calls it is in, a call to the ranks that have not come to it. Where the arrows end is what all
the others wait for (Mycroft, 3.5, looks for the rank with the fewest calls; the graph holds over several groups).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bootseer.diagnose.calls import Call, Group, RankTrace

# A collective, or the two ends of a message: group, operation ("" for collectives), source, target, tag, number.
Meeting = tuple[Group, str, int, int, int, int]
Node = int | Meeting


class Met(NamedTuple):
    """A meeting of ranks that has not ended."""

    here: dict[int, Call]  # who has come, as far as that is recorded
    missing: tuple[int, ...]  # who has not

    def odd(self) -> tuple[int, ...]:
        """Those that do something else than most; all of them where no kind has more than half; () for none."""
        kinds: dict[object, list[int]] = {}
        for rank, call in self.here.items():
            is_message = call.is_message()
            what = (call.size_bytes, call.dtype) if is_message else (call.op, *call.alike())
            kinds.setdefault(what, []).append(rank)
        if len(kinds) < 2:
            return ()
        most = max(kinds.values(), key=len)
        rest = [rank for ranks in kinds.values() if ranks is not most for rank in ranks]
        return tuple(sorted(rest if 2 * len(most) > len(self.here) else self.here))


class Waits(NamedTuple):
    """The graph."""

    meetings: dict[Meeting, Met]
    of_rank: dict[int, tuple[Meeting, ...]]  # the meetings in which a rank is and waits

    def followers(self, node: Node) -> Sequence[Node]:
        if isinstance(node, int):
            return self.of_rank.get(node, ())
        return self.meetings[node].missing


def meeting_of(call: Call, rank: int) -> Meeting:
    if not call.is_message():
        return call.group, "", -1, -1, 0, call.seq
    source, target = (rank, call.peer) if call.op == "send" else (call.peer, rank)
    return call.group, "message", source, target, call.tag, call.seq


def find_waits(traces: Mapping[int, RankTrace]) -> Waits:
    """What is open, without what only was not seen to end, and what is queued behind what is open."""
    begun = {rank: _begun(trace.calls) for rank, trace in traces.items()}
    came: dict[tuple[Group, int], int] = {}  # to how many collectives of a group
    sent: dict[tuple[Group, str, int, int, int], int] = {}
    there: dict[Meeting, dict[int, Call]] = {}
    for rank, calls in begun.items():
        for call in calls:
            meeting = meeting_of(call, rank)
            there.setdefault(meeting, {})[rank] = call
            if call.is_message():
                way = (call.group, call.op, meeting[2], meeting[3], call.tag)
                sent[way] = max(sent.get(way, 0), call.seq)
            else:
                came[call.group, rank] = max(came.get((call.group, rank), 0), call.seq)

    def missing(call: Call, rank: int) -> tuple[int, ...]:
        group = call.group
        if not call.is_message():
            return tuple(each for each in group.ranks if each != rank and came.get((group, each), 0) < call.seq)
        if call.op == "recv_any_source":
            others = [each for each in group.ranks if each != rank]
            got = sum(sent.get((group, "send", each, rank, call.tag), 0) for each in others)
            return () if got >= call.seq else tuple(others)
        other = "recv" if call.op == "send" else "send"
        _, _, source, target, tag, _ = meeting_of(call, rank)
        if sent.get((group, other, source, target, tag), 0) >= call.seq:
            return ()
        if other == "recv" and sent.get((group, "recv_any_source", -1, target, tag), 0) > 0:
            return ()  # which of those it was cannot be told
        return (call.peer,)

    meetings: dict[Meeting, Met] = {}
    of_rank: dict[int, list[Meeting]] = {}
    for rank, trace in traces.items():
        if trace.ended:
            continue
        open_calls = [call for call in begun[rank] if call.is_open()]
        found = []
        for call in open_calls:
            meeting = meeting_of(call, rank)
            if meeting not in meetings:
                meetings[meeting] = Met(there[meeting], missing(call, rank))
            met = meetings[meeting]
            # Nobody is missed and nobody waits for it: that it has ended was only not seen yet.
            if met.missing or met.odd() or call.waited_for:
                found.append((meeting, call.waited_for))
        waited = [meeting for meeting, is_waited_for in found if is_waited_for]
        if found:
            of_rank[rank] = waited or [meeting for meeting, _ in found]
    return Waits(meetings, {rank: tuple(found) for rank, found in of_rank.items()})


def _begun(calls: Sequence[Call]) -> Sequence[Call]:
    """Without those that an accelerator has not come to, as an older one has not ended."""
    behind = min((call.serial for call in calls if call.in_order and call.is_open()), default=None)
    if behind is None:
        return calls
    # What has ended was not queued there: it is on a CPU, or in another stream.
    return [call for call in calls if call.serial <= behind or not (call.on_device and call.is_open())]


def find_ends(waits: Waits) -> list[tuple[Node, ...]]:
    """Where the arrows end: single ranks that wait for nobody, single meetings that miss nobody, and circles."""
    groups = _strong(waits)
    of = {node: number for number, group in enumerate(groups) for node in group}
    return [
        group
        for number, group in enumerate(groups)
        if all(of[after] == number for node in group for after in waits.followers(node))
    ]


def find_behind(waits: Waits, ends: Iterable[Node]) -> set[int]:
    """Ranks that wait, over however many others, for these."""
    before: dict[Node, list[Node]] = {}
    nodes: list[Node] = [*waits.of_rank, *waits.meetings]
    for node in nodes:
        for after in waits.followers(node):
            before.setdefault(after, []).append(node)
    seen = set(ends)
    left = list(seen)
    while left:
        for node in before.get(left.pop(), ()):
            if node not in seen:
                seen.add(node)
                left.append(node)
    return {node for node in seen if isinstance(node, int)}


def _strong(waits: Waits) -> list[tuple[Node, ...]]:
    """Strongly connected components (Tarjan 1972), without recursion."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    found: list[tuple[Node, ...]] = []
    for root in waits.of_rank:
        if root in number:
            continue
        work: list[tuple[Node, int]] = [(root, 0)]
        while work:
            node, place = work.pop()
            if not place:
                number[node] = low[node] = len(number)
                stack.append(node)
                on_stack.add(node)
            after = waits.followers(node)
            while place < len(after) and (after[place] in number):
                if after[place] in on_stack:
                    low[node] = min(low[node], low[after[place]])
                place += 1
            if place < len(after):
                work += [(node, place + 1), (after[place], 0)]
                continue
            if low[node] == number[node]:
                group: list[Node] = []
                while not group or group[-1] != node:
                    group.append(stack.pop())
                on_stack.difference_update(group)
                found.append(tuple(group))
            if work:
                above = work[-1][0]
                low[above] = min(low[above], low[node])
    return found
