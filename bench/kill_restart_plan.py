"""PURE: which process of `bench kill_restart` is killed when, drawn by a seed; and what came of it, judged.

A job of two nodes restarts; one process is killed at a moment of that restart, of the time before or after.
Moments are drawn from the stages, so that short ones get their share, and from time. What counts is what ranks
have done afterwards, and what the launchers that are left have said at their end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NODES, RANKS_OF_NODE = 2, 2
RANKS = NODES * RANKS_OF_NODE
TARGETS = ("agent0", "agent1", "guard0", "guard1", "coordinator", "fork_server")
# Since when the moment is counted, and how long after that it may be.
STAGES: dict[str, float] = {
    "before": 0.2,  # all ranks make steps; a rank fails a little later
    "failing": 0.01,  # a rank is about to end
    "examining": 0.2,  # the post-mortem command runs, ranks are held; with the steps of the ladder only
    "stopping": 0.0,  # the rest is told to end: as long as that takes
    "mending": 1.0,  # health checks of the nodes; the same
    "measuring": 0.5,  # and of the network between them
    "gathering": 0.01,  # the restart is decided: with a pause, as long as that takes
    "starting": 0.03,  # nodes have their ranks
    "joining": 0.1,  # the first rank of the next attempt runs
    "after": 0.3,  # all ranks have made a step
    "time": 0.8,  # from `failing` on
}
OF_LADDER = ("examining", "mending", "measuring")
MODES = ("elastic", "fixed", "replaced")
MAX_SLOW_S = 0.3  # that ranks take to end
PAUSE_S = 0.3  # before a second restart
WENT_ON, ENDED, UNCLEAR = "went on", "ended clearly", "unclear"
GOES_ON_STEPS = 3


class Kill(NamedTuple):
    """One SIGKILL."""

    number: int
    target: str
    node: int  # of the process
    host: int  # the node with the coordinator
    mode: str  # elastic: --nnodes 1:2; fixed: 2; replaced: 2, and bootrun is started there once more
    stage: str
    after_s: float
    restart: int  # of the job, from 1; the second has a pause before it
    fail_rank: int
    slow_s: float
    has_ladder: bool = False  # a post-mortem command, health checks and the pairwise test at each restart

    @property
    def must_go_on(self) -> bool:
        """Whether there is no reason for the job to end."""
        return self.target == "fork_server" or (self.node != self.host and self.mode != "fixed")

    def __str__(self) -> str:
        name = self.target if self.target[-1] in "01" else f"{self.target} (node {self.node})"
        when = f"{self.stage} + {self.after_s * 1000:.0f} ms of restart {self.restart}"
        ladder = ", with the ladder's steps" if self.has_ladder else ""
        return f"{self.number}: {name}, {self.mode}, {when}{ladder}"


def draw(seed: int, count: int, targets: Sequence[str] = TARGETS) -> list[Kill]:
    """So many kills: of each target in turn, each time at another stage, until all stages had their turn."""
    chance = random.Random(seed)
    stages: dict[str, list[str]] = {target: [] for target in targets}
    kills = []
    for number in range(count):
        target = targets[number % len(targets)]
        if not stages[target]:
            stages[target] = chance.sample(sorted(STAGES), len(STAGES))
        stage = stages[target].pop()
        node = int(target[-1]) if target[-1] in "01" else chance.randrange(NODES)
        if target == "coordinator":
            host = node
        elif target.startswith("agent"):
            host = 1 - node  # an agent that is no coordinator
        else:
            host = chance.randrange(NODES)
        slow_s = chance.choice([0.0, chance.uniform(0.0, MAX_SLOW_S)])
        restart = chance.choice([1, 2])
        max_s = STAGES[stage]
        if stage == "stopping":
            max_s = slow_s + 0.01
        elif stage == "gathering" and restart == 2:
            max_s = PAUSE_S
        kills.append(
            Kill(
                number=number,
                target=target,
                node=node,
                host=host,
                mode=chance.choice(MODES),
                stage=stage,
                after_s=chance.uniform(0.0, max_s),
                restart=restart,
                fail_rank=chance.randrange(RANKS),
                slow_s=slow_s,
                has_ladder=stage in OF_LADDER or chance.random() < 0.3,
            )
        )
    return kills


class Step(NamedTuple):
    """A line of a rank's progress."""

    at_ns: int  # of the monotonic clock
    pid: int
    restart: int
    world: int
    step: int  # -1: begun


def parse_progress(text: str) -> list[Step]:
    """The whole lines of a rank's progress."""
    whole = text[: text.rfind("\n") + 1]
    return [Step(*map(int, line.split())) for line in whole.splitlines()]


def goes_on_ns(ranks: Mapping[int, Sequence[Step]], since_ns: int, kill: Kill) -> int | None:
    """When all ranks of one world had made enough steps after `since_ns`; None: they have not.

    The world is that of the newest line: others have been given up. One in which a rank is still to fail is none,
    nor, where a node was lost, one that had begun before.
    """
    newest = max((steps[-1] for steps in ranks.values() if steps), default=None)
    if newest is None:
        return None
    world, restart = newest.world, newest.restart
    if restart < kill.restart and kill.fail_rank < world:
        return None
    moments = []
    for rank in range(world):
        steps = ranks.get(rank, ())
        if not steps or (steps[-1].world, steps[-1].restart) != (world, restart):
            return None
        own = [each for each in steps if each.pid == steps[-1].pid]
        made = [each.at_ns for each in own if each.step >= 0 and each.at_ns > since_ns]
        if len(made) < GOES_ON_STEPS or (kill.target != "fork_server" and own[0].at_ns <= since_ns):
            return None
        moments.append(made[GOES_ON_STEPS - 1])
    return max(moments)


class End(NamedTuple):
    """A launcher that has ended, and was not killed by the bench."""

    node: int
    status: int
    text: str  # all that it has printed


def find_unclear(kill: Kill, ends: Sequence[End], agent_pid: int, endpoint: str) -> str:
    """What is wrong with what launchers have said; "" where each names what died.

    Those that ended with an error do so in an error; those that went on without a node in any line.

    Args: agent_pid: of the bootrun on the node of what was killed.
    """
    for end in ends:
        begin = "bootrun: error: " if end.status else "bootrun: "
        if not end.status and (kill.target == "fork_server" or end.node == kill.node):
            continue  # nothing else has died, or this one has taken its place
        lines = [line for line in end.text.splitlines() if line.startswith(begin)]
        if not any(_names(kill, end.node, line, agent_pid, endpoint) for line in lines):
            said = lines[-1] if lines else "no error"
            return f"node {end.node} ended with status {end.status} and says: {said}"
    return ""


def _names(kill: Kill, node: int, line: str, agent_pid: int, endpoint: str) -> bool:
    is_supervisor = kill.target.startswith("guard")
    if is_supervisor and kill.node == node:
        return "the supervisor process is gone" in line
    if is_supervisor and "its supervisor process was killed" not in line:
        return False
    if kill.node == kill.host:
        return f"coordinator at {endpoint} is gone" in line or "the node of the coordinator" in line
    return f"(pid {agent_pid}, node rank {kill.node})" in line


def judge(kill: Kill, went_on: bool, ends: Sequence[End], unclear: str) -> tuple[str, str]:
    """What came of it, and why that is wrong ("" where it is right).

    Args: ends: of launchers that were not killed, in the job's end if it went on; unclear: see find_unclear.
    """
    if went_on:
        failed = [end for end in ends if end.status and end.node != kill.node]
        if failed:
            return UNCLEAR, f"went on, but node {failed[0].node} ended with status {failed[0].status}"
        return (UNCLEAR, unclear) if unclear else (WENT_ON, "")
    if not ends or any(end.status == 0 for end in ends):
        return UNCLEAR, "neither did it go on, nor did all launchers end with an error"
    if unclear:
        return UNCLEAR, unclear
    return ENDED, "it could have gone on" if kill.must_go_on else ""
