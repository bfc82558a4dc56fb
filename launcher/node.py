"""What the agent has around it on its node: log tree, console copies, event files, devices, the final report.

The agent says when, this says how. Separate from the agent so that its decisions can be read without the files.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

from bootseer.errors import BootseerError, LaunchError
from bootseer.light_typing import TYPE_CHECKING, Any, compile_named_tuples
from bootseer.secret import SECRET_VARIABLES
from launcher.guard_client import Exited, GuardClient
from launcher.inherited import raise_limits
from launcher.loop import EventLoop
from launcher.ranks import logs
from launcher.ranks.console import Console
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.port import HeldPort, hold_any, hold_given
from launcher.ranks.preloader import OBSERVE, Preloader, PreloadSpan
from launcher.ranks.program import RankProgram
from launcher.recorded_start import HelperSpan, RecordedStart
from launcher.rendezvous.messages import (
    CheckTold,
    Examine,
    Failure,
    FailurePage,
    Finish,
    Mend,
    RuleFound,
    RuleSeen,
    RuleTold,
    SetupOrder,
    Standstill,
    StepTaken,
    World,
)
from launcher.spec import LaunchSpec
from launcher.supervise.page import NO_PAGE, Pages
from launcher.workplace import Workplace, WorkplaceEvents

if TYPE_CHECKING:
    from bootseer.events import EventWriter
    from bootseer.health.finding import Finding
    from launcher.agent import Agent
    from launcher.caches import CachesSpan
    from launcher.checkpoint import NodeCheckpoint
    from launcher.event_files import EventFile
    from launcher.head_start import HeadStart
    from launcher.health import NodeHealth
    from launcher.health_watch import HealthWatch
    from launcher.mounts import Mount, NodeMounts
    from launcher.node_steps import NodeSteps
    from launcher.peers import NodePeers
    from launcher.ranks.kernel_facts import KernelFacts
    from launcher.ranks.lost_output import LostOutput
    from launcher.ranks.record import AttemptRecord
    from launcher.ranks.tail import Tailer
    from launcher.rendezvous.host import Resolve, Spoiled
    from launcher.rules.engine import Measured
    from launcher.rules.node_rules import NodeRules
    from launcher.stage_span import StageSpan
    from launcher.status.node_status import Told
    from launcher.status.server import StatusServer
    from launcher.supervise.beats import NodeBeats
    from launcher.supervise.failure_files import FailureFiles, Rings
    from launcher.supervise.node_watch import NodeWatch

# What an attempt leaves to be done is done when the next one is under way: it must not take CPU from its start.
TIDY_AFTER_S = 1.0
# What the next failure needs is imported before it comes, when the start has the least of its own to do.
READY_AFTER_S = 0.2
WATCH_AFTER_S = 1.5  # no hang is seen sooner
BEATS_AFTER_S = 0.9  # the first ones are events of the ranks' own; before the rules, which read what it brings
RULES_AFTER_S = 1.0  # what ranks have printed before is read then
STATUS_AFTER_S = 2.0  # nobody asks sooner
OF_MOUNTS = ("disk-error", "mount-lost")  # known rules, which mounts of ours break, too
MOUNTS_EVERY_S = 1.0  # looks at what of mounts could not be read
CHECKS_AFTER_S = 3.0  # what was looked at beside the start is looked at again
MOST_CHECKS_SHOWN = 64  # lines of a job on what was found between nodes
MOST_STEPS = 2**60  # a rank may have written anything
RECORD_AFTER_S = 0.05  # the same for its first events, whose times are taken when they happen


class Node:
    """See the module's docstring; implements agent.Surroundings."""

    agent: Agent

    def __init__(
        self, loop: EventLoop, console: Console, guard: GuardClient, spec: LaunchSpec, began_ns: int
    ) -> None:
        self._loop = loop
        self._console = console
        self._guard = guard
        self._spec = spec
        self._began_wall_s = time.time() - (time.monotonic_ns() - began_ns) / 1e9
        self._began_ns = began_ns  # when bootrun began, or the last attempt ended
        self._launched_ns = 0  # when it knew what to do; 0 once that was told
        self.host = os.uname().nodename
        self._writer: EventWriter | None = None
        self._brought: list[tuple[str, str]] = []  # stage and digest, of which is to be said if it was warmed
        self.preloader = Preloader(
            *(
                loop,
                guard,
                spec,
                SECRET_VARIABLES,
                self._say_exec_instead,
                self._note_preload,
                self._say_begun_anew,
            )
        )
        self.recorded_start = RecordedStart(guard, spec, self._note_helper, self._on_start_recorded)
        self.checkpoint: NodeCheckpoint | None = None
        self.peers: NodePeers | None = None
        self.head_start: HeadStart | None = None  # in a job of several nodes
        self.workplace = Workplace(loop, spec, SECRET_VARIABLES, self._workplace_events())
        self._is_program_known = self.workplace.program is not None
        self._image_failure = ""
        self._has_ranks = False  # the attempt's ranks were started
        self._may_spawn = True  # nothing has failed that --strict does not forgive
        self._run_dir = ""
        self._events_dir = ""
        self._pages = Pages()
        self.event_file: EventFile | None = None  # this node's own, of a job of several nodes that writes events
        self._tailer: Tailer | None = None
        self._lost: LostOutput | None = None
        self._record: AttemptRecord | None = None
        self._early_exits: list[tuple[Rank, Exited]] = []  # of ranks, before there was one
        self._over: AttemptRecord | None = None  # of the last attempt
        self._unrecorded: RankGroup | None = None  # has just started
        self._attempt = 0
        self._ended_ns = 0  # the first rank of the attempt has ended
        self._unread: list[Rank] = []  # have ended before there were rules
        self._finish: Finish | None = None
        self._rings: Rings = (-1, {})  # of the attempt that is over, as it left them
        self._watch: NodeWatch | None = None  # over the attempt's ranks
        self._beats: NodeBeats | None = None
        self._rules: NodeRules | None = None  # over what they print
        self._group_rank = -1  # of this node in the last attempt that it had part in
        self._health: NodeHealth | None = None
        self._traces = b""  # of collectives, of the attempt that is over
        self._steps: NodeSteps | None = None  # from the first one on
        self._checks_shown = 0  # of those between nodes
        self._health_watch: HealthWatch | None = None  # once ranks run
        self._numbers_fall = False  # of the heartbeats of the attempt that is over
        self._failure_files: FailureFiles | None = None  # from the first page on
        self.job_statistics: Callable[[], dict[str, int | str]] = dict  # where the coordinator is here
        self._status: StatusServer | None = None
        self._status_paths: list[str] = []
        self._standstill: Told | None = None
        self._first_step_s: float | None = None  # of the attempt's ranks here, after they had started
        self._kernel: KernelFacts | None = None  # from the moment on when ranks run
        self._mounts: NodeMounts | None = None  # of ours, once there is one

    def _workplace_events(self) -> WorkplaceEvents:
        return WorkplaceEvents(
            coming=self._on_program_coming,
            hot_imports=self.preloader.suggest,
            known=self._on_program,
            image_failed=self._on_image_failed,
            setup_failed=lambda news: self.agent.on_set_up_failed(news),  # noqa: PLW0108  there is no agent yet
            setup_news=lambda news: self.agent.tell_setup(news),  # noqa: PLW0108
            image_noted=self._note_image,
            setup_noted=self._note_setup,
            show_noted=partial(self._note_span, "env", "show"),
            caches_noted=self._note_caches,
            image_figures=self._note_image_figures,
            fell_back=self.fell_back,
            said=self.say,
            setup_line=self._show_setup,
            complained=self.complain,
            mounted=self._on_mounted,
        )

    def say(self, text: str) -> None:
        """A line for people; --quiet leaves it out."""
        if not self._spec.quiet:
            self._console.say(text)

    def fell_back(self, stage: str, why: str) -> None:
        """Something that makes starts fast cannot be had: the ordinary way is taken, unless --strict forbids it.

        Args: stage: "" for help that is of no stage.
        """
        is_fatal = self._spec.strict and not self._has_ranks
        if not is_fatal:  # else the error says it
            self.say(why if why.startswith("warning: ") else f"warning: {why}")
        if self._events_dir:
            from bootseer.events import Stage

            writer = self._events()
            writer.attempt = self._attempt
            writer.instant(Stage(stage) if stage else None, "fell_back", error=why)
        if is_fatal:
            self._may_spawn = False  # the job ends as soon as its coordinator says so
            self.agent.on_fell_back(why)

    def passed_over(self, why: str) -> None:
        """A newer checkpoint is not taken."""
        self.say(f"warning: {why}")
        if self._events_dir:
            from bootseer.events import Stage

            writer = self._events()
            writer.attempt = self._attempt
            writer.instant(Stage.CHECKPOINT, "passed_over", error=why)

    def complain(self, text: str) -> None:
        """An error, in one line."""
        self._console.say(f"error: {text}")

    def warn(self, text: str) -> None:
        """A line of something that costs the user something; --quiet leaves it out."""
        self.say(f"warning: {text}")

    # ---- mounts of ours ----------------------------------------------------------------------------------------

    def _on_mounted(self, what: str, mount: Mount | None) -> None:
        """From now on files of an image, an environment or a checkpoint are read through it; None: no longer."""
        if self._mounts is None:
            if mount is None:
                return
            from launcher.mounts import NodeMounts

            self._mounts = NodeMounts()
        self._mounts.put(what, mount)

    def _note_checkpoints_mount(self, checkpoint: Mapping[str, str]) -> None:
        """Where ranks read the checkpoint by a mount, its faults lie beside it."""
        path = checkpoint.get("BOOTSEER_CHECKPOINT", "")
        if path.startswith("/"):
            from bootseer.mounts.faults import path_beside
            from launcher.mounts import Mount

            self._on_mounted("checkpoint", Mount(path_beside(path)))

    def _tell_rules(self, message: RuleFound | RuleSeen) -> None:
        """What rules have found; but what a rank prints of a mount of ours that fails is no disk's error."""
        group = self.agent.group
        is_known = isinstance(message, RuleFound) and message.rule in OF_MOUNTS and message.action == "report"
        if is_known and self._mounts is not None and group is not None and self._mounts.find(group.prepared_ns):
            return  # it is told as what it is
        self.agent.tell_rules(message)

    def _look_at_mounts(self, *, asks: bool = True) -> None:
        """Tells what of them cannot be read, as soon as that is known. Args: asks: as NodeMounts.find."""
        group = self.agent.group
        if self._mounts is None or group is None:
            return
        for what, why in self._mounts.waits(group.prepared_ns):
            from launcher.ranks.failure_class import MOUNTED

            self.warn(f"reads of {MOUNTED.get(what, what)} wait: {why}")
        for fault in self._mounts.news(group.prepared_ns, asks=asks):
            from launcher.ranks.failure_class import mount_line

            self.warn(mount_line(fault))
            if self._events_dir:
                from bootseer.events import Stage

                writer = self._events()
                writer.attempt = self._attempt
                attrs: dict[str, Any] = {"damaged": fault.is_damage}
                writer.instant(Stage(fault.what), "mount_fault", error=mount_line(fault), **attrs)

    def _watch_mounts(self, group: RankGroup) -> None:
        if self._mounts is not None and self._has_ranks and group is self.agent.group:
            self._look_at_mounts(asks=False)  # its keeper tells when it is lost
            self._loop.call_later(MOUNTS_EVERY_S, self._watch_mounts, group)

    def _give_up_mounts(self) -> None:
        """An attempt is over: what could not be read of them is had in another way by the next one."""
        group = self.agent.group
        if self._mounts is None or group is None:
            return
        self._look_at_mounts()
        for fault in self._mounts.find(group.prepared_ns):
            self.workplace.unreadable(fault)

    # ---- files -----------------------------------------------------------------------------------------------

    def make_run_dir(self) -> None:
        """Makes the log tree of this run and the folder of its events."""
        self._run_dir = logs.make_run_dir(self._spec.log_dir, self._spec.run_id)
        given = self._spec.events_dir
        if given is None:
            self._events_dir = "" if self._run_dir == logs.NO_LOG_DIR else f"{self._run_dir}/events"
        else:
            self._events_dir = "" if given == os.devnull else os.path.abspath(given)
        if self._events_dir:
            try:
                os.makedirs(self._events_dir, exist_ok=True)
            except OSError as error:
                self.say(f"warning: no events are written: {self._events_dir}: {error.strerror}")
                self._events_dir = ""
        if self._events_dir and not self._spec.is_single:
            from bootseer.events import agent_events_path
            from launcher.event_files import EventFile

            self.event_file = EventFile(agent_events_path(self._events_dir, self.host))

    def begin(self, secret: bytes | None) -> None:
        """Time zero: starts what can run before the nodes have met. Args: secret: of the job."""
        self.preloader.listing_path = self.recorded_start.begin(os.environ, self._events_dir)
        spec = self._spec
        if spec.load_checkpoint or spec.setup or spec.image or (spec.caches and spec.caches.store):
            self._begin_peers(secret)
        self._launched_ns = time.monotonic_ns()
        self._loop.call_later(STATUS_AFTER_S, self._open_status)
        own = self._own_folders()
        self.workplace.begin(own, "" if self._run_dir == logs.NO_LOG_DIR else self._run_dir, self.peers)
        if self._spec.load_checkpoint:
            from launcher.checkpoint import NodeCheckpoint

            self.checkpoint = NodeCheckpoint(
                self._loop,
                self._guard,
                self._spec,
                SECRET_VARIABLES,
                self.say,
                partial(self.fell_back, "checkpoint"),
                partial(self._note_span, "checkpoint", "checkpoint"),
                self.peers,
                self.agent.tell_checkpoint,
                self.passed_over,
            )
            self.checkpoint.begin()
        if self.workplace.program is not None:
            self.preloader.begin(os.environ, self.workplace.program)
        if spec.check != "off":
            self._begin_checks()

    def _own_folders(self) -> list[str]:
        """Of the run."""
        return [folder for folder in (self._run_dir, self._events_dir) if folder not in ("", logs.NO_LOG_DIR)]

    def _written_folders(self) -> list[str]:
        """That the job writes to."""
        return [os.getcwd(), os.environ.get("TMPDIR") or "/tmp", *self._own_folders()]  # noqa: S108  looked at only

    def _begin_checks(self) -> None:
        """Beside the start, which does not wait for them."""
        from launcher.health import NodeHealth

        folders, spec = self._written_folders(), self._spec
        failed = self.agent.on_unusable if spec.check == "fail" else None
        self._health = NodeHealth(
            self._loop, folders, SECRET_VARIABLES, self.say, self._note_finding, failed, spec.check_options
        )
        self._health.begin()

    def _watch_checks(self) -> None:
        """From now on checks are made while ranks run."""
        health, options = self._health, self._spec.check_options
        if health is None or self._health_watch is not None or (options is not None and options.every_s == 0):
            return
        from launcher.health_watch import HealthWatch

        def over(found: Finding) -> None:
            self._note_finding(found, "check_over")
            health.tell_over(found)

        self._health_watch = HealthWatch(
            self._loop, self._written_folders(), SECRET_VARIABLES, options, self.say, health.tell, over
        )
        self._health_watch.begin()

    def show_check(self, told: CheckTold) -> None:
        """What the coordinator has found of a node, or between nodes."""
        from bootseer.health.finding import BAD, OK, Finding
        from launcher.health import over_line

        rest = told.measured, told.limit, told.unit, told.way_out
        found = Finding(told.check, told.level, told.said, told.where, *rest)
        self._checks_shown += 1
        if self._checks_shown <= MOST_CHECKS_SHOWN:
            self.say(over_line(found) if told.is_over else f"check: {found.line()}")
        elif self._checks_shown == MOST_CHECKS_SHOWN + 1:
            self.say("check: what else is found between nodes is not shown any more; events have it")
        if self._group_rank == 0 and not self.agent.is_spare and (found.level != OK or told.is_over):
            self._note_finding(found, "check_over" if told.is_over else "check")
        if told.is_own and not told.is_over and found.level in BAD and self._spec.check == "fail":
            self.agent.on_unusable(f"this node is not fit for the job: {found.line()}")

    def _note_finding(self, found: Finding, name: str = "check") -> None:
        """Something of this node is not in order, or no longer so, as an event."""
        if self._events_dir:
            writer = self._events()
            writer.attempt = self._attempt
            writer.instant(None, name, error=found.line() if name == "check" else None, **found._asdict())

    def _begin_peers(self, secret: bytes | None) -> None:
        """Nodes help each other where there are several, and strangers are kept out."""
        if self._spec.is_single or self._spec.max_nodes == 1 or not self._spec.peers:
            return
        if secret is None:
            self.say(
                "warning: nodes do not help each other, as the job has no secret: each reads the store for itself"
            )
            return
        from launcher.peers import NodePeers

        self.peers = NodePeers(self._loop, self._spec, secret, SECRET_VARIABLES, partial(self.fell_back, ""))
        self.peers.begin()

    def when_program_known(self, then: Callable[[RankProgram], object]) -> None:
        """Calls `then`, once, with what ranks are run by: now, or when it is there. Never if that fails."""
        self.workplace.when_known(then)

    def set_up(self, order: SetupOrder) -> None:
        """An order of the coordinator for the ranks' environment."""
        self.workplace.set_up(order)

    def _show_setup(self, line: str) -> None:
        """A line of a set-up command, as those of ranks."""
        if not self._spec.quiet:
            self._console.show(f"[setup]: {line}\n")

    def _on_program_coming(self, with_caches: Callable[[str], RankProgram]) -> None:
        """The framework can be imported, while first-step caches are brought."""
        if not self._is_program_known:
            self._record_what_was_built()
            self.preloader.begin_early(os.environ, with_caches)

    def _on_program(self, program: RankProgram, caches_folder: str) -> None:
        """What ranks are run by is there, or there anew."""
        if self._is_program_known:
            self.preloader.move(program)
        else:
            self._is_program_known = True
            self._record_what_was_built()
            self.preloader.begin(os.environ, program, caches_folder)

    def _record_what_was_built(self) -> None:
        """What this start reads of it is recorded from nothing, and in an image too: other nodes will mount it."""
        if self.workplace.has_built:
            self.preloader.listing_path = self.recorded_start.begin_whole(self._events_dir)

    def _on_start_recorded(self) -> None:
        """What the start has read is known: other nodes will read the same of what was built here."""
        if self.workplace.has_built:
            files = self.recorded_start.files()  # of an image they are kept for this moment alone
            self.preloader.when_known(lambda: self.workplace.touched(files, self.preloader.hot_imports))

    def _on_image_failed(self, why: str) -> None:
        """Ranks that run inside go on; there will be no others."""
        self._image_failure = why
        if not self._has_ranks:
            self.agent.on_unusable(why)

    @property
    def resolve(self) -> Resolve | None:
        """Finds the version of the checkpoint that an attempt loads, if it is to load one."""
        return None if self.checkpoint is None else self.checkpoint.resolve

    @property
    def spoiled(self) -> Spoiled | None:
        """Is told that a version cannot be had."""
        return None if self.checkpoint is None else self.checkpoint.spoiled

    def on_service_ended(self, number: int, why: str) -> None:
        """A process that serves this node is gone."""
        if self.checkpoint is not None:
            self.checkpoint.on_service_ended(number, why)

    # ---- attempts --------------------------------------------------------------------------------------------

    def prepare(self, world: World) -> RankGroup:
        """Makes the attempt's folders and the group of its ranks; nothing runs yet."""
        spec = self._spec
        self._attempt, self._group_rank = world.attempt, world.group_rank
        if self._mounts is not None:
            self._mounts.begin()
        if self._ended_ns:
            self._began_ns, self._ended_ns = self._ended_ns, 0
        if self._health is not None and world.attempt:
            self._health.begin()
        self._numbers_fall, self._first_step_s = False, None
        if self._failure_files is not None:
            self._failure_files.attempt_over()
        logs.make_attempt_dirs(self._run_dir, world.attempt, spec.nproc)
        plan = logs.plan_logs(
            self._run_dir, world.attempt, spec.nproc, spec.redirects, spec.tee, spec.local_ranks_filter
        )
        has_hooks = spec.rank_hooks and spec.entry.mode != "program"
        ring = b""
        if has_hooks and spec.trace_collectives:
            from launcher.supervise.ring import NEW_RING

            ring = NEW_RING
        pages = [NO_PAGE] * spec.nproc
        if has_hooks:
            pages = self._pages.renew(spec.nproc, self.workplace.has_image, ring, self._remove_at_end)
        ranks = [
            Rank(world.first_rank + local_rank, local_rank, each, self._rank_events_file(world, local_rank), page)
            for local_rank, (each, page) in enumerate(zip(plan, pages, strict=True))
        ]
        return RankGroup(
            spec,
            world,
            self.host,
            self._guard,
            self.agent.to_job_clock,
            self.agent.group_events(),
            ranks,
            lambda pid: self._kernel.of(pid) if self._kernel is not None else None,
            lambda: self.checks,
            lambda since_ns: () if self._mounts is None else self._mounts.find(since_ns),
        )

    def spawn(self, group: RankGroup) -> None:
        """Starts the ranks of a prepared group, and the copies of their output."""
        if self._image_failure:
            raise LaunchError(self._image_failure)
        self._copy_output(group)

        def start(checkpoint: dict[str, str], fork: bool) -> None:
            if group.is_stopping or not self._may_spawn:
                return
            self._note_checkpoints_mount(checkpoint)
            group.begin_spawn()
            head_start = self.head_start if fork and group.world.group_world_size > 1 else None
            if head_start is not None and group.world.first_rank:
                head_start.follow(group.world, partial(spawn, checkpoint, fork))
                return
            spawn(checkpoint, fork)
            if head_start is not None:
                head_start.lead(group.world)

        def spawn(checkpoint: dict[str, str], fork: bool) -> None:
            program = self.workplace.program
            if group.is_stopping or not self._may_spawn:
                return
            assert program is not None
            self.recorded_start.prepare(group.ranks[0])
            self.preloader.prepare(group.ranks[0].events_file)
            try:
                group.spawn(program, SECRET_VARIABLES, self._numa_prefix, self._visible_devices, checkpoint, fork)
            except (BootseerError, OSError) as error:
                group.cannot_start(str(error))  # by now nobody may wait for `spawn` to return

        def settle(checkpoint: dict[str, str]) -> None:
            if not group.is_stopping:
                self.preloader.settle(group.world.attempt == 0, partial(start, checkpoint))

        def begin(checkpoint: dict[str, str]) -> None:
            own = ""
            if checkpoint:
                from launcher.checkpoint import own_path

                own = own_path(self._spec.load_checkpoint, checkpoint.get("BOOTSEER_CHECKPOINT_VERSION", ""))
            if not group.is_stopping:
                self.workplace.make_ready(checkpoint, own, settle, group.cannot_start)

        if self.checkpoint is not None:
            self.checkpoint.load(group.world, begin)
            return
        if group.world.checkpoint is not None:
            raise LaunchError(
                "the job loads a checkpoint, but this node was started without --load-checkpoint, so its ranks"
                " would begin from nothing: start all nodes with it, or none"
            )
        begin({})

    def _rank_events_file(self, world: World, local_rank: int) -> str:
        if not self._events_dir:
            return ""
        from bootseer.events import rank_events_path

        return rank_events_path(self._events_dir, self.host, world.first_rank + local_rank, world.attempt)

    def _copy_output(self, group: RankGroup) -> None:
        spec, attempt = self._spec, group.world.attempt
        for rank in group.ranks:
            prefix = logs.line_prefix(
                spec.log_line_prefix_template, spec.role, rank.rank, rank.local_rank, self.host
            )
            for stream, tee, path, needles in (
                (logs.OUT, rank.logs.tee_stdout, rank.logs.stdout_path, spec.stdout_filters),
                (logs.ERR, rank.logs.tee_stderr, rank.logs.stderr_path, spec.stderr_filters),
            ):
                if tee and path is not None:
                    encoded = tuple(needle.encode(errors="surrogateescape") for needle in needles)
                    self._tail().add(
                        path,
                        rank.rank,
                        stream,
                        prefix,
                        encoded,
                        logs.filtered_path(self._run_dir, attempt, stream),
                    )

    def _tail(self) -> Tailer:
        if self._tailer is None:
            from launcher.ranks.tail import Tailer

            self._tailer = Tailer(self._loop, self._console)
        return self._tailer

    def _numa_prefix(self, local_rank: int) -> list[str]:
        if self._spec.numa_binding is None:
            return []
        from launcher.numa import numactl_prefix

        words = numactl_prefix(self._spec.numa_binding, local_rank)
        if self.workplace.has_image:  # PATH is the image's
            from launcher.devices import find_program

            words[0] = find_program(words[0], os.environ) or words[0]
        return words

    def _visible_devices(self, local_rank: int) -> str | None:
        if not self._spec.virtual_local_rank:
            return None
        from launcher.devices import narrow_devices

        return narrow_devices(os.environ, local_rank)

    def _note_preload(self, span: PreloadSpan) -> None:
        """The span of a preload, as an event."""
        if not self._events_dir:
            return
        from bootseer.events import Stage

        writer = self._events()
        writer.attempt = self._attempt if span.is_part_of_start else None
        number = writer.begin(Stage.IMPORT, "preload", mono_ns=span.began_ns)
        attrs = {"modules": span.modules} if not span.error else {}
        writer.end(Stage.IMPORT, "preload", number, mono_ns=span.ended_ns, error=span.error or None, **attrs)
        for why in span.left_out if span.is_part_of_start else ():
            writer.instant(Stage.IMPORT, "fell_back", error=f"imported by each rank itself: {why}")
        if span.error and span.is_part_of_start:
            took_s = (span.ended_ns - span.began_ns) / 1e9
            writer.instant(
                Stage.IMPORT,
                "fell_back",
                error=f"preloading failed and was of no use, {took_s:.1f} s: {span.error}",
            )

    def on_helper_ended(self, number: int, cpu_s: float, answer: dict[str, Any]) -> None:
        """A helper of the guard's is gone, by itself or not."""
        if number == OBSERVE:
            self.preloader.on_helper_ended()
        else:
            self.recorded_start.on_helper_ended(number, cpu_s, answer)

    def _say_begun_anew(self, why: str) -> None:
        """Forked ranks have replaced themselves by exec'd ones."""
        self.say(f"warning: forked ranks have begun anew, exec'd: {why}")
        if self._events_dir:
            from bootseer.events import Stage

            writer = self._events()
            writer.attempt = self._attempt
            writer.instant(Stage.SPAWN, "exec_instead", error=why)

    def _note_helper(self, span: HelperSpan) -> None:
        """What was read ahead, or recorded, as an event of no stage: no rank waits for it."""
        if not self._events_dir:
            return
        writer = self._events()
        writer.attempt = self._attempt
        number = writer.begin(None, span.name, mono_ns=span.began_ns)
        writer.end(None, span.name, number, mono_ns=span.ended_ns, error=span.error or None, **span.facts)

    def _note_image(self, span: StageSpan) -> None:
        """How the image was opened."""
        self._brought.append(("image", str(span.facts.get("digest", ""))))
        self._note_span("image", "image", span)

    def _note_setup(self, span: StageSpan) -> None:
        """How the environment came to its place."""
        self._brought.append(("env", str(span.facts.get("tree", ""))))
        self._note_span("env", "setup", span)

    def _note_span(self, stage: str, name: str, span: StageSpan) -> None:
        """Something that ranks have waited for, as an event."""
        if not self._events_dir:
            return
        from bootseer.events import Stage

        writer = self._events()
        writer.attempt = self._attempt
        number = writer.begin(Stage(stage), name, mono_ns=span.began_ns)
        writer.end(Stage(stage), name, number, mono_ns=span.ended_ns, error=span.error or None, **span.facts)

    def _note_caches(self, span: CachesSpan) -> None:
        """What came of first-step caches, as an event."""
        if not self._events_dir:
            return
        from bootseer.events import Stage

        writer = self._events()
        writer.attempt = self._attempt
        if span.is_part_of_start:
            number = writer.begin(Stage.CACHES, span.name, mono_ns=span.began_ns)
            writer.end(
                Stage.CACHES, span.name, number, mono_ns=span.ended_ns, error=span.error or None, **span.facts
            )
        else:
            attrs: dict[str, Any] = dict(span.facts)
            writer.instant(Stage.CACHES, span.name, mono_ns=span.ended_ns, error=span.error or None, **attrs)

    def _note_image_figures(self, figures: Mapping[str, float]) -> None:
        """What the start has read of the image, and how long it waited for it."""
        from launcher.image import figures_line

        if line := figures_line(figures):
            self.say(line)
        if self._events_dir:
            from bootseer.events import Stage

            writer = self._events()
            writer.attempt = self._attempt
            for name, value in figures.items():
                unit = {"s": "s", "bytes": "bytes"}.get(name.rpartition("_")[2])
                writer.scalar(Stage.IMAGE, f"image_{name}", value, unit)

    def _say_exec_instead(self, why: str) -> None:
        """Ranks that were to be forked are exec'd."""
        self.say(f"warning: ranks are exec'd, not forked: {why}")
        if self._events_dir:
            from bootseer.events import Stage

            writer = self._events()
            writer.attempt = self._attempt
            writer.instant(Stage.SPAWN, "exec_instead", error=why)

    def _events(self) -> EventWriter:
        """Events of this node that are not of one attempt."""
        if self._writer is None:
            from bootseer.events import EventWriter, agent_events_path

            path = agent_events_path(self._events_dir, self.host)
            self._writer = EventWriter(path, self._spec.run_id, self.host)
        return self._writer

    # ---- an attempt's course ---------------------------------------------------------------------------------

    def observe_start(self, group: RankGroup) -> None:
        """All ranks run: from now on their first steps are waited for."""
        self._has_ranks = True
        self.preloader.attempt_started()
        if self._run_dir != logs.NO_LOG_DIR:
            from launcher.ranks.lost_output import LostOutput

            self._lost = LostOutput(self._loop, group.ranks, self.say)
        self._loop.call_later(READY_AFTER_S, self._get_ready)
        self._loop.call_later(TIDY_AFTER_S, self._tidy)
        if self._health is not None:
            self._loop.call_later(CHECKS_AFTER_S, self._watch_checks)
        if self._mounts is not None:
            self._loop.call_later(MOUNTS_EVERY_S, self._watch_mounts, group)
        if self._spec.on_hang != "off":
            self._loop.call_later(WATCH_AFTER_S, self._begin_watch, group)
        if self._spec.has_rules:
            self._loop.call_later(RULES_AFTER_S, self._begin_rules, group)
        if self._spec.event_log_handler == "console":
            from launcher.ranks.state_events import agent_event, rank_event

            duration_ms = (group.spawn_began_ns - self._began_ns) / 1e6
            self._console.show(agent_event(self._spec, self.host, group.world, "RENDEZVOUS", duration_ms) + "\n")
            for rank in group.ranks:
                self._console.show(rank_event(self._spec, self.host, group.world, rank, "START", None) + "\n")
        if self._events_dir:
            self._loop.call_later(BEATS_AFTER_S, self._begin_beats, group)
            self._unrecorded = group
            self._loop.call_later(RECORD_AFTER_S, self._make_record)

    def _make_record(self) -> None:
        group, self._unrecorded = self._unrecorded, None
        if group is None:
            return
        from launcher.ranks.record import AttemptRecord

        self._record = AttemptRecord(
            self._loop,
            self._events_dir,
            self._spec.run_id,
            self.host,
            group,
            self._began_ns,
            self._launched_ns,
            self.say,
            lambda: self._on_first_step(group.ranks[0]),
        )
        self._launched_ns = 0
        for rank, exited in self._early_exits:
            self._record.note_exit(rank, exited.status, exited.time_ns)
        self._early_exits.clear()

    def _on_first_step(self, rank: Rank) -> None:
        """All ranks of this node have made theirs; `rank` is local rank 0."""
        self._first_step_s = max(0.0, (time.monotonic_ns() - rank.started_ns) / 1e9)
        if self._failure_files is not None:
            self._failure_files.first_step(self._first_step_s)
        if self.checkpoint is not None:
            self.checkpoint.first_step_seen()
        self.workplace.first_step_seen()
        self.recorded_start.first_step_seen(rank)
        self.preloader.first_step_seen(rank.events_file, rank.is_forked, rank.pid)

    def _get_ready(self) -> None:
        from bootseer import counted  # noqa: F401
        from launcher import recovery  # noqa: F401
        from launcher.ranks import cause, errorfile, failure_class, report  # noqa: F401
        from launcher.ranks.kernel_facts import KernelFacts
        from launcher.supervise import beats, failure_notes  # noqa: F401

        if self._spec.has_rules:
            from launcher.rules import known, node_rules  # noqa: F401
        failure_class.get_ready()
        compile_named_tuples()
        if self._kernel is None:
            self._kernel = KernelFacts()
        else:
            self._kernel.begin()

    def _begin_watch(self, group: RankGroup) -> None:
        if not self._has_ranks or group.is_stopping or group.world.attempt != self._attempt:
            return
        from launcher.supervise.node_watch import NodeWatch

        agent = self.agent
        self._watch = NodeWatch(
            self._loop, group, agent.to_job_clock, agent.tell_watch, self.say, self._spec.trace_collectives
        )

    def send_stacks(self, number: int) -> None:
        """What the ranks of this node do, to the coordinator."""
        if self._watch is not None:
            self._watch.ask(number)

    def show_standstill(self, found: Standstill) -> None:
        """Keeps the report of a standstill and shows it."""
        from launcher.supervise.node_watch import SHOWN_LINES, keep_report

        try:
            kept = f" ({keep_report(self._run_dir, found)})"
        except OSError as error:
            kept = f" (it cannot be kept in {self._run_dir}: {error.strerror})"
        lines = found.text.rstrip().splitlines()
        from launcher.status.node_status import Told

        self._standstill = Told(found.attempt, lines[0], self._loop.time())
        self.complain(lines[0] + kept)
        for line in lines[1:SHOWN_LINES]:
            self._console.show(f"  {line}\n")

    def _begin_beats(self, group: RankGroup) -> None:
        if not self._has_ranks or self._beats is not None or group.world.attempt != self._attempt:
            return
        from launcher.supervise.beats import NodeBeats

        ranks = [rank for rank in group.ranks if rank.page_file and rank.events_file]
        self._beats = NodeBeats(self._loop, ranks, self._spec.run_id, self.host, group.world.attempt)

    def _begin_rules(self, group: RankGroup) -> None:
        if not self._has_ranks or self._rules is not None or group.world.attempt != self._attempt:
            return
        own = self._spec.log_rules
        if not own and not any(
            rank.logs.stdout_path or rank.logs.stderr_path or rank.events_file for rank in group.ranks
        ):
            return
        from launcher.rules.known import KNOWN
        from launcher.rules.node_rules import NodeRules, Told, describe_unseen

        if own and not self._attempt and (unseen := describe_unseen(group.ranks)):
            self.say(unseen)
        names = {rule.name for rule in own}
        known = [rule for rule in KNOWN if rule.name not in names] if self._spec.known_rules else []
        self._rules = NodeRules(
            self._loop, group, (*own, *known), Told(self._tell_rules, self.say, self._note_measured)
        )

    def _note_measured(self, measured: Measured) -> None:
        """A number that a rule has found in what a rank prints, as an event."""
        if self._events_dir:
            from bootseer.events import Kind

            writer, rule = self._events(), measured.rule
            writer.attempt = self._attempt
            attrs = {"rule": rule.name, "metric": rule.metric}
            writer.write(None, Kind.SCALAR, "rule_metric", rank=measured.rank, value=measured.value, attrs=attrs)

    def show_rule(self, told: RuleTold) -> None:
        """A rule over what ranks print was broken."""
        self.complain(told.text)
        if self._events_dir and self._group_rank == 0:
            writer = self._events()
            writer.attempt = told.attempt
            # Not as the event's own rank: that one may be of another node.
            attrs: dict[str, Any] = {"rule": told.rule, "class": told.kind, "action": told.action}
            if told.rank >= 0:
                attrs["of_rank"] = told.rank
            writer.instant(None, "rule_broken", error=told.text, **attrs)

    def _open_status(self) -> None:
        """From now on `bootseer status` sees this job."""
        from launcher.status.server import StatusServer

        def answer(then: Callable[[dict[str, Any] | Exception], object]) -> None:
            from launcher.status.node_status import NodeStatus

            NodeStatus(self._loop, self._spec, self.agent, self, self._began_ns).answer(then)

        try:
            self._status = StatusServer(self._loop, os.environ, answer, self._on_status_named)
        except (BootseerError, OSError) as error:
            self.say(f"warning: bootseer status does not see this job: {error}")

    def _on_status_named(self, paths: list[str]) -> None:
        self._status_paths = paths
        self._remove_at_end()

    def _remove_at_end(self) -> None:
        """Names that would be left if bootrun were killed: told before there are such files."""
        self._guard.remove_at_end(self._pages.names + self._status_paths)

    @property
    def watch(self) -> NodeWatch | None:
        """Over the attempt's ranks, while there is one."""
        return self._watch

    @property
    def run_dir(self) -> str:
        return self._run_dir

    @property
    def last_page(self) -> str:
        """The path of the newest failure's page; "" for none."""
        return "" if self._failure_files is None else self._failure_files.last_path

    @property
    def standstill(self) -> Told | None:
        """That was told last."""
        return self._standstill

    @property
    def checks(self) -> tuple[str, ...]:
        """What is known to be wrong with this node."""
        if self._health is None:
            return ()
        from launcher.health import worst_lines

        later = self._health_watch.found if self._health_watch is not None else {}
        return worst_lines({**self._health.found, **later}.values())

    @property
    def waits_for(self) -> str:
        """What an attempt's ranks wait for on this node; "" for nothing."""
        if self.workplace.waits_for:
            return self.workplace.waits_for
        return "the checkpoint" if self.checkpoint is not None else "the preloaded process"

    def keep_page(self, page: FailurePage) -> None:
        """A failure's page goes to the logs, where there are any."""
        if self._run_dir in ("", logs.NO_LOG_DIR):
            return
        if self._failure_files is None:
            from launcher.supervise.failure_files import FailureFiles

            agent = self.agent
            self._failure_files = FailureFiles(
                self._loop,
                self._run_dir,
                lambda: agent.to_job_clock(time.monotonic_ns())[0] / 1e9,
                self.say,
                self._began_wall_s,
            )
        self._failure_files.keep(page, self._attempt, self._first_step_s, self._rings)

    @property
    def step(self) -> str:
        """Of the restart ladder, that is under way on this node; "" for none."""
        return "" if self._steps is None else self._steps.doing

    def _take_steps(self) -> NodeSteps:
        if self._steps is None:
            from launcher.node_steps import NodeSteps, StepEvents

            run_dir = "" if self._run_dir == logs.NO_LOG_DIR else self._run_dir
            events = StepEvents(self.agent.tell_steps, self.say, self._note_helper, self._note_finding)
            folders = self._written_folders()
            self._steps = NodeSteps(self._loop, self._spec, run_dir, folders, SECRET_VARIABLES, events)
        return self._steps

    def examine(self, order: Examine, group: RankGroup) -> None:
        """The attempt has failed, its ranks are to be looked at before they are ended."""
        self._take_steps().examine(order, group)

    def end_examination(self) -> None:
        """They are ended now."""
        if self._steps is not None:
            self._steps.end_examination()

    def mend(self, order: Mend) -> None:
        """A step of the restart ladder, before the next attempt."""
        page, group = "", self.agent.group
        if order.data:
            self.keep_page(FailurePage(order.number, order.data))
            kept = self._failure_files.page_of(order.attempt) if self._failure_files is not None else ""
            page = f"{kept.removesuffix('.txt')}.json" if kept else ""
        self._take_steps().mend(order, page, group.prepared_ns if group is not None else 0)

    def note_step(self, step: StepTaken) -> None:
        """A step of the restart ladder, as an event."""
        if self._events_dir:
            writer = self._events()
            writer.attempt = step.attempt
            attrs: dict[str, Any] = {"step": step.step, "class": step.kind, "why": step.text}
            writer.instant(None, "ladder_step", **attrs)

    def reached(self) -> tuple[int, int | None]:
        """How far the ranks of the last attempt are: the most steps, -1 for not counted; the highest number."""
        pages = [page for page in self._pages.read() if page is not None and page.counts]
        steps = min(max((page.steps for page in pages), default=-1), MOST_STEPS)
        numbers = [page.step for page in pages if page.step is not None and abs(page.step) < MOST_STEPS]
        return steps, max(numbers, default=None) if not self._numbers_fall else None

    def traces(self) -> bytes:
        """What the ranks of the last attempt have called of torch.distributed; b"" where that is not traced."""
        return self._traces

    def _note_warmed(self) -> None:
        """What of this start `bootseer warm` had brought here before, as events."""
        brought, self._brought = [each for each in self._brought if each[1]], []
        if not brought or not self._events_dir:
            return
        from bootseer.events import Stage
        from launcher.warm.noted import find

        for warmed, at_s in find(brought, os.environ):
            attrs: dict[str, Any] = {"how": warmed.how, "what": warmed.what, "bytes": warmed.fetched_bytes}
            age_s = round(max(0.0, time.time() - at_s), 1)
            self._events().instant(Stage(warmed.stage), "warmed", age_s=age_s, **attrs)

    def _tidy(self) -> None:
        raise_limits()  # of CPU, mainly: a job may be long
        self._finish_record()
        self._note_warmed()
        gc.collect()  # bootrun runs without

    def _finish_record(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over.finish()

    def note_exit(self, group: RankGroup, rank: Rank, exited: Exited) -> None:
        """A rank has ended."""
        self._make_record()
        if exited.status and not group.is_stopping:
            self._look_at_mounts()
        if self._events_dir:
            if self._pages.have_notes:
                self._begin_beats(group)  # if it has not lived long enough for that
            if self._beats is not None:
                self._beats.rank_ended(rank.rank)
        if self._spec.has_rules:
            if exited.status and not group.is_stopping and self._rules is None:
                self._unread.append(rank)  # it has not lived long enough for that
            if self._rules is not None:
                self._rules.rank_ended(rank)
        if self._spec.event_log_handler == "console":
            from launcher.ranks.state_events import rank_event, state_of

            state = state_of(rank, group.is_stopping)
            event = rank_event(self._spec, self.host, group.world, rank, state, exited.status)
            self._console.show(event + "\n")
        if self._record is not None:
            self._record.note_exit(rank, exited.status, exited.time_ns)
        elif self._events_dir:
            self._early_exits.append((rank, exited))  # before the others of the node have started
        if (exited.status or group.is_stopping) and not self._ended_ns:
            self._ended_ns = exited.time_ns  # the next start, if there is one, begins with this

    def stopping(self) -> None:
        """The ranks have been told to end; the next ones may follow soon."""
        self.preloader.expect_fork()
        self._read_ended()

    def _read_ended(self) -> None:
        """What ranks have printed that ended before there were rules: the others do not wait for that."""
        unread, self._unread = self._unread, []
        group = self.agent.group
        if unread and group is not None:
            self._begin_rules(group)
        if self._rules is not None:
            for rank in unread:
                self._rules.rank_ended(rank)

    def attempt_over(self) -> None:
        """Nothing of the attempt runs any more."""
        self._read_ended()
        self._has_ranks, self._traces = False, b""
        self._take_traces()
        if self._lost is not None:
            self._lost.end()
            self._lost = None
        if self._watch is not None:
            self._numbers_fall = self._watch.numbers_fall
            self._watch.stop()
            self._watch = None
        if self._beats is not None:
            self._beats.stop()
            self._beats = None
        if self._rules is not None:
            self._rules.stop()
            self._rules = None
        if self.head_start is not None:
            self.head_start.over()
        if self.checkpoint is not None:
            self.checkpoint.cancel()
        self._give_up_mounts()
        self.workplace.attempt_over()
        if self._early_exits:
            self._unrecorded = self.agent.group  # was stopped before all of its ranks had started
        self._make_record()
        if self._record is not None:
            self._finish_record()
            # Its files are read when the next attempt runs: nobody waits for that.
            self._over, self._record = self._record, None
            self._over.stop()
        self._early_exits.clear()
        if self._tailer is not None:
            self._tailer.end_all()

    def _take_traces(self) -> None:
        """What the ranks had called of torch.distributed, as they left it."""
        group = self.agent.group
        if not self._spec.trace_collectives or group is None:
            return
        from launcher.supervise.node_watch import pack_traces
        from launcher.supervise.ring import copy_ring

        self._traces = pack_traces(group, self.agent.to_job_clock(0)[0])
        self._rings = group.world.attempt, {each.rank: copy_ring(each.page_file) for each in group.ranks}

    def hold_port(self, given: int | None) -> HeldPort:
        """A port for rank 0: the user's, or any."""
        return hold_any(self._spec.port_range) if given is None else hold_given(given)

    # ---- the end ---------------------------------------------------------------------------------------------

    def report(self, finish: Finish) -> None:
        """The job is over; what there is to say of it comes after the last output of the ranks."""
        self._finish = finish
        self._finish_record()

    def _show_report(self) -> None:
        """The final report, and the error file for a launcher above this one."""
        finish = self._finish
        if finish is None or not finish.status or finish.status > 128:
            return
        self.complain(finish.reason)
        first = next((failure for failure in finish.failures if not failure.stopped_by_us), None)
        if first is None:
            return
        from launcher.ranks.report import format_report

        page = "" if self._failure_files is None else self._failure_files.page_of(self._attempt)
        target, attempt = self._spec.entry.target, self._attempt
        world_size = self.agent.group.world.world_size if self.agent.group is not None else 0
        self._console.show(
            format_report(target, finish.failures, finish.unsure, attempt, finish.lost, page, world_size)
        )
        own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if own_file:
            self._write_own_error_file(own_file, first)

    def _write_own_error_file(self, path: str, first: Failure) -> None:
        from launcher.ranks.errorfile import read_error_file, write_own_error_file

        record = read_error_file(first.error_file)
        trouble = write_own_error_file(path, record, first.status, first.message, first.wall_s)
        if trouble:
            self.complain(trouble)

    def drain(self) -> None:
        """Lets the console have what is left, then tells the agent."""
        if self._tailer is None:
            self._loop.call_soon(self._on_drained, "")
        else:
            self._tailer.finish(self._on_drained)

    def hasten(self) -> None:
        """Goes without what the console has not taken."""
        if self._tailer is not None:
            self._tailer.hasten()
        if self._failure_files is not None:
            self._failure_files.hasten()

    def _on_drained(self, _line: str) -> None:
        if self._failure_files is None:
            self._on_all_written()
        else:
            self._failure_files.finish(self._on_all_written)

    def _on_all_written(self) -> None:
        self._show_report()
        self._note_warmed()
        self.agent.on_drained()  # after this no event is sent to the coordinator

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()
        if self.peers is not None:
            self.peers.close()
        if self._health is not None:
            self._health.close()
        if self._steps is not None:
            self._steps.close()
        if self._health_watch is not None:
            self._health_watch.close()
        if self._status is not None:
            self._status.close()
        if self._failure_files is not None:
            self._failure_files.close()
        self.workplace.close()
        self._finish_record()
        if self._record is not None:
            self._record.finish()
        self.preloader.close()
        self._note_warmed()
        self._pages.close()
        if self._writer is not None:
            if self._writer.dropped:
                from bootseer.counted import counted

                events = counted(self._writer.dropped, "event")
                self.say(
                    f"warning: {events} could not be written, so reports lack them: is the disk of"
                    f" {self._events_dir} full?"
                )
            self._writer.close()
        if self._tailer is not None:
            self._tailer.close()
        if self._kernel is not None:
            self._kernel.close()
