"""PURE: the brain of a job, at its coordinator: facts from the nodes in, orders to the nodes out.

It decides who takes part, which ranks they have, when an attempt ends and what comes next. One restart budget and
one attempt counter hold for the whole job (ours: torchrun keeps both per agent). The shell around it
(rendezvous/host.py) brings messages, lost nodes and the time; a job on one node uses the same brain.

    GATHERING --enough nodes--> RUNNING --first failure, node lost or joining, signal--> STOPPING
        ^                          |all nodes succeeded                                    |all nodes stopped
        +------- restart ----------|-------------------------------------------------------+
                                   +-----------------> FINISHED <---- budget spent, signal -+
Where that was asked for, EXAMINING (post-mortem command) comes before STOPPING, and MENDING (ladder.py) after it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import Enum

from bootseer.light_typing import TYPE_CHECKING, NamedTuple
from launcher.policy import NoProgress, RestartPolicy, SameError, StepLimits
from launcher.rendezvous import ranks
from launcher.rendezvous.messages import (
    CheckTold,
    ClockSays,
    Distributions,
    Environment,
    Examine,
    Examined,
    Failure,
    FailurePage,
    Finish,
    FromCoordinator,
    FromMember,
    GaveUp,
    Identity,
    Join,
    Leave,
    Mended,
    NodeStacks,
    Note,
    PairPort,
    PairResult,
    RankFailed,
    RankLooks,
    Refused,
    RuleFound,
    RuleSeen,
    RuleTold,
    Runs,
    SetupNews,
    Signalled,
    Spare,
    Standstill,
    Started,
    Stop,
    Stopped,
    Succeeded,
    WantEnvironment,
    WantStacks,
    Welcome,
)

if TYPE_CHECKING:
    from bootseer.health.finding import Finding as CheckFinding
    from bootseer.health.limits import Limits
    from launcher.exclusion import Exclusion
    from launcher.ladder import Fault
    from launcher.mending import Asked
    from launcher.pair_test import PairTest
    from launcher.ranks.cause import LostNode, Ordered
    from launcher.recovery import Recovery
    from launcher.rules.job_watch import Finding as BrokenRule
    from launcher.rules.job_watch import RuleWatch
    from launcher.rules.rule import Rule
    from launcher.setup_policy import JobSetup
    from launcher.setup_policy import Order as SetupSend
    from launcher.skew import ClockWatch
    from launcher.supervise.facts import RankFacts
    from launcher.supervise.failure_notes import FailureNotes
    from launcher.supervise.watch import HangWatch, Said

# Several nodes that join a running job within this time cost it one restart, not one each.
JOIN_SETTLE_S = 1.0
# What a node gets, on top of its ranks' grace, to reap unkillable processes and to answer.
STOP_MARGIN_S = 12.0
# A rank 0 that found its port taken is started again this often without touching the budget.
MOST_EARLY = 64  # ranks that are told
MOST_PORT_RETRIES = 10
MOST_FAILURES_TOLD = 64
MOST_JUDGED = 64  # of the first failures, for what may be a machine's or the network's matter
MOST_CHECKS_TOLD = 64  # findings between nodes that all are told; the rest only who it is about
# Of join_s: for all nodes to have the kept environment. What is left suffices to run set-up after it.
USE_SHARE = 0.5
# How long before its connection broke a node may have failed, where the shell does not know better; and before it
# said that it leaves.
UNHEARD_S, LEFT_S = 5.0, 1.0
ALIKE_S = 0.4  # after an error of the code, for the other ranks to come to the same line
MOST_LOST_TOLD = 8  # nodes of an attempt; each is told to all others
# A node whose connection broke is back within that, or it has ended.
CUT_S = 2.0
# So many times the silence that heartbeats allow, a node is waited for that the job cannot do without, or whose
# machine answers.
PATIENCE = 4
# A rank that somebody ends by one of these says nothing of whether the job gets on.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# News of set-up.
ENDS_JOB = {"failed": "set-up failed", "strict": "--strict: something failed", "misplaced": "no such store"}


class JobRules(NamedTuple):
    """What the job was asked for; all times in seconds."""

    run_id: str
    min_nodes: int
    max_nodes: int
    static: bool = False
    master: tuple[str, int] | None = None  # given by the user; None: rank 0's node offers one for each attempt
    max_restarts: int = 0
    max_membership_changes: int = 20
    grace_s: float = 30.0  # --shutdown-timeout
    join_s: float = 600.0
    last_call_s: float = 30.0
    early_s: float = 30.0  # an attempt that fails sooner is retried with backoff
    backoff_s: float = 1.0  # 0: no backoff
    restart_refill_s: float | None = None
    on_hang: str = "off"  # off | report | restart
    hang_least_s: float = 15.0
    log_rules: tuple[Rule, ...] = ()  # over what ranks print
    stops_on_same_error: bool = True
    excludes_nodes: bool = True
    stops_without_progress: bool = True
    give_up_status: int = 1  # when starting again cannot help
    check_pairs: str = "off"  # the network between nodes: network (after failures of it) | always | off
    check_limits: tuple[tuple[str, float], ...] = ()  # of health checks, where they are others
    allow_mixed: bool = False
    mixed_arguments: bool = False  # nodes may run different things
    open_membership: bool = True
    frees_endpoint: bool = False  # rank 0 binds the coordinator's own port (static, several nodes)
    setup_s: float = 0.0  # what set-up may take on top of join_s until all environments are there
    setup_wait_s: float = 0.0  # for the node that builds
    steps: StepLimits = StepLimits()  # of the restart ladder


class Send(NamedTuple):
    """Order: this message to that node."""

    node: int
    message: FromCoordinator


class Listen(NamedTuple):
    """Order: free the endpoint's port for rank 0, or take it again."""

    on: bool


Order = Send | Listen


class Phase(Enum):
    GATHERING = "gathering"
    RUNNING = "running"
    EXAMINING = "examining"  # the attempt has failed, its ranks are held for the post-mortem command
    STOPPING = "stopping"
    MENDING = "mending"  # nothing runs: checks, rollback or replay before the restart
    FINISHED = "finished"


OF_ATTEMPT = (Phase.RUNNING, Phase.EXAMINING, Phase.STOPPING)  # its ranks are there


class Part(Enum):
    """What a node does at present."""

    WAITING = "waiting"  # in the next world if there is room
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"  # told to stop, has not answered


class Silence(Enum):
    """How a node is not heard of."""

    CUT = "cut"  # its connection has broken
    MUTE = "mute"  # nothing that is sent to it arrives
    STALLED = "stalled"  # its machine takes what is sent to it, its bootrun says nothing


class _Silent(NamedTuple):
    """A node that is waited for."""

    how: Silence
    reason: str
    heard_s: float
    since_s: float
    until_s: float


class _Alike(NamedTuple):
    """A rank has failed, and it is waited for others that may fail alike."""

    reason: str  # the attempt ends for
    place: str  # of the error
    nodes: list[int]  # on which ranks have failed
    until_s: float
    ranks: int  # of the attempt


class _Loss(NamedTuple):
    host: str
    what: str  # the node and why
    heard_s: float
    noticed_s: float


class _Node:
    __slots__ = ("digest", "environment", "join", "part", "place", "port")

    def __init__(self, join: Join) -> None:
        self.join = join
        self.part = Part.WAITING
        self.place: int | None = None
        self.port = join.master_port
        self.digest: str | None = None if join.has_identity else ""
        self.environment: Distributions | None = None

    @property
    def name(self) -> str:
        rank = f", node rank {self.place}" if self.place is not None else ""
        return f"{self.join.host} (pid {self.join.pid}{rank})"


class Job:
    """See the module's docstring; every public method returns the orders that follow from the fact."""

    def __init__(self, rules: JobRules) -> None:
        self._rules = rules
        self._nodes: dict[int, _Node] = {}
        # Counted, not searched for: with 10,000 nodes a search at each message would take minutes.
        self._parts = dict.fromkeys(Part, 0)
        self._unidentified = 0
        self._by_node_rank: dict[int, int] = {}  # explicit node rank: node
        self._runs: dict[str, Runs] = {}  # what the ranks of a role run, by who came first
        self._others_told: set[str] = set()  # hosts of nodes of another job
        self._phase = Phase.GATHERING
        self._attempt = -1
        self._restarts = RestartPolicy(rules.max_restarts, rules.early_s, rules.backoff_s, rules.restart_refill_s)
        self._same_error = SameError()
        self._exclusion: Exclusion | None = None  # from the first failure on that may be a machine's
        self._no_progress = NoProgress()
        self._steps = -1  # the most that a rank has made in the attempt that was ended; -1: nothing counts them
        self._step: int | None = None  # the highest number that a rank has given
        self._unstarted = 0  # nodes of the attempt
        self._notes: FailureNotes | None = None  # from the first failure on
        self._watch: HangWatch | None = None  # from the first look on
        self._mismatch = ""  # who called something else than the rest, of the attempt that has ended last
        self._traces: list[bytes] = []  # of collectives, of an attempt that ends
        self._early: list[int] = []  # ranks that had ended with 0 before it was stopped
        self._stood_still = ""  # why this attempt is ended, although no rank has failed
        self._stood_kind = ""  # class of that failure
        self._recovery: Recovery | None = None  # from the first restart on
        self._examining: Asked[Examined] | None = None
        self._examining_s = 0.0  # how long that has taken
        self._stop_reason = ""  # what comes after it
        self._rule_watch: RuleWatch | None = None  # from the first finding on, or with rules about any rank
        self._is_anew = False  # the attempt is ended for what it was to load
        self._verdict: tuple[int, str] | None = None  # of a rule: exit status of the job, and why
        self._changes = 0  # of the world, other than by failures of ranks
        self._changes_by_host: dict[str, int] = {}
        self._port_retries = 0
        self._gather_since_s: float | None = None
        self._last_call_at_s: float | None = None
        self._not_before_s = 0.0
        self._regather = False  # the next world starts without a last call
        self._regroup_at_s: float | None = None  # late joiners restart the job then
        self._running_since_s = 0.0
        self._stop_began_s = 0.0
        self._waited_s = 0.0  # before that, for failures that are alike
        self._stop_by_s: float | None = None
        self._failures: list[Failure] = []
        self._alike: _Alike | None = None  # see `_wait_for_alike`
        self._ordered: tuple[tuple[int, int, int], Ordered, list[Failure]] | None = None  # see `_order_failures`
        self._known_failures: set[tuple[int, int]] = set()  # rank and pid
        self._succeeded: set[int] = set()  # nodes that have said so in this attempt
        self._digest = ""  # of the environment of the nodes at work
        self._silent: dict[int, _Silent] = {}  # nodes that may come back
        self._lost: list[_Loss] = []  # nodes that this attempt has lost
        self._gone: list[str] = []  # nodes, and why, that were lost while nothing ran on them
        self._lost_told = 0
        self._is_waiting_told = False
        self._signum = 0
        self._port_was_taken = False
        self._comparing: list[int] = []  # nodes asked for their environment
        self._setup: JobSetup | None = None  # with --setup, from the first word about it on
        self._pairs: PairTest | None = None  # while it is under way
        self._clocks: ClockWatch | None = None  # from the first word about one on
        self._skews: dict[str, str] = {}  # lines about clocks that differ now, by where
        self._orders: list[Order] = []

    # ---- what the shell asks ---------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self._phase is Phase.FINISHED

    def statistics(self) -> dict[str, int | str]:
        """Counters for the status command and the tests."""
        return {
            "phase": self._phase.value,
            "nodes": len(self._nodes),
            "attempt": self._attempt,
            "restart_count": self._restarts.count,
            "restarts_used": self._restarts.used,
            "membership_changes": self._changes,
        }

    def deadline_s(self) -> float | None:
        """The next moment at which `tick` may have something to do."""
        moments: list[float | None] = []
        if self._phase is Phase.GATHERING:
            if self._gather_since_s is not None and self._pairs is None:
                moments.append(self._gather_by_s(self._gather_since_s))
            moments += [self._last_call_at_s, self._not_before_s or None]
        elif self._phase is Phase.RUNNING:
            if self._alike is not None:
                moments.append(self._alike.until_s)
            else:
                moments.append(self._regroup_at_s)
                if self._watch is not None:
                    moments.append(self._watch.deadline_s())
            if self._rule_watch is not None:
                moments.append(self._rule_watch.deadline_s())
        elif self._phase is Phase.STOPPING:
            moments.append(self._stop_by_s)
        elif self._phase is Phase.EXAMINING and self._examining is not None:
            moments.append(self._examining.until_s)
        elif self._phase is Phase.MENDING and self._recovery is not None:
            moments.append(self._recovery.until_s)
        if self._setup is not None and self._phase is not Phase.FINISHED:
            moments.append(self._setup.deadline_s())
        if self._notes is not None and self._phase is not Phase.FINISHED:
            moments.append(self._notes.due_s)
        if self._pairs is not None:
            moments.append(self._pairs.deadline_s)
        if self._phase is not Phase.FINISHED:
            moments += [silent.until_s for silent in self._silent.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    # ---- facts -----------------------------------------------------------------------------------------------

    def receive(self, node: int, message: FromMember, now_s: float) -> list[Order]:
        """A message of a node; the first one of a node is its Join."""
        if isinstance(message, Join):
            self._on_join(node, message, now_s)
        elif node in self._nodes:
            self._on_message(self._nodes[node], node, message, now_s)
        return self._take_orders()

    def reached(self, node: int, address: str) -> None:
        """Where a node is reached by others is known better than by its Join; holds from the next attempt on."""
        known = self._nodes.get(node)
        if known is not None:
            known.join = known.join._replace(address=address)

    def not_begun(self, node: int, attempt: int, now_s: float) -> list[Order]:
        """The node never got its World of this attempt: it has nothing to stop and keeps its port."""
        known = self._nodes.get(node)
        if known is not None and attempt == self._attempt and known.part is Part.STOPPING:
            self._set_part(known, Part.WAITING)
            self._try_go_on(now_s)
        return self._take_orders()

    def lost(self, node: int, reason: str, now_s: float, heard_s: float | None = None) -> list[Order]:
        """The connection to a node is gone or it has been silent for too long; last heard of at `heard_s`."""
        self._drop(node, reason, now_s, now_s - UNHEARD_S if heard_s is None else heard_s)
        return self._take_orders()

    def unheard(
        self, node: int, how: Silence, reason: str, now_s: float, heard_s: float, limit_s: float
    ) -> list[Order]:
        """Nothing is heard of a node, which is no end of it: it is waited for, or given up.

        Said again as long as that is so. Where the others can go on without it, that is worth more than what its
        ranks have done, unless its bootrun alone stands still: then these go on.

        Args: limit_s: the silence that heartbeats allow.
        """
        known = self._nodes.get(node)
        if known is None or self._phase is Phase.FINISHED:
            return self._take_orders()
        before = self._silent.get(node)
        wait_s = self._patience_s(node, known, how, limit_s)
        if wait_s <= 0:
            self._give_up(node, reason, now_s, heard_s)
            return self._take_orders()
        since_s = now_s if before is None or how is Silence.CUT else before.since_s
        self._silent[node] = _Silent(how, reason, heard_s, since_s, since_s + wait_s)
        if how is not Silence.CUT and (before is None or before.how is Silence.CUT):
            text = (
                f"warning: nothing is heard of {known.name}: it {reason}; the job goes on, and it is waited for "
                f"up to {since_s + wait_s - now_s:.0f} s more"
            )
            for number in self._nodes.keys() - {node}:
                self._send(number, Note(text))
        return self._take_orders()

    def heard(self, node: int, now_s: float) -> list[Order]:
        """A node that was not heard of is heard of again."""
        silent = self._silent.pop(node, None)
        if silent is not None and self._phase is not Phase.FINISHED:
            known = self._nodes[node]
            self._tell_all(f"{known.name} is heard of again, after {now_s - silent.heard_s:.1f} s")
            if self._phase is Phase.GATHERING:
                self._try_start(now_s)
            elif self._phase is Phase.RUNNING and known.part is Part.WAITING and known.digest is not None:
                self._consider_late(node, now_s)
        return self._take_orders()

    def tick(self, now_s: float) -> list[Order]:
        """The time has come that `deadline_s` named, or any other."""
        for number in [number for number, silent in self._silent.items() if now_s >= silent.until_s]:
            self._give_up_silent(number, now_s)
        if self._notes is not None and self._notes.due_s is not None and now_s >= self._notes.due_s:
            self._tell_pages(self._notes)
        if self._setup is not None and self._phase is not Phase.FINISHED:
            self._tell_setup(self._setup.tick(now_s))
        if self._pairs is not None:
            self._pairs.tick(now_s)
            self._go_on_testing(self._pairs, now_s)
        if self._phase is Phase.GATHERING:
            self._not_before_s = 0.0 if now_s >= self._not_before_s else self._not_before_s
            self._try_start(now_s)
            since_s = self._gather_since_s if self._pairs is None else None
            if self._phase is Phase.GATHERING and since_s is not None and now_s >= self._gather_by_s(since_s):
                self._finish(1, self._describe_missing(now_s - since_s))
        elif self._phase is Phase.RUNNING:
            if self._alike is not None:
                self._wait_for_alike(self._alike, True, now_s)
            elif self._regroup_at_s is not None and now_s >= self._regroup_at_s:
                self._regroup(now_s)
            elif self._watch is not None:
                self._heed(self._watch.tick(now_s), now_s)
            if self._rule_watch is not None and self._phase is Phase.RUNNING:
                self._obey(self._rule_watch.tick(now_s), now_s)
        elif self._phase is Phase.EXAMINING:
            self._try_stop(now_s)
        elif self._phase is Phase.MENDING:
            self._try_mend_on(now_s)
        elif self._phase is Phase.STOPPING and self._stop_by_s is not None and now_s >= self._stop_by_s:
            for number, node in list(self._nodes.items()):
                if number in self._silent:
                    self._give_up_silent(number, now_s)
                elif node.part is Part.STOPPING:
                    self._send(
                        number, Refused(1, "this node did not stop its ranks in time; the job goes on without it")
                    )
                    self._drop(number, "did not stop its ranks in time", now_s, now_s)
        return self._take_orders()

    def _gather_by_s(self, since_s: float) -> float:
        """When a gathering ends: with enough nodes, set-up may take as long as it was given."""
        is_set_up = self._setup is not None and self._count_heard() >= self._rules.min_nodes
        return since_s + self._rules.join_s + (self._rules.setup_s if is_set_up else 0.0)

    def start_anew(self, attempt: int, reason: str, now_s: float) -> list[Order]:
        """What an attempt was to load cannot be had: another follows, or the shell says why none can.

        It costs no restart: no rank was at fault.
        """
        if attempt == self._attempt and self._phase in OF_ATTEMPT:
            self._is_anew = True
            if self._phase is not Phase.STOPPING:
                self._stop(reason, signal.SIGTERM, now_s)
        return self._take_orders()

    def _count_heard(self) -> int:
        return len(self._nodes) - len(self._silent)

    def _count_able(self, without: int = -1) -> int:
        """Nodes that are heard of and have said what they have; `without`: this one apart."""
        apart = self._nodes.keys() & {*self._silent, without}
        return len(self._nodes) - self._unidentified - sum(self._nodes[each].digest is not None for each in apart)

    def _patience_s(self, number: int, node: _Node, how: Silence, limit_s: float) -> float:
        """How long a node is waited for that is not heard of."""
        is_needed = self._count_able(number) < self._rules.min_nodes
        match self._phase:
            case Phase.RUNNING if node.part is not Part.WAITING:
                pass
            case Phase.STOPPING if node.part is not Part.WAITING and is_needed and self._may_go_on:
                pass
            case Phase.GATHERING if is_needed and self._pairs is None and not self._comparing:
                pass
            case _:
                return 0.0
        if how is Silence.CUT:
            return CUT_S if is_needed else 0.0
        most_s = (PATIENCE - 1) * limit_s
        if how is Silence.MUTE:
            return most_s if is_needed else 0.0
        return max(most_s, self._rules.join_s) if is_needed else most_s

    @property
    def _may_go_on(self) -> bool:
        """Whether another attempt may follow this one, which ends."""
        return not self._signum and (self._rules.max_restarts > 0 or self._is_anew)

    def fail(self, reason: str) -> list[Order]:
        """The job cannot go on."""
        if self._phase is not Phase.FINISHED:
            self._finish(1, reason)
        return self._take_orders()

    # ---- joining ---------------------------------------------------------------------------------------------

    def _on_join(self, number: int, join: Join, now_s: float) -> None:
        refusal = self._find_refusal(join)
        if refusal is not None:
            self._send(number, Refused(1, refusal))
            if join.host not in self._others_told and len(self._others_told) < MOST_LOST_TOLD:
                self._others_told.add(join.host)
                self._tell_all(f"refused {join.host} (pid {join.pid}): {refusal}")
            return
        if self._phase is Phase.FINISHED:
            self._send(number, Refused(1, f"job {join.run_id!r} has ended already"))
            return
        claimed = _claimed_rank(join, self._rules.static)
        before = self._by_node_rank.get(claimed, -1)
        if claimed >= 0 and before in self._silent:
            self._give_up_silent(before, now_s)  # this is the same node once more, or steps in for it
        node = _Node(join)
        self._nodes[number] = node
        self._runs.setdefault(join.role, join.runs)
        self._parts[node.part] += 1
        self._unidentified += node.digest is None
        self._send(number, Welcome(number, self._rules.open_membership))
        holder = self._by_node_rank.setdefault(claimed, number)
        if not self._rules.static and join.node_rank >= 0 and holder != number:
            self._send(
                number, Note(f"--node-rank {join.node_rank} was given to several nodes; their order is by name")
            )
        if join.max_restarts != self._rules.max_restarts:
            self._send(
                number,
                Note(
                    f"--max-restarts {join.max_restarts} here, {self._rules.max_restarts} at the coordinator: "
                    "the coordinator's counts"
                ),
            )
        if self._phase is Phase.GATHERING:
            if self._gather_since_s is None:
                self._gather_since_s = now_s
            self._try_start(now_s)
        elif node.digest is not None:
            self._consider_newcomer(number, now_s)

    def _find_refusal(self, join: Join) -> str | None:
        rules = self._rules
        if join.run_id != rules.run_id:
            return (
                f"this endpoint serves job {rules.run_id!r}, not {join.run_id!r}: "
                "use another --rdzv-endpoint or --rdzv-id"
            )
        runs = self._runs.get(join.role, join.runs)
        if runs != join.runs and not rules.mixed_arguments:
            from launcher.rendezvous.same_job import describe_difference, is_same

            if not is_same(join.runs, runs):
                return describe_difference(rules.run_id, join.runs, runs)
        if (join.min_nodes, join.max_nodes) != (rules.min_nodes, rules.max_nodes):
            ours, theirs = (f"{low}:{high}" for low, high in (rules[1:3], (join.min_nodes, join.max_nodes)))
            return f"--nnodes differs: {theirs} here, {ours} at the coordinator; give all nodes the same"
        if rules.static:
            if max(0, join.node_rank) >= rules.max_nodes:
                return f"--node-rank {join.node_rank} does not fit --nnodes {rules.max_nodes}: ranks go from 0"
            claimed = self._by_node_rank.get(max(0, join.node_rank), -1)
            other = self._nodes.get(claimed)
            if other is not None and claimed not in self._silent:
                return (
                    f"--node-rank {max(0, join.node_rank)} is already taken by {other.join.host} "
                    f"(pid {other.join.pid}): give each node its own"
                )
        return None

    def _set_part(self, node: _Node, part: Part) -> None:
        self._parts[node.part] -= 1
        self._parts[part] += 1
        node.part = part

    def _consider_newcomer(self, number: int, now_s: float) -> None:
        """A node came that can take part."""
        if self._silent and self._count_able(number) < self._rules.min_nodes <= self._count_able():
            # It steps in for a node of which nothing is heard.
            for other in [each for each in self._silent if self._nodes[each].part is not Part.WAITING]:
                self._give_up_silent(other, now_s)
        if self._phase is Phase.RUNNING:
            self._consider_late(number, now_s)

    def _consider_late(self, number: int, now_s: float) -> None:
        """A node came while the others run: it waits as a spare, or the job makes room."""
        running = len(self._nodes) - self._parts[Part.WAITING]
        if running >= self._rules.max_nodes or self._parts[Part.SUCCEEDED]:
            self._send(number, Spare(running))
        elif self._regroup_at_s is None:
            self._regroup_at_s = now_s + JOIN_SETTLE_S

    def _regroup(self, now_s: float) -> None:
        """Makes room for late joiners, if they are still there and the job is not about to end."""
        self._regroup_at_s = None
        if self._silent:
            self._regroup_at_s = now_s + JOIN_SETTLE_S  # who joined waits with the others
            return
        waiting = self._parts[Part.WAITING] - self._unidentified - self._count_excluded()
        if self._parts[Part.SUCCEEDED]:
            for number, node in self._nodes.items():
                if node.part is Part.WAITING:
                    self._send(number, Spare(len(self._nodes) - self._parts[Part.WAITING]))
        elif waiting > 0:
            from bootseer.counted import counted

            self._stop(f"{counted(waiting, 'more node joins', 'more nodes join')}", signal.SIGTERM, now_s)

    # ---- starting an attempt ---------------------------------------------------------------------------------

    def _try_start(self, now_s: float) -> None:
        rules = self._rules
        # A running job does not wait for what newcomers have to say.
        count = self._count_able() if self._attempt >= 0 else self._count_heard()
        if count >= rules.max_nodes:
            self._last_call_at_s = None
        if count < rules.min_nodes or self._comparing:
            self._last_call_at_s = None
            return
        if count < rules.max_nodes and not self._regather:
            if self._last_call_at_s is None:
                self._last_call_at_s = now_s + rules.last_call_s
            if now_s < self._last_call_at_s:
                return
            self._regather, self._last_call_at_s = True, None
        if now_s < self._not_before_s or (self._unidentified and self._attempt < 0):
            return
        if self._pairs is not None or (self._setup is not None and self._setup.mending & self._nodes.keys()):
            return
        if self._environments_agree():
            self._start(now_s)

    def _environments_agree(self) -> bool:
        digests = {number: node.digest or "" for number, node in self._nodes.items()}
        if self._attempt >= 0 or self._rules.allow_mixed or len(set(digests.values()) - {""}) < 2:
            return True  # later on, who differs is refused as soon as it says what it has
        if self._setup is not None and self._set_up_again(self._setup):
            return False
        from launcher.rendezvous.mixed import group_by_digest

        self._comparing = [numbers[0] for _, numbers in group_by_digest(digests)[:8]]
        for number in self._comparing:
            self._send(number, WantEnvironment())
        return False

    def _on_setup(self, node: _Node, number: int, news: SetupNews, now_s: float) -> None:
        """News about the environment of a node."""
        if self._phase is Phase.FINISHED:
            return
        if news.what in ENDS_JOB:
            where = f" on {node.join.host}" if self._rules.max_nodes > 1 else ""
            self._finish(1, f"{ENDS_JOB[news.what]}{where}: {news.text}")
            return
        if self._setup is None:
            from launcher.setup_policy import JobSetup

            rules = self._rules
            self._setup = JobSetup(rules.min_nodes, rules.setup_wait_s, rules.join_s * USE_SHARE)
        self._tell_setup(self._setup.receive(number, node.join.host, news, now_s))
        if news.what == "ready" and self._phase is Phase.GATHERING:
            self._try_start(now_s)

    def _tell_setup(self, orders: Iterable[SetupSend]) -> None:
        for order in orders:
            self._send(order.node, order.order)

    def _set_up_again(self, setup: JobSetup) -> bool:
        """The environments differ. Whether nodes make them anew, and say once more what they have."""
        orders = setup.try_again()
        for order in orders:
            node = self._nodes.get(order.node)
            if node is not None and node.join.has_identity and node.digest is not None:
                node.digest = None
                self._unidentified += 1
        self._tell_setup(orders)
        return bool(orders)

    def _refuse_differing(self, number: int, now_s: float) -> None:
        """A newcomer to a job that is under way has another environment."""
        self._send(
            number,
            Refused(
                1,
                "the Python environment of this node differs from that of the running job; install the same "
                "everywhere or start the job with --allow-mixed-environments",
            ),
        )
        self._drop(number, "it has another Python environment", now_s, now_s)

    def _on_environment(self, node: _Node, message: Environment) -> None:
        node.environment = message.distributions
        asked = [self._nodes[number] for number in self._comparing if number in self._nodes]
        if not asked or any(each.environment is None for each in asked):
            return
        from launcher.rendezvous.mixed import difference_table

        table = difference_table([(each.join.host, each.environment) for each in asked if each.environment])
        self._finish(
            1,
            "the nodes have different Python environments; install the same everywhere or pass "
            f"--allow-mixed-environments\n{table}",
        )

    def _start(self, now_s: float) -> None:
        candidates = [
            ranks.Candidate(number, node.join, node.place)
            for number, node in self._nodes.items()
            if node.digest is not None and number not in self._silent
        ]
        candidates = self._leave_out(candidates)
        members = ranks.choose_places(candidates, self._rules.max_nodes)
        if self._rules.static:
            members.sort(key=lambda member: max(0, member.join.node_rank))
        elif self._attempt < 0 and ranks.explicit_ranks_clash({m.node: m.join for m in members}):
            plain = [m._replace(join=m.join._replace(node_rank=-1)) for m in members]
            joins = {m.node: m.join for m in members}
            members = [m._replace(join=joins[m.node]) for m in sorted(plain, key=ranks.order_key)]
        first = self._nodes[members[0].node]
        master = self._rules.master or (first.join.address, first.port)
        self._attempt += 1
        self._phase = Phase.RUNNING
        self._running_since_s = now_s
        self._gather_since_s = self._last_call_at_s = self._regroup_at_s = None
        self._regather = False
        self._failures, self._lost, self._gone = [], [], []
        self._lost_told, self._is_waiting_told = 0, False
        self._known_failures.clear()
        self._succeeded.clear()
        self._digest = next((d for d in (self._nodes[m.node].digest for m in members) if d), "")
        self._port_was_taken = False
        self._stood_still = self._stood_kind = self._mismatch = ""
        self._examining_s = 0.0
        self._is_anew = False
        self._traces, self._early = [], []
        if self._rules.log_rules or self._rule_watch is not None:
            self._watch_rules().attempt_began(len(members))
        self._steps, self._step, self._unstarted = -1, None, len(members)
        if self._notes is not None:
            self._notes.began(now_s)
        if self._watch is not None:
            self._begin_watch(self._watch, now_s)
        if self._rules.frees_endpoint:
            self._orders.append(Listen(False))
        for node in self._nodes.values():
            node.place = None
        for member, world in zip(
            members, ranks.make_worlds(members, self._attempt, self._restarts.count, master), strict=True
        ):
            node = self._nodes[member.node]
            if member.place is None and self._attempt > 0:
                self._count_change(node.join.host)
            node.place = world.group_rank
            self._set_part(node, Part.RUNNING)
            self._send(member.node, world)
        for number, node in self._nodes.items():
            if node.place is None:
                self._send(number, Spare(len(members)))

    def _leave_out(self, candidates: list[ranks.Candidate]) -> list[ranks.Candidate]:
        """Without the nodes whose machines failed before, as long as there are enough others."""
        if self._exclusion is None or not self._exclusion.why:
            return candidates
        others = [each for each in candidates if each.join.host not in self._exclusion.why]
        if len(others) == len(candidates):
            return candidates
        if len(others) >= self._rules.min_nodes and not self._rules.static:
            return others
        named = sorted(set(self._exclusion.why) & {each.join.host for each in candidates}, key=ranks.natural_key)
        self._tell_all(f"{', '.join(named)} would be left out ({self._describe_need()}, there is no spare)")
        return candidates

    def _count_excluded(self) -> int:
        why = self._exclusion.why if self._exclusion is not None else {}
        return sum(node.part is Part.WAITING and node.join.host in why for node in self._nodes.values())

    # ---- while ranks run -------------------------------------------------------------------------------------

    def _on_message(self, node: _Node, number: int, message: FromMember, now_s: float) -> None:
        match message:
            case Identity(digest):
                self._unidentified -= node.digest is None
                node.digest = digest
                differs = bool(digest and self._digest and digest != self._digest)
                if self._attempt >= 0 and differs and not self._rules.allow_mixed:
                    self._refuse_differing(number, now_s)
                    return
                if node.part is Part.WAITING:
                    self._consider_newcomer(number, now_s)
                if message.why:
                    self._send(number, Note(f"the environment of this node was not compared: {message.why}"))
                if self._phase is Phase.GATHERING:
                    self._try_start(now_s)
            case Environment():
                if number in self._comparing and self._phase is Phase.GATHERING:
                    self._on_environment(node, message)
            case Started(attempt):
                if attempt == self._attempt:
                    self._running_since_s = max(self._running_since_s, now_s)
                    self._unstarted -= 1
                    if self._notes is not None and not self._unstarted:
                        self._notes.runs(now_s)
            case RankFailed(attempt, failure):
                if attempt == self._attempt and self._phase in OF_ATTEMPT:
                    self._add_failures([failure])
                    self._take_notes().heard(failure, now_s)
                    if self._phase is Phase.RUNNING:
                        self._on_first(failure, number, now_s)
                    else:
                        self._examine_too(node, number, now_s)
            case Succeeded(attempt):
                if attempt == self._attempt and node.place is not None:
                    self._succeeded.add(number)
                    if self._watch is not None:
                        self._watch.node_ended(number)
                    if self._rule_watch is not None:
                        self._rule_watch.ranks_ended()
                if attempt == self._attempt and node.part is Part.RUNNING:
                    self._set_part(node, Part.SUCCEEDED)
                    if self._phase is Phase.RUNNING and not self._parts[Part.RUNNING]:
                        self._finish(0, "")
            case Stopped(attempt):
                if attempt == self._attempt and node.part is Part.STOPPING:
                    self._on_stopped(node, message, now_s)
            case RankLooks(attempt, facts):
                if attempt == self._attempt and self._phase is Phase.RUNNING and self._rules.on_hang != "off":
                    self._on_looks(number, facts, now_s)
            case NodeStacks(asked, data, traces, layout, devices):
                if self._watch is not None and self._phase is Phase.RUNNING:
                    self._heed(self._watch.answered(number, asked, data, traces, layout, devices), now_s)
            case RuleFound(attempt, rule, kind, action, rank, text):
                if attempt == self._attempt and self._phase in OF_ATTEMPT:
                    from launcher.rules.job_watch import Finding

                    self._obey([Finding(rule, kind, action, rank, text)], now_s)
            case RuleSeen(attempt, rule, what):
                if attempt == self._attempt and self._rule_watch is not None:
                    self._rule_watch.seen(rule, what, now_s)
            case Examined(attempt):
                if attempt == self._attempt and self._examining is not None:
                    self._examining.answered(number, message)
                    self._try_stop(now_s)
            case Mended(attempt):
                if attempt == self._attempt and self._phase is Phase.MENDING and self._recovery is not None:
                    self._recovery.answered(number, message)
                    self._try_mend_on(now_s)
            case PairPort() | PairResult():
                if self._pairs is not None:
                    self._pairs.receive(number, message, now_s)
                    self._go_on_testing(self._pairs, now_s)
                    if self._phase is Phase.GATHERING:
                        self._try_start(now_s)
            case ClockSays():
                self._on_clock(number, message)
            case SetupNews():
                self._on_setup(node, number, message, now_s)
            case Signalled(signum):
                self._on_signal(number, signum, now_s)
            case Leave(reason):
                # Its ranks have ended before it said so.
                self._drop(number, reason, now_s, now_s - LEFT_S)

    # ---- standstill ------------------------------------------------------------------------------------------

    def _on_looks(self, number: int, facts: tuple[RankFacts, ...], now_s: float) -> None:
        if self._watch is None:
            from launcher.supervise.hang import HangSettings
            from launcher.supervise.watch import HangWatch

            self._watch = HangWatch(HangSettings(least_s=self._rules.hang_least_s))
            self._begin_watch(self._watch, now_s)
        self._heed(self._watch.looked(number, facts, now_s), now_s)

    def _begin_watch(self, watch: HangWatch, now_s: float) -> None:
        at_work = [node for node in self._nodes.values() if node.place is not None]
        watch.attempt_began(sum(node.join.local_world_size for node in at_work), len(at_work), now_s)

    def _heed(self, said: Iterable[Said], now_s: float) -> None:
        """Asks, tells, and ends the attempt where that was asked for."""
        from launcher.supervise.watch import Ask

        for each in said:
            places = [(number, node.place) for number, node in self._nodes.items() if node.place is not None]
            if isinstance(each, Ask):
                for number, _ in places:
                    self._send(number, WantStacks(self._attempt, each.number))
                continue
            for number, place in places:
                if place == 0:
                    self._send(number, Standstill(self._attempt, each.number, each.text, each.data))
                else:
                    self._send(number, Note(each.line))
            hang = self._watch.last if self._watch is not None else None
            is_ended = self._rules.on_hang == "restart" and self._phase is Phase.RUNNING
            is_ended &= hang is None or not hang.is_early
            if hang is not None:
                page = self._take_notes().stood_still(self._attempt, hang, each, is_ended, now_s)
                if page is not None:
                    self._keep(page)
            if is_ended:
                self._stood_still, self._stood_kind = each.line, "hang"
                self._examine(each.line, None, now_s)

    # ---- rules over what ranks print -------------------------------------------------------------------------

    def _watch_rules(self) -> RuleWatch:
        if self._rule_watch is None:
            from launcher.rules.job_watch import RuleWatch

            self._rule_watch = RuleWatch(self._rules.log_rules)
        return self._rule_watch

    def _obey(self, broken: Iterable[BrokenRule], now_s: float) -> None:
        """Tells of broken rules, and does what they say."""
        for each in broken:
            if self._watch_rules().is_news(each):
                told = RuleTold(self._attempt, each.rule, each.kind, each.action, each.rank, each.line)
                for number, node in self._nodes.items():
                    if node.place is not None:
                        self._send(number, told)
            if each.action in ("give-up", "stop") and self._verdict is None:
                status = self._rules.give_up_status if each.action == "give-up" else 1
                self._verdict = status, each.line
            if self._phase is Phase.RUNNING and each.action in ("restart", "give-up", "stop"):
                self._stood_still, self._stood_kind = each.line, each.kind or "rule"
                self._take_notes().rule_broken(self._stood_kind, each.line, each.rank, now_s)
                self._examine(each.line, None, now_s)

    def _add_failures(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            key = (failure.rank, failure.pid)
            if key not in self._known_failures:
                self._known_failures.add(key)
                self._failures.append(failure)

    def _on_signal(self, number: int, signum: int, now_s: float) -> None:
        if self._attempt >= 0 and self._nodes[number].place is None:
            # No rank of the job was on it, so it is no end of the job.
            stopped = f"stopped by {signal_name(signum)}"
            self._send(number, Refused(128 + signum, f"{stopped}; the job goes on without this node"))
            self._drop(number, stopped, now_s, now_s)
            return
        again, self._signum = self._signum != 0, self._signum or signum
        reason = f"stopped by {signal_name(signum)}"
        if self._phase in (Phase.GATHERING, Phase.MENDING):
            self._finish(128 + signum, reason)
        elif self._phase in (Phase.RUNNING, Phase.EXAMINING):
            self._stop(reason, signum, now_s)
        elif self._phase is Phase.STOPPING:
            # The ranks have a signal already; a second one to us shortens what is left of their time.
            grace_s = min(2.0, self._rules.grace_s) if again else self._rules.grace_s
            from bootseer.counted import counted

            self._send(number, Note(f"waiting for {counted(self._parts[Part.STOPPING], 'node')} to stop"))
            for each, node in self._nodes.items():
                if node.part is Part.STOPPING:
                    self._send(each, Stop(self._attempt, signum, grace_s, reason))

    def _give_up(self, number: int, reason: str, now_s: float, heard_s: float) -> None:
        """A node that is not heard of is not waited for any longer; if it comes back, that is as a newcomer."""
        self._send(number, GaveUp(f"it {reason}"))
        self._drop(number, reason, now_s, heard_s)

    def _give_up_silent(self, number: int, now_s: float) -> None:
        silent = self._silent.get(number)
        if silent is None or self._phase is Phase.FINISHED:
            return
        is_cut = silent.how is Silence.CUT
        reason = silent.reason if is_cut else f"was silent for {now_s - silent.heard_s:.0f} s"
        self._give_up(number, reason, now_s, silent.heard_s)

    def _drop(self, number: int, reason: str, now_s: float, heard_s: float) -> None:
        """A node is gone, whatever the way."""
        node = self._nodes.pop(number, None)
        self._silent.pop(number, None)
        if node is None or self._phase is Phase.FINISHED:
            return
        self._parts[node.part] -= 1
        self._unidentified -= node.digest is None
        claimed = _claimed_rank(node.join, self._rules.static)
        if self._by_node_rank.get(claimed) == number:
            del self._by_node_rank[claimed]
        if number in self._comparing:
            self._comparing = []
        if self._clocks is not None:
            self._clocks.lost(number)
        if self._pairs is not None:
            self._pairs.lost(number, now_s)
            self._go_on_testing(self._pairs, now_s)
        if self._setup is not None:
            self._tell_setup(self._setup.lost(number, now_s))
        took_part, what = node.part is not Part.WAITING, f"{node.name}: {reason}"
        if took_part:
            self._lost.append(_Loss(node.join.host, what, heard_s, now_s))
            self._count_change(node.join.host)
        elif node.place is not None or self._attempt < 0:
            self._gone = [*self._gone, what][-MOST_LOST_TOLD:]
        is_news = took_part or what in self._gone
        if is_news and self._phase is not Phase.RUNNING and self._lost_told < MOST_LOST_TOLD:
            self._lost_told += 1
            self._tell_all(f"lost node {what}")
        if self._examining is not None:
            self._examining.lost(number)
        if self._recovery is not None:
            self._recovery.lost(number)
        if self._phase is Phase.GATHERING:
            self._try_start(now_s)
            self._tell_waiting(now_s)
        elif self._phase is Phase.EXAMINING:
            self._try_stop(now_s)
        elif self._phase is Phase.MENDING:
            self._try_mend_on(now_s)
        elif self._phase is Phase.RUNNING and took_part:
            self._stop(f"lost node {what}", signal.SIGTERM, now_s)
        elif self._phase is Phase.STOPPING:
            self._try_go_on(now_s)

    def _count_change(self, host: str) -> None:
        self._changes_by_host[host] = self._changes_by_host.get(host, 0) + 1

    # ---- ending an attempt -----------------------------------------------------------------------------------

    def _on_first(self, failure: Failure, number: int, now_s: float) -> None:
        """A rank has failed, and no other is stopped yet."""
        place = ""
        if not self._rules.steps.post_mortem_s and self._rules.on_hang != "off":
            from launcher.ranks.failure_class import certain_user_error

            place = certain_user_error(failure)
        known = self._alike
        if known is None:
            placed = [node.join.local_world_size for node in self._nodes.values() if node.place is not None]
            known = self._alike = _Alike(_describe_failure(failure), place, [], now_s + ALIKE_S, sum(placed))
        known.nodes.append(number)
        has_stepped = self._watch is not None and self._watch.has_stepped
        self._wait_for_alike(known, place != "" and place == known.place and not has_stepped, now_s)

    def _wait_for_alike(self, known: _Alike, may_be: bool, now_s: float) -> None:
        """Ends the attempt, in which a rank has failed; a moment later while all may fail at the same line.

        An error of the code that all ranks make is no rank's; those that are stopped before are not known to make
        it. After the first step that is not waited for: what is wrong for all shows before it, mostly.
        """
        if may_be and now_s < known.until_s and len(self._failures) < known.ranks:
            return
        self._waited_s = now_s - (known.until_s - ALIKE_S)
        self._examine(known.reason, known.nodes[0], now_s)
        for number in known.nodes[1:]:
            if number in self._nodes:
                self._examine_too(self._nodes[number], number, now_s)

    def _examine(self, reason: str, only: int | None, now_s: float) -> None:
        """The attempt has failed: has the post-mortem command run where there is one, then ends its ranks.

        Args: only: the node whose rank has failed; None: no rank has, so all are looked at.
        """
        self._alike = None
        limit_s = self._rules.steps.post_mortem_s
        if not limit_s:
            self._stop(reason, signal.SIGTERM, now_s)
            return
        from launcher.mending import Asked

        at_work = {
            number: node
            for number, node in self._nodes.items()
            if node.part is not Part.WAITING and number not in self._silent
        }
        asked = {number: node.join.host for number, node in at_work.items() if only in (None, number)}
        self._phase, self._stop_reason, self._regroup_at_s = Phase.EXAMINING, reason, None
        self._examining = Asked(asked, limit_s, now_s)
        for number in at_work:
            self._send(number, Examine(self._attempt, limit_s, number in asked))
        self._try_stop(now_s)

    def _examine_too(self, node: _Node, number: int, now_s: float) -> None:
        """A rank of one more node has failed, while the first is looked at."""
        asked = self._examining
        left_s = 0.0 if asked is None else asked.left_s(now_s)
        if asked is not None and left_s and asked.ask_also(number, node.join.host):
            self._send(number, Examine(self._attempt, left_s, True))

    def _try_stop(self, now_s: float) -> None:
        """Ends the ranks once nobody looks at them any more."""
        asked = self._examining
        if asked is None or (now_s < asked.until_s and not asked.is_over):
            return
        lines = [f"{host}: {answer.text}" for host, answer in asked.answers]
        lines += [f"{host}: nothing was heard of the post-mortem command in time" for host in asked.silent]
        self._examining_s = now_s - asked.began_s
        self._take_notes().examined(self._examining_s, lines)
        self._stop(self._stop_reason, signal.SIGTERM, now_s)

    def _stop(self, reason: str, signum: int, now_s: float) -> None:
        self._phase = Phase.STOPPING
        self._examining = self._alike = None
        self._stop_began_s, self._waited_s = now_s - self._waited_s, 0.0
        self._regroup_at_s = None
        self._stop_by_s = now_s + self._rules.grace_s + STOP_MARGIN_S
        for number, node in self._nodes.items():
            if node.part is not Part.WAITING:
                self._set_part(node, Part.STOPPING)
                self._send(number, Stop(self._attempt, signum, self._rules.grace_s, reason))
        for number in list(self._silent):
            if not self._may_go_on or self._count_able() >= self._rules.min_nodes:
                self._give_up_silent(number, now_s)
        if self._phase is Phase.STOPPING:  # and no node given up was the last that did not stop
            self._try_go_on(now_s)

    def _on_stopped(self, node: _Node, message: Stopped, now_s: float) -> None:
        self._set_part(node, Part.WAITING)
        node.port = message.master_port
        self._port_was_taken |= message.port_was_taken
        self._steps = max(self._steps, message.steps)
        if message.step is not None:
            self._step = message.step if self._step is None else max(self._step, message.step)
        self._add_failures(message.failures)
        if message.traces:
            self._traces.append(message.traces)
        self._early += message.ended
        self._try_go_on(now_s)

    def _try_go_on(self, now_s: float) -> None:
        """Decides what comes after an attempt, once nothing of it runs on any node."""
        if self._parts[Part.STOPPING]:
            return
        self._stop_by_s = None
        if self._rules.frees_endpoint:
            self._orders.append(Listen(True))
        self._note_early()
        has_failed = bool(self._stood_still) or any(not failure.stopped_by_us for failure in self._failures)
        if not self._signum and (has_failed or self._lost):
            if self._traces:
                from launcher.supervise.watch import find_mismatch

                self._mismatch, self._traces = find_mismatch(self._traces), []
            notes, lost = self._take_notes(), self._lost_nodes()
            is_stood = self._stood_kind == "hang"
            lasts = self._watch is not None and self._watch.last is not None
            notes.ended(self._attempt, self._failures, lost, is_stood, lasts, self._stop_began_s, now_s)
            notes.called_otherwise(self._mismatch)
            notes.checked(self._skews.values())
        if self._signum:
            self._finish(128 + self._signum, f"stopped by {signal_name(self._signum)}")
        elif self._verdict is not None:
            self._finish(*self._verdict)
        elif self._lost:
            self._after_loss(now_s)
        elif self._is_anew:
            self._decided("another attempt, or none", "what it was to load cannot be had: no failure of ranks")
            self._gather_again(now_s)
        elif has_failed:
            self._after_failure(now_s)
        elif self._succeeded and self._succeeded.issuperset(
            number for number, node in self._nodes.items() if node.place is not None
        ):
            self._finish(0, "")  # all had ended well before they heard of the newcomers
        else:
            self._gather_again(now_s, changed=True)

    def _after_loss(self, now_s: float) -> None:
        """Nodes were lost: the ranks that failed are taken for its victims unless one certainly failed before."""
        if self._failures and not self._order_failures().nodes:
            self._after_failure(now_s)
            return
        gone = "; ".join(loss.what for loss in self._lost)
        if self._count_heard() >= self._rules.min_nodes:
            self._decided(
                "the nodes that are left come together anew", "the loss of a node is no failure of ranks"
            )
            self._begin_pairs(now_s, is_network=False)
            self._gather_again(now_s, changed=True)
            return
        # The job cannot go on without them, so to give their ranks up costs what their failure would have cost.
        lived_s = self._stop_began_s - self._examining_s - self._running_since_s
        most = self._rules.max_restarts
        delay_s = self._restarts.after_failure(lived_s)
        if delay_s is None:
            from bootseer.counted import counted

            after = f"after {counted(self._restarts.count, 'restart')}" if most else "and --max-restarts is 0"
            self._finish(1, f"lost node {gone}; {self._describe_need()} {after}")
            return
        self._not_before_s = now_s + delay_s if delay_s else 0.0
        self._tell_all(f"restart {self._restarts.used} of {most}: lost node {gone}")
        self._decided(f"restart {self._restarts.used} of {most}", "--max-restarts", delay_s)
        self._begin_pairs(now_s, is_network=False)
        self._gather_again(now_s)

    def _note_early(self) -> None:
        """A rank that lost another may have lost one that had ended with 0, without a failure of its own."""
        if self._early:
            from launcher.ranks.exits import Kind, classify

            early = tuple(sorted(self._early)[:MOST_EARLY])
            self._failures = [
                failure._replace(early=early) if classify(failure) is Kind.CONSEQUENCE else failure
                for failure in self._failures
            ]
            self._ordered = None

    def _order_failures(self) -> Ordered:
        return self._order_all()[0]

    def _order_all(self) -> tuple[Ordered, list[Failure]]:
        """Also those that may have been the first; worked out once while nothing is added in this attempt."""
        key = self._attempt, len(self._failures), len(self._lost)
        if self._ordered is None or self._ordered[0] != key:
            from launcher.ranks.cause import order_failures

            ordered = order_failures(tuple(self._failures), self._lost_nodes())
            unsure = frozenset(ordered.unsure)
            first = [each for each in ordered.failures if each.rank in unsure] or list(ordered.failures[:1])
            self._ordered = key, ordered, first
        return self._ordered[1:]

    def _lost_nodes(self) -> list[LostNode]:
        if not self._lost:
            return []
        from launcher.ranks.cause import LostNode

        return [LostNode(loss.host, int(loss.heard_s * 1e9), int(loss.noticed_s * 1e9)) for loss in self._lost]

    def _after_failure(self, now_s: float) -> None:
        # What post-mortem and stopping took is no life.
        lived_s = self._stop_began_s - self._examining_s - self._running_since_s
        if self._port_was_taken and self._port_retries < MOST_PORT_RETRIES:
            self._port_retries += 1
            self._tell_all(
                f"rank 0 found its port taken by another process; trying another ({self._port_retries})"
            )
            self._decided("another attempt, on another port", "a port that was taken is no failure of ranks")
            self._gather_again(now_s)
            return
        if not self._rules.max_restarts:
            self._finish(1, self._describe_end())
            return
        hopeless, is_last = self._find_hopeless(), not self._restarts.has_left(lived_s)
        of_network = False if self._will_measure(self._is_networks()) else None
        is_evicted = not (hopeless or is_last) and self._consider_machines(now_s, of_network)
        fault = self._judge()._replace(is_evicted=is_evicted, hopeless=hopeless, is_last=is_last)
        recovery = self._take_recovery()
        decision = recovery.decide(self._attempt, fault, lived_s)
        if decision.ends:
            from bootseer.counted import counted

            last = f"{self._describe_end()} after {counted(self._restarts.count, 'restart')}"
            self._finish(*((self._rules.give_up_status, hopeless) if hopeless else (1, last)))
            return
        delay_s = self._restarts.after_failure(lived_s) or 0.0
        self._not_before_s = now_s + delay_s if delay_s else 0.0
        early = self._restarts.early_in_a_row
        wait = f" in {delay_s:g} s (it failed early {early} times in a row)" if delay_s else ""
        self._tell_all(
            f"restart {self._restarts.used} of {self._rules.max_restarts}{wait}{self._describe_first()}"
        )
        self._decided(
            f"restart {self._restarts.used} of {self._rules.max_restarts}{wait}", "--max-restarts", delay_s
        )
        recovery.begin(self._attempt, decision, fault.kind, now_s)
        self._try_mend_on(now_s)

    def _describe_end(self) -> str:
        """Why the last attempt has ended."""
        return self._stood_still or "; ".join(filter(None, ["ranks failed", self._mismatch]))

    def _describe_first(self) -> str:
        from launcher.ranks.report import describe_first

        ordered = self._order_failures()
        placed = [node.join.local_world_size for node in self._nodes.values() if node.place is not None]
        first = describe_first(ordered.failures, ordered.unsure, 0 if self._lost else sum(placed))
        return ": " + "; ".join(filter(None, [self._mismatch, first])) if first else ""

    def _first_failures(self) -> list[Failure]:
        """Those that may have been the first to fail."""
        return self._order_all()[1]

    def _consider_machines(self, now_s: float, of_network: bool | None = None) -> bool:
        """Leaves nodes out whose machines are to blame. Returns: whether there is one more.

        Args: of_network: by failures of the network alone, or by all others; None: by any.
        """
        from launcher.ranks.failure_class import machine_fault

        if not self._can_exclude:
            return False
        first = [
            (failure, machine_fault(failure))
            for failure in self._first_failures()[:MOST_JUDGED]
            if of_network in (None, _is_of_network(failure))
        ]
        if self._exclusion is None and not any(fault for _, fault in first):
            return False
        hosts = {node.place: node.join.host for node in self._nodes.values() if node.place is not None}
        faults = [
            fault._replace(host=hosts.get(failure.group_rank, failure.node)) for failure, fault in first if fault
        ]
        news = self._take_exclusion().after_failure(faults, now_s)
        for fault in news:
            self._take_recovery().left_out(self._attempt, fault)
        return bool(news)

    @property
    def _can_exclude(self) -> bool:
        return self._rules.excludes_nodes and self._rules.max_nodes > 1

    def _take_exclusion(self) -> Exclusion:
        if self._exclusion is None:
            from launcher.exclusion import Exclusion

            self._exclusion = Exclusion()
        return self._exclusion

    def _find_hopeless(self) -> str:
        """Why another attempt would fail too; "" where it may not. By those that may have failed first."""
        first = self._first_failures()
        if self._rules.stops_on_same_error:
            from launcher.ranks.failure_class import error_before_script, repeated_errors

            unread = [error_before_script(failure) for failure in first]
            if unread and all(unread):
                return (
                    f"{unread[0]}: before the script's first statement, or in a file that cannot be compiled, so "
                    "another attempt would fail there too (--same-error restart tries all the same)"
                )
            errors = (error for failure in first for error in repeated_errors(failure))
            if again := self._same_error.after_failure(errors):
                return (
                    f"{again}: the same as in the attempt before, so another would fail there too "
                    "(--same-error restart tries all the same)"
                )
        is_killed = bool(first) and all(-each.status in KILLS and each.oom != "yes" for each in first)
        if not self._rules.stops_without_progress or (is_killed and not self._stood_still):
            return ""
        stuck = self._no_progress.after_failure(self._steps, self._step)
        more = "another would get no further (--no-progress restart tries all the same)"
        return f"{stuck}, so {more}" if stuck else ""

    # ---- the restart ladder ----------------------------------------------------------------------------------

    def _judge(self) -> Fault:
        from launcher.ladder import Fault
        from launcher.ranks.failure_class import judge

        return Fault(self._stood_kind) if self._stood_still else judge(self._first_failures())

    def _take_recovery(self) -> Recovery:
        if self._recovery is None:
            from launcher.recovery import Recovery, Surroundings

            self._recovery = Recovery(
                self._rules.steps,
                Surroundings(
                    hosts=lambda: {number: node.join.host for number, node in self._nodes.items()},
                    at_work=self._at_work,
                    send=self._send,
                    tell_all=self._tell_all,
                    exclusion=self._take_exclusion if self._can_exclude else lambda: None,
                    notes=self._take_notes,
                ),
            )
        return self._recovery

    def _at_work(self) -> list[int]:
        """Nodes of the last attempt that are left, in the order of their ranks."""
        placed = sorted((node.place, number) for number, node in self._nodes.items() if node.place is not None)
        return [number for _, number in placed]

    def _try_mend_on(self, now_s: float) -> None:
        """Starts again once all steps between the attempts are over."""
        if self._recovery is None or not self._recovery.go_on(now_s):
            self._phase = Phase.MENDING
            return
        self._begin_pairs(now_s, self._is_networks())
        self._gather_again(now_s)

    # ---- checks of more than one node ------------------------------------------------------------------------

    def _is_networks(self) -> bool:
        """Whether all that may have failed first says that it was the network."""
        first = self._first_failures()[:MOST_JUDGED]
        return bool(first) and all(_is_of_network(failure) for failure in first)

    def _will_measure(self, is_network: bool) -> bool:
        """Whether nodes measure the network between them before they start again."""
        when = self._rules.check_pairs
        is_asked = when == "always" or (when == "network" and is_network)
        return is_asked and sum(node.place is not None for node in self._nodes.values()) > 1

    def _begin_pairs(self, now_s: float, is_network: bool) -> None:
        if not self._will_measure(is_network):
            return
        hosts = {number: node.join.host for number, node in self._nodes.items() if node.place is not None}
        from launcher.pair_test import PairTest

        self._pairs = PairTest(2 * self._attempt, hosts, self._limits(), now_s)
        self._go_on_testing(self._pairs, now_s)

    def _go_on_testing(self, test: PairTest, now_s: float) -> None:
        for ask in test.take():
            self._send(ask.node, ask.message)
        if not test.is_over or self._pairs is None:
            return
        self._pairs = None
        if self._phase is Phase.GATHERING and self._gather_since_s is not None:
            self._gather_since_s = max(now_s, self._not_before_s)
        owners = {id(found): node for node, found in test.named.items()}
        for place, found in enumerate(test.findings):
            self._tell_check(found, owners.get(id(found)), to_all=place < MOST_CHECKS_TOLD)
        if self._notes is not None:
            self._notes.checked(found.line() for found in test.findings)
        for number, found in test.named.items():
            if number in self._nodes and self._rules.excludes_nodes:
                self._exclude_tested(self._nodes[number].join.host, f"network: {found.what}")
        if not test.named and not self._lost:
            self._consider_machines(now_s, of_network=True)

    def _exclude_tested(self, host: str, what: str) -> None:
        from launcher.exclusion import MachineFault

        if self._take_exclusion().after_test(host, what):
            self._take_recovery().left_out(self._attempt, MachineFault(host, what, is_grave=True))

    def _on_clock(self, number: int, message: ClockSays) -> None:
        """What a node's wall clock says."""
        if self._clocks is None:
            from launcher.skew import ClockWatch

            self._clocks = ClockWatch(self._limits())
        self._clocks.said(number, message.wall_ns, message.job_ns, message.error_ns)
        hosts = {each: node.join.host for each, node in self._nodes.items() if node.place is not None}
        for change in self._clocks.look(hosts):
            found = change.finding
            if change.is_over:
                self._skews.pop(found.where, None)
            else:
                self._skews[found.where] = found.line()
            self._tell_check(found, None, change.is_over)

    def _limits(self) -> Limits:
        from bootseer.health.limits import Limits

        return Limits()._replace(**dict(self._rules.check_limits))

    def _tell_check(
        self, found: CheckFinding, own: int | None, is_over: bool = False, *, to_all: bool = True
    ) -> None:
        """To all nodes, or to `own`, the one that it is about."""
        for number in self._nodes if to_all else self._nodes.keys() & {own}:
            self._send(number, CheckTold(number == own, is_over, *found))

    # ---- pages of failures -----------------------------------------------------------------------------------

    def _take_notes(self) -> FailureNotes:
        if self._notes is None:
            from launcher.supervise.failure_notes import FailureNotes

            self._notes = FailureNotes(self._rules.run_id)
        return self._notes

    def _decided(self, action: str, rule: str, backoff_s: float = 0.0) -> None:
        """What is done about the failure that ended the attempt, for its page."""
        if self._notes is not None:
            self._notes.decided(action, rule, backoff_s)

    def _tell_pages(self, notes: FailureNotes) -> None:
        for page in notes.take():
            self._keep(page)

    def _keep(self, page: FailurePage) -> None:
        """At the node with rank 0, or the nearest to it that is left."""
        if at_work := self._at_work():
            self._send(at_work[0], page)

    def _gather_again(self, now_s: float, *, changed: bool = False) -> None:
        """Nodes come together for the next attempt; `changed`: because nodes came or went."""
        self._changes += changed
        if changed and self._changes > self._rules.max_membership_changes:
            host, times = max(self._changes_by_host.items(), key=lambda item: item[1], default=("", 0))
            who = f"; {host} came and went {times} times: look at that node" if times > 1 else ""
            self._finish(
                1,
                f"{self._changes} membership changes, more than max_membership_changes="
                f"{self._rules.max_membership_changes}{who}",
            )
            return
        self._phase = Phase.GATHERING
        self._regather = True
        if self._setup is not None:
            self._tell_setup(self._setup.between_attempts(now_s))
        self._gather_since_s = max(now_s, self._not_before_s)  # nobody is late while the job itself waits
        self._try_start(now_s)
        self._tell_waiting(now_s)

    def _tell_waiting(self, now_s: float) -> None:
        """There are not enough nodes any more, which may last; told once before each attempt."""
        missing, since_s = self._rules.min_nodes - self._count_heard(), self._gather_since_s
        if self._phase is not Phase.GATHERING or missing <= 0 or since_s is None or self._is_waiting_told:
            return
        self._is_waiting_told = True
        left_s = self._gather_by_s(since_s) - now_s
        nodes = "node" if missing == 1 else "nodes"
        self._tell_all(f"waiting up to {left_s:.0f} s (join_timeout) for {missing} more {nodes}")

    def _finish(self, status: int, reason: str) -> None:
        self._phase = Phase.FINISHED
        self._pairs = None
        failures: tuple[Failure, ...] = ()
        unsure: tuple[int, ...] = ()
        lost: tuple[str, ...] = ()
        if self._failures and status:
            ordered = self._order_failures()
            failures, unsure = ordered.failures[:MOST_FAILURES_TOLD], ordered.unsure
            lost = ordered.nodes[:MOST_FAILURES_TOLD]
        if self._notes is not None:
            self._notes.finished(reason)
            self._tell_pages(self._notes)
        for number in self._nodes:
            self._send(number, Finish(status, reason, failures, unsure, lost))

    # ---- words -----------------------------------------------------------------------------------------------

    def _describe_need(self) -> str:
        low, high = self._rules.min_nodes, self._rules.max_nodes
        from bootseer.counted import counted

        return (
            f"the job needs {counted(low, 'node')}"
            if low == high
            else f"the job needs at least {counted(low, 'node')}"
        )

    def _describe_missing(self, waited_s: float) -> str:
        heard = [node.join.host for number, node in self._nodes.items() if number not in self._silent]
        here = ", ".join(sorted(heard, key=ranks.natural_key)[:16])
        if len(heard) < self._rules.min_nodes:
            return (
                f"only {len(heard)} of {self._rules.min_nodes} nodes joined within {waited_s:.0f} s "
                f"(join_timeout): {here or 'none'}{self._describe_lost()}"
            )
        mending = self._setup.mending if self._setup is not None else ()
        if unready := [self._nodes[number].join.host for number in mending if number in self._nodes]:
            return f"the environment was not had anew on {', '.join(sorted(unready)[:16])} within {waited_s:.0f} s"
        silent = [n.join.host for n in self._nodes.values() if n.digest is None] or [
            self._nodes[number].join.host
            for number in self._comparing
            if number in self._nodes and self._nodes[number].environment is None
        ]
        return f"no word about their Python environment from {', '.join(silent[:16])} within {waited_s:.0f} s"

    def _describe_lost(self) -> str:
        lost = [*(loss.what for loss in self._lost[:MOST_LOST_TOLD]), *self._gone]
        return "; lost: " + "; ".join(lost) if lost else ""

    def _tell_all(self, text: str) -> None:
        for number in self._nodes:
            self._send(number, Note(text))

    def _send(self, number: int, message: FromCoordinator) -> None:
        self._orders.append(Send(number, message))

    def _take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders


def _claimed_rank(join: Join, static: bool) -> int:
    """The node rank a node claims for itself, -1 for none; static jobs have 0 as the default."""
    return max(0, join.node_rank) if static else join.node_rank


def _is_of_network(failure: Failure) -> bool:
    from launcher.ranks.failure_class import FailureClass, classify_failure

    return classify_failure(failure).kind is FailureClass.NETWORK


def signal_name(signum: int) -> str:
    """SIGTERM for 15; real-time signals have no name of their own."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _describe_failure(failure: Failure) -> str:
    if failure.status < 0:
        how = f"was ended by {signal_name(-failure.status)}"
    else:
        how = f"exited with status {failure.status}"
    return f"rank {failure.rank} on {failure.node} (pid {failure.pid}) {how}"
