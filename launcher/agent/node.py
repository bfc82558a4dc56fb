"""A node of a job, around its ranks: it makes all parts of the node, and calls them at each moment of an attempt.

The agent decides when something is done, and this module has it done, so its decisions can be read without files.
The parts: what ranks need (node_provisions.py), what is observed of them (node_features.py, node_observers.py),
what is written (node_files.py, node_reports.py).
"""

from __future__ import annotations

import gc
import os
import time

from bootseer.light_typing import TYPE_CHECKING, Any, Callable
from bootseer.secret import SECRET_VARIABLES
from launcher.agent.node_features import FailureEvidence, MountWatch, NodeFeature, StatusSocket
from launcher.agent.node_files import RECORD_AFTER_S, AttemptRecords, NodeEvents, OutputCopies, RunDirectories
from launcher.agent.node_provisions import NodeProvisions, UserLines
from launcher.base.inherited import raise_limits
from launcher.base.loop import EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.output import logs
from launcher.ranks.output.console import Console
from launcher.ranks.stats_page import NO_STATS_PAGE, StatsPages
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited, SupervisorClient

if TYPE_CHECKING:
    from launcher.agent.agent import Agent
    from launcher.agent.event_files import EventFile
    from launcher.agent.node_checks import NodeChecks
    from launcher.agent.node_observers import RankObservers
    from launcher.agent.node_reports import NodeReports
    from launcher.agent.node_status import JobInterface, Reported
    from launcher.agent.node_steps import NodeSteps
    from launcher.monitor.failure.files import Rings
    from launcher.monitor.node_watch import NodeWatch

# The clean-up after an attempt runs only after the next one has started, so that it takes no CPU from the start.
TIDY_AFTER_S = 1.0
MAX_STEPS = 2**60  # a rank can write any value


class Node:
    """What the agent needs of a node; implements agent.NodeInterface."""

    agent: Agent

    def __init__(
        self, loop: EventLoop, console: Console, guard: SupervisorClient, spec: LaunchSpec, began_ns: int
    ) -> None:
        """Args: began_ns: when bootrun began, on the monotonic clock."""
        self._loop = loop
        self._console = console
        self._supervisor = guard
        self._spec = spec
        self.host = os.uname().nodename
        self.event_file: EventFile | None = None  # of this node, in a job on several nodes that writes events
        self.job: JobInterface | None = None  # once it is known
        self._group_rank = -1  # of this node in the last attempt that it took part in
        self._finish: messages.Finish | None = None
        self._checks: NodeChecks | None = None  # with --check, or once the coordinator has found something
        self._steps: NodeSteps | None = None  # from the first one on
        self._reports: NodeReports | None = None  # from the first one on
        self._observers: RankObservers | None = None  # once ranks run

        def find_agent() -> Agent:
            return self.agent  # it is made later

        host, say = self.host, self.say
        self._directories = directories = RunDirectories()
        self._events = events = NodeEvents(spec, host, directories)
        self._records = AttemptRecords(loop, spec, host, directories, say, self._on_first_step, began_ns)
        self._output = OutputCopies(loop, console, spec, host, directories)
        self._status = StatusSocket(loop, self._answer_status, say, self._remove_at_end)
        self._mounts = mounts = MountWatch(loop, find_agent, events, say, self._on_unreadable)
        lines = UserLines(say, self.complain, self._show_setup)
        self.provisions = NodeProvisions(loop, guard, spec, directories, events, find_agent, lines, mounts)
        self._pages = StatsPages()
        self._dashboard = self._make_dashboard() if spec.dashboard else NodeFeature()
        began_wall_s = time.time() - (time.monotonic_ns() - began_ns) / 1e9
        self._evidence = FailureEvidence(loop, spec, directories, find_agent, say, began_wall_s, self._rings)

    def _features(self) -> list[NodeFeature]:
        """Return all parts that follow attempts, in the order in which they learn of a moment."""
        found = [self._evidence.feature]
        if self._checks is not None:
            found.append(self._checks.feature)
        if self._steps is not None:
            found.append(NodeFeature(close=self._steps.close))
        observers = () if self._observers is None else self._observers.features
        return [*found, self._status.feature, self._dashboard, *self.provisions.features(), *observers]

    def _make_dashboard(self) -> NodeFeature:
        from launcher.agent.node_dashboard import NodeDashboard

        def is_coordinator() -> bool:
            return self.job is not None and bool(self.job.statistics())

        return NodeDashboard(self._loop, self._spec.dashboard, is_coordinator, self.say).feature

    # ---- lines for the user ----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a line to the user; --quiet suppresses it."""
        if not self._spec.quiet:
            self._console.say(text)

    def complain(self, text: str) -> None:
        """Print an error in one line."""
        self._console.say(f"error: {text}")

    def _show_setup(self, line: str) -> None:
        """Print a line of a set-up command in the format of ranks' output."""
        if not self._spec.quiet:
            self._console.show(f"[setup]: {line}\n")

    # ---- before attempts -------------------------------------------------------------------------------------

    def make_run_dir(self) -> None:
        """Make the log tree of this run and the directory of its events."""
        self._directories.make(self._spec, self.say)
        if not self._spec.is_single and (path := self._events.agent_file()):
            from launcher.agent.event_files import EventFile

            self.event_file = EventFile(path)

    def begin(self, secret: bytes | None) -> None:
        """Start the work that can run before the rendezvous, at time zero. Args: secret: of the job."""
        self.provisions.prefetch(secret)
        self._records.launched_ns = time.monotonic_ns()
        self._status.begin()
        self.provisions.begin()
        if self._spec.check != "off":
            self._find_checks().begin()

    # ---- attempts --------------------------------------------------------------------------------------------

    def prepare(self, world: messages.World) -> RankGroup:
        """Make the attempt's directories and the group of its ranks; nothing runs yet."""
        spec, run_dir, attempt = self._spec, self._directories.run, world.attempt
        self._events.attempt, self._group_rank = attempt, world.group_rank
        self._records.prepare()
        for feature in self._features():
            feature.prepare(world)
        logs.make_attempt_dirs(run_dir, attempt, spec.nproc)
        plan = logs.plan_logs(run_dir, attempt, spec.nproc, spec.redirects, spec.tee, spec.local_ranks_filter)
        has_hooks = spec.rank_hooks and spec.entry.mode != "program"
        ring = b""
        if has_hooks and spec.trace_collectives:
            from launcher.monitor.collectives.ring import NEW_RING

            ring = NEW_RING
        pages = [NO_STATS_PAGE] * spec.nproc
        if has_hooks:
            has_image = self.provisions.environment.has_image
            pages = self._pages.renew(spec.nproc, has_image, ring, self._remove_at_end)
        ranks = []
        for local_rank, (files, page) in enumerate(zip(plan, pages, strict=True)):
            rank = world.first_rank + local_rank
            ranks.append(Rank(rank, local_rank, files, self._events.rank_file(rank, attempt), page))
        return RankGroup(
            spec,
            world,
            self.host,
            self._supervisor,
            self.agent.to_job_clock,
            self.agent.group_events(),
            ranks,
            self._evidence.kernel_of,
            lambda: self.checks,
            self._mounts.find,
        )

    def spawn(self, group: RankGroup) -> None:
        """Start the ranks of a prepared group, and the copying of their output."""
        self.provisions.check_image()
        self._output.begin(group)
        self.provisions.start(group)

    def observe_start(self, group: RankGroup) -> None:
        """Begin all observation of an attempt; its ranks run now."""
        self._loop.call_later(TIDY_AFTER_S, self._tidy)
        self._find_observers()
        for feature in self._features():
            feature.started(group)
        self._records.started(group)

    def _tidy(self) -> None:
        raise_limits()  # mainly of CPU time, which a long job can exceed
        self._records.finish_last()
        self._events.warmed()
        gc.collect()  # bootrun runs with automatic collection disabled

    def _on_first_step(self, rank: Rank) -> None:
        """Note that all ranks of this node have made their first step; `rank` is local rank 0."""
        for feature in self._features():
            feature.first_step(rank)

    def note_exit(self, group: RankGroup, rank: Rank, exited: Exited) -> None:
        """Record the end of a rank."""
        self._records.make(RECORD_AFTER_S)
        self._find_observers()
        for feature in self._features():
            feature.rank_ended(group, rank, exited)
        self._records.note_exit(group, rank, exited)

    def stopping(self) -> None:
        """Prepare for the next ranks; the present ones have been asked to end."""
        for feature in self._features():
            feature.stopping()

    def attempt_over(self) -> None:
        """Finish an attempt of which no process runs any more."""
        for feature in reversed(self._features()):
            feature.over()
        self._records.end_attempt(self.agent.group)
        self._output.end_attempt()

    def _on_unreadable(self, fault: messages.MountFault) -> None:
        """Replace a mount with faults: the next attempt gets its files by another method."""
        self.provisions.environment.unreadable(fault)

    def reached(self) -> tuple[int, int | None]:
        """Return the last attempt's progress: the most steps (-1: not counted), and the highest step number."""
        pages = [page for page in self._pages.read() if page is not None and page.counts]
        steps = min(max((page.steps for page in pages), default=-1), MAX_STEPS)
        numbers = [page.step for page in pages if page.step is not None and abs(page.step) < MAX_STEPS]
        decreases = self._observers is not None and self._observers.sampling.numbers_decrease
        return steps, max(numbers, default=None) if not decreases else None

    def traces(self) -> bytes:
        """Return the traces of torch.distributed calls of the last attempt; b"" if they are not traced."""
        return b"" if self._observers is None else self._observers.traces.packed

    def _rings(self) -> Rings:
        """Return the calls of the last attempt's ranks."""
        return (-1, {}) if self._observers is None else self._observers.traces.rings

    # ---- orders and reports of the coordinator ---------------------------------------------------------------

    def carry_out(self, order: messages.FromCoordinator) -> None:
        """Carry out an order that needs no decision of the agent, or show a report."""
        match order:
            case messages.SetupOrder():
                self.provisions.environment.set_up(order)
            case messages.RecoveryStep():
                self._recover(order)
            case messages.StepTaken(step=messages.BACKOFF_STEP):
                self._records.pause(order.text)
            case messages.StepTaken(attempt=attempt):
                attrs: dict[str, Any] = {"step": order.step, "class": order.kind, "why": order.text}
                self._events.instant("", "ladder_step", attempt=attempt, **attrs)
            case messages.FailureRecordMessage():
                self._evidence.keep(order)
            case messages.CheckReport():
                self._find_checks().show(order, self._group_rank)
            case messages.HangReport():
                self._find_reports().show_hang(order)
            case messages.RuleReport():
                self._find_reports().show_rule(order, is_first_node=self._group_rank == 0)

    def send_stacks(self, number: int) -> None:
        """Send the stacks of this node's ranks to the coordinator."""
        if self.watch is not None:
            self.watch.ask(number)

    def examine(self, order: messages.Examine, group: RankGroup) -> None:
        """Inspect the ranks of a failed attempt before they are ended."""
        self._find_steps().examine(order, group)

    def end_examination(self) -> None:
        """End the inspection; the ranks are ended now."""
        if self._steps is not None:
            self._steps.end_examination()

    def _recover(self, order: messages.RecoveryStep) -> None:
        """Take a step of the escalation ladder before the next attempt."""
        record, group = "", self.agent.group
        if order.data:
            self._evidence.keep(messages.FailureRecordMessage(order.number, order.data))
            kept = self._evidence.path_of(order.attempt)
            record = f"{kept.removesuffix('.txt')}.json" if kept else ""
        self._find_steps().recover(order, record, group.prepared_ns if group is not None else 0)

    def _find_steps(self) -> NodeSteps:
        if self._steps is None:
            from launcher.agent.node_steps import NodeSteps, StepEvents

            note, directories = self._events, self._directories
            events = StepEvents(self.agent.send_step_result, self.say, note.helper, note.finding)
            self._steps = NodeSteps(
                self._loop, self._spec, directories.logs, directories.written(), SECRET_VARIABLES, events
            )
        return self._steps

    def _find_checks(self) -> NodeChecks:
        if self._checks is None:
            from launcher.agent.node_checks import NodeChecks

            self._checks = NodeChecks(
                self._loop, self._spec, self._directories, self.agent, self._events, self.say
            )
        return self._checks

    def _find_observers(self) -> RankObservers:
        if self._observers is None:
            from launcher.agent.node_observers import RankObservers

            self._observers = RankObservers(
                self._loop,
                self._console,
                self._spec,
                self.host,
                self._directories,
                self._pages,
                lambda: self.agent,
                self._events,
                self.say,
                self._mounts.explains,
                lambda: self._records.began_ns,
            )
        return self._observers

    def _find_reports(self) -> NodeReports:
        if self._reports is None:
            from launcher.agent.node_reports import NodeReports

            self._reports = NodeReports(self._loop, self._console, self.complain, self._directories, self._events)
        return self._reports

    # ---- status ----------------------------------------------------------------------------------------------

    def _answer_status(self, request: str, then: Callable[[dict[str, Any] | Exception], object]) -> None:
        from launcher.agent.node_status import NodeStatus

        status = NodeStatus(self._loop, self._spec, self.agent, self, self._records.began_ns)
        (status.answer_ranks if request == "ranks" else status.answer)(then)

    def _remove_at_end(self) -> None:
        """Send the supervisor the names of files to remove if bootrun is killed, before the files exist."""
        self._supervisor.remove_at_end(self._pages.names + self._status.paths)

    @property
    def watch(self) -> NodeWatch | None:
        """The watch over the attempt's ranks; None if there is none."""
        return None if self._observers is None else self._observers.sampling.watch

    @property
    def run_dir(self) -> str:
        return self._directories.run

    @property
    def events_dir(self) -> str:
        """The directory of events; "" if none are written."""
        return self._directories.events

    @property
    def last_page(self) -> str:
        """The path of the newest failure record; "" for none."""
        return self._evidence.last_path

    @property
    def reported_hang(self) -> Reported | None:
        """The last hang that was reported."""
        return None if self._reports is None else self._reports.hang

    @property
    def checks(self) -> tuple[str, ...]:
        """The known faults of this node."""
        return () if self._checks is None else self._checks.lines

    @property
    def unready(self) -> str:
        """The part besides the fork server that the attempt's ranks wait for, for a message; "" for none."""
        return self.provisions.unready

    @property
    def step(self) -> str:
        """The step of the escalation ladder that runs on this node; "" for none."""
        return "" if self._steps is None else self._steps.doing

    # ---- the end ---------------------------------------------------------------------------------------------

    def report(self, finish: messages.Finish) -> None:
        """Keep the job's result; the report follows the last output of the ranks."""
        self._finish = finish
        self._records.finish_last()

    def drain(self) -> None:
        """Write the remaining output to the console, then notify the agent."""
        self._output.finish(lambda _line: self._evidence.finish(self._on_all_written))

    def hasten(self) -> None:
        """Drop the output that the console has not accepted."""
        self._output.hasten()
        self._evidence.hasten()

    def _on_all_written(self) -> None:
        self._show_end()
        self._events.warmed()
        self.agent.on_drained()  # after this no event is sent to the coordinator

    def _show_end(self) -> None:
        """Print the final report if the job has failed."""
        finish, group, attempt = self._finish, self.agent.group, self._events.attempt
        if finish is None or not finish.status or finish.status > 128:
            return
        record, world_size = self._evidence.path_of(attempt), group.world.world_size if group is not None else 0
        self._find_reports().show_end(finish, self._spec.entry.target, attempt, record, world_size)

    def close(self) -> None:
        for feature in self._features():
            feature.close()
        self._records.close()
        self._events.warmed()
        self._pages.close()
        self._events.close(self.say)
        self._output.close()
