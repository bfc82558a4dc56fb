"""What the ranks of a node need before they start, and their start once all of it is ready.

In: the launch specification, a prepared RankGroup. Out: image, environment, caches, checkpoint, peers and fork
server, each begun as early as possible; then ranks that run. An optimization that fails is reported here, and the
normal path is taken.
"""

from __future__ import annotations

import os

from bootseer.errors import BootseerError, LaunchError
from bootseer.light_stdlib import partial
from bootseer.light_typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Protocol
from bootseer.secret import SECRET_VARIABLES
from launcher.agent.node_features import MountWatch, NodeFeature
from launcher.agent.node_files import NodeEvents, RunDirectories
from launcher.base.loop import EventLoop
from launcher.provision.runtime_env import RuntimeEnvironment, RuntimeEvents
from launcher.ranks.group import RankGroup
from launcher.ranks.preloader import OBSERVE, Preloader
from launcher.ranks.program import RankProgram
from launcher.ranks.start_recorder import StartTrace
from launcher.rendezvous import messages
from launcher.spec import LaunchSpec
from launcher.supervisor.client import SupervisorClient

if TYPE_CHECKING:
    from launcher.coordinator.host import Resolve, Spoiled
    from launcher.provision.checkpoint import NodeCheckpoint
    from launcher.provision.peers import NodePeers
    from launcher.ranks.rank0_ready import ReadinessWait


class ProvisionAgent(Protocol):
    """The part of the agent that provisions use."""

    @property
    def group(self) -> RankGroup | None: ...
    def on_fell_back(self, why: str) -> None: ...
    def on_unusable(self, why: str) -> None: ...
    def on_set_up_failed(self, news: messages.SetupReport) -> None: ...
    def send_setup(self, news: messages.SetupReport) -> None: ...
    def send_checkpoint_failure(self, message: messages.CheckpointFailed) -> None: ...


class UserLines(NamedTuple):
    """Functions that print lines for the user."""

    say: Callable[[str], object]  # omitted with --quiet
    complain: Callable[[str], object]  # an error
    show_setup: Callable[[str], object]  # of a set-up command


class NodeProvisions:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        guard: SupervisorClient,
        spec: LaunchSpec,
        directories: RunDirectories,
        events: NodeEvents,
        agent: Callable[[], ProvisionAgent],
        lines: UserLines,
        mounts: MountWatch,
    ) -> None:
        """Args: agent: the node exists before it; mounts: learns which mounts ranks read."""
        self._loop = loop
        self._supervisor = guard
        self._spec = spec
        self._directories = directories
        self._events = events
        self._agent = agent
        self._lines = lines
        self._mounts = mounts
        self._has_ranks = False  # the attempt's ranks were started
        self._image_failure = ""
        self.preloader = Preloader(
            loop, guard, spec, SECRET_VARIABLES, self._warn_exec, events.preload, self._warn_restarted
        )
        self.trace = StartTrace(guard, spec, events.helper, self._on_start_recorded)
        self.environment = RuntimeEnvironment(loop, spec, SECRET_VARIABLES, self._environment_events())
        self._is_program_known = self.environment.program is not None
        self.peers: NodePeers | None = None
        self.checkpoint: NodeCheckpoint | None = None
        self.readiness: ReadinessWait | None = None  # of rank 0, in a job of several nodes
        self._start = RankStart(spec, self.environment, self.preloader, self.trace, mounts.put_checkpoint)

    def _environment_events(self) -> RuntimeEvents:
        events, lines = self._events, self._lines
        return RuntimeEvents(
            coming=self._on_program_coming,
            hot_imports=self.preloader.add_stored_imports,
            known=self._on_program,
            image_failed=self._on_image_failed,
            setup_failed=lambda news: self._agent().on_set_up_failed(news),
            setup_news=lambda news: self._agent().send_setup(news),
            image_noted=lambda span: events.fetched("image", "image", span, "digest"),
            setup_noted=lambda span: events.fetched("env", "setup", span, "tree"),
            show_noted=partial(events.span, "env", "show"),
            caches_noted=events.caches,
            image_figures=self._show_image_figures,
            fell_back=self.fell_back,
            said=lines.say,
            setup_line=lines.show_setup,
            complained=lines.complain,
            mounted=self._mounts.put,
        )

    def features(self) -> list[NodeFeature]:
        """Return those parts that follow attempts."""
        checkpoint, environment, preloader = self.checkpoint, self.environment, self.preloader
        found = []
        if checkpoint is not None:
            free = checkpoint.first_step_seen
            found.append(NodeFeature(first_step=lambda _: free(), over=checkpoint.cancel, close=checkpoint.close))
        if self.peers is not None:
            found.append(NodeFeature(close=self.peers.close))
        found += [
            NodeFeature(
                first_step=lambda _: environment.first_step_seen(),
                over=environment.attempt_over,
                close=environment.close,
            ),
            NodeFeature(first_step=self.trace.first_step_seen),
            NodeFeature(
                started=lambda _: preloader.attempt_started(),
                stopping=preloader.expect_fork,
                first_step=lambda rank: preloader.first_step_seen(rank.events_file, rank.is_forked, rank.pid),
                close=preloader.close,
            ),
            self._mounts.feature,  # after an attempt the environment learns of their faults before its own turn
        ]
        if self.readiness is not None:
            found.append(NodeFeature(over=self.readiness.over))
        found.append(NodeFeature(started=self._on_started, over=self._on_over))  # at the end before all of these
        return found

    def _on_started(self, _group: RankGroup) -> None:
        self._has_ranks = True

    def _on_over(self) -> None:
        self._has_ranks = False

    # ---- time zero -------------------------------------------------------------------------------------------

    def prefetch(self, secret: bytes | None) -> None:
        """Begin to prefetch what the last start has read, and to share data with peers.

        Args: secret: of the job, None for none.
        """
        spec = self._spec
        self.preloader.listing_path = self.trace.begin(os.environ, self._directories.events)
        if spec.load_checkpoint or spec.setup or spec.image or (spec.caches and spec.caches.store):
            self._begin_peers(secret)

    def begin(self) -> None:
        """Begin all other parts that need no rendezvous."""
        spec, directories = self._spec, self._directories
        self.environment.begin(directories.own(), directories.logs, self.peers)
        if spec.load_checkpoint:
            from launcher.provision.checkpoint import NodeCheckpoint

            self.checkpoint = NodeCheckpoint(
                self._loop,
                self._supervisor,
                spec,
                SECRET_VARIABLES,
                self._lines.say,
                partial(self.fell_back, "checkpoint"),
                partial(self._events.span, "checkpoint", "checkpoint"),
                self.peers,
                self._agent().send_checkpoint_failure,
                self._pass_over,
            )
            self.checkpoint.begin()
        if self.environment.program is not None:
            self.preloader.begin(os.environ, self.environment.program)

    def _begin_peers(self, secret: bytes | None) -> None:
        """Begin peer sharing if there are several nodes; warn that it is disabled without a job secret."""
        if self._spec.is_single or self._spec.max_nodes == 1 or not self._spec.peers:
            return
        if secret is None:
            self._warn(
                "peer sharing disabled: no job secret is set (BOOTSEER_SECRET_FILE);"
                " each node reads the store by itself"
            )
            return
        from launcher.provision.peers import NodePeers

        self.peers = NodePeers(self._loop, self._spec, secret, SECRET_VARIABLES, partial(self.fell_back, ""))
        self.peers.begin()

    # ---- the coordinator -------------------------------------------------------------------------------------

    @property
    def resolve(self) -> Resolve | None:
        """The function that finds the checkpoint version of an attempt; None if the job loads none."""
        return None if self.checkpoint is None else self.checkpoint.resolve

    @property
    def spoiled(self) -> Spoiled | None:
        """The function that receives a version that cannot be loaded; None if the job loads none."""
        return None if self.checkpoint is None else self.checkpoint.spoiled

    @property
    def unready(self) -> str:
        """The part besides the fork server that the attempt's ranks wait for, for a message; "" for none."""
        return self.environment.waits_for or ("the checkpoint" if self.checkpoint is not None else "")

    # ---- ranks -----------------------------------------------------------------------------------------------

    def start(self, group: RankGroup) -> None:
        """Prepare what the ranks of a group need, then start them. Raises: LaunchError, see RankStart.begin."""
        self._start.begin(group, self.checkpoint, self.readiness)

    def check_image(self) -> None:
        """Raises: LaunchError if the image has failed, so that no rank can start any more."""
        if self._image_failure:
            raise LaunchError(self._image_failure)

    def _on_image_failed(self, why: str) -> None:
        """Refuse new ranks after the image has failed; ranks that run in it continue."""
        self._image_failure = why
        if not self._has_ranks:
            self._agent().on_unusable(why)

    def _on_program_coming(self, with_caches: Callable[[str], RankProgram]) -> None:
        """Begin importing the framework while compile caches are fetched."""
        if not self._is_program_known:
            self._record_what_was_built()
            self.preloader.begin_early(os.environ, with_caches)

    def _on_program(self, program: RankProgram, caches_directory: str) -> None:
        """Begin preloading with the program that runs ranks, or move to a new one."""
        if self._is_program_known:
            self.preloader.move(program)
        else:
            self._is_program_known = True
            self._record_what_was_built()
            self.preloader.begin(os.environ, program, caches_directory)

    def _record_what_was_built(self) -> None:
        """Record a full access trace of a tree built here, also in an image: other nodes will mount the tree."""
        if self.environment.has_built:
            self.preloader.listing_path = self.trace.begin_whole(self._directories.events)

    def _on_start_recorded(self) -> None:
        """Store the recorded access trace with a tree built here: other nodes will read the same files."""
        if self.environment.has_built:
            files = self.trace.files()  # with an image they are kept only until now
            self.preloader.when_known(lambda: self.environment.touched(files, self.preloader.hot_imports))

    # ---- processes -------------------------------------------------------------------------------------------

    def on_service_ended(self, number: int, why: str) -> None:
        """Handle the end of a service process of this node."""
        if self.checkpoint is not None:
            self.checkpoint.on_service_ended(number, why)

    def on_helper_ended(self, number: int, cpu_s: float, answer: dict[str, Any]) -> None:
        """Handle the end of a helper process of the supervisor."""
        if number == OBSERVE:
            self.preloader.on_helper_ended()
        else:
            self.trace.on_helper_ended(number, cpu_s, answer)

    # ---- lines and events ------------------------------------------------------------------------------------

    def fell_back(self, stage: str, why: str) -> None:
        """Warn that an optimization is unavailable and the fallback is used; with --strict, fail the job.

        Args: stage: "" for an optimization of no stage.
        """
        is_fatal = self._spec.strict and not self._has_ranks
        if not is_fatal:  # else the error reports it
            self._lines.say(why if why.startswith("warning: ") else f"warning: {why}")
        self._events.instant(stage, "fell_back", error=why)
        if is_fatal:
            self._start.is_allowed = False  # the job ends when its coordinator ends it
            self._agent().on_fell_back(why)

    def _warn(self, text: str) -> None:
        self._lines.say(f"warning: {text}")

    def _pass_over(self, why: str) -> None:
        """Warn that a newer checkpoint is skipped."""
        self._warn(why)
        self._events.instant("checkpoint", "passed_over", error=why)

    def _warn_exec(self, why: str) -> None:
        """Warn that ranks are started with exec instead of fork."""
        self._warn(f"ranks are exec'd, not forked: {why}")
        self._events.instant("spawn", "exec_instead", error=why)

    def _warn_restarted(self, why: str) -> None:
        """Warn that forked ranks have restarted with exec."""
        self._warn(f"forked ranks were restarted with exec: {why}")
        self._events.instant("spawn", "exec_instead", error=why)

    def _show_image_figures(self, figures: Mapping[str, float]) -> None:
        """Report how much the start has read from the image, and its stall time."""
        from launcher.provision.image import figures_line

        if line := figures_line(figures):
            self._lines.say(line)
        self._events.image_figures(figures)


class RankStart:
    """Starts the ranks of an attempt when all that they need is ready.

    One after the other: the checkpoint, the rest of their environment, the decision on a fork, rank 0's node.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        environment: RuntimeEnvironment,
        preloader: Preloader,
        trace: StartTrace,
        loaded: Callable[[Mapping[str, str]], object],
    ) -> None:
        """Args: loaded: gets the ranks' variables about the checkpoint, before they start."""
        self._spec = spec
        self._environment = environment
        self._preloader = preloader
        self._trace = trace
        self._loaded = loaded
        self.is_allowed = True  # False after a fallback that --strict forbids

    def begin(self, group: RankGroup, checkpoint: NodeCheckpoint | None, readiness: ReadinessWait | None) -> None:
        """Prepare what the ranks of a group need, then start them.

        Args: checkpoint: None if this node loads none; readiness: of rank 0, in a job on several nodes.
        Raises: LaunchError if the nodes were started with different flags.
        """
        then = partial(self._make_ready, group, readiness)
        if checkpoint is not None:
            checkpoint.load(group.world, then)
            return
        if group.world.checkpoint is not None:
            raise LaunchError(
                "the job loads a checkpoint, but this node was started without --load-checkpoint, so its ranks"
                " would start from scratch: start all nodes with it, or none"
            )
        then({})

    def _make_ready(self, group: RankGroup, readiness: ReadinessWait | None, checkpoint: dict[str, str]) -> None:
        own = ""
        if checkpoint:
            from launcher.provision.checkpoint_version import own_path

            own = own_path(self._spec.load_checkpoint, checkpoint.get("BOOTSEER_CHECKPOINT_VERSION", ""))
        if not group.is_stopping:
            settle = partial(self._settle, group, readiness)
            self._environment.make_ready(checkpoint, own, settle, group.cannot_start)

    def _settle(self, group: RankGroup, readiness: ReadinessWait | None, checkpoint: dict[str, str]) -> None:
        if not group.is_stopping:
            start = partial(self._start, group, readiness, checkpoint)
            self._preloader.settle(group.world.attempt == 0, start)

    def _start(
        self, group: RankGroup, readiness: ReadinessWait | None, checkpoint: dict[str, str], fork: bool
    ) -> None:
        if group.is_stopping or not self.is_allowed:
            return
        self._loaded(checkpoint)
        group.begin_spawn()
        if readiness is None or not fork or group.world.group_world_size == 1:
            self._spawn(group, checkpoint, fork)
        elif group.world.first_rank:
            readiness.follow(group.world, partial(self._spawn, group, checkpoint, fork))
        else:
            self._spawn(group, checkpoint, fork)
            readiness.watch_port(group.world)

    def _spawn(self, group: RankGroup, checkpoint: dict[str, str], fork: bool) -> None:
        program = self._environment.program
        if group.is_stopping or not self.is_allowed:
            return
        assert program is not None
        self._trace.prepare(group.ranks[0])
        self._preloader.prepare(group.ranks[0].events_file)
        try:
            group.spawn(program, SECRET_VARIABLES, self._numa_prefix, self._visible_devices, checkpoint, fork)
        except (BootseerError, OSError) as error:
            group.cannot_start(str(error))  # the caller of `begin` may have returned

    def _numa_prefix(self, local_rank: int) -> list[str]:
        if self._spec.numa_binding is None:
            return []
        from launcher.ranks.numa import numactl_prefix

        words = numactl_prefix(self._spec.numa_binding, local_rank)
        if self._environment.has_image:  # PATH applies inside the image
            from launcher.ranks.devices import find_program

            words[0] = find_program(words[0], os.environ) or words[0]
        return words

    def _visible_devices(self, local_rank: int) -> str | None:
        if not self._spec.virtual_local_rank:
            return None
        from launcher.ranks.devices import visible_device_of

        return visible_device_of(os.environ, local_rank)
