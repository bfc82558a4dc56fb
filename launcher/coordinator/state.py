"""PURE: what the parts of a job share at its coordinator: its settings, phase, nodes, attempt and orders."""

from __future__ import annotations

from bootseer.light_stdlib import Enum
from bootseer.light_typing import TYPE_CHECKING, NamedTuple
from launcher.coordinator.attempt import Attempt
from launcher.coordinator.nodes import JobNodes
from launcher.coordinator.orders import Outbox
from launcher.coordinator.records import JobRecords
from launcher.coordinator.restart_policy import MembershipChanges, RestartPolicy, StepLimits

if TYPE_CHECKING:
    from bootseer.tuning import LauncherTuning
    from launcher.rules.rule import Rule


class JobRules(NamedTuple):
    """The settings of the job; all times in seconds."""

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
    log_rules: tuple[Rule, ...] = ()  # over the output of ranks
    stops_on_same_error: bool = True
    excludes_nodes: bool = True
    stops_without_progress: bool = True
    give_up_status: int = 1  # if a restart cannot help
    check_pairs: str = "off"  # the network between nodes: network (after failures of it) | always | off
    check_limits: tuple[tuple[str, float], ...] = ()  # changed limits of health checks
    allow_mixed: bool = False
    mixed_arguments: bool = False  # nodes may run different programs
    open_membership: bool = True
    frees_endpoint: bool = False  # rank 0 binds the coordinator's own port (static, several nodes)
    setup_s: float = 0.0  # time for set-up on top of join_s, until all environments exist
    setup_wait_s: float = 0.0  # for the node that builds the environment
    steps: StepLimits = StepLimits()  # of the escalation ladder
    tuning: LauncherTuning | None = None  # changed limits

    def limits(self) -> LauncherTuning:
        """Return the limits that operators may change."""
        if self.tuning is not None:
            return self.tuning
        from bootseer.tuning import DEFAULTS  # a start needs no limit

        return DEFAULTS.launcher


class Phase(Enum):
    GATHERING = "gathering"
    RUNNING = "running"
    EXAMINING = "examining"  # the attempt has failed, its ranks are stopped (SIGSTOP) for the post-mortem command
    STOPPING = "stopping"
    RECOVERING = "mending"  # nothing runs: checks, rollback or replay before the restart
    FINISHED = "finished"


OF_ATTEMPT = (Phase.RUNNING, Phase.EXAMINING, Phase.STOPPING)  # its ranks exist


class JobState:
    def __init__(self, rules: JobRules) -> None:
        self.rules = rules
        self.phase = Phase.GATHERING
        self.attempt = Attempt()
        self.signum = 0  # of the first signal that ends the job
        self.restarts = RestartPolicy(
            rules.max_restarts,
            rules.early_s,
            rules.backoff_s,
            rules.restart_refill_s,
        )
        self.changes = MembershipChanges(rules.max_membership_changes)
        self.nodes = JobNodes(rules.static)
        self.outbox = Outbox(self.nodes.by_number.keys())
        self.records = JobRecords(rules.run_id, self.nodes, self.outbox, rules.limits)

    @property
    def may_go_on(self) -> bool:
        """Whether another attempt may follow the current one, which ends."""
        return not self.signum and (self.rules.max_restarts > 0 or self.attempt.is_again)

    def describe_need(self) -> str:
        """Return how many nodes the job needs."""
        from bootseer.counted import counted

        low, high = self.rules.min_nodes, self.rules.max_nodes
        least = "" if low == high else "at least "
        return f"the job needs {least}{counted(low, 'node')}"
