"""Wait-for graph of ranks and calls of torch.distributed that do not end. Pure.

A rank points to the calls it is in, a call to the ranks that have not entered it. Where the arrows end is what all
others wait for. (Mycroft, 3.5, searches for the rank with the fewest calls; the graph also works over several
groups.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bootseer.hangs.calls import Call, Group, RankTrace

# A collective, or the two ends of a message: group, operation ("" for collectives), source, target, tag, number.
Meeting = tuple[Group, str, int, int, int, int]
Node = int | Meeting


class Joined(NamedTuple):
    """A meeting of ranks that has not ended."""

    here: dict[int, Call]  # the ranks that have entered, as far as recorded
    missing: tuple[int, ...]  # the ranks that have not

    def odd(self) -> tuple[int, ...]:
        """Return the ranks whose call differs from the majority; all if there is no majority; () for none."""
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


class WaitGraph(NamedTuple):
    meetings: dict[Meeting, Joined]
    of_rank: dict[int, tuple[Meeting, ...]]  # the meetings in which a rank waits

    def followers(self, node: Node) -> Sequence[Node]:
        if isinstance(node, int):
            return self.of_rank.get(node, ())
        return self.meetings[node].missing


def meeting_of(call: Call, rank: int) -> Meeting:
    if not call.is_message():
        return call.group, "", -1, -1, 0, call.seq
    source, target = (rank, call.peer) if call.op == "send" else (call.peer, rank)
    return call.group, "message", source, target, call.tag, call.seq


def find_waits(traces: Mapping[int, RankTrace]) -> WaitGraph:
    """Build the graph of open calls, without unobserved ends and calls queued behind open ones."""
    begun = {rank: _begun(trace.calls) for rank, trace in traces.items()}
    came: dict[tuple[Group, int], int] = {}  # number of collectives entered, by group and rank
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
            return ()  # it is unknown which of those it was
        return (call.peer,)

    meetings: dict[Meeting, Joined] = {}
    of_rank: dict[int, list[Meeting]] = {}
    for rank, trace in traces.items():
        if trace.ended:
            continue
        open_calls = [call for call in begun[rank] if call.is_open()]
        found = []
        for call in open_calls:
            meeting = meeting_of(call, rank)
            if meeting not in meetings:
                meetings[meeting] = Joined(there[meeting], missing(call, rank))
            met = meetings[meeting]
            # No rank is missing and none waits for it: only its end was not observed yet.
            if met.missing or met.odd() or call.waited_for:
                found.append((meeting, call.waited_for))
        waited = [meeting for meeting, is_waited_for in found if is_waited_for]
        if found:
            of_rank[rank] = waited or [meeting for meeting, _ in found]
    return WaitGraph(meetings, {rank: tuple(found) for rank, found in of_rank.items()})


def _begun(calls: Sequence[Call]) -> Sequence[Call]:
    """Return the calls without those that an accelerator has not begun because an older one has not ended."""
    behind = min((call.serial for call in calls if call.in_order and call.is_open()), default=None)
    if behind is None:
        return calls
    # A call that has ended was not queued there: it is on a CPU, or in another stream.
    return [call for call in calls if call.serial <= behind or not (call.on_device and call.is_open())]


def find_roots(waits: WaitGraph) -> list[tuple[Node, ...]]:
    """Return where the arrows end: ranks that wait for no other, meetings that miss no rank, and circles."""
    groups = _strong(waits)
    of = {node: number for number, group in enumerate(groups) for node in group}
    return [
        group
        for number, group in enumerate(groups)
        if all(of[after] == number for node in group for after in waits.followers(node))
    ]


def find_waiting(waits: WaitGraph, ends: Iterable[Node]) -> set[int]:
    """Return the ranks that wait for these, directly or over others."""
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


def _strong(waits: WaitGraph) -> list[tuple[Node, ...]]:
    """Return the strongly connected components (Tarjan 1972), without recursion."""
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
