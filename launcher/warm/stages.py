"""The stages of warming: each fetches one part of a job's data to this node's caches, as a start would.

In: a LaunchSpec, limits. Out: a Warmed for each stage. The library does the work. This module chooses the method
(mount, unpack, in place) as a start does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import BootseerError, NotFound, StorageError
from bootseer.ipc.channel import Channel
from bootseer.linux.child_processes import end_process
from bootseer.own_module import command_of
from bootseer.tuning import current
from launcher.spec import LaunchSpec
from launcher.warm.options import is_named
from launcher.warm.results import (
    CACHED,
    CACHES,
    CHECKPOINT,
    ENV,
    FAILED,
    HELD,
    IMAGE,
    IN_PLACE,
    NOTHING,
    SEEDED,
    STAGES,
    UNPACKED,
    Warmed,
    described,
)

if TYPE_CHECKING:
    from bootseer.cli.node_arena import NodeArena
    from bootseer.env.service.look import LookupResult
    from bootseer.env.spec import SetupSpec
    from bootseer.env.store.store import FoundSnapshot
    from bootseer.mounts.sandbox.process import ImageSandbox
    from bootseer.mounts.tree_daemon.fill import FillLimits

CACHES_PATIENCE_S = 90.0  # for the process that seeds compile caches, on top of the limit of fetching them
BRIEF_S = 1.0  # idle time after which their mount ends, so that the job's start is recorded

Say = Callable[[str], object]  # a line for users
Progress = Callable[[str, int, int], object]  # stage, bytes done, total bytes


class WarmLimits(NamedTuple):
    max_bytes: int | None = None  # to fetch in a stage
    max_bytes_per_s: float | None = None
    hold_s: float = 0.0  # how long a checkpoint is held; 0: none is loaded


def stages_of(spec: LaunchSpec) -> tuple[str, ...]:
    """PURE: return the stages of a job that can be warmed, in order."""
    has = {
        IMAGE: spec.image is not None,
        ENV: spec.setup is not None,
        CACHES: spec.caches is not None,
        CHECKPOINT: bool(spec.load_checkpoint),
    }
    return tuple(stage for stage in STAGES if has[stage])


class Warmer:
    """Warms one job, one stage after the other, to spare the node.

    Make it while this process has one thread: a mount needs a process that is forked now.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        limit: WarmLimits,
        say: Say,
        progress: Progress,
        will_hold: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Args: will_hold: receives the digest of the checkpoint before memory is taken for it."""
        self._will_hold = will_hold
        self._spec, self._limit, self._say, self._progress = spec, limit, say, progress
        self._mounted_env: tuple[str, str, list[str]] | None = None  # URL, digest, targets
        self._arena: NodeArena | None = None
        self._digest: str | None = None  # of the image's tree
        self._is_store_silent = False  # the store of environments did not answer
        self._has_env = False  # the environment was already in place
        self._environ = dict(os.environ) | ({} if spec.image is None else spec.image.environ)  # of set-up
        self._sandbox = _sandbox(spec)

    def run(self, only: tuple[str, ...]) -> list[Warmed]:
        """Warm the job's stages in `only`. A stage that fails is reported; the next ones still run."""
        work = {
            IMAGE: self._warm_image,
            ENV: self._warm_env,
            CACHES: self._warm_caches,
            CHECKPOINT: self._warm_checkpoint,
        }
        found = []
        for stage in stages_of(self._spec):
            if stage not in only:
                continue
            began_s = time.monotonic()
            try:
                warmed = work[stage]()
            except (BootseerError, OSError) as error:
                warmed = Warmed(stage, FAILED, text=described(error))
            found.append(warmed._replace(took_s=round(time.monotonic() - began_s, 3)))
        return found

    # ---- the image -------------------------------------------------------------------------------------------

    def _warm_image(self) -> Warmed:
        from bootseer import aio
        from bootseer.blocks.trace import workload_key
        from bootseer.image.commands.common import opened_store, tree_url
        from bootseer.image.commands.traces import hot_blocks, known_traces
        from bootseer.linux.privileges import may_mount
        from bootseer.mounts.sandbox.source import ROOTFS, open_source
        from bootseer.trust import Trust

        spec, options = self._spec, self._spec.image
        assert options is not None
        if options.url.startswith(ROOTFS):
            return Warmed(IMAGE, NOTHING, text="the image is a directory of this node")
        url, trust = tree_url(options.url), Trust.load()
        digest = self._image_digest()
        is_program = spec.entry.mode == "program"
        names = (spec.entry.target, "") if is_program else (options.pythons[0], spec.entry.target)
        if not may_mount():
            # In this case a start unpacks the whole image.
            with closing(open_source(url, names, name=options.name, digest=digest)) as source:
                return Warmed(IMAGE, UNPACKED, source.digest)
        workload = workload_key(*names) if is_named(spec.entry.target) else ""

        def find_hot(block_count: int) -> list[int]:
            with opened_store(url) as store:
                known = known_traces(store, digest, block_count, trust, workload=workload)
            return hot_blocks(known, workload) or hot_blocks(known)

        async def choose(block_count: int) -> list[int]:
            return await aio.run_abandonable(find_hot, block_count, timeout_s=600.0)

        filled = self._fill(IMAGE, url, digest, trust, choose)
        note = "" if filled[0] else "no access trace yet: the first start that makes a step records one"
        return Warmed(IMAGE, CACHED, digest, filled[1], filled[2], text=note)

    def _image_digest(self) -> str:
        """Return the digest of the image's tree; "" for a directory. Raises: as `find_digest`."""
        from bootseer.image.commands.common import find_digest, tree_url
        from bootseer.mounts.sandbox.source import ROOTFS
        from bootseer.trust import Trust

        options = self._spec.image
        assert options is not None
        if self._digest is None:
            is_folder = options.url.startswith(ROOTFS)
            url = options.url if is_folder else tree_url(options.url)
            self._digest = "" if is_folder else find_digest(url, Trust.load(), name=options.name)
        return self._digest

    # ---- the environment -------------------------------------------------------------------------------------

    def _warm_env(self) -> Warmed:
        from bootseer.env.service.look import look_up
        from bootseer.env.store_layout import below, tree_directory
        from bootseer.tree.head import split_pin

        options = self._spec.setup
        assert options is not None
        setup = self._setup_spec()
        if not setup.store:
            return Warmed(ENV, NOTHING, text="there is no store to fetch it from: give --env-store")
        looked = look_up(setup, self._environ, wait_s=0.0)
        self._is_store_silent, self._has_env = looked.is_silent, looked.there is not None
        targets = looked.keyed.targets
        there, found = looked.there, looked.found
        is_same = there is not None and (found is None or there.tree == found.snapshot.tree)
        if there is not None and is_same and "there" in options.ways:
            return Warmed(ENV, IN_PLACE, there.tree, text=", ".join(targets))
        if looked.store is None:
            return Warmed(ENV, FAILED, text=looked.cannot)
        if found is None:
            return Warmed(ENV, NOTHING, text="the store does not have it: the first start builds it")
        tree = found.snapshot.tree
        url = below(split_pin(looked.store.url)[0], tree_directory(found.snapshot.key))
        way = self._method(options.ways)
        size = fetched = 0
        if way == "mount" or self._limit[:2] != (None, None):  # unpacking has no limits
            _, size, fetched = self._fill(ENV, url, tree, looked.store.trust, _choose_all)
        if way == "mount":
            self._mounted_env = (url, tree, list(targets))
            return Warmed(ENV, CACHED, tree, size, fetched)
        if way == "unpack":
            return self._unpack_env(setup, looked, found)._replace(size_bytes=size, fetched_bytes=fetched)
        return Warmed(ENV, NOTHING, text=f"--env-way {','.join(options.ways)} fetches it only when it is needed")

    def _method(self, ways: tuple[str, ...]) -> str:
        """Return the method of a start that does not find the environment in place."""
        for way in ways:
            if way == "unpack" or (way == "mount" and self._sandbox is not None):
                return way
        return ""

    def _unpack_env(self, setup: SetupSpec, looked: LookupResult, found: FoundSnapshot) -> Warmed:
        from bootseer.env.commands.restore import restore_spec

        total, done = max(1, found.snapshot.bytes), 0

        def count(more: int, _files: int) -> None:
            nonlocal done
            done += more
            self._progress(ENV, done, total)

        with self._using(setup):
            put = restore_spec(setup, (), self._environ, count=count)
        how = IN_PLACE if put.how == "there" else UNPACKED
        return Warmed(ENV, how, put.found.snapshot.tree, text=", ".join(looked.keyed.targets))

    @contextmanager
    def _using(self, setup: SetupSpec) -> Iterator[None]:
        """Protect a directory in Bootseer's cache from the clean-up of unused ones meanwhile."""
        from bootseer.env.restore.used_directories import UsedDirectory
        from bootseer.env.service.image_target import directory_of

        directory = directory_of(setup)
        with ExitStack() as stack:
            if directory:
                stack.enter_context(closing(UsedDirectory(directory)))
            yield

    def _setup_spec(self) -> SetupSpec:
        from bootseer.env.commands.spec import NO_PYTHON, find_python
        from bootseer.env.spec import SetupSpec

        options = self._spec.setup
        assert options is not None
        cwd, image = os.getcwd(), self._spec.image
        has_python = image is None and self._spec.entry.mode != "program"
        python = self._spec.python if has_python else NO_PYTHON
        spec = SetupSpec(
            commands=options.commands,
            inputs=options.inputs,
            targets=options.targets,
            variables=options.variables,
            store=options.store,
            salt=options.salt,
            max_age_s=options.max_age_s,
            timeout_s=options.timeout_s,
            wait_s=options.wait_s,
            python=find_python(python, os.environ, cwd),
            cwd=cwd,
            in_image=image is not None,
            image="" if image is None else self._image_digest(),
        )
        if image is None or spec.targets:
            return spec
        from bootseer.env.service.image_target import with_own_target

        return with_own_target(spec, image.pythons[0], self._environ)

    # ---- compile caches -----------------------------------------------------------------------------------

    def _warm_caches(self) -> Warmed:
        """Warm compile caches with the service of a start, in the environment that ranks will see."""
        options = self._spec.caches
        assert options is not None
        if not options.store:
            return Warmed(CACHES, NOTHING, text="without --env-store they are kept only on this node")
        if self._spec.image is not None:
            return Warmed(
                CACHES, NOTHING, text="they depend on the image's frameworks, which are known when it runs"
            )
        if self._spec.setup is not None and self._mounted_env is None and not self._is_env_there():
            return Warmed(CACHES, NOTHING, text="they depend on the environment, which is not ready yet")
        with ExitStack() as stack:
            prefix: tuple[str, ...] = ()
            if self._mounted_env is not None:
                from bootseer.env.restore.mounted import OPTIONS, mount_env

                url, digest, targets = self._mounted_env
                assert self._sandbox is not None
                brief = OPTIONS._replace(prefetches=False, records=False, idle_s=BRIEF_S)
                env = mount_env(url, digest, targets, self._sandbox, options=brief)
                stack.callback(env.close)
                self._sandbox = None  # closed with it
                prefix = env.prefix
            answer = _ask_caches(
                prefix,
                {
                    "do": "open",
                    "python": self._spec.python,
                    "store": options.store,
                    "dirs": dict(options.dirs),
                    "salt": options.salt,
                    "is_silent": self._is_store_silent,
                },
            )
        for each in answer.get("notes", ()):
            self._say(str(each))
        if answer["did"] != "opened":
            return Warmed(CACHES, FAILED, text=str(answer.get("why", "the caches service has failed")))
        size = int(answer["bytes"])
        if answer["is_cold"]:
            return Warmed(CACHES, NOTHING, text=str(answer["line"]))
        return Warmed(CACHES, SEEDED, "", size, size, text=str(answer["line"]))

    def _is_env_there(self) -> bool:
        from bootseer.env.service.look import look_up
        from bootseer.logs import sent_to

        if self._is_store_silent:
            return self._has_env
        with sent_to(lambda _: None):  # the stage of the environment has logged it
            return look_up(self._setup_spec(), self._environ, wait_s=0.0).there is not None

    # ---- the checkpoint --------------------------------------------------------------------------------------

    def _warm_checkpoint(self) -> Warmed:
        if not self._limit.hold_s and not self._spec.checkpoint_disk_bytes:
            return Warmed(
                CHECKPOINT,
                NOTHING,
                text="not loaded: --checkpoint-disk keeps it on this node's disk, --hold in memory",
            )
        from bootseer.cli.node_arena import NodeArena

        arena = NodeArena(
            self._spec.load_checkpoint,
            self._spec.checkpoint_memory_bytes,
            holds=self._limit.hold_s > 0,
            max_bytes_per_s=self._limit.max_bytes_per_s,
            disk_bytes=self._spec.checkpoint_disk_bytes,
            is_eager=False,  # the holder of an older version releases it first
        )
        try:
            if not self._limit.hold_s:
                with arena:
                    return self._keep_checkpoint(arena)
            self._will_hold(arena.resolve()[1])
            found = arena.load(partial(self._progress, CHECKPOINT), self._limit.max_bytes)
        except NotFound:
            arena.close()
            return Warmed(CHECKPOINT, NOTHING, text="there is no checkpoint yet")
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        version = found["BOOTSEER_CHECKPOINT_VERSION"]
        fetched = arena.size - arena.disk_bytes - arena.taken_bytes
        return Warmed(CHECKPOINT, HELD, found["BOOTSEER_CHECKPOINT_DIGEST"], arena.size, fetched, text=version)

    def _keep_checkpoint(self, arena: NodeArena) -> Warmed:
        """Keep the checkpoint on this node's disk, for the next job that loads it."""
        from bootseer.cache_folder import locate, prepare
        from bootseer.checkpoint.service.disk_copy import is_kept

        cache = prepare(locate(os.environ, os.geteuid()))
        version, digest = arena.resolve()
        if is_kept(cache, digest):
            return Warmed(CHECKPOINT, IN_PLACE, digest, arena.size, 0, text=version)
        arena.load(partial(self._progress, CHECKPOINT), self._limit.max_bytes)
        if why := arena.copy(partial(self._progress, CHECKPOINT)):
            return Warmed(CHECKPOINT, NOTHING, text=f"it is not kept on this node's disk: {why}")
        return Warmed(CHECKPOINT, CACHED, digest, arena.size, arena.size - arena.disk_bytes, text=version)

    @property
    def is_holding(self) -> bool:
        return self._arena is not None

    def hold(self) -> bool:
        """Wait until a job takes the checkpoint (True) or its time is over (False). Raises: CheckpointError."""
        return self._arena is not None and self._arena.is_taken(self._limit.hold_s)

    # ---- blocks ----------------------------------------------------------------------------------------------

    def _fill(self, stage: str, url: str, digest: str, trust: Any, choose: Any) -> tuple[int, int, int]:
        """Fill the block cache. Returns: number of chosen blocks, their stored bytes, and the bytes fetched."""
        from bootseer import aio
        from bootseer.mounts.tree_daemon.fill import FillLimits, fill_cache
        from bootseer.mounts.tree_daemon.settings import Settings
        from bootseer.tree.head import split_pin

        settings = Settings(url=split_pin(url)[0], keys=[each.key.line for each in trust.trusted])
        limits: FillLimits = FillLimits(self._limit.max_bytes, self._limit.max_bytes_per_s)

        def progress(done: int, total: int) -> None:
            self._progress(stage, done, total)

        filled = aio.run_sync(fill_cache(settings, digest, choose, progress, limits))
        return filled.blocks, filled.size, filled.fetched_bytes

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


async def _choose_all(_block_count: int) -> None:
    """Choose all blocks: an environment is needed completely, sooner or later."""


def _sandbox(spec: LaunchSpec) -> ImageSandbox | None:
    if spec.setup is None or "mount" not in spec.setup.ways:
        return None
    from bootseer.env.service.mount import fork_sandbox

    return fork_sandbox()


def _ask_caches(prefix: tuple[str, ...], order: Mapping[str, object]) -> dict[str, Any]:
    """Send a request to a new caches service (bootseer.env.compile_cache.service). Returns: its answer. Raises:
    StorageError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    argv = [*prefix, *command_of("bootseer.env.compile_cache.service")]
    with ours:
        with theirs:
            service = subprocess.Popen(argv, stdin=theirs.fileno(), stdout=theirs.fileno())
        try:
            channel = Channel(ours)
            channel.send(order)
            answer = channel.receive(CACHES_PATIENCE_S + current().env.cache_seed_s)
            if answer is None:
                raise StorageError("the compile-cache service has ended")
            channel.shutdown()
            service.wait(CACHES_PATIENCE_S)
            return answer
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StorageError(f"the service of compile caches has failed: {error}") from error
        finally:
            end_process(service)
