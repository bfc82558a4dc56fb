"""What the nodes of a job and its coordinator tell each other; also the calls of a single-node job with itself.

Plain named tuples: they cost nothing to import, and msgspec encodes and validates them on the wire (wire.py), so
a message that reaches this side has the types below. Times in `_ns` are nanoseconds of the coordinator's
monotonic clock unless the name says local; `error_ns` bounds how wrong such a time can be.
"""

from __future__ import annotations

from bootseer.light_typing import NamedTuple
from launcher.supervise.facts import RankFacts

# ---- records -----------------------------------------------------------------------------------------------


class MountFault(NamedTuple):
    """A mount of bootrun's own, below the ranks of a node, could not be read."""

    what: str  # env, image, checkpoint
    why: str  # one line: block, pack, store, cause
    is_damage: bool  # to ask again later does not mend it
    is_end: bool = False  # the mount has ended


class Failure(NamedTuple):
    """A rank that ended in any other way than exit status 0."""

    node: str  # host name of its node
    group_rank: int
    rank: int
    local_rank: int
    pid: int
    status: int  # exit status, or minus the signal's number, as in subprocess
    time_ns: int  # moment of the exit
    error_ns: int
    wall_s: float  # the node's wall clock at that moment, for people
    stopped_by_us: bool  # it ended after the launcher had told it to
    error_file: str  # "" when there is none
    message: str  # from the error file, else ""
    traceback: str  # from the error file, else ""
    stderr_tail: tuple[str, ...]  # last lines of its stderr log, () when it went to the console
    oom: str = ""  # killed for want of memory: yes, maybe, no, "" where that cannot be known
    kernel: tuple[str, ...] = ()  # lines of the kernel's log about it, or about accelerators
    checks: tuple[str, ...] = ()  # what health checks have found wrong with its node by then
    mounts: tuple[MountFault, ...] = ()  # in this attempt, on its node
    early: tuple[int, ...] = ()  # ranks that had ended with 0 before it lost another; by the coordinator


class Distributions(NamedTuple):
    """What decides whether two nodes run the same Python environment."""

    interpreter: str  # version and ABI, "3.11.7 cpython-311-x86_64-linux-gnu"
    names: tuple[str, ...]  # "torch==2.13.0", sorted


# ---- member to coordinator ---------------------------------------------------------------------------------


class Runs(NamedTuple):
    """What a node's ranks run, by digests (same_job.py); empty where that is not compared."""

    shown: str = ""  # for people, without secrets
    place: str = ""  # of the script
    content: str = ""  # of its name and content; "" where that cannot be known
    args: str = ""


class Join(NamedTuple):
    """First message after the handshake: who I am and which job I mean."""

    run_id: str
    host: str  # host name
    address: str  # where ranks of other nodes reach this node: --local-addr, else the connection's own address
    pid: int
    node_rank: int  # -1: not given
    role: str
    local_world_size: int
    min_nodes: int
    max_nodes: int
    max_restarts: int
    master_port: int  # a port this node holds for its next attempt as rank 0
    has_identity: bool  # an Identity message will follow
    runs: Runs = Runs()


class Resume(NamedTuple):
    """First message after the handshake of a node that had joined: its last connection has broken."""

    token: str  # of its Welcome
    received: int  # messages of the coordinator


class Identity(NamedTuple):
    """Digest of the node's Distributions, "" when it could not be found out (then `why` says so)."""

    digest: str
    why: str


class Environment(NamedTuple):
    """Answer to WantEnvironment."""

    distributions: Distributions


class SetupNews(NamedTuple):
    """What came of looking for the ranks' environment, fetching or making it (setup_policy.py)."""

    # waiting, looked, fetched, unfetched, damaged, published, found, unpublished, failed, strict, misplaced
    what: str
    key: str  # of the environment, "" where it is not known
    tree: str  # that was found, or "" for none
    text: str  # why not, or why it failed


class CheckpointFailed(NamedTuple):
    """The version that an attempt loads cannot be had on this node."""

    attempt: int
    digest: str  # of the version
    is_damaged: bool  # for good: another version may do
    text: str  # for people: why


class PeerServes(NamedTuple):
    """This node serves bytes to the others of the job (launcher/peers.py), or no longer."""

    host: str  # host name, for people
    address: str  # an IP address of this node
    port: int  # 0: no longer


class EventsDropped(NamedTuple):
    """Lines of a node's event files that it has not sent, so far, by reason."""

    rate: int  # heartbeats beyond their rate
    long: int
    unread: int  # the files grew faster than they may be read
    torn: int  # cut off


class EventBatch(NamedTuple):
    """Lines of a node's event files; only after WantEvents, also after Finish."""

    data: bytes  # zlib; b"" for none
    raw_bytes: int  # of the lines
    lines: int
    local_ns: int  # the node's clock when this was packed, and by it the coordinator's
    job_ns: int
    error_ns: int
    dropped: EventsDropped


class Ping(NamedTuple):
    """Heartbeat; carries the sender's clock for the mapping."""

    local_ns: int
    received: int = 0  # messages of the coordinator (session.py)


class Started(NamedTuple):
    """All ranks of the node run."""

    attempt: int
    spawn_s: float


class Listens(NamedTuple):
    """Rank 0 of this node listens on the attempt's master port."""

    attempt: int


class RankLooks(NamedTuple):
    """What is seen of the node's ranks from outside, now and then while they run; times by the job's clock."""

    attempt: int
    facts: tuple[RankFacts, ...]


class NodeStacks(NamedTuple):
    """Answer to WantStacks."""

    number: int  # of the question
    data: bytes  # of supervise/watch.py: zlib of JSON
    traces: bytes = b""  # of supervise/ring.py: the same; b"" without --trace-collectives
    layout: str = ""  # of bootseer.layout, a line of bootseer/diagnose/layout.py
    devices: str = ""  # of supervise/accelerators.py: what accelerators do, as JSON


class RuleFound(NamedTuple):
    """A rule over what ranks print was broken on this node (launcher/rules)."""

    attempt: int
    rule: str  # its name
    kind: str  # class of failure, "" for none
    action: str  # report, restart, give-up, stop
    rank: int  # -1: none in particular
    text: str  # why


class RuleSeen(NamedTuple):
    """For a rule about any rank of the job: what this node has seen for it."""

    attempt: int
    rule: str
    what: str  # a line with start, match, stop; watch: it sees what its ranks print; blind: no longer


class PairPort(NamedTuple):
    """Answer to WantPairs: others may measure their network to this node here."""

    number: int  # of the test
    address: str  # an IP address
    port: int  # 0: it cannot take part


class PairMeasured(NamedTuple):
    """What a node has measured with another of its group (bootseer/health/pairs.py)."""

    partner: int
    error: str
    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


class PairResult(NamedTuple):
    """Answer to PairOrder."""

    number: int
    measured: tuple[PairMeasured, ...]


class ClockSays(NamedTuple):
    """With --check: the node's wall clock, and by the coordinator's monotonic one when that was."""

    wall_ns: int
    job_ns: int
    error_ns: int


class RankFailed(NamedTuple):
    """First failure of an attempt on this node, sent at once."""

    attempt: int
    failure: Failure


class Succeeded(NamedTuple):
    """All ranks of the node ended with status 0."""

    attempt: int


class Stopped(NamedTuple):
    """Answer to Stop, once nothing of the attempt runs on the node any more; never sent unasked."""

    attempt: int
    failures: tuple[Failure, ...]
    master_port: int  # a fresh one for the next attempt
    port_was_taken: bool  # another process listens on the master port of the attempt
    steps: int = -1  # the most that a rank of this node has made; -1: nothing counts them
    step: int | None = None  # the highest number that a rank here has given with a heartbeat
    traces: bytes = b""  # calls of torch.distributed of the ranks here, where they are traced (supervise/ring.py)
    ended: tuple[int, ...] = ()  # ranks here that had ended with 0 before they were told to stop


class Examined(NamedTuple):
    """Answer to Examine, of a node that was to run the command."""

    attempt: int
    seconds: float
    text: str  # what came of it, for people


class BadFinding(NamedTuple):
    """What a health check has found that makes its node unfit."""

    check: str  # its name
    text: str  # for people


class Mended(NamedTuple):
    """Answer to Mend."""

    attempt: int
    step: str
    is_well: bool  # the command ended with status 0; the checks were run
    seconds: float
    text: str  # what came of it, for people
    found: tuple[BadFinding, ...] = ()  # of checks
    suspects: tuple[str, ...] = ()  # host names that a replay has found to be at fault


class Signalled(NamedTuple):
    """The agent of this node was told to stop the job by a signal."""

    signum: int


class Leave(NamedTuple):
    """The node goes and the job may go on without it."""

    reason: str


# ---- coordinator to member ---------------------------------------------------------------------------------


class Welcome(NamedTuple):
    """The node takes part, as a member or as a spare."""

    node_id: int
    open_membership: bool  # no secret protects this job
    token: str = ""  # for Resume


class Resumed(NamedTuple):
    """Answer to Resume: the node takes part as before."""

    received: int  # messages of the node (session.py)


class GaveUp(NamedTuple):
    """The job goes on without this node: its ranks are of no use any more, it may join anew."""

    reason: str


class Nudge(NamedTuple):
    """Nothing is heard of the node: if its machine lives, TCP says that this has arrived."""


class WantEvents(NamedTuple):
    """The coordinator writes a file with the events of all nodes: send yours."""


class Pong(NamedTuple):
    """Answer to Ping: its local_ns, and the coordinator's clock when it came in and when this went out."""

    local_ns: int
    received_ns: int
    sent_ns: int
    received: int = 0  # messages of the node (session.py)


class WantEnvironment(NamedTuple):
    """Send your Environment: the nodes differ and a table is to be printed."""


class SetupOrder(NamedTuple):
    """What to do for the ranks' environment."""

    do: str  # use, show, build, wait, own, again
    tree: str  # to be used; of `build`: a damaged one, to be replaced
    text: str  # for people; of `build`: "others" if other nodes wait for it


class PeerNode(NamedTuple):
    """A node that serves bytes to others."""

    id: str  # of this node in this job, for good
    address: str  # an IP address
    port: int


class PeerNodes(NamedTuple):
    """All nodes of this one's group that serve by now; only to nodes that do."""

    own: str  # id of the node that this is sent to
    nodes: tuple[PeerNode, ...]


class Pinned(NamedTuple):
    """The version of the checkpoint that all ranks of an attempt load; empty strings: there is none yet."""

    version: str
    digest: str  # of its manifest, or of names, sizes and etags of its files


class World(NamedTuple):
    """Start attempt `attempt` with these ranks."""

    attempt: int  # counts starts of the job, from 0, never repeats
    restart_count: int  # failures of the job so far: TORCHELASTIC_RESTART_COUNT
    group_rank: int
    group_world_size: int
    first_rank: int  # global rank of local rank 0
    world_size: int
    first_role_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    checkpoint: Pinned | None = None  # without --load-checkpoint


class Spare(NamedTuple):
    """No place in the world at present; wait."""

    nodes: int


class Stop(NamedTuple):
    """End attempt `attempt`: `signum` to the ranks, after `grace_s` seconds KILL, then answer Stopped."""

    attempt: int
    signum: int
    grace_s: float
    reason: str


class Examine(NamedTuple):
    """Attempt `attempt` has failed: hold its ranks as they are until Stop, for the post-mortem command."""

    attempt: int
    limit_s: float
    runs: bool  # this node runs the command, and answers Examined


class Mend(NamedTuple):
    """Between two attempts: take this step (ladder.py), then answer Mended."""

    attempt: int  # that has failed
    step: str  # stop-time-checks, rollback, replay
    limit_s: float
    kind: str  # class of the failure
    number: int  # of its page
    data: bytes  # the page as far as it is known, b"" for none
    hosts: tuple[str, ...]  # of the attempt


class StepTaken(NamedTuple):
    """A step of the restart ladder, to the node with rank 0, which keeps it among its events."""

    attempt: int  # that has failed
    step: str
    kind: str  # class of the failure
    text: str  # why, or what came of it


class MasterListens(NamedTuple):
    """Rank 0 of an attempt listens on its master port: forked ranks of other nodes have waited for that."""

    attempt: int


class WantStacks(NamedTuple):
    """Send what the ranks of attempt `attempt` do: the job stands still."""

    attempt: int
    number: int


class Standstill(NamedTuple):
    """The job stands still: to the node with rank 0, which keeps the report."""

    attempt: int
    number: int  # of the standstill in this job, from 0
    text: str  # for people
    data: bytes  # zlib of JSON: the same for programs


class RuleTold(NamedTuple):
    """A broken rule, to all nodes: a line for people; the node with rank 0 keeps it among its events."""

    attempt: int
    rule: str
    kind: str
    action: str
    rank: int
    text: str  # for people


class WantPairs(NamedTuple):
    """Listen: nodes are about to measure the network between each other."""

    number: int


class PairNode(NamedTuple):
    """Where a node listens for that."""

    address: str
    port: int


class PairOrder(NamedTuple):
    """Measure, in rounds, each node of this group with each other."""

    number: int
    own: int  # which of `nodes` this one is
    nodes: tuple[PairNode, ...]


class CheckTold(NamedTuple):
    """What the coordinator has found of a node, or between nodes, to all: a Finding (bootseer/health)."""

    is_own: bool  # it is about the node that this is sent to
    is_over: bool
    check: str
    level: str
    said: str
    where: str
    measured: float | None
    limit: float | None
    unit: str
    way_out: str


class FailurePage(NamedTuple):
    """How an attempt failed, and what was done: to the node with rank 0, which keeps it."""

    number: int  # of the page in this job, from 0
    data: bytes  # of supervise/failure_page.py: zlib of JSON


class Note(NamedTuple):
    """A line for the people who read this node's console."""

    text: str


class Finish(NamedTuple):
    """The job is over: exit with `status`."""

    status: int
    reason: str  # "" when all went well
    failures: tuple[Failure, ...]  # first failure first; at most 64
    unsure: tuple[int, ...]  # ranks of which none can be told to be the first; () when it is known
    lost: tuple[str, ...] = ()  # hosts of lost nodes that may have failed before these ranks; at most 64


class Refused(NamedTuple):
    """The node cannot take part: end with `status` and this one line."""

    status: int
    reason: str


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
    | SetupNews
    | CheckpointFailed
    | EventBatch
    | PeerServes
    | Listens
    | RankLooks
    | NodeStacks
    | RuleFound
    | RuleSeen
    | Examined
    | Mended
    | PairPort
    | PairResult
    | ClockSays
)
FromCoordinator = (
    Welcome
    | Resumed
    | GaveUp
    | Nudge
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
    | Standstill
    | RuleTold
    | FailurePage
    | Examine
    | Mend
    | StepTaken
    | WantPairs
    | PairOrder
    | CheckTold
)
