"""What a node observes of ranks that run: one class for each feature, as in node_features.py.

Separate from that module, since it is imported only when ranks run, or when the first of them has ended.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Callable
from launcher.agent.node_features import FindAgent, NodeFeature
from launcher.agent.node_files import NodeEvents, RunDirectories
from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.output import logs
from launcher.ranks.output.console import Console
from launcher.ranks.stats_page import StatsPages
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited

if TYPE_CHECKING:
    from launcher.monitor.failure.files import Rings
    from launcher.monitor.node_watch import NodeWatch
    from launcher.monitor.samples.heartbeats import HeartbeatCopier
    from launcher.ranks.lost_output import LostOutput
    from launcher.rules.node_rules import NodeRules

WATCH_AFTER_S = 1.5  # no hang is detected sooner
HEARTBEATS_AFTER_S = 0.9  # ranks write their first ones themselves; before the rules, which read these events
RULES_AFTER_S = 1.0  # earlier output of ranks is read then


class RankObservers:
    """All observers of a node's ranks."""

    def __init__(
        self,
        loop: EventLoop,
        console: Console,
        spec: LaunchSpec,
        host: str,
        directories: RunDirectories,
        pages: StatsPages,
        agent: FindAgent,
        events: NodeEvents,
        say: Callable[[str], object],
        is_explained: Callable[[messages.RuleFired | messages.RuleObservation], bool],
        began_ns: Callable[[], int],
    ) -> None:
        """Args: is_explained: see OutputRules; began_ns: see StateEvents."""
        self.sampling = RankSampling(loop, spec, agent, say)
        self.traces = CollectiveTraces(spec, agent)
        self.features = (
            HeartbeatCopies(loop, spec, host, directories, pages).feature,
            self.sampling.feature,
            LostOutputWatch(loop, directories, say).feature,
            self.traces.feature,
            OutputRules(loop, spec, agent, say, events, is_explained).feature,  # they read heartbeats
            StateEvents(spec, host, console, began_ns).feature,
        )


class CollectiveTraces:
    """The ranks' calls of torch.distributed in the last attempt, if they are traced."""

    def __init__(self, spec: LaunchSpec, agent: FindAgent) -> None:
        self._spec = spec
        self._agent = agent
        self.packed = b""  # for the coordinator
        self.rings: Rings = (-1, {})  # copied at its end

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(over=self._copy)

    def _copy(self) -> None:
        self.packed = b""
        group = self._agent().group
        if not self._spec.trace_collectives or group is None:
            return
        from launcher.monitor.collectives.ring import copy_ring
        from launcher.monitor.node_watch import pack_traces

        self.packed = pack_traces(group, self._agent().to_job_clock(0)[0])
        self.rings = group.world.attempt, {each.rank: copy_ring(each.page_file) for each in group.ranks}


class LostOutputWatch:
    """Reports output of ranks that their log files could not store."""

    def __init__(self, loop: EventLoop, directories: RunDirectories, say: Callable[[str], object]) -> None:
        self._loop = loop
        self._directories = directories
        self._say = say
        self._lost: LostOutput | None = None

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(started=self._on_started, over=self._on_over)

    def _on_started(self, group: RankGroup) -> None:
        if self._directories.run != logs.NO_LOG_DIR:
            from launcher.ranks.lost_output import LostOutput

            self._lost = LostOutput(self._loop, group.ranks, self._say)

    def _on_over(self) -> None:
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.end()


class RankSampling:
    """The watch over the attempt's ranks, by which the coordinator detects hangs; begins after a moment."""

    def __init__(self, loop: EventLoop, spec: LaunchSpec, agent: FindAgent, say: Callable[[str], object]) -> None:
        self._loop = loop
        self._spec = spec
        self._agent = agent
        self._say = say
        self._alarm = Alarm(loop)
        self.watch: NodeWatch | None = None
        self.numbers_decrease = False  # the step numbers of the last attempt's heartbeats

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(prepare=self._prepare, started=self._on_started, over=self._on_over)

    def _prepare(self, _world: messages.World) -> None:
        self.numbers_decrease = False

    def _on_started(self, group: RankGroup) -> None:
        if self._spec.on_hang != "off":
            self._alarm.set(WATCH_AFTER_S, self._begin, group)

    def _begin(self, group: RankGroup) -> None:
        if group.is_stopping:
            return
        from launcher.monitor.node_watch import NodeWatch

        agent, traces = self._agent(), self._spec.trace_collectives
        self.watch = NodeWatch(self._loop, group, agent.to_job_clock, agent.send_samples, self._say, traces)

    def _on_over(self) -> None:
        self._alarm.cancel()
        watch, self.watch = self.watch, None
        if watch is not None:
            self.numbers_decrease = watch.numbers_fall
            watch.stop()


class HeartbeatCopies:
    """Copies the ranks' heartbeats to their event files; begins after a moment, or when a rank has ended."""

    def __init__(
        self, loop: EventLoop, spec: LaunchSpec, host: str, directories: RunDirectories, pages: StatsPages
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._host = host
        self._directories = directories
        self._pages = pages
        self._running: RankGroup | None = None
        self._copier: HeartbeatCopier | None = None

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(started=self._on_started, rank_ended=self._on_rank_ended, over=self._on_over)

    def _on_started(self, group: RankGroup) -> None:
        self._running = group
        if self._directories.events:
            self._loop.call_later(HEARTBEATS_AFTER_S, self._begin, group)

    def _begin(self, group: RankGroup) -> None:
        if group is not self._running or self._copier is not None:
            return
        from launcher.monitor.samples.heartbeats import HeartbeatCopier

        ranks = [rank for rank in group.ranks if rank.page_file and rank.events_file]
        self._copier = HeartbeatCopier(self._loop, ranks, self._spec.run_id, self._host, group.world.attempt)

    def _on_rank_ended(self, group: RankGroup, rank: Rank, _exited: Exited) -> None:
        if self._directories.events:
            if self._pages.have_heartbeats:
                self._begin(group)  # if the rank ended before they began
            if self._copier is not None:
                self._copier.rank_ended(rank.rank)

    def _on_over(self) -> None:
        self._running = None
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.stop()


class OutputRules:
    """Applies the log rules to the ranks' output; begins after a moment."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        agent: FindAgent,
        say: Callable[[str], object],
        events: NodeEvents,
        is_explained: Callable[[messages.RuleFired | messages.RuleObservation], bool],
    ) -> None:
        """Args: is_explained: whether a finding is reported in another way."""
        self._loop = loop
        self._spec = spec
        self._agent = agent
        self._say = say
        self._events = events
        self._is_explained = is_explained
        self._running: RankGroup | None = None
        self._rules: NodeRules | None = None
        self._unread: list[Rank] = []  # ranks that ended before there were rules

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(
            started=self._on_started,
            rank_ended=self._on_rank_ended,
            stopping=self._read_ended,
            over=self._on_over,
        )

    def _on_started(self, group: RankGroup) -> None:
        self._running = group
        if self._spec.has_rules:
            self._loop.call_later(RULES_AFTER_S, self._begin, group)

    def _begin(self, group: RankGroup) -> None:
        if group is not self._running or self._rules is not None:
            return
        own = self._spec.log_rules
        if not own and not any(
            rank.logs.stdout_path or rank.logs.stderr_path or rank.events_file for rank in group.ranks
        ):
            return
        from launcher.rules.known import BUILTIN_RULES
        from launcher.rules.node_rules import NodeRules, Reported, describe_unseen

        if own and not group.world.attempt and (unseen := describe_unseen(group.ranks)):
            self._say(unseen)
        names = {rule.name for rule in own}
        known = [rule for rule in BUILTIN_RULES if rule.name not in names] if self._spec.known_rules else []
        told = Reported(self._send, self._say, self._events.measured)
        self._rules = NodeRules(self._loop, group, (*own, *known), told)

    def _send(self, message: messages.RuleFired | messages.RuleObservation) -> None:
        if not self._is_explained(message):
            self._agent().send_rules(message)

    def _on_rank_ended(self, group: RankGroup, rank: Rank, exited: Exited) -> None:
        if self._rules is not None:
            self._rules.rank_ended(rank)
        elif self._spec.has_rules and exited.status and not group.is_stopping:
            self._unread.append(rank)  # it ended before the rules began

    def _read_ended(self) -> None:
        """Apply rules to the output of ranks that ended before there were rules; other ranks do not wait."""
        unread, self._unread = self._unread, []
        group = self._agent().group
        if unread and group is not None:
            self._begin(group)
        if self._rules is not None:
            for rank in unread:
                self._rules.rank_ended(rank)

    def _on_over(self) -> None:
        self._read_ended()
        self._running = None
        rules, self._rules = self._rules, None
        if rules is not None:
            rules.stop()


class StateEvents:
    """Prints state events of ranks as torchrun does, with `--event-log-handler console`."""

    def __init__(self, spec: LaunchSpec, host: str, console: Console, began_ns: Callable[[], int]) -> None:
        """Args: began_ns: returns when the attempt became necessary."""
        self._spec = spec
        self._host = host
        self._console = console
        self._began_ns = began_ns

    @property
    def feature(self) -> NodeFeature:
        if self._spec.event_log_handler != "console":
            return NodeFeature()
        return NodeFeature(started=self._on_started, rank_ended=self._on_rank_ended)

    def _on_started(self, group: RankGroup) -> None:
        from launcher.ranks.state_events import agent_event, rank_event

        duration_ms = (group.spawn_began_ns - self._began_ns()) / 1e6
        self._console.show(agent_event(self._spec, self._host, group.world, "RENDEZVOUS", duration_ms) + "\n")
        for rank in group.ranks:
            self._console.show(rank_event(self._spec, self._host, group.world, rank, "START", None) + "\n")

    def _on_rank_ended(self, group: RankGroup, rank: Rank, exited: Exited) -> None:
        from launcher.ranks.state_events import rank_event, state_of

        state = state_of(rank, group.is_stopping)
        event = rank_event(self._spec, self._host, group.world, rank, state, exited.status)
        self._console.show(event + "\n")
