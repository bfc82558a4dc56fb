"""The order of a job's failures. In: the failures of all nodes. Out: the same in order, with what is uncertain.

Pure. Times are already on the coordinator's clock, each with a bound on its error. Two failures of one node share
that error, so their order is known far better than the bound. The rank's own report comes first: a rank that
bootrun stopped, or whose messages show a victim of another rank, is not the cause while there is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.rendezvous.messages import Failure

# Exits that the supervisor collects at once have no particular order; it collects within this time of an exit.
SAME_COLLECTION_NS = 2_000_000


class LostNode(NamedTuple):
    """A node whose agent sent nothing more: it failed some time between these two moments."""

    host: str
    received_ns: int
    noticed_ns: int


class OrderedFailures(NamedTuple):
    failures: tuple[Failure, ...]
    unsure: tuple[int, ...]  # ranks of which any may be the first; () if the first is known
    nodes: tuple[str, ...]  # lost nodes that may have failed first, before all ranks if `unsure` is empty


class _EndTime(NamedTuple):
    """The time of an end, on the coordinator's clock."""

    node: str  # unique for each agent; "" for a lost node
    time_ns: int
    error_ns: int


def order_failures(failures: Sequence[Failure], lost: Sequence[LostNode] = ()) -> OrderedFailures:
    """Order failures by how near they are to the cause, then by time."""
    classes = {id(failure): _nearness(failure) for failure in failures}
    ordered = sorted(failures, key=lambda f: (classes[id(f)], f.time_ns, f.rank))
    if not ordered:
        return OrderedFailures((), (), tuple(node.host for node in lost))
    nearest = classes[id(ordered[0])]
    rivals = [failure for failure in ordered if classes[id(failure)] == nearest]
    if lost and nearest != _CAUSE:  # ranks whose messages show victims are victims of the node
        return OrderedFailures(tuple(ordered), (), tuple(node.host for node in lost))
    first, nodes = _find_first(rivals, lost)
    if not first:
        return OrderedFailures(tuple(ordered), (), nodes)
    rest = [failure for failure in ordered if failure is not first[0]]
    unsure = tuple(sorted(f.rank for f in first)) if len(first) > 1 or nodes else ()
    return OrderedFailures((first[0], *rest), unsure, nodes)


_CAUSE, _TIMEOUT, _VICTIM, _STOPPED = range(4)


def _nearness(failure: Failure) -> int:
    from launcher.ranks.exits import find_sign

    if failure.stopped_by_us:
        return _STOPPED
    sign = find_sign(failure)
    if sign is None:
        return _CAUSE
    # If no rank has another reason, a rank that waited in vain ended before those that lost it.
    return _TIMEOUT if sign.weak else _VICTIM


def _find_first(rivals: Sequence[Failure], lost: Sequence[LostNode]) -> tuple[list[Failure], tuple[str, ...]]:
    """Return the failures before which no other certainly happened, earliest first; and such nodes."""
    moments = [_EndTime(f"{f.node}/{f.group_rank}", f.time_ns, f.error_ns) for f in rivals]
    gone = [_lost_moment(node) for node in lost]
    # Only the earliest of each node can rule others out, so this stays linear in the number of ranks.
    earliest: dict[str, _EndTime] = {}
    for moment in moments:
        known = earliest.get(moment.node)
        if known is None or moment.time_ns < known.time_ns:
            earliest[moment.node] = moment
    sooner = _Bounds([*earliest.values(), *gone])
    first = [
        failure for failure, moment in zip(rivals, moments, strict=True) if sooner.may_be_first(moment, earliest)
    ]
    nodes = tuple(node.host for node, moment in zip(lost, gone, strict=True) if sooner.may_be_first(moment, {}))
    return sorted(first, key=lambda f: (f.time_ns, f.rank)), nodes


def _lost_moment(node: LostNode) -> _EndTime:
    middle_ns = (node.received_ns + node.noticed_ns) // 2
    return _EndTime("", middle_ns, node.noticed_ns - middle_ns)


class _Bounds:
    """The two earliest upper bounds, so that a failure's own node can be left out."""

    def __init__(self, moments: Sequence[_EndTime]) -> None:
        self._highs = sorted((moment.time_ns + moment.error_ns, moment.node) for moment in moments)

    def may_be_first(self, moment: _EndTime, earliest: dict[str, _EndTime]) -> bool:
        own = earliest.get(moment.node)
        if own is not None and own.time_ns + SAME_COLLECTION_NS < moment.time_ns:
            return False
        low_ns = moment.time_ns - moment.error_ns - SAME_COLLECTION_NS
        for high_ns, node in self._highs[:2]:
            if high_ns < low_ns and not (own is not None and node == moment.node):
                return False
        return True
