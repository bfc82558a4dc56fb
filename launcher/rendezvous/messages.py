"""Messages between the nodes of a job and its coordinator; a single-node job uses them inside one process.

Plain named tuples. msgspec encodes and validates them on the wire (wire.py), so a received message has the types
below. Times in `_ns` are nanoseconds of the coordinator's monotonic clock, or of the node's if the name has local;
`error_ns` bounds the error of such a time.

Each class costs a start 0.03 ms. So here are those of every start; the others are in rare_messages.py, which is
imported when one of them is first used. Modules on the launch path write `messages.Leave`.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from launcher.rendezvous.rare_messages import BACKOFF_STEP as BACKOFF_STEP
    from launcher.rendezvous.rare_messages import AttemptMessage as AttemptMessage
    from launcher.rendezvous.rare_messages import BadFinding as BadFinding
    from launcher.rendezvous.rare_messages import CheckpointFailed as CheckpointFailed
    from launcher.rendezvous.rare_messages import CheckReport as CheckReport
    from launcher.rendezvous.rare_messages import ClockReading as ClockReading
    from launcher.rendezvous.rare_messages import Distributions as Distributions
    from launcher.rendezvous.rare_messages import Environment as Environment
    from launcher.rendezvous.rare_messages import EventBatch as EventBatch
    from launcher.rendezvous.rare_messages import EventsDropped as EventsDropped
    from launcher.rendezvous.rare_messages import Examine as Examine
    from launcher.rendezvous.rare_messages import Examined as Examined
    from launcher.rendezvous.rare_messages import Failure as Failure
    from launcher.rendezvous.rare_messages import FailureRecordMessage as FailureRecordMessage
    from launcher.rendezvous.rare_messages import FromCoordinator as FromCoordinator
    from launcher.rendezvous.rare_messages import FromMember as FromMember
    from launcher.rendezvous.rare_messages import HangReport as HangReport
    from launcher.rendezvous.rare_messages import Identity as Identity
    from launcher.rendezvous.rare_messages import Leave as Leave
    from launcher.rendezvous.rare_messages import Listens as Listens
    from launcher.rendezvous.rare_messages import LivenessProbe as LivenessProbe
    from launcher.rendezvous.rare_messages import MasterListens as MasterListens
    from launcher.rendezvous.rare_messages import MountFault as MountFault
    from launcher.rendezvous.rare_messages import NodeStacks as NodeStacks
    from launcher.rendezvous.rare_messages import PairMeasured as PairMeasured
    from launcher.rendezvous.rare_messages import PairNode as PairNode
    from launcher.rendezvous.rare_messages import PairOrder as PairOrder
    from launcher.rendezvous.rare_messages import PairPort as PairPort
    from launcher.rendezvous.rare_messages import PairResult as PairResult
    from launcher.rendezvous.rare_messages import PeerNode as PeerNode
    from launcher.rendezvous.rare_messages import PeerNodes as PeerNodes
    from launcher.rendezvous.rare_messages import PeerServes as PeerServes
    from launcher.rendezvous.rare_messages import Ping as Ping
    from launcher.rendezvous.rare_messages import Pinned as Pinned
    from launcher.rendezvous.rare_messages import Pong as Pong
    from launcher.rendezvous.rare_messages import RankSamples as RankSamples
    from launcher.rendezvous.rare_messages import RecoveryResult as RecoveryResult
    from launcher.rendezvous.rare_messages import RecoveryStep as RecoveryStep
    from launcher.rendezvous.rare_messages import Resume as Resume
    from launcher.rendezvous.rare_messages import Resumed as Resumed
    from launcher.rendezvous.rare_messages import RuleFired as RuleFired
    from launcher.rendezvous.rare_messages import RuleObservation as RuleObservation
    from launcher.rendezvous.rare_messages import RuleReport as RuleReport
    from launcher.rendezvous.rare_messages import SetupOrder as SetupOrder
    from launcher.rendezvous.rare_messages import SetupReport as SetupReport
    from launcher.rendezvous.rare_messages import Signalled as Signalled
    from launcher.rendezvous.rare_messages import Spare as Spare
    from launcher.rendezvous.rare_messages import StepTaken as StepTaken
    from launcher.rendezvous.rare_messages import Stopped as Stopped
    from launcher.rendezvous.rare_messages import WantEnvironment as WantEnvironment
    from launcher.rendezvous.rare_messages import WantEvents as WantEvents
    from launcher.rendezvous.rare_messages import WantPairs as WantPairs
    from launcher.rendezvous.rare_messages import WantStacks as WantStacks


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)  # such as __path__, which each `from` import looks for
    from launcher.rendezvous import rare_messages

    # All of them: msgspec looks up the names of annotations here.
    globals().update({key: value for key, value in vars(rare_messages).items() if not key.startswith("_")})
    return getattr(rare_messages, name)


class EntryDigest(NamedTuple):
    """The entry point of a node's ranks, as digests (same_job.py); empty if that is not compared."""

    shown: str = ""  # for users, without secrets
    place: str = ""  # of the script
    content: str = ""  # of its name and content; "" if unknown
    args: str = ""


class Join(NamedTuple):
    """First message after the handshake: the identity of the node and its job."""

    run_id: str
    host: str  # host name
    address: str  # at which ranks of other nodes reach this node: --local-addr, else the connection's own
    pid: int
    node_rank: int  # -1: not given
    role: str
    local_world_size: int
    min_nodes: int
    max_nodes: int
    max_restarts: int
    master_port: int  # a port this node holds for its next attempt as rank 0
    has_identity: bool  # an Identity message will follow
    runs: EntryDigest = EntryDigest()


class Started(NamedTuple):
    """All ranks of the node run."""

    attempt: int
    spawn_s: float


class RankFailed(NamedTuple):
    """First failure of an attempt on this node, sent at once."""

    attempt: int
    failure: Failure


class Succeeded(NamedTuple):
    """All ranks of the node ended with status 0."""

    attempt: int


class Welcome(NamedTuple):
    """The node takes part, as a member or as a spare."""

    node_id: int
    open_membership: bool  # no secret protects this job
    token: str = ""  # for Resume


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


class Stop(NamedTuple):
    """End attempt `attempt`: `signum` to the ranks, after `grace_s` seconds KILL, then answer Stopped."""

    attempt: int
    signum: int
    grace_s: float
    reason: str


class Note(NamedTuple):
    """A line for this node's console."""

    text: str


class Finish(NamedTuple):
    """The job is over: exit with `status`."""

    status: int
    reason: str  # "" after success
    failures: tuple[Failure, ...]  # first failure first; at most 64
    unsure: tuple[int, ...]  # ranks of which any may be the first; () if the first is known
    lost: tuple[str, ...] = ()  # hosts of lost nodes that may have failed before these ranks; at most 64


class DroppedFromJob(NamedTuple):
    """The job continues without this node: its ranks are useless now, and it may rejoin."""

    reason: str


class Refused(NamedTuple):
    """The node cannot take part: it ends with `status` and this one line."""

    status: int
    reason: str
