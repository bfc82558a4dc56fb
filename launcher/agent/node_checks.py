"""The health checks of a node: beside the start of each attempt, while ranks run, and those between nodes.

In: --check, reports of the coordinator. Out: log lines, events; with `--check fail` the node leaves the job.
Imported only if checks are made. What runs their processes is in launcher/health.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from bootseer.health.finding import BAD, OK, Finding
from bootseer.secret import SECRET_VARIABLES
from launcher.agent.node_features import NodeFeature
from launcher.agent.node_files import NodeEvents, RunDirectories
from launcher.base.loop import EventLoop
from launcher.health.start_checks import NodeHealth, over_line, worst_finding_lines
from launcher.ranks.group import RankGroup
from launcher.rendezvous.messages import CheckReport, World
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.health.run_checks import HealthWatch

CHECKS_AFTER_S = 3.0  # the checks made during the start are repeated then
MAX_CHECKS_SHOWN = 64  # lines of a job about findings between nodes


class CheckedAgent(Protocol):
    """The part of the agent that checks use."""

    @property
    def is_spare(self) -> bool: ...
    def on_unusable(self, why: str) -> None: ...


class NodeChecks:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        directories: RunDirectories,
        agent: CheckedAgent,
        events: NodeEvents,
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._directories = directories
        self._agent = agent
        self._events = events
        self._say = say
        self._shown = 0  # findings between nodes
        self._health: NodeHealth | None = None
        self._watch: HealthWatch | None = None  # once ranks run

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(prepare=self._prepare, started=self._on_started, close=self._close)

    def begin(self) -> None:
        """Begin the checks; the start does not wait for them."""
        directories, spec = self._directories.written(), self._spec
        failed = self._agent.on_unusable if spec.check == "fail" else None
        self._health = NodeHealth(
            self._loop, directories, SECRET_VARIABLES, self._say, self._events.finding, failed, spec.check_options
        )
        self._health.begin()

    @property
    def lines(self) -> tuple[str, ...]:
        """The known faults of this node."""
        if self._health is None:
            return ()
        later = self._watch.found if self._watch is not None else {}
        return worst_finding_lines({**self._health.found, **later}.values())

    def show(self, told: CheckReport, group_rank: int) -> None:
        """Print what the coordinator has found about a node, or between nodes.

        Args: group_rank: of this node in its last attempt; -1: it has taken part in none.
        """
        rest = told.measured, told.limit, told.unit, told.way_out
        found = Finding(told.check, told.level, told.said, told.where, *rest)
        self._shown += 1
        if self._shown <= MAX_CHECKS_SHOWN:
            self._say(over_line(found) if told.is_over else f"check: {found.line()}")
        elif self._shown == MAX_CHECKS_SHOWN + 1:
            self._say("check: further findings between nodes are not shown; the event files have them")
        if group_rank == 0 and not self._agent.is_spare and (found.level != OK or told.is_over):
            self._events.finding(found, "check_over" if told.is_over else "check")
        if told.is_own and not told.is_over and found.level in BAD and self._spec.check == "fail":
            self._agent.on_unusable(f"this node is not fit for the job: {found.line()}")

    def _prepare(self, world: World) -> None:
        if self._health is not None and world.attempt:
            self._health.begin()

    def _on_started(self, _group: RankGroup) -> None:
        if self._health is not None:
            self._loop.call_later(CHECKS_AFTER_S, self._repeat)

    def _repeat(self) -> None:
        """Begin the repeated checks while ranks run."""
        health, options = self._health, self._spec.check_options
        if health is None or self._watch is not None or (options is not None and options.every_s == 0):
            return
        from launcher.health.run_checks import HealthWatch

        def over(found: Finding) -> None:
            self._events.finding(found, "check_over")
            health.report_over(found)

        self._watch = HealthWatch(
            self._loop, self._directories.written(), SECRET_VARIABLES, options, self._say, health.tell, over
        )
        self._watch.begin()

    def _close(self) -> None:
        if self._health is not None:
            self._health.close()
        if self._watch is not None:
            self._watch.close()
