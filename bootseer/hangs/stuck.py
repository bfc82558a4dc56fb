"""The first stuck rank of a job that hangs in torch.distributed, over all its process groups. Pure.

In: the calls of all ranks (calls.py). Out: the rank for which the others wait, directly or over several groups,
its victims, the certainty and the reasons. Where ranks wait in a circle, the rank is named that breaks the order
of calls which it always followed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from bootseer.hangs.calls import Call, RankTrace, find_order_break, name_ranks
from bootseer.hangs.wait_graph import Joined, Meeting, WaitGraph, find_roots, find_waiting, find_waits, meeting_of

LATE_NS = 1_000_000_000  # a straggler is at least so much later than the others (Mycroft, table 3)
MAX_VICTIM_LINES = 8
MAX_RANKS = 1024  # in a record


class CauseKind(Enum):
    ABSENT = "did-not-enter"  # it is in no call: computes, sleeps, loads data
    ENDED = "has-ended"
    STOPPED = "is-stopped"
    UNSEEN = "not-traced"  # the calls of the rank are not known
    MISMATCH = "mismatch"  # operation, size, type or root
    MESSAGE = "message-without-its-end"  # a send without a receive, or the reverse
    ORDER = "different-order"  # of groups
    TRANSFER = "does-not-end"  # all are in it: a slow sender, the network, the library


class Certainty(Enum):
    CERTAIN = "certain"
    LIKELY = "likely"
    UNSURE = "unsure"


class Cause(NamedTuple):
    kind: CauseKind
    ranks: tuple[int, ...]  # the culprits; all participants if nothing singles one out
    call: str  # the one in which the others wait
    sure: Certainty
    line: str
    why: tuple[str, ...]
    victims: tuple[int, ...]
    waiting: tuple[str, ...]  # lines on what victims do


def find_causes(traces: Iterable[RankTrace]) -> list[Cause]:
    """Return the causes, the one with most waiting ranks first, of equals the oldest; [] if no rank waits."""
    by_rank = {each.rank: each for each in traces}
    waits = find_waits(by_rank)
    found = []
    for end in find_roots(waits):
        ranks = sorted(node for node in end if isinstance(node, int))
        meetings = [node for node in end if not isinstance(node, int)]
        behind = find_waiting(waits, end)
        kind, blamed, call, sure, line, why = _judge(ranks, meetings, waits, by_rank)
        victims = tuple(sorted(behind - set(blamed)))
        cause = Cause(kind, blamed, call, sure, line, why, victims, _name_waiting(victims, waits))
        found.append((-len(behind), _last_ns(by_rank, blamed), cause))
    return [cause for *_, cause in sorted(found, key=lambda each: (each[0], each[1], each[2].ranks))]


def find_mismatches(traces: Iterable[RankTrace]) -> list[Cause]:
    """Return causes from calls of failed ranks that did not match each other, the oldest first.

    Gloo ends a rank that receives more than its buffer holds; the others then fail because it is gone.
    """
    by_rank = {each.rank: each for each in traces}
    there: dict[Meeting, dict[int, Call]] = {}
    for rank, trace in by_rank.items():
        for call in trace.calls:
            there.setdefault(meeting_of(call, rank), {})[rank] = call
    found = []
    for here in there.values():
        met = Joined(here, ())
        if any(not call.left_ns or call.failed for call in here.values()) and (odd := met.odd()):
            judged = _judge_mismatch(met, odd, by_rank)
            victims = tuple(sorted(here.keys() - set(judged[1])))
            found.append((min(call.entered_ns for call in here.values()), Cause(*judged, victims, ())))
    return [cause for _, cause in sorted(found, key=lambda each: (each[0], each[1].ranks))]


_Judged = tuple[CauseKind, tuple[int, ...], str, Certainty, str, tuple[str, ...]]


def _judge(
    ranks: Sequence[int],
    meetings: Sequence[Meeting],
    waits: WaitGraph,
    by_rank: Mapping[int, RankTrace],
) -> _Judged:
    for meeting in meetings:
        if odd := waits.meetings[meeting].odd():
            return _judge_mismatch(waits.meetings[meeting], odd, by_rank)
    if not meetings:
        return _judge_absent(ranks[0], waits, by_rank)
    if not ranks:
        return _judge_transfer(waits.meetings[meetings[0]], by_rank)
    return _judge_circle(ranks, meetings, waits, by_rank)


def _judge_absent(rank: int, waits: WaitGraph, by_rank: Mapping[int, RankTrace]) -> _Judged:
    missed = [met for met in waits.meetings.values() if rank in met.missing]
    # The call that misses only this rank: it may be absent from others because it is absent from this one.
    met = min(missed, key=lambda each: (len(each.missing), min(call.entered_ns for call in each.here.values())))
    call = next(iter(met.here.values()))
    trace = by_rank.get(rank)
    if trace is None:
        line = f"rank {rank} has not entered {call}, and its state is unknown"
        return CauseKind.UNSEEN, (rank,), str(call), Certainty.LIKELY, line, ("its calls cannot be read",)
    name = _counterpart(call, met)
    why = [_last_words(trace)]
    sure = Certainty.CERTAIN
    turn = find_order_break(trace.calls)
    if turn is not None:
        why.append(f"before that it made {turn} where it had always made another call")
    if call.is_message() and (wrong := _other_tag(trace, call, met)) is not None:
        why.append(f"it made {wrong} with tag {wrong.tag}, not {call.tag}")
        line = f"rank {rank} has not made {name}, but one with another tag"
        return CauseKind.MESSAGE, (rank,), str(call), sure, line, tuple(why)
    if trace.ended:
        return CauseKind.ENDED, (rank,), str(call), sure, f"rank {rank} has ended without {name}", tuple(why)
    if trace.stopped:
        return CauseKind.STOPPED, (rank,), str(call), sure, f"rank {rank} is stopped before {name}", tuple(why)
    newest = max(trace.calls, key=lambda each: each.serial, default=None)
    if newest is not None and newest.lost:
        line = f"rank {rank} has not entered {name}; whether it is still in {newest} cannot be observed"
        return CauseKind.ABSENT, (rank,), str(call), Certainty.UNSURE, line, tuple(why)
    line = f"rank {rank} has not entered {name}, and is in no other call"
    return CauseKind.ABSENT, (rank,), str(call), sure, line, tuple(why)


def _judge_mismatch(met: Joined, odd: tuple[int, ...], by_rank: Mapping[int, RankTrace]) -> _Judged:
    sure = Certainty.CERTAIN if len(odd) < len(met.here) else Certainty.UNSURE
    why = [f"rank {rank}: {call}, {call.amount()}" for rank, call in sorted(met.here.items())][:MAX_VICTIM_LINES]
    if sure is Certainty.UNSURE and (
        turned := _find_turned(odd, by_rank, why) or _find_new(odd, met, by_rank, why)
    ):
        odd, sure = turned, Certainty.LIKELY
    calls = list(met.here.values())
    first = next((call for rank, call in met.here.items() if rank not in odd), calls[0])
    operations = {call.op for call in calls}
    if len(operations) > 1 and not first.is_message():
        own = " and ".join(sorted({call.op for rank, call in met.here.items() if rank in odd}))
        line = f"{name_ranks(odd)} made {own} where others made {first}"
    else:
        line = f"{name_ranks(odd)} entered {first} with another size, type or root"
    return CauseKind.MISMATCH, odd, str(first), sure, line, tuple(why)


def _judge_transfer(met: Joined, by_rank: Mapping[int, RankTrace]) -> _Judged:
    call = next(iter(met.here.values()))
    still = sorted(rank for rank, each in met.here.items() if each.is_open())
    stopped = tuple(rank for rank in met.here if rank in by_rank and by_rank[rank].stopped)
    if stopped:
        line = f"{name_ranks(stopped)} is stopped in {call}"
        return CauseKind.STOPPED, stopped, str(call), Certainty.CERTAIN, line, ("all others are in the same call",)
    if call.is_message():
        source = next((rank for rank, each in met.here.items() if each.op == "send"), call.peer)
        line = f"{call}: both ends have entered it, and it does not end: slow sender, rank {source}, or network"
        return CauseKind.TRANSFER, (source,), str(call), Certainty.UNSURE, line, (call.amount(),)
    times = sorted((each.entered_ns, rank) for rank, each in met.here.items())
    if len(still) < len(met.here):
        line = f"{name_ranks(still)} has not left {call}, others have"
        return CauseKind.TRANSFER, tuple(still), str(call), Certainty.LIKELY, line, (call.amount(),)
    late_ns = times[-1][0] - times[-2][0] if len(times) > 1 else 0
    if late_ns >= LATE_NS:
        line = f"all have entered {call} and it does not end; rank {times[-1][1]} entered last"
        why = (f"{late_ns / 1e9:.1f} s after the others",)
        return CauseKind.TRANSFER, (times[-1][1],), str(call), Certainty.UNSURE, line, why
    line = f"all have entered {call} and it does not end: the network, or the library"
    return CauseKind.TRANSFER, tuple(still), str(call), Certainty.UNSURE, line, (call.amount(),)


def _judge_circle(
    ranks: Sequence[int], meetings: Sequence[Meeting], waits: WaitGraph, by_rank: Mapping[int, RankTrace]
) -> _Judged:
    mets = [waits.meetings[meeting] for meeting in meetings]
    calls = [_own_call(rank, waits) for rank in ranks]
    why: list[str] = [f"rank {rank} waits in {call}" for rank, call in zip(ranks, calls, strict=True)]
    why = why[:MAX_VICTIM_LINES]
    first = str(calls[0])
    idle = tuple(rank for rank, call in zip(ranks, calls, strict=True) if not call.waited_for)
    if idle and len(idle) < len(ranks):
        line = f"{name_ranks(idle)} has calls in progress but waits for none of them, and has not entered those"
        line += " in which the others wait"
        return CauseKind.ABSENT, idle, _missed_by(idle, mets) or first, Certainty.LIKELY, line, tuple(why)
    turned = _find_turned(ranks, by_rank, why)
    blamed = turned or tuple(ranks)
    sure = Certainty.LIKELY if turned else Certainty.UNSURE
    missed = _missed_by(blamed, mets) or first
    if all(call.is_message() for call in calls) or (turned and all(map(_is_message, _missed(turned, mets)))):
        line = f"{missed} has no counterpart: {name_ranks(blamed)}"
        line += " did not make it, and waits elsewhere" if turned else " wait in a circle"
        return CauseKind.MESSAGE, blamed, missed, sure, line, tuple(why)
    line = f"{name_ranks(blamed)} made calls in another order than the rest and has not entered {missed}"
    line += "; ranks wait in a circle"
    return CauseKind.ORDER, blamed, missed, sure, line, tuple(why)


def _is_message(call: Call) -> bool:
    return call.is_message()


def _missed(ranks: Iterable[int], mets: Iterable[Joined]) -> list[Call]:
    """Return the calls that these ranks have not entered."""
    wanted = set(ranks)
    return [next(iter(met.here.values())) for met in mets if wanted & set(met.missing)]


def _missed_by(ranks: Iterable[int], mets: Iterable[Joined]) -> str:
    return next((str(call) for call in _missed(ranks, mets)), "")


def _find_turned(ranks: Iterable[int], by_rank: Mapping[int, RankTrace], why: list[str]) -> tuple[int, ...]:
    """Return the ranks that break their usual order of calls; () if none or all of them do."""
    among = tuple(ranks)
    turns = {rank: find_order_break(by_rank[rank].calls) for rank in among if rank in by_rank}
    found = tuple(rank for rank, turn in turns.items() if turn is not None)
    if not found or len(found) == len(among):
        return ()
    why += [f"rank {rank} made {turns[rank]} where it had always made another call" for rank in found]
    return found


def _find_new(
    ranks: Iterable[int], met: Joined, by_rank: Mapping[int, RankTrace], why: list[str]
) -> tuple[int, ...]:
    """Return the ranks whose call has a size or type that is new for its kind; () if none or all have."""
    among = [rank for rank in ranks if rank in by_rank]
    new = []
    for rank in among:
        call = met.here[rank]
        same = [each for each in by_rank[rank].calls if each.kind() == call.kind() and each.serial < call.serial]
        if same and call.alike() not in {each.alike() for each in same}:
            new.append(rank)
    if not new or len(new) == len(among):
        return ()
    why += [f"rank {rank} never used that size or type in it before" for rank in new]
    return tuple(new)


def _own_call(rank: int, waits: WaitGraph) -> Call:
    return waits.meetings[waits.of_rank[rank][0]].here[rank]


def _counterpart(call: Call, met: Joined) -> str:
    """Return the call that a rank should have made, for users."""
    if not call.is_message():
        return str(call)
    other = next(iter(met.here))
    if call.op == "send":
        return f"receive #{call.seq} from rank {other} in {call.group}"
    return f"send #{call.seq} to rank {other} in {call.group}" if call.peer >= 0 else str(call)


def _other_tag(trace: RankTrace, call: Call, met: Joined) -> Call | None:
    """Return a message of the rank that would be the other end but for its tag."""
    other = next(iter(met.here))
    ops = ("send",) if call.op != "send" else ("recv",)
    for each in reversed(trace.calls):
        if each.op in ops and each.peer == other and each.group == call.group:
            is_wrong = each.tag != call.tag and each.entered_ns > call.entered_ns - LATE_NS
            return each if is_wrong and each.is_open() else None
    return None


def _last_words(trace: RankTrace) -> str:
    if not trace.calls:
        return f"rank {trace.rank} has made no call yet"
    last = max(trace.calls, key=lambda call: call.serial)
    return f"the last call of rank {trace.rank} was {last}"


def _last_ns(by_rank: Mapping[int, RankTrace], ranks: Iterable[int]) -> int:
    """Return when they were last observed in a call."""
    times = [
        max((max(call.entered_ns, call.left_ns) for call in by_rank[rank].calls), default=0)
        for rank in ranks
        if rank in by_rank
    ]
    return min(times, default=0)


def _name_waiting(victims: Sequence[int], waits: WaitGraph) -> tuple[str, ...]:
    """Return lines as `ranks 0-2 wait in all_reduce #5 of dp for rank 3`, the most frequent first."""
    wanted = set(victims)
    lines = []
    for met in waits.meetings.values():
        here = [rank for rank in met.here if rank in wanted and met.here[rank].is_open()]
        if here:
            waits_for = f" for {name_ranks(met.missing)}" if met.missing else ""
            verb = "waits" if len(here) == 1 else "wait"
            lines.append((-len(here), f"{name_ranks(here)} {verb} in {met.here[here[0]]}{waits_for}"))
    return tuple(line for _, line in sorted(lines)[:MAX_VICTIM_LINES])


def describe(causes: Sequence[Cause]) -> list[str]:
    """Return lines for users, the root cause first; [] where there is none."""
    lines = []
    for number, cause in enumerate(causes[:3]):
        what = "root cause" if not number else "also"
        lines.append(f"{what} ({cause.sure.value}): {cause.line}")
        lines += [f"    {each}" for each in cause.why]
        if cause.victims:
            lines.append(f"  victims: {name_ranks(cause.victims)}")
            lines += [f"    {each}" for each in cause.waiting]
    return lines


def as_record(cause: Cause) -> dict[str, object]:
    ranks = {"ranks": list(cause.ranks[:MAX_RANKS]), "victims": list(cause.victims[:MAX_RANKS])}
    return {**cause._asdict(), "kind": cause.kind.value, "sure": cause.sure.value, **ranks}
