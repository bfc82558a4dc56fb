"""The agent of a node: carries out what the coordinator decides and tells it what happens to the ranks.

One object on the event loop. In: messages of the coordinator, events of the guard, signals. Out: requests to the
guard, messages to the coordinator, lines for people, one exit status. It decides nothing about the job (job.py).
"""

from __future__ import annotations

import signal
import time
from enum import Enum

from bootseer.errors import BootseerError
from bootseer.light_typing import Protocol
from launcher.guard_client import Exited, GuardClient
from launcher.job import signal_name
from launcher.loop import Cancellable, EventLoop
from launcher.ranks.group import GroupEvents, Rank, RankGroup
from launcher.ranks.port import HeldPort, is_listened_on
from launcher.rendezvous.link import Link
from launcher.rendezvous.messages import (
    CheckpointFailed,
    CheckTold,
    Examine,
    Examined,
    Failure,
    FailurePage,
    Finish,
    FromCoordinator,
    GaveUp,
    Leave,
    Mend,
    Mended,
    NodeStacks,
    Note,
    RankFailed,
    RankLooks,
    Refused,
    RuleFound,
    RuleSeen,
    RuleTold,
    SetupNews,
    SetupOrder,
    Signalled,
    Spare,
    Standstill,
    Started,
    StepTaken,
    Stop,
    Stopped,
    Succeeded,
    WantStacks,
    Welcome,
    World,
)
from launcher.spec import LaunchSpec

# The coordinator's order to stop follows a signal within a round trip; without it the ranks are stopped anyway.
SIGNAL_PATIENCE_S = 2.0
# A rank that ended by a signal which we handle is told of a little later: was it meant for the whole job?
SAME_SIGNAL_S = 0.1


class State(Enum):
    WAITING = "waiting"  # no attempt on this node
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # all ranks here ended well; others may still run
    STOPPING = "stopping"
    ENDING = "ending"  # the exit status is known, the last output is on its way
    ENDED = "ended"


class Surroundings(Protocol):
    """What the composition root gives to the agent beside its own parts (app.py)."""

    def say(self, text: str) -> None: ...  # a line that --quiet leaves out
    def complain(self, text: str) -> None: ...  # an error, said in any case
    def prepare(self, world: World) -> RankGroup: ...
    def spawn(self, group: RankGroup) -> None: ...
    def set_up(self, order: SetupOrder) -> None: ...  # of the ranks' environment
    def observe_start(self, group: RankGroup) -> None: ...
    def note_exit(self, group: RankGroup, rank: Rank, exited: Exited) -> None: ...
    def stopping(self) -> None: ...  # the ranks have been told to end
    def attempt_over(self) -> None: ...
    def send_stacks(self, number: int) -> None: ...  # of the ranks, to the coordinator
    def show_standstill(self, found: Standstill) -> None: ...
    def show_rule(self, told: RuleTold) -> None: ...
    def keep_page(self, page: FailurePage) -> None: ...  # of a failure
    def traces(self) -> bytes: ...  # calls of torch.distributed in the attempt that is over, b"" where not traced
    def examine(self, order: Examine, group: RankGroup) -> None: ...  # before its ranks are ended
    def end_examination(self) -> None: ...
    def mend(self, order: Mend) -> None: ...  # between two attempts
    def note_step(self, step: StepTaken) -> None: ...  # of the restart ladder
    def show_check(self, told: CheckTold) -> None: ...  # of several nodes
    def reached(self) -> tuple[int, int | None]: ...  # steps that the ranks here have made, number of the last
    def report(self, finish: Finish) -> None: ...
    def drain(self) -> None: ...
    def hasten(self) -> None: ...  # a signal while `drain` is under way
    def hold_port(self, given: int | None) -> HeldPort: ...


class Agent:
    """See the module's docstring. `status` is the exit status once `is_ended`."""

    def __init__(self, loop: EventLoop, spec: LaunchSpec, around: Surroundings, port: HeldPort) -> None:
        self._loop = loop
        self._spec = spec
        self._around = around
        self._port: HeldPort | None = port
        self._guard: GuardClient | None = None
        self._link: Link | None = None
        self._state = State.WAITING
        self._group: RankGroup | None = None
        self._signum = 0
        self._leaving = ""  # why this node goes although the job may go on
        self._is_given_up = (
            False  # the job has gone on without this node, which joins again when its ranks have ended
        )
        self._patience: Cancellable | None = None
        self._start_error = ""
        self._is_member = False  # the coordinator knows this node
        self._is_spare = False
        self.last_stop: Stop | None = None  # that this node was told
        self._too_slow = ""  # with --strict: what failed although there is another way
        self.status = 1

    def connect(self, guard: GuardClient, link: Link) -> None:
        """The two ends are there; both may be used from the first callback on."""
        self._guard, self._link = guard, link

    @property
    def port(self) -> int:
        """The port this node holds for its next attempt as rank 0."""
        return self._port.port if self._port is not None else 0

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """This node's monotonic clock as the coordinator's, with the bound of the error."""
        return self._link.to_job_clock(local_ns) if self._link is not None else (local_ns, 0)

    @property
    def state(self) -> State:
        return self._state

    @property
    def group(self) -> RankGroup | None:
        """Of this attempt, or of the last one."""
        return self._group

    @property
    def is_member(self) -> bool:
        """Whether the coordinator knows this node."""
        return self._is_member

    @property
    def is_spare(self) -> bool:
        """Whether there is no place for it at present."""
        return self._is_spare

    @property
    def is_link_closed(self) -> bool:
        return self._link is None or self._link.is_closed

    @property
    def is_ended(self) -> bool:
        return self._state is State.ENDED

    # ---- the coordinator -------------------------------------------------------------------------------------

    def on_message(self, message: FromCoordinator) -> None:
        if self._state in (State.ENDING, State.ENDED):
            return
        if self._patience is not None:
            self._patience.cancel()  # the coordinator is there
        match message:
            case World():
                self._start_attempt(message)
            case Stop():
                self._on_stop(message)
            case Finish(status):
                self._around.report(message)
                if self._is_given_up:
                    self._stop_then_end(status)  # its ranks are of an attempt that is over
                else:
                    self._end(status)
            case GaveUp(reason):
                self._on_given_up(reason)
            case Refused(status, reason):
                self._around.complain(reason)
                self._stop_then_end(status)
            case Welcome(_, open_membership):
                self._is_member, self._is_given_up = True, False
                if self._too_slow:
                    self.on_fell_back(self._too_slow)
                if open_membership and not self._spec.is_single:
                    self._around.say(
                        "no secret is set: whoever reaches the endpoint can join this job "
                        "(BOOTSEER_SECRET_FILE closes it)"
                    )
            case Note(text):
                self._around.say(text)
            case SetupOrder():
                self._around.set_up(message)
            case WantStacks(attempt, number):
                if self._group is not None and attempt == self._group.world.attempt:
                    self._around.send_stacks(number)
            case Standstill():
                self._around.show_standstill(message)
            case RuleTold():
                self._around.show_rule(message)
            case FailurePage():
                self._around.keep_page(message)
            case Examine():
                self._on_examine(message)
            case Mend():
                self._around.mend(message)
            case StepTaken():
                self._around.note_step(message)
            case CheckTold():
                self._around.show_check(message)
            case Spare(nodes):
                self._is_spare = True
                from bootseer.counted import counted

                self._around.say(
                    f"this node is a spare: {counted(nodes, 'node is', 'nodes are')} at work, it waits"
                )

    def _on_given_up(self, reason: str) -> None:
        """What this node's ranks do is of no use to the job any more; the node itself may be."""
        if self._leaving or self._is_given_up:
            return
        self._is_given_up = True
        group = self._group
        if group is None or self._state is State.WAITING:
            self._around.say(f"warning: the job has gone on without this node: {reason}")
            self._rejoin()
            return
        self._around.say(f"warning: the job has gone on without this node: {reason}; its ranks are stopped")
        if self._state is not State.STOPPING:
            self._state = State.STOPPING
            self._around.end_examination()
            group.stop(signal.SIGTERM, self._spec.shutdown_timeout_s)

    def _rejoin(self) -> None:
        if self._link is not None:
            self._link.rejoin(self.port)

    def on_lost(self, reason: str, status: int = 1) -> None:
        """There is no coordinator (any more)."""
        if self._state in (State.ENDING, State.ENDED):
            return
        self._around.complain(reason)
        self._stop_then_end(128 + self._signum if self._signum else status)

    def on_unusable(self, why: str) -> None:
        """No rank can run on this node."""
        if self._state in (State.ENDING, State.ENDED) or self._leaving:
            return
        self._around.complain(why)
        if self._is_member:
            self._leave(why, 1)
        else:
            self._stop_then_end(1)

    def tell_setup(self, news: SetupNews) -> None:
        """News of the ranks' environment, for the coordinator."""
        if self._state not in (State.ENDING, State.ENDED) and not self._leaving:
            self._send(news)

    def tell_checkpoint(self, message: CheckpointFailed) -> None:
        """The version that an attempt is to load cannot be had here."""
        if self._state not in (State.ENDING, State.ENDED) and not self._leaving:
            self._send(message)

    def on_set_up_failed(self, news: SetupNews) -> None:
        """A set-up command has failed: that is the job's error, not only this node's."""
        if self._is_member:
            self.tell_setup(news)
        else:
            self.on_unusable(f"set-up failed: {news.text}" if news.what == "failed" else news.text)

    def on_fell_back(self, why: str) -> None:
        """With --strict: the job ends, as soon as its coordinator can be told."""
        self._too_slow = why
        if self._is_member:
            self.tell_setup(SetupNews("strict", "", "", why))

    # ---- attempts --------------------------------------------------------------------------------------------

    def _start_attempt(self, world: World) -> None:
        if world.attempt:
            from bootseer.counted import counted

            self._around.say(
                f"attempt {world.attempt} starts: {counted(world.world_size, 'rank')} on"
                f" {counted(world.group_world_size, 'node')}"
            )
        self._state = State.RUNNING
        self._is_spare = False
        self._start_error = ""
        self._group = None
        try:
            if world.group_rank == 0 and (self._port is None or world.master_port != self._port.port):
                self._drop_port()
                self._port = self._around.hold_port(world.master_port)
            self._group = self._around.prepare(world)
            self._around.spawn(self._group)
        except (BootseerError, OSError) as error:
            self._on_cannot_start(str(error))

    def group_events(self) -> GroupEvents:
        """The callbacks that `prepare` gives to each new RankGroup."""
        return GroupEvents(
            started=self._on_started,
            failed=self._on_rank_failed,
            exited=self._on_rank_exited,
            succeeded=self._on_succeeded,
            cannot_start=self._on_cannot_start,
        )

    def tell_watch(self, message: RankLooks | NodeStacks) -> None:
        """What is seen of the ranks from outside."""
        if self._state is State.RUNNING:
            self._send(message)

    def tell_rules(self, message: RuleFound | RuleSeen) -> None:
        """What rules over the ranks' output have found: also in the last lines of ranks that are being ended."""
        if self._state in (State.RUNNING, State.STOPPING):
            self._send(message)

    def _on_started(self) -> None:
        group = self._group
        if group is not None and self._state is State.RUNNING:
            spawn_s = (time.monotonic_ns() - group.spawn_began_ns) / 1e9
            self._send(Started(group.world.attempt, spawn_s))
            self._around.observe_start(group)

    def tell_steps(self, message: Examined | Mended) -> None:
        """What came of a step of the restart ladder on this node."""
        if self._state not in (State.ENDING, State.ENDED):
            self._send(message)

    def _on_examine(self, order: Examine) -> None:
        group, is_there = self._group, self._state in (State.RUNNING, State.SUCCEEDED)
        if group is not None and is_there and order.attempt == group.world.attempt:
            self._around.examine(order, group)

    def _on_rank_failed(self, failure: Failure) -> None:
        if self._spec.steps is not None and self._spec.steps.post_mortem and self._group is not None:
            self._group.hold()  # before the others see that this one is gone
        if -failure.status in self._spec.signals_to_handle and not self._signum:
            # Slurm and others signal all processes of a job at once: ours may be about to come.
            self._loop.call_later(SAME_SIGNAL_S, self._tell_failed, failure)
        else:
            self._tell_failed(failure)

    def _tell_failed(self, failure: Failure) -> None:
        group = self._group
        if group is not None and failure in group.failures and self._state in (State.RUNNING, State.STOPPING):
            self._send(RankFailed(group.world.attempt, failure))

    def _on_rank_exited(self, rank: Rank, exited: Exited) -> None:
        if self._group is not None:
            self._around.note_exit(self._group, rank, exited)

    def _on_succeeded(self) -> None:
        group = self._group
        if group is not None and self._state is State.RUNNING:
            self._state = State.SUCCEEDED
            self._send(Succeeded(group.world.attempt))

    def _on_cannot_start(self, why: str) -> None:
        if self._start_error or self._state is not State.RUNNING:
            return
        self._start_error = why
        self._around.complain(why)
        self._leave(why, 1)

    def _on_stop(self, stop: Stop) -> None:
        group = self._group
        if group is None or stop.attempt != group.world.attempt or self._state is State.WAITING:
            return
        self.last_stop = stop
        is_first = self._state is not State.STOPPING
        if is_first:
            self._state = State.STOPPING
            self._around.end_examination()
        group.stop(stop.signum, stop.grace_s)
        if is_first:
            self._around.stopping()
            self._around.say(f"stopping attempt {stop.attempt}: {stop.reason}")

    # ---- the guard -------------------------------------------------------------------------------------------

    def on_spawned(self, key: int, pid: int, time_ns: int) -> None:
        if self._group is not None:
            self._group.on_spawned(key, pid, time_ns)

    def on_forked(self, key: int, pid: int, time_ns: int) -> None:
        if self._group is not None:
            self._group.on_spawned(key, pid, time_ns, is_forked=True)

    def on_spawn_failed(self, key: int, number: int, what: str) -> None:
        if self._group is not None:
            self._group.on_spawn_failed(key, number, what)

    def on_exited(self, exited: Exited) -> None:
        if self._group is not None:
            self._group.on_exited(exited)

    def on_lingering(self, key: int, left: list[tuple[int, str]]) -> None:
        rank = self._group.find(key) if self._group is not None else None
        if rank is not None:
            self._around.say(
                f"rank {rank.rank} has ended but left {_name(left)} behind; "
                f"they get {self._spec.shutdown_timeout_s:g} s to finish"
            )

    def on_tree_ended(self, key: int, killed: list[tuple[int, str]]) -> None:
        rank = self._group.find(key) if self._group is not None else None
        if killed:
            whose = f"rank {rank.rank}" if rank is not None else "a rank"
            self._around.say(f"warning: killed what {whose} had left behind: {_name(killed)}")
        if self._group is not None:
            self._group.on_tree_ended(key)

    def on_stopped(self, killed: list[tuple[int, str]], stuck: list[tuple[int, str, str]]) -> None:
        group = self._group
        if killed:
            self._around.say(f"warning: killed what ranks had started and did not end in time: {_name(killed)}")
        if stuck:
            names = ", ".join(f"{pid} ({name}{', in ' + wait if wait else ''})" for pid, name, wait in stuck)
            self._around.say(
                f"warning: processes that cannot be killed (waiting in the kernel) are left behind: {names}"
            )
        if group is None:
            return
        for failure in group.failures:
            if failure.stopped_by_us and failure.status == -signal.SIGKILL:
                self._around.say(
                    f"warning: rank {failure.rank} (pid {failure.pid}) did not end in time and was killed"
                )
        self._around.attempt_over()
        if self._leaving:
            self._send(Leave(self._leaving))
            self._end(self.status)
        elif self._state is State.STOPPING:
            self._state = State.WAITING
            was_taken = self._port_was_taken(group)
            self._renew_port()
            if self._is_given_up:
                self._rejoin()
                return
            reached, traces = self._around.reached(), self._around.traces()
            failures, ended = tuple(group.failures), tuple(group.ended)
            self._send(Stopped(group.world.attempt, failures, self.port, was_taken, *reached, traces, ended))

    def on_guard_gone(self) -> None:
        """The guard was killed; the sentinel ends what it had started."""
        if self._state in (State.ENDING, State.ENDED):
            return
        self._around.complain("the guard process is gone (killed?); all ranks of this node were ended with it")
        self._send(Leave("its guard process was killed"))
        self._end(128 + self._signum if self._signum else 1)

    def _port_was_taken(self, group: RankGroup) -> bool:
        """Whether rank 0 failed because somebody else listens on its port; all of ours are gone by now."""
        if group.world.group_rank != 0 or not any(f.rank == 0 and not f.stopped_by_us for f in group.failures):
            return False
        self._drop_port()
        return is_listened_on(group.world.master_port)

    def _drop_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _renew_port(self) -> None:
        """A port for the next attempt; without one only an attempt in which this node has rank 0 cannot start."""
        self._drop_port()
        try:
            self._port = self._around.hold_port(None)
        except (BootseerError, OSError) as error:
            self._around.say(f"warning: no port is held for the next attempt: {error}")

    # ---- signals ---------------------------------------------------------------------------------------------

    def on_signal(self, signum: int) -> None:
        """A signal that ends the job (or this node's part in it)."""
        again, self._signum = bool(self._signum), self._signum or signum
        name = signal_name(signum)
        if self._state in (State.ENDING, State.ENDED):
            self._around.hasten()
            return
        if not again:
            is_alone = self._is_spare or self._spec.signal_scope == "node"
            self._around.say(f"{name}: stopping {'this node' if is_alone else 'the job'}")
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
            self._send(Signalled(signum))
            if again and self._state is State.STOPPING and self._group is not None:
                self._group.stop(signum, min(2.0, self._spec.shutdown_timeout_s))
            if self._link is not None and not self._link.is_local and self._patience is None:
                self._patience = self._loop.call_later(SIGNAL_PATIENCE_S, self._stop_without_orders)

    def _stop_without_orders(self) -> None:
        if self._state in (State.WAITING, State.RUNNING, State.SUCCEEDED):
            self._leave(f"stopped by {signal_name(self._signum)}", 128 + self._signum)

    def on_forward(self, signum: int) -> None:
        """A signal for the ranks only."""
        if self._group is not None and self._state is State.RUNNING:
            self._group.forward(signum)

    # ---- ending ----------------------------------------------------------------------------------------------

    def _leave(self, reason: str, status: int) -> None:
        """Ends this node's ranks, then its part in the job."""
        again, self._leaving, self.status = bool(self._leaving), reason, status
        group = self._group
        if group is None or self._state is State.WAITING:
            self._send(Leave(reason))
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
        self._drop_port()
        if self._group is not None:
            self._around.attempt_over()
        self._around.drain()

    def on_drained(self) -> None:
        """The last output is out (or was given up): the agent has nothing left to do."""
        self._state = State.ENDED
        if self._link is not None:
            self._link.close()
        self._loop.stop()

    def _send(
        self,
        message: RankLooks
        | NodeStacks
        | RuleFound
        | RuleSeen
        | RankFailed
        | Started
        | Succeeded
        | Stopped
        | Signalled
        | Leave
        | SetupNews
        | CheckpointFailed
        | Examined
        | Mended,
    ) -> None:
        if self._link is not None:
            self._link.send(message)


def _name(processes: list[tuple[int, str]]) -> str:
    shown = ", ".join(f"{name} (pid {pid})" for pid, name in processes[:8])
    more = len(processes) - 8
    return f"{shown} and {more} more" if more > 0 else shown
