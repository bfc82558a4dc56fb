"""The runtime environment of a node's ranks: their image, environment and compile caches, if any.

    image --digest--> environment --ready--+
      +-----------open--------------------+--> caches --> program

Each part begins as soon as it can: the image's digest determines the job's environment; set-up commands wait until
the image is open. In: the job's options, orders of the coordinator. Out: a RankProgram, and a new one after a lost
part was restored. Without any of the three the program is known at once.
"""

from __future__ import annotations

import os

from bootseer.light_stdlib import partial
from bootseer.light_typing import TYPE_CHECKING, Callable, Iterable, Mapping, NamedTuple, Sequence
from launcher.base.loop import EventLoop
from launcher.ranks.program import RankProgram, own_program
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.base.stage_span import StageSpan
    from launcher.provision.compile_caches import CachesSpan, NodeCaches
    from launcher.provision.environment import NodeSetup, ReadyEnvironment
    from launcher.provision.failed_mounts import ServedMount
    from launcher.provision.image import NodeImage
    from launcher.provision.peers import NodePeers
    from launcher.rendezvous.messages import MountFault, SetupOrder, SetupReport


IMPORT_AFTER_S = 0.05  # the rendezvous goes first


class RuntimeEvents(NamedTuple):
    """Callbacks of the node."""

    # All but the directory of compile caches; called with a function that gets it ("": unknown).
    coming: Callable[[Callable[[str], RankProgram]], object]
    hot_imports: Callable[[tuple[str, ...]], object]  # before that: modules that ranks elsewhere have imported
    # The ranks' program and the directory of their compile caches, "" for none; again after a change.
    known: Callable[[RankProgram, str], object]
    image_failed: Callable[[str], object]  # no more ranks can be started
    setup_failed: Callable[[SetupReport], object]
    setup_news: Callable[[SetupReport], object]  # for the coordinator
    image_noted: Callable[[StageSpan], object]
    setup_noted: Callable[[StageSpan], object]
    show_noted: Callable[[StageSpan], object]  # of a mounted environment, in the image
    caches_noted: Callable[[CachesSpan], object]
    image_figures: Callable[[Mapping[str, float]], object]
    fell_back: Callable[[str, str], object]  # stage, reason
    said: Callable[[str], object]
    setup_line: Callable[[str], object]
    complained: Callable[[str], object]
    mounted: Callable[[str, ServedMount | None], object]  # kind, and the mount that ranks read from now on


class RuntimeEnvironment:
    """The runtime environment of a node's ranks."""

    def __init__(self, loop: EventLoop, spec: LaunchSpec, unset: tuple[str, ...], events: RuntimeEvents) -> None:
        """Args: unset: variables that no helper process gets."""
        self._loop = loop
        self._spec = spec
        self._unset = unset
        self._events = events
        self._peers: NodePeers | None = None
        self._image: NodeImage | None = None
        self._setup: NodeSetup | None = None
        self._caches: NodeCaches | None = None
        self._in_image: RankProgram | None = None  # the program that the image alone determines
        self._environment: ReadyEnvironment | None = None
        self._is_shown = True  # the environment, in the image
        self._attempts = 0  # counted when made ready and when over
        self._has_ranks = False  # they write where a reopened image would write
        is_later = spec.image is not None or spec.setup is not None or spec.caches is not None
        self.program = None if is_later else own_program(spec.python)
        self._is_settled = not is_later  # `program` is valid; False while a part is restored
        self._awaiting: list[Callable[[RankProgram], object]] = []

    def begin(self, own: Iterable[str], run_dir: str, peers: NodePeers | None) -> None:
        """Begin all parts, at time zero. Args: own: directories that ranks need; run_dir: "" without logs."""
        self._peers = peers
        if self._spec.image is not None:
            self._begin_image(own)
        if self._spec.setup is not None:
            self._begin_setup(run_dir)
        elif self._spec.image is None and self._spec.caches is not None:
            self._open_caches(own_program(self._spec.python))
        if self.program is None and self._spec.caches is not None:
            self._loop.call_later(IMPORT_AFTER_S, _import_ahead)

    def _begin_image(self, own: Iterable[str]) -> None:
        from launcher.provision.image import ImageEvents, NodeImage

        events = ImageEvents(
            resolved=self._on_digest,
            opened=self._on_image,
            lost=self._on_image_lost,
            failed=self._on_image_failed,
            noted=self._events.image_noted,
            show_noted=self._events.show_noted,
            started=self._events.image_figures,
            fell_back=partial(self._events.fell_back, "image"),
            said=self._events.said,
            mounted=partial(self._events.mounted, "image"),
        )
        self._image = NodeImage(self._loop, self._spec, self._unset, events, self._peers)
        self._image.begin(own)

    def _begin_setup(self, run_dir: str) -> None:
        from launcher.provision.environment import NodeSetup, SetupEvents

        events = SetupEvents(
            ready=self._on_environment,
            failed=self._events.setup_failed,
            news=self._events.setup_news,
            noted=self._events.setup_noted,
            fell_back=partial(self._events.fell_back, "env"),
            said=self._events.said,
            line=self._events.setup_line,
            complained=self._events.complained,
            mounted=partial(self._events.mounted, "env"),
        )
        self._setup = NodeSetup(self._loop, self._spec, self._unset, events, self._peers)
        self._setup.begin(run_dir)

    # ---- one after the other ---------------------------------------------------------------------------------

    @property
    def has_image(self) -> bool:
        return self._image is not None

    def when_known(self, then: Callable[[RankProgram], object]) -> None:
        """Call `then` once with the program that runs ranks, when all parts are ready; never if that fails."""
        if self.program is not None and self._is_settled and self._is_there():
            then(self.program)
        else:
            self._awaiting.append(then)

    def _is_there(self) -> bool:
        has_image = self._image is None or self._image.is_open
        return has_image and (self._setup is None or (self._setup.is_ready and self._is_shown))

    def set_up(self, order: SetupOrder) -> None:
        """Carry out the coordinator's order for the environment."""
        setup, image = self._setup, self._image
        if setup is None:
            return
        from launcher.provision.environment import RUNS_SET_UP

        if image is not None and order.do in RUNS_SET_UP:
            self._is_shown = False
            # Another environment that is shown there hides its directory.
            image.hide(lambda: self._run_set_up(setup, order))
        else:
            setup.carry_out(order)

    def look_again(self) -> None:
        """Search again for an unfinished environment: the coordinator treats this node as a new one."""
        if self._setup is not None:
            self._setup.look_again()

    def _run_set_up(self, setup: NodeSetup, order: SetupOrder) -> None:
        setup.carry_out(order)
        self._open_for_set_up()

    def _open_for_set_up(self) -> None:
        if self._image is not None and self._setup is not None and self._setup.wants_image and not self._has_ranks:
            self._image.open_again()

    def _on_digest(self, digest: str) -> None:
        if self._setup is not None:
            self._setup.image_resolved(digest)

    def _on_image(self, program: RankProgram) -> None:
        self._in_image = program
        if self._setup is not None:
            self._setup.image_opened(program)
        self._join()

    def _on_image_lost(self) -> None:
        if self._setup is not None:
            self._setup.image_lost()
            self._open_for_set_up()

    def _on_image_failed(self, why: str) -> None:
        self._awaiting.clear()
        self._events.image_failed(why)

    def _on_environment(self, found: ReadyEnvironment) -> None:
        self._environment = found
        self._events.hot_imports(found.hot_imports)
        if self._image is None:
            self._open_caches(own_program(self._spec.python)._replace(prefix=found.prefix))
            return
        self._is_shown = False
        if found.prefix:
            self._image.show_from(found.prefix[-1], found.targets, partial(self._on_shown, found))
        else:
            self._image.hide(partial(self._on_hidden, found))  # one that was mounted may hide it

    def _on_hidden(self, found: ReadyEnvironment) -> None:
        if found is self._environment:
            self._is_shown = True
            self._join()

    def _on_shown(self, found: ReadyEnvironment, why: str) -> None:
        assert self._setup is not None
        if found is not self._environment or not self._setup.is_ready:
            return  # its service was lost as well, and another environment follows
        if why:
            self._is_shown = False
            self._setup.without_mount(why)
            return
        self._is_shown = True
        self._join()

    def _join(self) -> None:
        """Continue with the caches if the image is open and the environment is shown in it."""
        program = self._in_image
        if program is None:
            return
        if self._setup is None:
            self._open_caches(program)
        elif self._environment is not None and self._is_there():
            assert self._spec.setup is not None
            assert self._spec.image is not None
            own = self._environment.targets if not self._spec.setup.targets else ()
            python = self._spec.image.late_python or self._environment.python
            self._open_caches(in_environment(program, python, own))

    def _open_caches(self, program: RankProgram) -> None:
        """Open the compile caches, if they are kept, once the environment is ready."""
        self._is_settled = False
        if self._spec.caches is None:
            self._on_known(program)
            return
        caches = self._caches
        if caches is None:
            from launcher.provision.compile_caches import CachesEvents, NodeCaches

            events = CachesEvents(
                said=self._events.said,
                fell_back=partial(self._events.fell_back, "caches"),
                noted=self._events.caches_noted,
                misplaced=self._on_misplaced,
            )
            caches = self._caches = NodeCaches(self._loop, self._spec, self._unset, events, self._peers)
        from bootseer.env.compile_cache.directories import early_variables

        inherited = program.inherited(os.environ)
        if early_variables(inherited) is not None:
            self._events.coming(
                lambda directory: program._replace(
                    environ={**(early_variables(inherited, directory) or {}), **program.environ}
                )
            )
        is_silent = self._setup is not None and self._setup.is_store_silent
        caches.open(program, lambda found: self._on_known(found, caches.folder), is_silent=is_silent)

    def _on_misplaced(self, why: str) -> None:
        from launcher.rendezvous.messages import SetupReport

        self._awaiting.clear()
        self._events.setup_failed(SetupReport("misplaced", "", "", why))

    def _on_known(self, program: RankProgram, caches_directory: str = "") -> None:
        self.program, self._is_settled = program, True
        self._events.known(program, caches_directory)
        awaiting, self._awaiting = self._awaiting, []
        for then in awaiting:
            then(program)

    # ---- attempts --------------------------------------------------------------------------------------------

    def make_ready(
        self,
        checkpoint: dict[str, str],
        own_checkpoint: str,
        then: Callable[[dict[str, str]], object],
        failed: Callable[[str], object],
    ) -> None:
        """Prepare an attempt: call `then` when ranks can be started, `failed` if they cannot.

        Args:
            checkpoint: the ranks' variables about the loaded one; `then` gets those that are valid in the image.
            own_checkpoint: the version's own path, for an image in which the node's path is not visible.
        """
        if self._image is None:
            self.when_known(lambda _: self._seed(lambda: then(checkpoint)))
            return
        from launcher.provision.image import checkpoint_paths, reachable, without_files

        def shown(missing: list[str]) -> None:
            found, line = reachable(checkpoint, own_checkpoint, missing)
            why = without_files(checkpoint, found) if self._spec.checkpoint_files else ""
            if why:
                failed(why)
                return
            if line:
                self._events.fell_back("checkpoint", line)
            self.when_known(lambda _: self._seed(lambda: start(found)))

        def start(found: dict[str, str]) -> None:
            self._has_ranks = number == self._attempts  # else that attempt is over and has no ranks
            then(found)

        self._attempts += 1
        number = self._attempts
        self._has_ranks = False
        self._open_for_set_up()
        paths = checkpoint_paths(checkpoint, own_checkpoint) if checkpoint else []
        image = self._image
        self.when_known(lambda _: image.show(paths, shown))

    def _seed(self, then: Callable[[], object]) -> None:
        """Restore the caches before every attempt, to remove entries that the last one has left incomplete."""
        if self._caches is None:
            then()
        else:
            self._caches.seed(then)

    @property
    def waits_for(self) -> str:
        """The part that is not ready yet, for a message; "" for none."""
        if self._image is not None and not self._image.is_open:
            return "the image"
        if self._setup is not None and not self._setup.is_ready:
            return "the environment (set-up)"
        return "compile caches" if self.program is None or not self._is_settled else ""

    @property
    def has_built(self) -> bool:
        """Whether the environment was built here and is published."""
        return self._setup is not None and self._setup.has_built

    def touched(self, files: Sequence[tuple[str, Sequence[tuple[int, int]]]], imports: Sequence[str]) -> None:
        """Pass on the start's access trace, see NodeSetup.touched."""
        if self._setup is not None:
            self._setup.touched(files, imports)

    def unreadable(self, fault: MountFault) -> None:
        """Report a mount that was unreadable in the attempt that is over now."""
        if fault.what == "env" and self._setup is not None:
            self._setup.unreadable(fault.why)
        elif fault.what == "image" and self._image is not None and not fault.is_end:  # its service reopens it
            self._image.unreadable(fault.why, is_damage=fault.is_damage)

    def attempt_over(self) -> None:
        """Handle the end of an attempt."""
        self._attempts += 1
        self._has_ranks = False
        self._open_for_set_up()
        if self._caches is not None:
            self._caches.attempt_over()

    def first_step_seen(self) -> None:
        """Notify all parts of the first step of all ranks of this node."""
        for part in (self._image, self._setup, self._caches):
            if part is not None:
                part.first_step_seen()

    def close(self) -> None:
        for part in (self._image, self._setup, self._caches):
            if part is not None:
                part.close()


def _import_ahead() -> None:
    """Import modules that are needed later, while image and environment are waited for."""
    import bootseer.env.compile_cache.directories  # noqa: F401
    import launcher.provision.compile_caches  # noqa: F401


def in_environment(program: RankProgram, python: str, own: tuple[str, ...]) -> RankProgram:
    """PURE: return the program for an image with an environment. Args: own: targets that no flag named."""
    environ = dict(program.environ)
    if own:
        path = environ.get("PATH") or os.defpath
        environ |= {"PATH": f"{own[0]}/bin:{path}", "VIRTUAL_ENV": own[0]}
    return program._replace(python=python or program.python, environ=environ)
