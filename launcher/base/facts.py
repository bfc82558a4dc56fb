"""Observations of a rank from outside at one moment, and findings about them. Plain values, no code.

Times are seconds of the node's monotonic clock in a node's samples, and of the coordinator's in findings.
"""

from __future__ import annotations

from bootseer.light_stdlib import Enum
from bootseer.light_typing import NamedTuple


class RankFacts(NamedTuple):
    """One rank at one moment. Unknown values are -1 or ""."""

    rank: int
    at_s: float  # time of the sample
    steps: int  # optimizer steps and heartbeats so far; -1: not counted (rank hooks off, no optimizer yet)
    step_at_s: float  # time of the last of them; -1: none yet
    output_bytes: int  # of its stdout and stderr so far
    cpu_s: float  # of all its threads, and of the processes it started
    io_bytes: int  # read and written by it, network and disk together
    state: str  # of its main thread: R, S, D, T, Z, ... of proc(5)
    wait: str  # the kernel function in which the main thread waits
    step_takes_s: float = 0.0  # time of most steps now; 0: not known
    step_least_s: float = 0.0  # minimum time of most steps


class HangKind(Enum):
    FROZEN = "frozen"  # a process is stopped: SIGSTOP, or a debugger
    ALL_IDLE = "all-idle"  # no rank makes steps or works
    ONE_APART = "one-apart"  # no steps; some ranks do something else than the rest
    ALL_BUSY = "all-busy"  # no steps, and all work: a long compilation, or all spin in a collective
    ALL_SPIN = "all-spin"  # no steps, all work, and their calls of torch.distributed show that they wait
    STUCK_IN_KERNEL = "stuck-in-kernel"  # state D: a disk or a mount that does not answer
    NOT_STARTED = "not-started"  # before the first step: some wait for others, and these do nothing
    SLOW = "slow"  # steps are made, and take far longer than before: some wait for others
    NOT_ENDED = "not-ended"  # some ranks have ended, and the rest does nothing


class Hang(NamedTuple):
    kind: HangKind
    since_s: float  # the last progress of any rank
    ranks: tuple[int, ...]  # that are apart from the rest; () if none is
    limit_s: float  # the allowed gap
    longest_gap_s: float  # longest healthy gap so far
    why: str  # for users, one line
    is_early: bool = False  # to be reported, but it ends no job yet: the job starts, or is near its end
    is_doubtful: bool = False  # to be queried, and reported only if the ranks' stacks confirm it
    evidence: str = ""  # why these ranks are named, or why none is; "": by the kind
    is_guess: bool = False  # the evidence for the ranks is weak, or there is none
