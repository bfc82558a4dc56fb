"""PURE: whether, and how long, a job waits for a silent node, which may not have ended.

A separate module, as only a job on several nodes loads it.
"""

from __future__ import annotations

from launcher.coordinator.nodes import NodeState, Silence, SilentNode
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous.messages import Note

# A node whose connection broke is back within this time, or it has ended.
CUT_S = 2.0
# The coordinator waits for a node that the job needs, or whose machine answers, this many times the silence that
# heartbeats allow.
PATIENCE = 4


def try_to_wait(
    state: JobState,
    number: int,
    how: Silence,
    reason: str,
    now_s: float,
    heard_s: float,
    limit_s: float,
    *,
    may_gather: bool,
) -> bool:
    """Wait for a silent node if the job needs it or can spare the time. Returns: whether it waits.

    Args: limit_s: the silence that heartbeats allow; may_gather: gathering waits for nothing but nodes.
    """
    nodes = state.nodes
    before = nodes.silent.get(number)
    wait_s = _patience_s(state, number, how, limit_s, may_gather)
    if wait_s <= 0:
        return False
    since_s = now_s if before is None or how is Silence.CUT else before.since_s
    nodes.silent[number] = SilentNode(how, reason, heard_s, since_s, since_s + wait_s)
    if how is not Silence.CUT and (before is None or before.how is Silence.CUT):
        text = (
            f"warning: no message from {nodes.by_number[number].name}: it {reason}; the job continues, waiting "
            f"for it up to {since_s + wait_s - now_s:.0f} s more"
        )
        for other in nodes.by_number.keys() - {number}:
            state.outbox.send(other, Note(text))
    return True


def _patience_s(state: JobState, number: int, how: Silence, limit_s: float, may_gather: bool) -> float:
    """Return how long to wait for a silent node; 0: not at all."""
    rules, node = state.rules, state.nodes.by_number[number]
    is_needed = state.nodes.count_able(number) < rules.min_nodes
    match state.phase:
        case Phase.RUNNING if node.state is not NodeState.WAITING:
            pass
        case Phase.STOPPING if node.state is not NodeState.WAITING and is_needed and state.may_go_on:
            pass
        case Phase.GATHERING if is_needed and may_gather:
            pass
        case _:
            return 0.0
    if how is Silence.CUT:
        return CUT_S if is_needed else 0.0
    max_s = (PATIENCE - 1) * limit_s
    if how is Silence.MUTE:
        return max_s if is_needed else 0.0
    return max(max_s, rules.join_s) if is_needed else max_s
