"""PURE: the brain of a job, at its coordinator: facts from the nodes in, orders to the nodes out.

It decides who takes part, which ranks they have, when an attempt ends and what comes next. One restart budget and
one attempt counter hold for the whole job (ours: torchrun keeps both per agent). The shell around it
(rendezvous/host.py) brings messages, lost nodes and the time; a job on one node uses the same brain.

    GATHERING --enough nodes--> RUNNING --first failure, node lost or joining, signal--> STOPPING
        ^                          |all nodes succeeded                                    |all nodes stopped
        +------- restart ----------|-------------------------------------------------------+
                                   +-----------------> FINISHED <---- budget spent, signal -+
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from launcher.policy import NoProgress, RestartPolicy, SameError
from launcher.rendezvous import ranks
from launcher.rendezvous.messages import (
    Distributions,
    Environment,
    Failure,
    FailurePage,
    Finish,
    FromCoordinator,
    FromMember,
    Identity,
    Join,
    Leave,
    NodeStacks,
    Note,
    RankFailed,
    RankLooks,
    Refused,
    RuleFound,
    RuleSeen,
    RuleTold,
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
    from launcher.exclusion import Exclusion
    from launcher.ranks.cause import LostNode, Ordered
    from launcher.rules.job_watch import Finding as BrokenRule
    from launcher.rules.job_watch import RuleWatch
    from launcher.rules.rule import Rule
    from launcher.setup_policy import JobSetup
    from launcher.setup_policy import Order as SetupSend
    from launcher.supervise.facts import RankFacts
    from launcher.supervise.failure_notes import FailureNotes
    from launcher.supervise.watch import HangWatch, Said

# Several nodes that join a running job within this time cost it one restart, not one each.
JOIN_SETTLE_S = 1.0
# What a node gets, on top of its ranks' grace, to reap unkillable processes and to answer.
STOP_MARGIN_S = 12.0
# A rank 0 that found its port taken is started again this often without touching the budget.
MOST_PORT_RETRIES = 10
MOST_FAILURES_TOLD = 64
# Of join_s: for all nodes to have the kept environment. What is left suffices to run set-up after it.
USE_SHARE = 0.5
# How long before its connection broke a node may have failed, where the shell does not know better.
UNHEARD_S = 5.0
# A rank that somebody ends by one of these says nothing of whether the job gets on.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    allow_mixed: bool = False
    open_membership: bool = True
    frees_endpoint: bool = False  # rank 0 binds the coordinator's own port (static, several nodes)
    setup_s: float = 0.0  # what set-up may take on top of join_s until all environments are there
    setup_wait_s: float = 0.0  # for the node that builds


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
    STOPPING = "stopping"
    FINISHED = "finished"


class Part(Enum):
    """What a node does at present."""

    WAITING = "waiting"  # in the next world if there is room
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"  # told to stop, has not answered


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
        self._stood_still = ""  # why this attempt is ended, although no rank has failed
        self._rule_watch: RuleWatch | None = None  # from the first finding on, or with rules about any rank
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
        self._stop_by_s: float | None = None
        self._failures: list[Failure] = []
        self._known_failures: set[tuple[int, int]] = set()  # rank and pid
        self._succeeded: set[int] = set()  # nodes that have said so in this attempt
        self._digest = ""  # of the environment of the nodes at work
        self._lost: list[_Loss] = []  # nodes that this attempt has lost
        self._signum = 0
        self._port_was_taken = False
        self._comparing: list[int] = []  # nodes asked for their environment
        self._setup: JobSetup | None = None  # with --setup, from the first word about it on
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
            if self._gather_since_s is not None:
                moments.append(self._gather_by_s(self._gather_since_s))
            moments += [self._last_call_at_s, self._not_before_s or None]
        elif self._phase is Phase.RUNNING:
            moments.append(self._regroup_at_s)
            if self._watch is not None:
                moments.append(self._watch.deadline_s())
            if self._rule_watch is not None:
                moments.append(self._rule_watch.deadline_s())
        elif self._phase is Phase.STOPPING:
            moments.append(self._stop_by_s)
        if self._setup is not None and self._phase is not Phase.FINISHED:
            moments.append(self._setup.deadline_s())
        if self._notes is not None and self._phase is not Phase.FINISHED:
            moments.append(self._notes.due_s)
        return min((moment for moment in moments if moment is not None), default=None)

    # ---- facts -----------------------------------------------------------------------------------------------

    def receive(self, node: int, message: FromMember, now_s: float) -> list[Order]:
        """A message of a node; the first one of a node is its Join."""
        if isinstance(message, Join):
            self._on_join(node, message, now_s)
        elif node in self._nodes:
            self._on_message(self._nodes[node], node, message, now_s)
        return self._take_orders()

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

    def tick(self, now_s: float) -> list[Order]:
        """The time has come that `deadline_s` named, or any other."""
        if self._notes is not None and self._notes.due_s is not None and now_s >= self._notes.due_s:
            self._tell_pages(self._notes)
        if self._setup is not None and self._phase is not Phase.FINISHED:
            self._tell_setup(self._setup.tick(now_s))
        if self._phase is Phase.GATHERING:
            self._not_before_s = 0.0 if now_s >= self._not_before_s else self._not_before_s
            self._try_start(now_s)
            since_s = self._gather_since_s
            if self._phase is Phase.GATHERING and since_s is not None and now_s >= self._gather_by_s(since_s):
                self._finish(1, self._describe_missing(now_s - since_s))
        elif self._phase is Phase.RUNNING:
            if self._regroup_at_s is not None and now_s >= self._regroup_at_s:
                self._regroup(now_s)
            elif self._watch is not None:
                self._heed(self._watch.tick(now_s), now_s)
            if self._rule_watch is not None and self._phase is Phase.RUNNING:
                self._obey(self._rule_watch.tick(now_s), now_s)
        elif self._phase is Phase.STOPPING and self._stop_by_s is not None and now_s >= self._stop_by_s:
            for number, node in list(self._nodes.items()):
                if node.part is Part.STOPPING:
                    self._send(
                        number, Refused(1, "this node did not stop its ranks in time; the job goes on without it")
                    )
                    self._drop(number, "did not stop its ranks in time", now_s, now_s)
        return self._take_orders()

    def _gather_by_s(self, since_s: float) -> float:
        """When a gathering ends: with enough nodes, set-up may take as long as it was given."""
        is_set_up = self._setup is not None and len(self._nodes) >= self._rules.min_nodes
        return since_s + self._rules.join_s + (self._rules.setup_s if is_set_up else 0.0)

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
            return
        if self._phase is Phase.FINISHED:
            self._send(number, Refused(1, f"job {join.run_id!r} has ended already"))
            return
        node = _Node(join)
        self._nodes[number] = node
        self._parts[node.part] += 1
        self._unidentified += node.digest is None
        self._send(number, Welcome(number, self._rules.open_membership))
        holder = self._by_node_rank.setdefault(_claimed_rank(join, self._rules.static), number)
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
        elif self._phase is Phase.RUNNING and node.digest is not None:
            self._consider_late(number, now_s)

    def _find_refusal(self, join: Join) -> str | None:
        rules = self._rules
        if join.run_id != rules.run_id:
            return (
                f"this endpoint serves job {rules.run_id!r}, not {join.run_id!r}: "
                "use another --rdzv-endpoint or --rdzv-id"
            )
        if (join.min_nodes, join.max_nodes) != (rules.min_nodes, rules.max_nodes):
            ours, theirs = (f"{low}:{high}" for low, high in (rules[1:3], (join.min_nodes, join.max_nodes)))
            return f"--nnodes differs: {theirs} here, {ours} at the coordinator; give all nodes the same"
        if rules.static:
            if max(0, join.node_rank) >= rules.max_nodes:
                return f"--node-rank {join.node_rank} does not fit --nnodes {rules.max_nodes}: ranks go from 0"
            other = self._nodes.get(self._by_node_rank.get(max(0, join.node_rank), -1))
            if other is not None:
                return (
                    f"--node-rank {max(0, join.node_rank)} is already taken by {other.join.host} "
                    f"(pid {other.join.pid}): give each node its own"
                )
        return None

    def _set_part(self, node: _Node, part: Part) -> None:
        self._parts[node.part] -= 1
        self._parts[part] += 1
        node.part = part

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
        waiting = self._parts[Part.WAITING] - self._unidentified - self._count_excluded()
        if self._parts[Part.SUCCEEDED]:
            for number, node in self._nodes.items():
                if node.part is Part.WAITING:
                    self._send(number, Spare(len(self._nodes) - self._parts[Part.WAITING]))
        elif waiting > 0:
            self._stop(f"{waiting} more node(s) join", signal.SIGTERM, now_s)

    # ---- starting an attempt ---------------------------------------------------------------------------------

    def _try_start(self, now_s: float) -> None:
        rules, count = self._rules, len(self._nodes)
        if self._attempt >= 0:
            count -= self._unidentified  # a running job does not wait for what newcomers have to say
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
        if news.what in ("failed", "strict"):
            where = f" on {node.join.host}" if self._rules.max_nodes > 1 else ""
            what = "set-up failed" if news.what == "failed" else "--strict: something failed"
            self._finish(1, f"{what}{where}: {news.text}")
            return
        if self._setup is None:
            from launcher.setup_policy import JobSetup

            rules = self._rules
            self._setup = JobSetup(rules.min_nodes, rules.setup_wait_s, rules.join_s * USE_SHARE)
        self._tell_setup(self._setup.receive(number, node.join.host, news, now_s))

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
            if node.digest is not None
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
        self._failures, self._lost = [], []
        self._known_failures.clear()
        self._succeeded.clear()
        self._digest = next((d for d in (self._nodes[m.node].digest for m in members) if d), "")
        self._port_was_taken = False
        self._stood_still = ""
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
                if self._phase is Phase.RUNNING and node.part is Part.WAITING:
                    self._consider_late(number, now_s)
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
                if attempt == self._attempt and self._phase in (Phase.RUNNING, Phase.STOPPING):
                    self._add_failures([failure])
                    self._take_notes().heard(failure, now_s)
                    if self._phase is Phase.RUNNING:
                        self._stop(_describe_failure(failure), signal.SIGTERM, now_s)
            case Succeeded(attempt):
                if attempt == self._attempt and node.place is not None:
                    self._succeeded.add(number)
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
                    self._on_looks(facts, now_s)
            case NodeStacks(asked, data, traces, layout):
                if self._watch is not None and self._phase is Phase.RUNNING:
                    self._heed(self._watch.answered(number, asked, data, traces, layout), now_s)
            case RuleFound(attempt, rule, kind, action, rank, text):
                if attempt == self._attempt and self._phase in (Phase.RUNNING, Phase.STOPPING):
                    from launcher.rules.job_watch import Finding

                    self._obey([Finding(rule, kind, action, rank, text)], now_s)
            case RuleSeen(attempt, rule, what):
                if attempt == self._attempt and self._rule_watch is not None:
                    self._rule_watch.seen(rule, what, now_s)
            case SetupNews():
                self._on_setup(node, number, message, now_s)
            case Signalled(signum):
                self._on_signal(number, signum, now_s)
            case Leave(reason):
                self._drop(number, reason, now_s, now_s)

    # ---- standstill ------------------------------------------------------------------------------------------

    def _on_looks(self, facts: tuple[RankFacts, ...], now_s: float) -> None:
        if self._watch is None:
            from launcher.supervise.hang import HangSettings
            from launcher.supervise.watch import HangWatch

            self._watch = HangWatch(HangSettings(least_s=self._rules.hang_least_s))
            self._begin_watch(self._watch, now_s)
        self._watch.looked(facts)

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
            is_ended = self._rules.on_hang == "restart" and self._phase is Phase.RUNNING
            if self._watch is not None and (hang := self._watch.last) is not None:
                page = self._take_notes().stood_still(self._attempt, hang, each, is_ended, now_s)
                if page is not None:
                    self._keep(page)
            if is_ended:
                self._stood_still = each.line
                self._stop(each.line, signal.SIGTERM, now_s)

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
                self._stood_still = each.line
                self._stop(each.line, signal.SIGTERM, now_s)

    def _add_failures(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            key = (failure.rank, failure.pid)
            if key not in self._known_failures:
                self._known_failures.add(key)
                self._failures.append(failure)

    def _on_signal(self, number: int, signum: int, now_s: float) -> None:
        again, self._signum = self._signum != 0, self._signum or signum
        reason = f"stopped by {signal_name(signum)}"
        if self._phase is Phase.GATHERING:
            self._finish(128 + signum, reason)
        elif self._phase is Phase.RUNNING:
            self._stop(reason, signum, now_s)
        elif self._phase is Phase.STOPPING:
            # The ranks have a signal already; a second one to us shortens what is left of their time.
            grace_s = min(2.0, self._rules.grace_s) if again else self._rules.grace_s
            self._send(number, Note(f"waiting for {self._parts[Part.STOPPING]} node(s) to stop"))
            for each, node in self._nodes.items():
                if node.part is Part.STOPPING:
                    self._send(each, Stop(self._attempt, signum, grace_s, reason))

    def _drop(self, number: int, reason: str, now_s: float, heard_s: float) -> None:
        """A node is gone, whatever the way."""
        node = self._nodes.pop(number, None)
        if node is None or self._phase is Phase.FINISHED:
            return
        self._parts[node.part] -= 1
        self._unidentified -= node.digest is None
        claimed = _claimed_rank(node.join, self._rules.static)
        if self._by_node_rank.get(claimed) == number:
            del self._by_node_rank[claimed]
        if number in self._comparing:
            self._comparing = []
        if self._setup is not None:
            self._tell_setup(self._setup.lost(number, now_s))
        took_part = node.part is not Part.WAITING
        if took_part:
            self._lost.append(_Loss(node.join.host, f"{node.name}: {reason}", heard_s, now_s))
            self._count_change(node.join.host)
        if self._phase is Phase.GATHERING:
            self._try_start(now_s)
        elif self._phase is Phase.RUNNING and took_part:
            self._stop(f"lost node {node.name}: {reason}", signal.SIGTERM, now_s)
        elif self._phase is Phase.STOPPING:
            self._try_go_on(now_s)

    def _count_change(self, host: str) -> None:
        self._changes_by_host[host] = self._changes_by_host.get(host, 0) + 1

    # ---- ending an attempt -----------------------------------------------------------------------------------

    def _stop(self, reason: str, signum: int, now_s: float) -> None:
        self._phase = Phase.STOPPING
        self._stop_began_s = now_s
        self._regroup_at_s = None
        self._stop_by_s = now_s + self._rules.grace_s + STOP_MARGIN_S
        for number, node in self._nodes.items():
            if node.part is not Part.WAITING:
                self._set_part(node, Part.STOPPING)
                self._send(number, Stop(self._attempt, signum, self._rules.grace_s, reason))
        self._try_go_on(now_s)

    def _on_stopped(self, node: _Node, message: Stopped, now_s: float) -> None:
        self._set_part(node, Part.WAITING)
        node.port = message.master_port
        self._port_was_taken |= message.port_was_taken
        self._steps = max(self._steps, message.steps)
        if message.step is not None:
            self._step = message.step if self._step is None else max(self._step, message.step)
        self._add_failures(message.failures)
        self._try_go_on(now_s)

    def _try_go_on(self, now_s: float) -> None:
        """Decides what comes after an attempt, once nothing of it runs on any node."""
        if self._parts[Part.STOPPING]:
            return
        self._stop_by_s = None
        if self._rules.frees_endpoint:
            self._orders.append(Listen(True))
        has_failed = bool(self._stood_still) or any(not failure.stopped_by_us for failure in self._failures)
        if not self._signum and (has_failed or self._lost):
            notes, is_stood = self._take_notes(), bool(self._stood_still)
            notes.ended(self._attempt, self._failures, self._lost_nodes(), is_stood, self._stop_began_s, now_s)
        if self._signum:
            self._finish(128 + self._signum, f"stopped by {signal_name(self._signum)}")
        elif self._verdict is not None:
            self._finish(*self._verdict)
        elif self._lost:
            self._after_loss(now_s)
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
        if len(self._nodes) < self._rules.min_nodes and self._rules.max_restarts == 0:
            self._finish(1, f"lost node {gone}; {self._describe_need()} and --max-restarts is 0")
        else:
            self._decided(
                "the nodes that are left come together anew", "the loss of a node is no failure of ranks"
            )
            self._gather_again(now_s, changed=True)

    def _order_failures(self) -> Ordered:
        from launcher.ranks.cause import order_failures

        return order_failures(tuple(self._failures), self._lost_nodes())

    def _lost_nodes(self) -> list[LostNode]:
        if not self._lost:
            return []
        from launcher.ranks.cause import LostNode

        return [LostNode(loss.host, int(loss.heard_s * 1e9), int(loss.noticed_s * 1e9)) for loss in self._lost]

    def _after_failure(self, now_s: float) -> None:
        lived_s = self._stop_began_s - self._running_since_s  # what stopping took is no life
        if self._port_was_taken and self._port_retries < MOST_PORT_RETRIES:
            self._port_retries += 1
            self._tell_all(
                f"rank 0 found its port taken by another process; trying another ({self._port_retries})"
            )
            self._decided("another attempt, on another port", "a port that was taken is no failure of ranks")
            self._gather_again(now_s)
            return
        hopeless = self._find_hopeless() if self._rules.max_restarts else ""
        if hopeless:
            self._finish(self._rules.give_up_status, hopeless)
            return
        delay_s = self._restarts.after_failure(lived_s)
        if delay_s is None:
            after = f" after {self._restarts.count} restart(s)" if self._restarts.used else ""
            self._finish(1, f"{self._stood_still or 'ranks failed'}{after}")
            return
        if self._rules.excludes_nodes and self._rules.max_nodes > 1:
            self._consider_machines(now_s)
        self._not_before_s = now_s + delay_s if delay_s else 0.0
        early = self._restarts.early_in_a_row
        wait = f" in {delay_s:g} s (it failed early {early} times in a row)" if delay_s else ""
        self._tell_all(
            f"restart {self._restarts.used} of {self._rules.max_restarts}{wait}{self._describe_first()}"
        )
        self._decided(
            f"restart {self._restarts.used} of {self._rules.max_restarts}{wait}", "--max-restarts", delay_s
        )
        self._gather_again(now_s)

    def _describe_first(self) -> str:
        from launcher.ranks.report import describe_first

        ordered = self._order_failures()
        first = describe_first(ordered.failures, ordered.unsure)
        return f": {first}" if first else ""

    def _first_failures(self) -> list[Failure]:
        """Those that may have been the first to fail."""
        ordered = self._order_failures()
        return [each for each in ordered.failures if each.rank in ordered.unsure] or list(ordered.failures[:1])

    def _consider_machines(self, now_s: float) -> None:
        """Leaves nodes out whose machines are to blame."""
        from launcher.ranks.failure_class import machine_fault

        first = [(failure, machine_fault(failure)) for failure in self._first_failures()]
        if self._exclusion is None:
            if not any(fault for _, fault in first):
                return
            from launcher.exclusion import Exclusion

            self._exclusion = Exclusion()
        hosts = {node.place: node.join.host for node in self._nodes.values() if node.place is not None}
        faults = [
            fault._replace(host=hosts.get(failure.group_rank, failure.node)) for failure, fault in first if fault
        ]
        for fault in self._exclusion.after_failure(faults, now_s):
            self._tell_all(f"{fault.host} is left out of further attempts while others suffice: {fault.what}")

    def _find_hopeless(self) -> str:
        """Why another attempt would fail too; "" where it may not. By those that may have failed first."""
        first = self._first_failures()
        if self._rules.stops_on_same_error:
            from launcher.ranks.failure_class import certain_user_error

            errors = (error for failure in first if (error := certain_user_error(failure)))
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
        places = [(node.place, number) for number, node in self._nodes.items() if node.place is not None]
        if places:
            self._send(min(places)[1], page)

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
        self._gather_since_s = now_s
        self._try_start(now_s)

    def _finish(self, status: int, reason: str) -> None:
        self._phase = Phase.FINISHED
        failures: tuple[Failure, ...] = ()
        unsure: tuple[int, ...] = ()
        if self._failures and status:
            ordered = self._order_failures()
            failures, unsure = ordered.failures[:MOST_FAILURES_TOLD], ordered.unsure
        if self._notes is not None:
            self._notes.finished(reason)
            self._tell_pages(self._notes)
        for number in self._nodes:
            self._send(number, Finish(status, reason, failures, unsure))

    # ---- words -----------------------------------------------------------------------------------------------

    def _describe_need(self) -> str:
        low, high = self._rules.min_nodes, self._rules.max_nodes
        return f"the job needs {low} nodes" if low == high else f"the job needs at least {low} nodes"

    def _describe_missing(self, waited_s: float) -> str:
        here = ", ".join(sorted((n.join.host for n in self._nodes.values()), key=ranks.natural_key)[:16])
        if len(self._nodes) < self._rules.min_nodes:
            lost = "; lost: " + "; ".join(loss.what for loss in self._lost) if self._lost else ""
            return (
                f"only {len(self._nodes)} of {self._rules.min_nodes} nodes joined within {waited_s:.0f} s "
                f"(join_timeout): {here or 'none'}{lost}"
            )
        silent = [n.join.host for n in self._nodes.values() if n.digest is None] or [
            self._nodes[number].join.host
            for number in self._comparing
            if number in self._nodes and self._nodes[number].environment is None
        ]
        return f"no word about their Python environment from {', '.join(silent[:16])} within {waited_s:.0f} s"

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
