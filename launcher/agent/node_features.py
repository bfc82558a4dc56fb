"""What a node does around the attempts of its ranks, one class for each feature, and the hooks that node.py calls.

A new feature is a class with a property `feature`, and one line in `Node._features`; in node_observers.py, if it
has nothing to do before ranks run. Modules that do the work are imported when they are needed: a start imports
none of them before its ranks run.
"""

from __future__ import annotations

import os
import time

from bootseer.errors import BootseerError
from bootseer.light_typing import TYPE_CHECKING, Callable, Mapping, NamedTuple, Protocol
from launcher.agent.node_files import NodeEvents, RunDirectories
from launcher.base.loop import EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited

if TYPE_CHECKING:
    from launcher.monitor.failure.files import FailureFiles, Rings
    from launcher.provision.failed_mounts import NodeMounts, ServedMount
    from launcher.ranks.kernel_facts import KernelEvidence, KernelFacts
    from launcher.status.server import Answer, StatusServer

# Modules that handle a failure are imported in advance, when the start is least busy.
READY_AFTER_S = 0.2
STATUS_AFTER_S = 2.0  # no client queries the status sooner
OF_MOUNTS = ("disk-error", "mount-lost")  # built-in rules that faults of Bootseer's mounts break, too
MOUNTS_EVERY_S = 1.0  # between checks for read faults of mounts


def _nothing(*_arguments: object) -> None:
    """Do nothing at a moment that a feature does not need."""


class NodeFeature(NamedTuple):
    """A part of a node, by what it does at the moments of an attempt; each call returns at once.

    The node calls all features in the order of its list; `over` in reverse, as what began last ends first.
    """

    prepare: Callable[[messages.World], object] = _nothing  # the ranks of an attempt are about to be made
    started: Callable[[RankGroup], object] = _nothing  # all of them run
    rank_ended: Callable[[RankGroup, Rank, Exited], object] = _nothing
    stopping: Callable[[], object] = _nothing  # they have been asked to end
    first_step: Callable[[Rank], object] = _nothing  # all have made it; the argument is local rank 0
    over: Callable[[], object] = _nothing  # no process of the attempt runs any more
    close: Callable[[], object] = _nothing  # the job is over


class AttemptAgent(Protocol):
    """The part of the agent that features use."""

    @property
    def group(self) -> RankGroup | None: ...
    def to_job_clock(self, local_ns: int) -> tuple[int, int]: ...
    def send_samples(self, message: messages.RankSamples | messages.NodeStacks) -> None: ...
    def send_rules(self, message: messages.RuleFired | messages.RuleObservation) -> None: ...


FindAgent = Callable[[], AttemptAgent]  # the node exists before its agent


# ---- failures ------------------------------------------------------------------------------------------------


class FailureEvidence:
    """What explains failures of this node's ranks: reports of the kernel, and the run's failure records."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        directories: RunDirectories,
        agent: FindAgent,
        say: Callable[[str], object],
        began_wall_s: float,
        rings: Callable[[], Rings],
    ) -> None:
        """Args: began_wall_s: when the run began; rings: returns the calls of the last attempt's ranks."""
        self._loop = loop
        self._spec = spec
        self._directories = directories
        self._agent = agent
        self._say = say
        self._began_wall_s = began_wall_s
        self._rings = rings
        self._files: FailureFiles | None = None  # from the first failure record on
        self._kernel: KernelFacts | None = None  # once ranks run
        self._attempt = 0
        self._first_step_s: float | None = None  # of the attempt's ranks here, measured from their start

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(
            prepare=self._prepare, started=self._on_started, first_step=self._on_first_step, close=self._close
        )

    def _prepare(self, world: messages.World) -> None:
        self._attempt, self._first_step_s = world.attempt, None
        if self._files is not None:
            self._files.attempt_over()

    def _on_started(self, _group: RankGroup) -> None:
        self._loop.call_later(READY_AFTER_S, self._get_ready)

    def _get_ready(self) -> None:
        import resource  # noqa: F401

        from bootseer import counted, tuning  # noqa: F401
        from launcher.coordinator import ending, machines, recovery, restarts  # noqa: F401
        from launcher.monitor.samples import heartbeats  # noqa: F401
        from launcher.ranks import cause, error_file, failure_class, report  # noqa: F401
        from launcher.ranks.kernel_facts import KernelFacts
        from launcher.rendezvous import rare_messages  # noqa: F401

        if self._spec.has_rules:
            from launcher.rules import known, node_rules  # noqa: F401
        failure_class.compile_patterns()
        if self._kernel is None:
            self._kernel = KernelFacts()
        else:
            self._kernel.begin()

    def _on_first_step(self, rank: Rank) -> None:
        self._first_step_s = max(0.0, (time.monotonic_ns() - rank.started_ns) / 1e9)
        if self._files is not None:
            self._files.first_step(self._first_step_s)

    def kernel_of(self, pid: int) -> KernelEvidence | None:
        """Return what the kernel has reported about a process that died; None if that is not known."""
        return self._kernel.of(pid) if self._kernel is not None else None

    def keep(self, record: messages.FailureRecordMessage) -> None:
        """Save a failure record in the log directory, if there is one."""
        if not self._directories.logs:
            return
        if self._files is None:
            from launcher.monitor.failure.files import FailureFiles

            to_job_clock = self._agent().to_job_clock
            self._files = FailureFiles(
                self._loop,
                self._directories.run,
                lambda: to_job_clock(time.monotonic_ns())[0] / 1e9,
                self._say,
                self._began_wall_s,
            )
        self._files.keep(record, self._attempt, self._first_step_s, self._rings())

    @property
    def last_path(self) -> str:
        """The path of the newest failure record; "" for none."""
        return "" if self._files is None else self._files.last_path

    def path_of(self, attempt: int) -> str:
        """Return the path of the newest record if it is about this attempt; else ""."""
        return "" if self._files is None else self._files.page_of(attempt)

    def finish(self, then: Callable[[], object]) -> None:
        """Call `then` when the newest record is complete."""
        if self._files is None:
            then()
        else:
            self._files.finish(then)

    def hasten(self) -> None:
        """Do not wait any more for what would complete it."""
        if self._files is not None:
            self._files.hasten()

    def _close(self) -> None:
        if self._files is not None:
            self._files.close()
        if self._kernel is not None:
            self._kernel.close()


# ---- mounts --------------------------------------------------------------------------------------------------


class MountWatch:
    """Bootseer's mounts below this node's ranks, once there are some: reports their read faults."""

    def __init__(
        self,
        loop: EventLoop,
        agent: FindAgent,
        events: NodeEvents,
        say: Callable[[str], object],
        unreadable: Callable[[messages.MountFault], object],
    ) -> None:
        """Args: unreadable: gets each mount with faults in the attempt that is over."""
        self._loop = loop
        self._agent = agent
        self._events = events
        self._say = say
        self._unreadable = unreadable
        self._mounts: NodeMounts | None = None
        self._running: RankGroup | None = None

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(
            prepare=self._prepare, started=self._on_started, rank_ended=self._on_rank_ended, over=self._on_over
        )

    def put(self, what: str, mount: ServedMount | None) -> None:
        """Record the mount that serves an image, an environment or a checkpoint; None removes it."""
        if self._mounts is None:
            if mount is None:
                return
            from launcher.provision.failed_mounts import NodeMounts

            self._mounts = NodeMounts()
        self._mounts.put(what, mount)

    def put_checkpoint(self, checkpoint: Mapping[str, str]) -> None:
        """Record the mount of a mounted checkpoint; its fault journal lies beside it."""
        path = checkpoint.get("BOOTSEER_CHECKPOINT", "")
        if path.startswith("/"):
            from bootseer.mounts.faults import path_beside
            from launcher.provision.failed_mounts import ServedMount

            self.put("checkpoint", ServedMount(path_beside(path)))

    def find(self, since_ns: int) -> tuple[messages.MountFault, ...]:
        """Return the read faults since then, on the monotonic clock."""
        return () if self._mounts is None else self._mounts.find(since_ns)

    def explains(self, message: messages.RuleFired | messages.RuleObservation) -> bool:
        """Return whether a fault of a mount explains this finding, and is reported instead."""
        group = self._agent().group
        is_of_mounts = (
            isinstance(message, messages.RuleFired) and message.rule in OF_MOUNTS and message.action == "report"
        )
        return is_of_mounts and group is not None and bool(self.find(group.prepared_ns))

    def _prepare(self, _world: messages.World) -> None:
        if self._mounts is not None:
            self._mounts.begin()

    def _on_started(self, group: RankGroup) -> None:
        self._running = group
        if self._mounts is not None:
            self._loop.call_later(MOUNTS_EVERY_S, self._look, group)

    def _look(self, group: RankGroup) -> None:
        if group is self._running:
            self._report(asks=False)  # its service reports when a mount is lost
            self._loop.call_later(MOUNTS_EVERY_S, self._look, group)

    def _on_rank_ended(self, group: RankGroup, _rank: Rank, exited: Exited) -> None:
        if exited.status and not group.is_stopping:
            self._report()

    def _on_over(self) -> None:
        """Drop mounts with faults in the ended attempt: the next one gets their files by another method."""
        self._running = None
        group = self._agent().group
        if self._mounts is None or group is None:
            return
        self._report()
        for fault in self.find(group.prepared_ns):
            self._unreadable(fault)

    def _report(self, *, asks: bool = True) -> None:
        """Report new faults. Args: asks: see NodeMounts.find."""
        group = self._agent().group
        if self._mounts is None or group is None:
            return
        for what, why in self._mounts.waits(group.prepared_ns):
            from launcher.ranks.failure_class import MOUNTED

            self._say(f"warning: reads of {MOUNTED.get(what, what)} wait: {why}")
        for fault in self._mounts.news(group.prepared_ns, asks=asks):
            from launcher.ranks.failure_class import mount_line

            self._say(f"warning: {mount_line(fault)}")
            self._events.instant(fault.what, "mount_fault", error=mount_line(fault), damaged=fault.is_damage)


# ---- status --------------------------------------------------------------------------------------------------


class StatusSocket:
    """The socket through which `bootseer status` sees this job; opened a moment after the start."""

    def __init__(
        self,
        loop: EventLoop,
        answer: Answer,
        say: Callable[[str], object],
        named: Callable[[], object],
    ) -> None:
        """Args: named: called when `paths` are known, before files of these names exist."""
        self._loop = loop
        self._answer = answer
        self._say = say
        self._named = named
        self._server: StatusServer | None = None
        self.paths: list[str] = []

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(close=self._close)

    def begin(self) -> None:
        """Open it later."""
        self._loop.call_later(STATUS_AFTER_S, self._open)

    def _open(self) -> None:
        from launcher.status.server import StatusServer

        try:
            self._server = StatusServer(self._loop, os.environ, self._answer, self._on_named)
        except (BootseerError, OSError) as error:
            self._say(f"warning: bootseer status does not see this job: {error}")

    def _on_named(self, paths: list[str]) -> None:
        self.paths = paths
        self._named()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
