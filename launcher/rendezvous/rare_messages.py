"""Messages that not every start needs, and unions of all. messages.py has these names too, loaded on first use."""

from __future__ import annotations

from bootseer.light_typing import NamedTuple
from launcher.base.facts import RankFacts
from launcher.rendezvous.messages import (
    DroppedFromJob,
    Finish,
    Join,
    Note,
    RankFailed,
    Refused,
    Started,
    Stop,
    Succeeded,
    Welcome,
    World,
)

# ---- records -----------------------------------------------------------------------------------------------


class MountFault(NamedTuple):
    """A read fault of a mount of bootrun below the ranks of a node."""

    what: str  # env, image, checkpoint
    why: str  # one line: block, pack, store, cause
    is_damage: bool  # a later retry does not help
    is_end: bool = False  # the mount has ended


class Failure(NamedTuple):
    """A rank that did not end with exit status 0."""

    node: str  # host name of its node
    group_rank: int
    rank: int
    local_rank: int
    pid: int
    status: int  # exit status, or minus the signal's number, as in subprocess
    time_ns: int  # time of the exit
    error_ns: int
    wall_s: float  # the node's wall clock at that time, for users
    stopped_by_us: bool  # it ended after the launcher stopped it
    error_file: str  # "" when there is none
    message: str  # from the error file, else ""
    traceback: str  # from the error file, else ""
    stderr_tail: tuple[str, ...]  # last lines of its stderr log, () if stderr is the console
    oom: str = ""  # killed by the OOM killer: yes, maybe, no, "" if unknown
    kernel: tuple[str, ...] = ()  # lines of the kernel's log about it, or about accelerators
    checks: tuple[str, ...] = ()  # findings of health checks on its node by then
    mounts: tuple[MountFault, ...] = ()  # in this attempt, on its node
    early: tuple[int, ...] = ()  # ranks that had ended with 0 before it lost another; set by the coordinator


class Distributions(NamedTuple):
    """The facts that show whether two nodes run the same Python environment."""

    interpreter: str  # version and ABI, "3.11.7 cpython-311-x86_64-linux-gnu"
    names: tuple[str, ...]  # "torch==2.13.0", sorted


# ---- member to coordinator ---------------------------------------------------------------------------------


class Resume(NamedTuple):
    """First message after the handshake of a node that had joined and lost its connection."""

    token: str  # of its Welcome
    received: int  # messages of the coordinator


class Identity(NamedTuple):
    """Digest of the node's Distributions, "" if unknown (then `why` gives the reason)."""

    digest: str
    why: str


class Environment(NamedTuple):
    """Answer to WantEnvironment."""

    distributions: Distributions


class SetupReport(NamedTuple):
    """The result of searching, fetching or making the ranks' environment (setup_policy.py)."""

    # waiting, looked, fetched, unfetched, damaged, published, found, unpublished, failed, strict, misplaced
    what: str
    key: str  # of the environment, "" if unknown
    tree: str  # that was found, "" for none
    text: str  # why not, or why it failed


class CheckpointFailed(NamedTuple):
    """The checkpoint version of an attempt is unavailable on this node."""

    attempt: int
    digest: str  # of the version
    is_damaged: bool  # permanently: another version may work
    text: str  # for users: the reason


class PeerServes(NamedTuple):
    """This node serves bytes to other nodes of the job (launcher/provision/peers.py), or no longer does."""

    host: str  # host name, for users
    address: str  # an IP address of this node
    port: int  # 0: no longer


class EventsDropped(NamedTuple):
    """Number of event lines that a node has not sent so far, by reason."""

    rate: int  # heartbeats beyond their rate
    long: int
    unread: int  # the files grew faster than the read limit
    torn: int  # truncated lines


class EventBatch(NamedTuple):
    """Lines of a node's event files; only after WantEvents, also after Finish."""

    data: bytes  # zlib; b"" for none
    raw_bytes: int  # of the lines
    lines: int
    local_ns: int  # the node's clock when this was packed, and the matching time of the coordinator
    job_ns: int
    error_ns: int
    dropped: EventsDropped


class Ping(NamedTuple):
    """A heartbeat; carries the sender's clock for the mapping."""

    local_ns: int
    received: int = 0  # messages from the coordinator (session.py)


class Listens(NamedTuple):
    """Rank 0 of this node listens on the attempt's master port."""

    attempt: int


class RankSamples(NamedTuple):
    """Regular observations of the node's ranks from outside; times by the job's clock."""

    attempt: int
    facts: tuple[RankFacts, ...]


class NodeStacks(NamedTuple):
    """Answer to WantStacks."""

    number: int  # of the query
    data: bytes  # of supervise/watch.py: zlib of JSON
    traces: bytes = b""  # of monitor/collectives/ring.py: the same; b"" without --trace-collectives
    layout: str = ""  # of bootseer.layout, a line of bootseer/hangs/layout.py
    devices: str = ""  # of monitor/collectives/accelerators.py: the use of accelerators, as JSON


class RuleFired(NamedTuple):
    """A log rule fired on this node (launcher/rules)."""

    attempt: int
    rule: str  # its name
    kind: str  # class of failure, "" for none
    action: str  # report, restart, give-up, stop
    rank: int  # -1: none in particular
    text: str  # the reason


class RuleObservation(NamedTuple):
    """For a rule about any rank of the job: an observation of this node."""

    attempt: int
    rule: str
    what: str  # a line with start, match, stop; watch: it sees its ranks' output; blind: no longer


class PairPort(NamedTuple):
    """Answer to WantPairs: the place at which others can measure their network to this node."""

    number: int  # of the test
    address: str  # an IP address
    port: int  # 0: it cannot take part


class PairMeasured(NamedTuple):
    """A measurement of a node with another one of its group (bootseer/health/pairs.py)."""

    partner: int
    error: str
    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


class PairResult(NamedTuple):
    """Answer to PairOrder."""

    number: int
    measured: tuple[PairMeasured, ...]


class ClockReading(NamedTuple):
    """With --check: the node's wall clock, and the coordinator's monotonic time of the reading."""

    wall_ns: int
    job_ns: int
    error_ns: int


class Stopped(NamedTuple):
    """Answer to Stop, after all processes of the attempt on the node have ended; never sent unrequested."""

    attempt: int
    failures: tuple[Failure, ...]
    master_port: int  # a fresh one for the next attempt
    port_was_taken: bool  # another process listens on the attempt's master port
    steps: int = -1  # the maximum of this node's ranks; -1: not counted
    step: int | None = None  # the highest number that a rank here gave with a heartbeat
    traces: bytes = b""  # calls of torch.distributed by the ranks here, if traced (monitor/collectives/ring.py)
    ended: tuple[int, ...] = ()  # ranks here that had ended with 0 before they were stopped


class Examined(NamedTuple):
    """Answer to Examine, from a node that ran the command."""

    attempt: int
    seconds: float
    text: str  # the result, for users


class BadFinding(NamedTuple):
    """A finding of a health check that makes its node unfit."""

    check: str  # its name
    text: str  # for users


class RecoveryResult(NamedTuple):
    """Answer to RecoveryStep."""

    attempt: int
    step: str
    is_well: bool  # the command ended with status 0; the checks were run
    seconds: float
    text: str  # the result, for users
    found: tuple[BadFinding, ...] = ()  # of checks
    suspects: tuple[str, ...] = ()  # host names of machines that a replay found faulty


class Signalled(NamedTuple):
    """The agent of this node got a signal to stop the job."""

    signum: int


class Leave(NamedTuple):
    """The node leaves, and the job may continue without it."""

    reason: str


# ---- coordinator to member ---------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """Answer to Resume: the node takes part as before."""

    received: int  # messages from the node (session.py)


class LivenessProbe(NamedTuple):
    """The node is silent: if its machine lives, TCP confirms that this has arrived."""


class WantEvents(NamedTuple):
    """Request to send events, as the coordinator writes a file with the events of all nodes."""


class Pong(NamedTuple):
    """Answer to Ping: its local_ns, and the coordinator's clock at its arrival and at the answer."""

    local_ns: int
    received_ns: int
    sent_ns: int
    received: int = 0  # messages from the node (session.py)


class WantEnvironment(NamedTuple):
    """Request for the Environment: the nodes differ, and the coordinator prints a table."""


class SetupOrder(NamedTuple):
    """An order about the ranks' environment."""

    do: str  # use, show, build, wait, own, again
    tree: str  # to use; for `build`: a damaged one, to replace
    text: str  # for users; for `build`: "others" if other nodes wait for it


class PeerNode(NamedTuple):
    """A node that serves bytes to others."""

    id: str  # of this node, constant during the job
    address: str  # an IP address
    port: int


class PeerNodes(NamedTuple):
    """The serving nodes of the receiver's group; sent only to nodes that serve."""

    own: str  # id of the receiving node
    nodes: tuple[PeerNode, ...]


class Pinned(NamedTuple):
    """The checkpoint version that all ranks of an attempt load; empty strings: there is none yet."""

    version: str
    digest: str  # of its manifest, or of names, sizes and etags of its files


class Spare(NamedTuple):
    """The node has no place in the world at present, and waits."""

    nodes: int


class Examine(NamedTuple):
    """Attempt `attempt` has failed: hold its ranks as they are until Stop, for the post-mortem command."""

    attempt: int
    limit_s: float
    runs: bool  # this node runs the command, and answers Examined


class RecoveryStep(NamedTuple):
    """Order to take this step (escalation.py) between two attempts, then answer RecoveryResult."""

    attempt: int  # that has failed
    step: str  # stop-time-checks, rollback, replay
    limit_s: float
    kind: str  # class of the failure
    number: int  # of its failure record
    data: bytes  # the record as far as it is known, b"" for none
    hosts: tuple[str, ...]  # of the attempt


BACKOFF_STEP = "backoff"


class StepTaken(NamedTuple):
    """A step of the escalation ladder, to the node with rank 0, which writes it to its events.

    Or the backoff before the next attempt, to all nodes, which write it with that attempt.
    """

    attempt: int  # that has failed
    step: str  # BACKOFF_STEP: a pause
    kind: str  # class of the failure
    text: str  # the reason, or the result; of a pause, its seconds


class MasterListens(NamedTuple):
    """Rank 0 of an attempt listens on its master port; forked ranks of other nodes wait for this."""

    attempt: int


class WantStacks(NamedTuple):
    """Request for the stacks of the ranks of attempt `attempt`: the job hangs."""

    attempt: int
    number: int


class HangReport(NamedTuple):
    """A hang of the job, to the node with rank 0, which writes the report."""

    attempt: int
    number: int  # of the hang in this job, from 0
    text: str  # for users
    data: bytes  # zlib of JSON: the same for programs


class RuleReport(NamedTuple):
    """A fired rule, to all nodes: a line for users; the node with rank 0 writes it to its events."""

    attempt: int
    rule: str
    kind: str
    action: str
    rank: int
    text: str  # for users


class WantPairs(NamedTuple):
    """Order to listen: nodes are about to measure the network between each other."""

    number: int


class PairNode(NamedTuple):
    """The place at which a node listens for that."""

    address: str
    port: int


class PairOrder(NamedTuple):
    """Order to measure, in rounds, each node of this group with each other."""

    number: int
    own: int  # which of `nodes` this one is
    nodes: tuple[PairNode, ...]


class CheckReport(NamedTuple):
    """The coordinator's finding about a node, or between nodes, to all: a Finding (bootseer/health)."""

    is_own: bool  # it is about the receiving node
    is_over: bool
    check: str
    level: str
    said: str
    where: str
    measured: float | None
    limit: float | None
    unit: str
    way_out: str


class FailureRecordMessage(NamedTuple):
    """The record of a failed attempt and the reaction to it, to the node with rank 0, which writes it."""

    number: int  # of the record in this job, from 0
    data: bytes  # of monitor/failure/record.py: zlib of JSON


FromMember = (
    Join
    | Resume
    | Identity
    | Environment
    | Ping
    | Started
    | RankFailed
    | Succeeded
    | Stopped
    | Signalled
    | Leave
    | SetupReport
    | CheckpointFailed
    | EventBatch
    | PeerServes
    | Listens
    | RankSamples
    | NodeStacks
    | RuleFired
    | RuleObservation
    | Examined
    | RecoveryResult
    | PairPort
    | PairResult
    | ClockReading
)
FromCoordinator = (
    Welcome
    | Resumed
    | DroppedFromJob
    | LivenessProbe
    | Pong
    | WantEnvironment
    | World
    | Spare
    | Stop
    | Note
    | Finish
    | Refused
    | SetupOrder
    | WantEvents
    | PeerNodes
    | MasterListens
    | WantStacks
    | HangReport
    | RuleReport
    | FailureRecordMessage
    | Examine
    | RecoveryStep
    | StepTaken
    | WantPairs
    | PairOrder
    | CheckReport
)

# About the attempt that a node is in.
AttemptMessage = (
    Started
    | RankFailed
    | Succeeded
    | Stopped
    | RankSamples
    | RuleFired
    | RuleObservation
    | Examined
    | RecoveryResult
)
