"""The agent of a node: carries out the coordinator's decisions and reports to it what happens to the ranks.

One object on the event loop. In: messages of the coordinator, events of the supervisor, signals. Out: requests to
the supervisor, messages to the coordinator, log lines, one exit status. It decides nothing about the job (job.py).
"""

from __future__ import annotations

import time

from bootseer.errors import BootseerError
from bootseer.light_stdlib import Enum, signal
from bootseer.light_typing import TYPE_CHECKING, Callable, Protocol
from launcher.base.loop import Alarm, EventLoop
from launcher.coordinator.job import signal_name
from launcher.ranks.group import GroupEvents, Rank, RankGroup
from launcher.ranks.port import NextPort, is_listened_on
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited, SupervisorClient

if TYPE_CHECKING:
    from launcher.rendezvous.link import Link

# The coordinator's stop order follows a signal within a round trip; without it the agent stops the ranks anyway.
SIGNAL_PATIENCE_S = 2.0
# A rank that a handled signal has ended is reported after this delay: the signal may be meant for the whole job.
SAME_SIGNAL_S = 0.1


class State(Enum):
    WAITING = "waiting"  # no attempt on this node
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # all ranks of this node succeeded; others may still run
    STOPPING = "stopping"
    ENDING = "ending"  # the exit status is known, the last output is being written
    ENDED = "ended"


class NodeInterface(Protocol):
    """Interface of the node (node.py) that the agent uses; the composition root (app.py) passes it."""

    def say(self, text: str) -> None: ...  # logs a line that --quiet omits
    def complain(self, text: str) -> None: ...  # logs an error, which --quiet does not omit
    def prepare(self, world: messages.World) -> RankGroup: ...
    def spawn(self, group: RankGroup) -> None: ...
    def carry_out(self, order: messages.FromCoordinator) -> None: ...
    def observe_start(self, group: RankGroup) -> None: ...
    def note_exit(self, group: RankGroup, rank: Rank, exited: Exited) -> None: ...
    def stopping(self) -> None: ...  # the ranks have received the stop signal
    def attempt_over(self) -> None: ...
    def send_stacks(self, number: int) -> None: ...  # stacks of the ranks, to the coordinator
    def traces(self) -> bytes: ...  # collectives of the attempt that is over, b"" if not traced
    def examine(self, order: messages.Examine, group: RankGroup) -> None: ...  # before its ranks are ended
    def end_examination(self) -> None: ...
    def reached(self) -> tuple[int, int | None]: ...  # steps made by the ranks of this node, number of the last
    def report(self, finish: messages.Finish) -> None: ...
    def drain(self) -> None: ...
    def hasten(self) -> None: ...  # a signal during `drain`


class RankProcesses:
    """Passes the supervisor's reports about processes to the attempt's ranks; logs what they left behind."""

    def __init__(
        self, group: Callable[[], RankGroup | None], say: Callable[[str], object], grace_s: float
    ) -> None:
        """Args: group: the ranks of this attempt, or of the last one; grace_s: of processes that a rank left."""
        self._group = group
        self._say = say
        self._grace_s = grace_s

    def on_spawned(self, key: int, pid: int, time_ns: int) -> None:
        if (group := self._group()) is not None:
            group.on_spawned(key, pid, time_ns)

    def on_forked(self, key: int, pid: int, time_ns: int) -> None:
        if (group := self._group()) is not None:
            group.on_spawned(key, pid, time_ns, is_forked=True)

    def on_spawn_failed(self, key: int, number: int, what: str) -> None:
        if (group := self._group()) is not None:
            group.on_spawn_failed(key, number, what)

    def on_exited(self, exited: Exited) -> None:
        if (group := self._group()) is not None:
            group.on_exited(exited)

    def on_lingering(self, key: int, left: list[tuple[int, str]]) -> None:
        rank = self._find(key)
        if rank is not None:
            self._say(
                f"rank {rank.rank} has ended but left {_name(left)} behind; they get {self._grace_s:g} s to finish"
            )

    def on_tree_ended(self, key: int, killed: list[tuple[int, str]]) -> None:
        group, rank = self._group(), self._find(key)
        if killed:
            whose = f"rank {rank.rank}" if rank is not None else "a rank"
            self._say(f"warning: killed processes that {whose} left behind: {_name(killed)}")
        if group is not None:
            group.on_tree_ended(key)

    def log_stopped(self, killed: list[tuple[int, str]], stuck: list[tuple[int, str, str]]) -> None:
        """Log what did not end in time.

        Args: killed: number and name; stuck: number, name, and where it waits in the kernel.
        """
        if killed:
            self._say(f"warning: killed processes of ranks that did not end in time: {_name(killed)}")
        if stuck:
            names = ", ".join(f"{pid} ({name}{', in ' + wait if wait else ''})" for pid, name, wait in stuck)
            self._say(f"warning: processes that cannot be killed (waiting in the kernel) are left behind: {names}")
        group = self._group()
        for failure in group.failures if group is not None else ():
            if failure.stopped_by_us and failure.status == -signal.SIGKILL:
                self._say(f"warning: rank {failure.rank} (pid {failure.pid}) did not end in time and was killed")

    def _find(self, key: int) -> Rank | None:
        group = self._group()
        return group.find(key) if group is not None else None


class Agent:
    """See the module's docstring. `status` is the exit status once `is_ended`.

    `processes` takes those reports of the supervisor that need no decision.
    """

    def __init__(self, loop: EventLoop, spec: LaunchSpec, around: NodeInterface, port: NextPort) -> None:
        self._loop = loop
        self._spec = spec
        self._node = around
        self._port = port
        self._supervisor: SupervisorClient | None = None
        self._link: Link | None = None
        self._state = State.WAITING
        self._group: RankGroup | None = None
        self._signum = 0
        self._leaving = ""  # why this node leaves although the job may continue
        # The job continued without this node, which joins again when its ranks have ended.
        self._is_given_up = False
        self._patience = Alarm(loop)  # after a signal, for the coordinator's order
        self._start_error = ""
        self._is_member = False  # the coordinator knows this node
        self._is_spare = False
        self.last_stop: messages.Stop | None = None  # that this node received
        self._failed_optimization = ""  # with --strict: the optimization that failed
        self.status = 1
        self.processes = RankProcesses(lambda: self._group, around.say, spec.shutdown_timeout_s)

    def connect(self, guard: SupervisorClient, link: Link) -> None:
        """Set both connections; callbacks may use them from the first one on."""
        self._supervisor, self._link = guard, link

    @property
    def port(self) -> int:
        """The port this node holds for its next attempt as rank 0."""
        return self._port.number

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """Convert this node's monotonic time to the coordinator's; also return the bound of the error."""
        return self._link.to_job_clock(local_ns) if self._link is not None else (local_ns, 0)

    @property
    def state(self) -> State:
        return self._state

    @property
    def group(self) -> RankGroup | None:
        """The ranks of this attempt, or of the last one."""
        return self._group

    @property
    def is_member(self) -> bool:
        """Whether the coordinator knows this node."""
        return self._is_member

    @property
    def is_spare(self) -> bool:
        """Whether the job has no place for this node at present."""
        return self._is_spare

    @property
    def is_link_closed(self) -> bool:
        return self._link is None or self._link.is_closed

    @property
    def is_ended(self) -> bool:
        return self._state is State.ENDED

    # ---- the coordinator -------------------------------------------------------------------------------------

    def on_message(self, message: messages.FromCoordinator) -> None:
        if self._state in (State.ENDING, State.ENDED):
            return
        # The frequent ones first: a class that a case names is made when the case is reached.
        match message:
            case messages.World():
                self._start_attempt(message)
            case messages.Stop():
                self._patience.cancel()
                self._on_stop(message)
            case messages.Finish(status):
                self._patience.cancel()
                self._node.report(message)
                # Ranks of a node that was given up are of an attempt that is over.
                (self._stop_then_end if self._is_given_up else self._end)(status)
            case messages.Welcome(_, open_membership):
                self._is_member, self._is_given_up = True, False
                if self._failed_optimization:
                    self.on_fell_back(self._failed_optimization)
                if open_membership and not self._spec.is_single:
                    self._node.say(
                        "no secret is set: any host that reaches the endpoint can join this job "
                        "(set BOOTSEER_SECRET_FILE to prevent this)"
                    )
            case messages.Note(text):
                self._node.say(text)
            case messages.DroppedFromJob(reason):
                self._on_given_up(reason)
            case messages.Refused(status, reason):
                self._patience.cancel()
                self._node.complain(reason)
                self._stop_then_end(status)
            case messages.WantStacks(attempt, number):
                if self._group is not None and attempt == self._group.world.attempt:
                    self._node.send_stacks(number)
            case messages.Examine():
                self._on_examine(message)
            case messages.Spare(nodes):
                self._is_spare = True
                self._node.say(_spare_line(nodes))
            case _:
                self._node.carry_out(message)

    def _on_given_up(self, reason: str) -> None:
        """Stop this node's ranks, which the job does not need any more; then the node joins again."""
        if self._leaving or self._is_given_up:
            return
        self._is_given_up = True
        if self._signum:
            self._leave(f"stopped by {signal_name(self._signum)}", 128 + self._signum)
            return
        group = self._group
        if group is None or self._state is State.WAITING:
            self._node.say(f"warning: the job continued without this node: {reason}")
            self._rejoin()
            return
        self._node.say(f"warning: the job continued without this node: {reason}; stopping its ranks")
        if self._state is not State.STOPPING:
            self._state = State.STOPPING
            self._node.end_examination()
            group.stop(signal.SIGTERM, self._spec.shutdown_timeout_s)

    def _rejoin(self) -> None:
        if self._link is not None:
            self._link.rejoin(self.port)

    def on_lost(self, reason: str) -> None:
        """Stop: the coordinator is lost or was never reached."""
        if self._state in (State.ENDING, State.ENDED):
            return
        self._node.complain(reason)
        self._stop_then_end(128 + self._signum if self._signum else 1)

    def on_unusable(self, why: str) -> None:
        """Leave the job: no rank can run on this node."""
        if self._state in (State.ENDING, State.ENDED) or self._leaving:
            return
        self._node.complain(why)
        if self._is_member:
            self._leave(why, 1)
        else:
            self._stop_then_end(1)

    def send_setup(self, news: messages.SetupReport) -> None:
        """Send the coordinator news of the ranks' environment."""
        if self._state not in (State.ENDING, State.ENDED) and not self._leaving:
            self._send(news)

    def send_checkpoint_failure(self, message: messages.CheckpointFailed) -> None:
        """Report that this node cannot load the checkpoint version of an attempt."""
        if self._state not in (State.ENDING, State.ENDED) and not self._leaving:
            self._send(message)

    def on_set_up_failed(self, news: messages.SetupReport) -> None:
        """Report a failed set-up command, which fails the job and not only this node."""
        if self._is_member:
            self.send_setup(news)
        else:
            self.on_unusable(f"set-up failed: {news.text}" if news.what == "failed" else news.text)

    def on_fell_back(self, why: str) -> None:
        """With --strict: end the job as soon as the coordinator can receive the reason."""
        self._failed_optimization = why
        if self._is_member:
            self.send_setup(messages.SetupReport("strict", "", "", why))

    # ---- attempts --------------------------------------------------------------------------------------------

    def _start_attempt(self, world: messages.World) -> None:
        if world.attempt:
            self._node.say(_attempt_line(world))
        self._state = State.RUNNING
        self._is_spare = False
        self._start_error = ""
        self._group = None
        try:
            if world.group_rank == 0:
                self._port.take(world.master_port)
            self._group = self._node.prepare(world)
            self._node.spawn(self._group)
        except (BootseerError, OSError) as error:
            self._on_cannot_start(str(error))

    def group_events(self) -> GroupEvents:
        """Return the callbacks that `prepare` gives to each new RankGroup."""
        return GroupEvents(
            started=self._on_started,
            failed=self._on_rank_failed,
            exited=self._on_rank_exited,
            succeeded=self._on_succeeded,
            cannot_start=self._on_cannot_start,
        )

    def send_samples(self, message: messages.RankSamples | messages.NodeStacks) -> None:
        if self._state is State.RUNNING:
            self._send(message)

    def send_rules(self, message: messages.RuleFired | messages.RuleObservation) -> None:
        """Send matches of log rules, also from the last lines of ranks that are being stopped."""
        if self._state in (State.RUNNING, State.STOPPING):
            self._send(message)

    def _on_started(self) -> None:
        group = self._group
        if group is not None and self._state is State.RUNNING:
            spawn_s = (time.monotonic_ns() - group.spawn_began_ns) / 1e9
            self._send(messages.Started(group.world.attempt, spawn_s))
            self._node.observe_start(group)

    def send_step_result(self, message: messages.Examined | messages.RecoveryResult) -> None:
        """Send the result of an escalation step on this node."""
        if self._state not in (State.ENDING, State.ENDED):
            self._send(message)

    def _on_examine(self, order: messages.Examine) -> None:
        group, is_there = self._group, self._state in (State.RUNNING, State.SUCCEEDED)
        if group is not None and is_there and order.attempt == group.world.attempt:
            self._node.examine(order, group)

    def _on_rank_failed(self, failure: messages.Failure) -> None:
        if self._spec.steps is not None and self._spec.steps.post_mortem and self._group is not None:
            self._group.hold()  # before the others see that this one is gone
        if -failure.status in self._spec.signals_to_handle and not self._signum:
            # Slurm and others signal all processes of a job at once: bootrun may be about to receive it too.
            self._loop.call_later(SAME_SIGNAL_S, self._tell_failed, failure)
        else:
            self._tell_failed(failure)

    def _tell_failed(self, failure: messages.Failure) -> None:
        group = self._group
        if group is not None and failure in group.failures and self._state in (State.RUNNING, State.STOPPING):
            self._send(messages.RankFailed(group.world.attempt, failure))

    def _on_rank_exited(self, rank: Rank, exited: Exited) -> None:
        if self._group is not None:
            self._node.note_exit(self._group, rank, exited)

    def _on_succeeded(self) -> None:
        group = self._group
        if group is not None and self._state is State.RUNNING:
            self._state = State.SUCCEEDED
            self._send(messages.Succeeded(group.world.attempt))

    def _on_cannot_start(self, why: str) -> None:
        if self._start_error or self._state is not State.RUNNING:
            return
        self._start_error = why
        self._node.complain(why)
        self._leave(why, 1)

    def _on_stop(self, stop: messages.Stop) -> None:
        group = self._group
        if group is None or stop.attempt != group.world.attempt or self._state is State.WAITING:
            return
        self.last_stop = stop
        is_first = self._state is not State.STOPPING
        if is_first:
            self._state = State.STOPPING
            self._node.end_examination()
        group.stop(stop.signum, stop.grace_s)
        if is_first:
            self._node.stopping()
            self._node.say(f"stopping attempt {stop.attempt}: {stop.reason}")

    # ---- the supervisor --------------------------------------------------------------------------------------

    def on_stopped(self, killed: list[tuple[int, str]], stuck: list[tuple[int, str, str]]) -> None:
        """Handle the end of all ranks. Args: as of RankProcesses.log_stopped."""
        self.processes.log_stopped(killed, stuck)
        group = self._group
        if group is None:
            return
        self._node.attempt_over()
        if self._leaving:
            self._send(messages.Leave(self._leaving))
            self._end(self.status)
        elif self._state is State.STOPPING:
            self._state = State.WAITING
            was_taken = self._port_was_taken(group)
            self._renew_port()
            if self._is_given_up:
                self._rejoin()
                return
            reached, traces = self._node.reached(), self._node.traces()
            failures, ended = tuple(group.failures), tuple(group.ended)
            self._send(
                messages.Stopped(group.world.attempt, failures, self.port, was_taken, *reached, traces, ended)
            )

    def on_supervisor_gone(self) -> None:
        """Leave the job: the supervisor was killed, and the watchdog ends its processes."""
        if self._state in (State.ENDING, State.ENDED):
            return
        self._node.complain("the supervisor process is gone (killed?); all ranks of this node were ended with it")
        self._send(messages.Leave("its supervisor process was killed"))
        self._end(128 + self._signum if self._signum else 1)

    def _port_was_taken(self, group: RankGroup) -> bool:
        """Return whether rank 0 failed as another process listens on its port; all ranks have ended by now."""
        if group.world.group_rank != 0 or not any(f.rank == 0 and not f.stopped_by_us for f in group.failures):
            return False
        self._port.drop()
        return is_listened_on(group.world.master_port)

    def _renew_port(self) -> None:
        """Hold a port for the next attempt, which needs it only if this node has rank 0."""
        try:
            self._port.renew()
        except (BootseerError, OSError) as error:
            self._node.say(f"warning: no port is held for the next attempt: {error}")

    # ---- signals ---------------------------------------------------------------------------------------------

    def on_signal(self, signum: int) -> None:
        """Handle a signal that ends the job (or this node's part in it)."""
        again, self._signum = bool(self._signum), self._signum or signum
        name = signal_name(signum)
        if self._state in (State.ENDING, State.ENDED):
            self._node.hasten()
            return
        if not again:
            is_alone = self._is_spare or self._spec.signal_scope == "node"
            self._node.say(f"{name}: stopping {'this node' if is_alone else 'the job'}")
        if not self._is_member:
            self._end(128 + self._signum)
        elif self._leaving:
            if self._group is not None:
                grace_s = self._spec.shutdown_timeout_s
                self._group.stop(signum, min(2.0, grace_s) if again else grace_s)
        elif (
            self._is_given_up or self._is_spare or (self._spec.signal_scope == "node" and not self._spec.is_single)
        ):
            self._leave(f"stopped by {name}", 128 + self._signum)
        else:
            self._send(messages.Signalled(signum))
            if again and self._state is State.STOPPING and self._group is not None:
                self._group.stop(signum, min(2.0, self._spec.shutdown_timeout_s))
            if self._link is not None and not self._link.is_local and not self._patience.is_set:
                self._patience.set(SIGNAL_PATIENCE_S, self._stop_without_orders)

    def _stop_without_orders(self) -> None:
        self._patience.cancel()  # the next signal sets it again
        if self._state in (State.WAITING, State.RUNNING, State.SUCCEEDED):
            self._leave(f"stopped by {signal_name(self._signum)}", 128 + self._signum)

    def on_forward(self, signum: int) -> None:
        """Forward a signal to the ranks."""
        if self._group is not None and self._state is State.RUNNING:
            self._group.forward(signum)

    # ---- ending ----------------------------------------------------------------------------------------------

    def _leave(self, reason: str, status: int) -> None:
        """End this node's ranks, then its part in the job."""
        again, self._leaving, self.status = bool(self._leaving), reason, status
        group = self._group
        if group is None or self._state is State.WAITING:
            self._send(messages.Leave(reason))
            self._end(status)
            return
        self._state = State.STOPPING
        grace_s = self._spec.shutdown_timeout_s
        group.stop(self._signum or signal.SIGTERM, min(2.0, grace_s) if again else grace_s)

    def _stop_then_end(self, status: int) -> None:
        if self._link is not None:
            self._link.close()
        self._leave("ended", status)

    def _end(self, status: int) -> None:
        if self._state in (State.ENDING, State.ENDED):
            return
        self.status = status
        self._state = State.ENDING
        self._port.drop()
        if self._group is not None:
            self._node.attempt_over()
        self._node.drain()

    def on_drained(self) -> None:
        """End the loop: the last output is written (or abandoned)."""
        self._state = State.ENDED
        if self._link is not None:
            self._link.close()
        self._loop.stop()

    def _send(self, message: messages.FromMember) -> None:
        if self._link is not None:
            self._link.send(message)


def _attempt_line(world: messages.World) -> str:
    from bootseer.counted import counted

    ranks, nodes = counted(world.world_size, "rank"), counted(world.group_world_size, "node")
    return f"attempt {world.attempt} starts: {ranks} on {nodes}"


def _spare_line(nodes: int) -> str:
    from bootseer.counted import counted

    return f"this node is a spare: {counted(nodes, 'node runs', 'nodes run')} the job, this one waits"


def _name(processes: list[tuple[int, str]]) -> str:
    shown = ", ".join(f"{name} (pid {pid})" for pid, name in processes[:8])
    more = len(processes) - 8
    return f"{shown} and {more} more" if more > 0 else shown
