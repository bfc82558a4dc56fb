"""Which failure of a job was the first: the failures of all nodes in, in order and with what is not sure out.

Pure. Times are already those of the coordinator's clock, each with a bound on its error; two failures of one node
share that error, so their order is known far better than the bound. What a rank said of itself comes first: one
that was stopped by us, or whose words show it a victim of another, is not the cause while there is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.rendezvous.messages import Failure

# Exits that the guard finds in one look are in no particular order; it looks within this time of an exit.
SAME_LOOK_NS = 2_000_000


class LostNode(NamedTuple):
    """A node whose agent was not heard of any more: it failed some time between these two moments."""

    host: str
    heard_ns: int
    noticed_ns: int


class Ordered(NamedTuple):
    """The failures of a job, the first failure first."""

    failures: tuple[Failure, ...]
    unsure: tuple[int, ...]  # ranks of which none can be told to be the first; () when it is known
    nodes: tuple[str, ...]  # lost nodes that may have been the first, before all ranks when `unsure` is empty


class _Moment(NamedTuple):
    """When something ended, on the coordinator's clock."""

    node: str  # unlike for each agent; "" for a lost node
    time_ns: int
    error_ns: int


def order_failures(failures: Sequence[Failure], lost: Sequence[LostNode] = ()) -> Ordered:
    """Orders failures by how near they are to the cause, then by time."""
    classes = {id(failure): _nearness(failure) for failure in failures}
    ordered = sorted(failures, key=lambda f: (classes[id(f)], f.time_ns, f.rank))
    if not ordered:
        return Ordered((), (), tuple(node.host for node in lost))
    nearest = classes[id(ordered[0])]
    rivals = [failure for failure in ordered if classes[id(failure)] == nearest]
    if lost and nearest != _CAUSE:  # ranks that say they are victims are victims of the node
        return Ordered(tuple(ordered), (), tuple(node.host for node in lost))
    first, nodes = _find_first(rivals, lost)
    if not first:
        return Ordered(tuple(ordered), (), nodes)
    rest = [failure for failure in ordered if failure is not first[0]]
    unsure = tuple(sorted(f.rank for f in first)) if len(first) > 1 or nodes else ()
    return Ordered((first[0], *rest), unsure, nodes)


_CAUSE, _TIMEOUT, _VICTIM, _STOPPED = range(4)


def _nearness(failure: Failure) -> int:
    from launcher.ranks.exits import find_sign

    if failure.stopped_by_us:
        return _STOPPED
    sign = find_sign(failure)
    if sign is None:
        return _CAUSE
    # Where nobody has another reason, a rank that waited in vain ended before those that lost it.
    return _TIMEOUT if sign.weak else _VICTIM


def _find_first(rivals: Sequence[Failure], lost: Sequence[LostNode]) -> tuple[list[Failure], tuple[str, ...]]:
    """Those before which nothing else is certain to have been, earliest first; and such nodes."""
    moments = [_Moment(f"{f.node}/{f.group_rank}", f.time_ns, f.error_ns) for f in rivals]
    gone = [_lost_moment(node) for node in lost]
    # Only the earliest of each node can rule others out, so this stays linear in the number of ranks.
    earliest: dict[str, _Moment] = {}
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


def _lost_moment(node: LostNode) -> _Moment:
    middle_ns = (node.heard_ns + node.noticed_ns) // 2
    return _Moment("", middle_ns, node.noticed_ns - middle_ns)


class _Bounds:
    """The two earliest upper bounds, so that one's own node can be left out."""

    def __init__(self, moments: Sequence[_Moment]) -> None:
        self._highs = sorted((moment.time_ns + moment.error_ns, moment.node) for moment in moments)

    def may_be_first(self, moment: _Moment, earliest: dict[str, _Moment]) -> bool:
        own = earliest.get(moment.node)
        if own is not None and own.time_ns + SAME_LOOK_NS < moment.time_ns:
            return False
        low_ns = moment.time_ns - moment.error_ns - SAME_LOOK_NS
        for high_ns, node in self._highs[:2]:
            if high_ns < low_ns and not (own is not None and node == moment.node):
                return False
        return True
