"""Where the ranks of a node run: in their image, with their environment and first-step caches, if they have them.

    image --digest--> environment --ready--+
      +-----------open--------------------+--> caches --> program

Each begins as soon as it can: which environment belongs to a job is known when the image's digest is; set-up
commands wait until the image is open. In: the job's options, orders of the coordinator. Out: a RankProgram, again
when something was lost and is there anew. Without any of the three the program is known at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from bootseer.light_typing import TYPE_CHECKING, NamedTuple
from launcher.loop import EventLoop
from launcher.ranks.program import RankProgram, own_program
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.caches import CachesSpan, NodeCaches
    from launcher.image import NodeImage
    from launcher.mounts import Mount
    from launcher.peers import NodePeers
    from launcher.rendezvous.messages import MountFault, SetupNews, SetupOrder
    from launcher.setup import Environment, NodeSetup
    from launcher.stage_span import StageSpan


IMPORT_AFTER_S = 0.05  # the rendezvous goes first


class WorkplaceEvents(NamedTuple):
    """What the node is told; each a callback."""

    # All of it but where first-step caches are: what it will be if they are in this folder, "" for nobody knows.
    coming: Callable[[Callable[[str], RankProgram]], object]
    hot_imports: Callable[[tuple[str, ...]], object]  # before that: what ranks elsewhere have imported, as stored
    # By what ranks are run, and the folder of their first-step caches, "" for none; again when that has changed.
    known: Callable[[RankProgram, str], object]
    image_failed: Callable[[str], object]  # no more ranks can be started
    setup_failed: Callable[[SetupNews], object]
    setup_news: Callable[[SetupNews], object]  # for the coordinator
    image_noted: Callable[[StageSpan], object]
    setup_noted: Callable[[StageSpan], object]
    show_noted: Callable[[StageSpan], object]  # of a mounted environment, in the image
    caches_noted: Callable[[CachesSpan], object]
    image_figures: Callable[[Mapping[str, float]], object]
    fell_back: Callable[[str, str], object]  # stage, why: the ordinary way is taken
    said: Callable[[str], object]
    setup_line: Callable[[str], object]
    complained: Callable[[str], object]
    mounted: Callable[[str, Mount | None], object]  # of what; what ranks read through it from now on


class Workplace:
    """See the module's docstring."""

    def __init__(self, loop: EventLoop, spec: LaunchSpec, unset: tuple[str, ...], events: WorkplaceEvents) -> None:
        """Args: unset: variables that no helper process gets."""
        self._loop = loop
        self._spec = spec
        self._unset = unset
        self._events = events
        self._peers: NodePeers | None = None
        self._image: NodeImage | None = None
        self._setup: NodeSetup | None = None
        self._caches: NodeCaches | None = None
        self._in_image: RankProgram | None = None  # what the image alone says
        self._environment: Environment | None = None
        self._is_shown = True  # the environment, in the image
        self._attempts = 0  # that were made ready, or are over
        self._has_ranks = False  # they write where an image that is opened anew would write
        is_later = spec.image is not None or spec.setup is not None or spec.caches is not None
        self.program = None if is_later else own_program(spec.python)
        self._is_settled = not is_later  # what `program` says is so; not while something is made anew
        self._awaiting: list[Callable[[RankProgram], object]] = []

    def begin(self, own: Iterable[str], run_dir: str, peers: NodePeers | None) -> None:
        """Time zero. Args: own: folders that ranks need in any case; run_dir: for logs, "" for none."""
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
        from launcher.image import ImageEvents, NodeImage

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
        from launcher.setup import NodeSetup, SetupEvents

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
        """Calls `then`, once, with what ranks are run by: now, or when all is there. Never if that fails."""
        if self.program is not None and self._is_settled and self._is_there():
            then(self.program)
        else:
            self._awaiting.append(then)

    def _is_there(self) -> bool:
        has_image = self._image is None or self._image.is_open
        return has_image and (self._setup is None or (self._setup.is_ready and self._is_shown))

    def set_up(self, order: SetupOrder) -> None:
        """An order of the coordinator for the environment."""
        setup, image = self._setup, self._image
        if setup is None:
            return
        from launcher.setup import RUNS_SET_UP

        if image is not None and order.do in RUNS_SET_UP:
            self._is_shown = False
            # What is shown of another one lies above its folder.
            image.hide(lambda: self._run_set_up(setup, order))
        else:
            setup.obey(order)

    def look_again(self) -> None:
        """The coordinator takes this node for a new one: what is not there yet is looked for anew."""
        if self._setup is not None:
            self._setup.look_again()

    def _run_set_up(self, setup: NodeSetup, order: SetupOrder) -> None:
        setup.obey(order)
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

    def _on_environment(self, found: Environment) -> None:
        self._environment = found
        self._events.hot_imports(found.hot_imports)
        if self._image is None:
            self._open_caches(own_program(self._spec.python)._replace(prefix=found.prefix))
            return
        self._is_shown = False
        if found.prefix:
            self._image.show_from(found.prefix[-1], found.targets, partial(self._on_shown, found))
        else:
            self._image.hide(partial(self._on_hidden, found))  # one that was mounted may lie above it

    def _on_hidden(self, found: Environment) -> None:
        if found is self._environment:
            self._is_shown = True
            self._join()

    def _on_shown(self, found: Environment, why: str) -> None:
        assert self._setup is not None
        if found is not self._environment or not self._setup.is_ready:
            return  # its keeper was lost as well, and another environment comes
        if why:
            self._is_shown = False
            self._setup.without_mount(why)
            return
        self._is_shown = True
        self._join()

    def _join(self) -> None:
        """The image, with the environment in it."""
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
        """The environment is there: what the first step needs comes next, if it is kept, then ranks."""
        self._is_settled = False
        if self._spec.caches is None:
            self._on_known(program)
            return
        caches = self._caches
        if caches is None:
            from launcher.caches import CachesEvents, NodeCaches

            events = CachesEvents(
                said=self._events.said,
                fell_back=partial(self._events.fell_back, "caches"),
                noted=self._events.caches_noted,
                misplaced=self._on_misplaced,
            )
            caches = self._caches = NodeCaches(self._loop, self._spec, self._unset, events, self._peers)
        from bootseer.env.caches_folders import early_variables

        inherited = program.inherited(os.environ)
        if early_variables(inherited) is not None:
            self._events.coming(
                lambda folder: program._replace(
                    environ={**(early_variables(inherited, folder) or {}), **program.environ}
                )
            )
        is_silent = self._setup is not None and self._setup.is_store_silent
        caches.open(program, lambda found: self._on_known(found, caches.folder), is_silent=is_silent)

    def _on_misplaced(self, why: str) -> None:
        from launcher.rendezvous.messages import SetupNews

        self._awaiting.clear()
        self._events.setup_failed(SetupNews("misplaced", "", "", why))

    def _on_known(self, program: RankProgram, caches_folder: str = "") -> None:
        self.program, self._is_settled = program, True
        self._events.known(program, caches_folder)
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
        """Before an attempt: ranks can be started when `then` is called, and not at all when `failed` is.

        Args:
            checkpoint: what ranks are told of the one that is loaded; `then` gets what of it is true in the image.
            own_checkpoint: the version's own path, for an image in which the node's is not seen.
        """
        if self._image is None:
            self.when_known(lambda _: self._seed(lambda: then(checkpoint)))
            return
        from launcher.image import checkpoint_paths, reachable, without_files

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
            self._has_ranks = number == self._attempts  # else that one is over, and has none
            then(found)

        self._attempts += 1
        number = self._attempts
        self._has_ranks = False
        self._open_for_set_up()
        paths = checkpoint_paths(checkpoint, own_checkpoint) if checkpoint else []
        image = self._image
        self.when_known(lambda _: image.show(paths, shown))

    def _seed(self, then: Callable[[], object]) -> None:
        """Before every attempt: what the last one has left half written in the caches must be gone."""
        if self._caches is None:
            then()
        else:
            self._caches.seed(then)

    @property
    def waits_for(self) -> str:
        """What is not there yet, in words; "" for nothing."""
        if self._image is not None and not self._image.is_open:
            return "the image"
        if self._setup is not None and not self._setup.is_ready:
            return "the environment (set-up)"
        return "first-step caches" if self.program is None or not self._is_settled else ""

    @property
    def has_built(self) -> bool:
        """The environment was made here, and is published."""
        return self._setup is not None and self._setup.has_built

    def touched(self, files: Sequence[tuple[str, Sequence[tuple[int, int]]]], imports: Sequence[str]) -> None:
        """What the start has read, as NodeSetup.touched."""
        if self._setup is not None:
            self._setup.touched(files, imports)

    def unreadable(self, fault: MountFault) -> None:
        """What is mounted could not be read while the attempt ran that is over now."""
        if fault.what == "env" and self._setup is not None:
            self._setup.unreadable(fault.why)
        elif fault.what == "image" and self._image is not None and not fault.is_end:  # its keeper opens it anew
            self._image.unreadable(fault.why, is_damage=fault.is_damage)

    def attempt_over(self) -> None:
        """No rank runs any more."""
        self._attempts += 1
        self._has_ranks = False
        self._open_for_set_up()
        if self._caches is not None:
            self._caches.attempt_over()

    def first_step_seen(self) -> None:
        """All ranks of this node have made theirs."""
        for part in (self._image, self._setup, self._caches):
            if part is not None:
                part.first_step_seen()

    def close(self) -> None:
        for part in (self._image, self._setup, self._caches):
            if part is not None:
                part.close()


def _import_ahead() -> None:
    """What is needed when image and environment are there, while they are waited for."""
    import bootseer.env.caches_folders  # noqa: F401
    import launcher.caches  # noqa: F401


def in_environment(program: RankProgram, python: str, own: tuple[str, ...]) -> RankProgram:
    """PURE: what ranks are run by in an image that has an environment. Args: own: folders that nobody named."""
    environ = dict(program.environ)
    if own:
        path = environ.get("PATH") or os.defpath
        environ |= {"PATH": f"{own[0]}/bin:{path}", "VIRTUAL_ENV": own[0]}
    return program._replace(python=python or program.python, environ=environ)
