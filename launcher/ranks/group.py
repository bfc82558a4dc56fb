"""The ranks of one attempt on this node: started through the supervisor, their exits turned into facts.

Knows commands, environment, log files and error files of its ranks, but nothing of other nodes. Separate from the
agent, which decides with the coordinator how to react to the facts.
"""

from __future__ import annotations

import errno
import os
import time

from bootseer.light_stdlib import Enum, signal
from bootseer.light_typing import TYPE_CHECKING, Callable, Mapping, NamedTuple
from launcher.ranks.command import rank_command
from launcher.ranks.environ import rank_environ
from launcher.ranks.output.logs import RankLogs
from launcher.ranks.program import RankProgram
from launcher.ranks.stats_page import NO_STATS_PAGE, StatsPageFile, read_exit_status
from launcher.rendezvous import messages
from launcher.supervisor.client import Exited, SpawnRequest, SupervisorClient

if TYPE_CHECKING:
    from launcher.ranks.environ import RankOptions
    from launcher.ranks.kernel_facts import KernelEvidence

STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 16 * 1024


class RankState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    LINGERING = "lingering"  # succeeded; its descendants may still run
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Rank:
    __slots__ = (
        *("cpu_s", "events_file", "is_forked", "local_rank", "logs", "page", "pid", "rank", "started_ns", "state"),
    )

    def __init__(
        self, rank: int, local_rank: int, logs: RankLogs, events_file: str, page: StatsPageFile = NO_STATS_PAGE
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.logs = logs
        self.events_file = events_file
        self.page = page
        self.pid = 0
        self.started_ns = 0  # its exec or fork, on the monotonic clock
        self.cpu_s = 0.0
        self.is_forked = False  # from the fork server
        self.state = RankState.STARTING

    @property
    def page_file(self) -> str:
        """The stats page that shows its steps to the agent (stats_page.py); "" for none."""
        return self.page.path

    @property
    def stacks_file(self) -> str:
        """The file that receives its stacks on request (monitor/samples/stacks.py): behind its stats page."""
        return self.page.path


class GroupEvents(NamedTuple):
    """Callbacks by which the agent learns of its ranks."""

    started: Callable[[], object]  # all ranks run
    failed: Callable[[messages.Failure], object]  # the first failure of the group
    exited: Callable[[Rank, Exited], object]  # each rank
    succeeded: Callable[[], object]  # all ranks ended with 0 and none of their processes is left
    cannot_start: Callable[[str], object]  # one line


class RankGroup:
    """See the module's docstring."""

    def __init__(
        self,
        spec: RankOptions,
        world: messages.World,
        node: str,
        guard: SupervisorClient,
        to_job_clock: Callable[[int], tuple[int, int]],
        events: GroupEvents,
        ranks: list[Rank],
        kernel_word: Callable[[int], KernelEvidence | None] = lambda _pid: None,
        checks: Callable[[], tuple[str, ...]] = tuple,
        mounts: Callable[[int], tuple[messages.MountFault, ...]] = lambda _since_ns: (),
    ) -> None:
        """Args: mounts: returns the read faults of bootrun's mounts since then."""
        self._spec = spec
        self.world = world
        self._node = node
        self._supervisor = guard
        self._to_job_clock = to_job_clock
        self._events = events
        self._kernel_word = kernel_word
        self._checks, self._mounts = checks, mounts
        self.ranks = ranks
        self._by_key = {world.attempt << 20 | rank.local_rank: rank for rank in ranks}
        self.failures: list[messages.Failure] = []
        self.ended: list[int] = []  # ranks that have ended with 0 before they were stopped
        self.prepared_ns = time.monotonic_ns()
        self.spawn_began_ns = 0
        self._stop_reported_ns: int | None = None
        # Ranks whose script was over when they were stopped, with its status; 0: by an exception.
        self._had_failed: dict[int, int] = {}

    # ---- starting --------------------------------------------------------------------------------------------

    def begin_spawn(self) -> None:
        """Note that all that ranks need on this node is ready."""
        self.spawn_began_ns = time.monotonic_ns()

    def spawn(
        self,
        program: RankProgram,
        unset: tuple[str, ...],
        prefix: Callable[[int], list[str]],
        devices: Callable[[int], str | None],
        checkpoint: Mapping[str, str],
        fork: bool = False,
    ) -> None:
        """Start all ranks.

        Args: unset: variables that they do not get; prefix: gives the arguments before a rank's command (numactl);
            devices: gives its CUDA_VISIBLE_DEVICES if it gets its own; checkpoint: variables with the place of
            the checkpoint; fork: from the fork server if possible.
        """
        spec, world = self._spec, self.world
        inside = program.inside if spec.rank_hooks else ""
        inherited = program.inherited(os.environ)
        requests = []
        for key, rank in self._by_key.items():
            argv = rank_command(
                spec.entry,
                python=program.python,
                local_rank=rank.local_rank,
                inside=inside,
                events_file=rank.events_file,
                run_id=spec.run_id,
                node=self._node,
                rank=rank.rank,
                attempt=world.attempt,
                page_file=rank.page.given,
            )
            environ = {
                **program.environ,
                **rank_environ(
                    spec, world, rank.local_rank, rank.logs.error_file, devices(rank.local_rank), inherited
                ),
                **checkpoint,
            }
            command = [*prefix(rank.local_rank), *program.prefix, *argv]
            outputs = rank.logs.stdout_path, rank.logs.stderr_path
            requests.append(SpawnRequest(key, command, environ, [*unset, *program.unset], *outputs))
        if fork:
            spare = len(requests) if spec.can_restart else 0
            self._supervisor.fork(world.master_port if world.first_rank == 0 else 0, spare, requests)
            return
        for request in requests:
            self._supervisor.spawn(request)

    def cannot_start(self, why: str) -> None:
        """Report that no rank can be started here."""
        self._events.cannot_start(why)

    # ---- reports of the supervisor ---------------------------------------------------------------------------

    def on_spawned(self, key: int, pid: int, time_ns: int, is_forked: bool = False) -> None:
        rank = self._by_key.get(key)
        if rank is None:
            return
        rank.is_forked = is_forked
        rank.pid = pid
        rank.started_ns = time_ns
        if rank.state is RankState.STARTING:
            rank.state = RankState.RUNNING
        if all(each.state is not RankState.STARTING for each in self.ranks):
            self._events.started()

    def on_spawn_failed(self, key: int, number: int, what: str) -> None:
        rank = self._by_key.get(key)
        if rank is not None:
            rank.state = RankState.FAILED
            self._events.cannot_start(f"cannot start rank {rank.rank}: {describe_exec_error(what, number)}")

    def on_exited(self, exited: Exited) -> None:
        rank = self._by_key.get(exited.key)
        if rank is None or rank.state is RankState.FAILED:
            return
        rank.cpu_s = exited.cpu_s
        rank.state = RankState.FAILED if exited.status else RankState.LINGERING
        self._events.exited(rank, exited)
        if not exited.status:
            if self._stop_reported_ns is None or exited.time_ns < self._stop_reported_ns:
                self.ended.append(rank.rank)
            return
        failure = self._describe(rank, exited)
        self.failures.append(failure)
        if not failure.stopped_by_us:
            self._events.failed(failure)

    def on_tree_ended(self, key: int) -> None:
        rank = self._by_key.get(key)
        if rank is None or rank.state is not RankState.LINGERING:
            return
        rank.state = RankState.SUCCEEDED
        if all(each.state is RankState.SUCCEEDED for each in self.ranks):
            self._events.succeeded()

    def find(self, key: int) -> Rank | None:
        return self._by_key.get(key)

    # ---- ending ----------------------------------------------------------------------------------------------

    def stop(self, signum: int, grace_s: float) -> None:
        """End all ranks with everything they started; a second call only shortens the wait."""
        if self._stop_reported_ns is None:
            for rank in self.ranks:
                if rank.state is RankState.RUNNING:
                    status = read_exit_status(rank.page_file)
                    if status or os.path.exists(rank.logs.error_file):
                        self._had_failed[rank.rank] = status
            self._stop_reported_ns = time.monotonic_ns()
            self._supervisor.stop(signum, grace_s)
        else:
            self._supervisor.hasten(grace_s)

    def hold(self) -> None:
        """Suspend the running ranks until they are ended, so that none exits because its peers are gone."""
        if not self.is_stopping:
            self.forward(int(signal.SIGSTOP))

    def forward(self, signum: int) -> None:
        """Pass a signal to the ranks that run; they continue."""
        self._supervisor.signal(
            [key for key, rank in self._by_key.items() if rank.state is RankState.RUNNING], signum
        )

    @property
    def is_stopping(self) -> bool:
        return self._stop_reported_ns is not None

    def _describe(self, rank: Rank, exited: Exited) -> messages.Failure:
        is_stopped = self._stop_reported_ns is not None and exited.time_ns > self._stop_reported_ns
        if is_stopped and rank.rank in self._had_failed:
            # With torch an interpreter takes a second to end. In this time its peers lose it, and fail sooner.
            from launcher.ranks.exits import find_sign

            status = self._had_failed[rank.rank]
            if status and exited.status < 0:  # by bootrun's signal
                exited = exited._replace(status=status)
            failure = self._as_failure(rank, exited, False)
            if find_sign(failure) is None:
                return failure
        return self._as_failure(rank, exited, is_stopped)

    def _as_failure(self, rank: Rank, exited: Exited, by_us: bool) -> messages.Failure:
        from launcher.ranks.error_file import read_error_file, read_tail

        time_ns, error_ns = self._to_job_clock(exited.time_ns)
        # The error text of a stopped rank explains nothing, and for 80,000 ranks it would be a gigabyte.
        record = None if by_us else read_error_file(rank.logs.error_file)
        tail: tuple[str, ...] = ()
        if not by_us and rank.logs.stderr_path not in (None, os.devnull):
            tail = read_tail(rank.logs.stderr_path or "", STDERR_TAIL_LINES, STDERR_TAIL_BYTES)
        word = None if by_us else self._kernel_word(exited.pid)
        return messages.Failure(
            node=self._node,
            group_rank=self.world.group_rank,
            rank=rank.rank,
            local_rank=rank.local_rank,
            pid=exited.pid,
            status=exited.status,
            time_ns=time_ns,
            error_ns=error_ns,
            wall_s=exited.wall_s,
            stopped_by_us=by_us,
            error_file=rank.logs.error_file if record is not None else "",
            message=record.message if record is not None else "",
            traceback=record.traceback if record is not None else "",
            stderr_tail=tail,
            oom=word.oom if word is not None else "",
            kernel=word.lines if word is not None else (),
            checks=() if by_us else self._checks(),
            mounts=() if by_us else self._mounts(self.prepared_ns),
        )


def describe_exec_error(program: str, number: int) -> str:
    """Return why a program was not executed, with the fix. Args: number: the errno of execve(2)."""
    fix = ""
    is_file = os.path.isfile(program)
    if number == errno.ENOENT:
        if is_file:
            fix = (
                "; its first line names an interpreter that does not exist"
                if "/" in program
                else (f"; a program without / is looked for in PATH: write ./{program}")
            )
        elif "/" in program:
            fix = "; give a path relative to this directory, or a program in PATH"
        else:
            fix = "; it is not in PATH"
    elif number == errno.EACCES and os.path.isdir(program):
        fix = "; it is a directory"
    elif number == errno.EACCES and is_file and not os.access(program, os.X_OK):
        fix = f"; make it executable: chmod +x {program}"
    elif number == errno.ENOEXEC and is_file:
        fix = "; its first line must name an interpreter, such as #!/bin/sh"
    return f"{program}: {os.strerror(number).lower()}{fix}"
