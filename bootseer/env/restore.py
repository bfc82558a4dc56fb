"""Puts an environment in its place on this node, by the first way that works.

    there     a marker says so, and the target is still as it was left: nothing is read of any store
    mount     the tree lies over its targets, for the ranks alone; blocks come as they are read (mounted.py)
    unpack    new files are made beside each target (restore_unpack.py), moved there by renames (restore_move.py);
              targets are as they were until all of them are whole: no program ever sees half an environment

What fails is told, and the next way is tried. A target is changed by one process at a time; who waits for it finds
the environment there. An interrupted run is completed, or undone, by the next one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from bootseer.env.restore_call import Call
from bootseer.env.restore_claim import claimed_at
from bootseer.env.restore_unpack import unpack
from bootseer.env.settling import settle_later
from bootseer.env.staging import WAIT_S as WAIT_S
from bootseer.errors import BootseerError, ConfigError
from bootseer.tree.materialise import Progress

if TYPE_CHECKING:
    from bootseer.env.env_tree import EnvTree
    from bootseer.env.mounted import MountedEnv
    from bootseer.env.reads import Reads
    from bootseer.env.snapshot import Snapshot
    from bootseer.mounts.holder import Holder
    from bootseer.mounts.tree_mount import TreeOptions
    from bootseer.trust import Trust

THERE, MOUNT, UNPACK = "there", "mount", "unpack"
WAYS = (THERE, MOUNT, UNPACK)


class Restored(NamedTuple):
    """An environment that can be used."""

    how: str  # one of WAYS
    took_s: float
    prefix: tuple[str, ...]  # words before a rank's command; only of a mounted one
    notes: tuple[str, ...]  # lines for people: what is not as it was
    mounted: MountedEnv | None = None  # to be closed when no rank is to be started any more
    failures: tuple[str, ...] = ()  # lines for people: ways that were tried first
    skipped: Mapping[str, int] = {}  # attributes that this user or the file system cannot have, and how often


class Mounting(NamedTuple):
    """What the way `mount` needs."""

    holder: Holder  # forked before this process had threads
    trust: Trust | None = None
    workload: str = ""
    options: TreeOptions | None = None


def restore(
    snapshot: Snapshot,
    tree: EnvTree,
    *,
    targets: Sequence[str] = (),
    base: Mapping[str, str] | None = None,
    reads: Reads | None = None,
    expected: Mapping[str, str] | None = None,
    ways: Sequence[str] = WAYS,
    mounting: Mounting | None = None,
    hot: Sequence[int] = (),
    on_progress: Progress | None = None,
    environ: Mapping[str, str] | None = None,
    wait_s: float = WAIT_S,
    before_move: Callable[[], object] = lambda: None,
) -> Restored:
    """Puts the environment of a snapshot that is believed where it belongs.

    Args:
        targets: other folders than the snapshot's, one for each: then scripts and the like are rewritten.
        base: of the key document; kept in the markers, for the key of the next start, as is what set-up reads.
        expected: `state_of` targets when the key was made; one that has changed since is left alone: by target.
        mounting: None: nothing is mounted.
        hot: blocks in the order of a start; what lies in them is unpacked first.
        on_progress: bytes and files since the last call.
        environ: says where the cache is.
        wait_s: for another process at a target.
        before_move: called when all is unpacked beside its target and nothing was changed yet; what it raises, if
            that is no BootseerError, ends it there.
    Raises: what the last way raises: ConfigError, StorageError, IntegrityError. The targets are as they were then.
    """
    call = Call(
        snapshot,
        tree,
        targets or snapshot.targets,
        base or {},
        reads,
        expected or {},
        environ or os.environ,
        wait_s,
        before_move,
    )
    return _first_that_works(call, ways, mounting, hot, on_progress)


def recover(
    targets: Sequence[str], *, environ: Mapping[str, str] | None = None, wait_s: float = WAIT_S
) -> list[str]:
    """Completes or undoes what a killed run has left at targets: to be called before keys are made of them.

    Waits for who is at them. Returns: lines for people. Raises: StorageError, ConfigError.
    """
    notes: list[str] = []
    environ = os.environ if environ is None else environ
    for target in sorted({os.path.realpath(each) for each in targets}):
        if os.path.isdir(os.path.dirname(target)):
            with claimed_at(target, environ, wait_s) as claimed:
                notes += claimed.notes
                if claimed.unsettled:
                    settle_later([target], environ)
    return notes


@contextmanager
def alone_at(targets: Sequence[str], *, environ: Mapping[str, str], wait_s: float = WAIT_S) -> Iterator[list[str]]:
    """Alone at targets, for who changes them by other means than `restore`; gives lines for people.

    Raises: StorageError, ConfigError.
    """
    with ExitStack() as stack:
        notes: list[str] = []
        for target in sorted({os.path.realpath(each) for each in targets}):
            claimed = stack.enter_context(claimed_at(target, environ, wait_s))
            claimed.settle()
            notes += claimed.notes
        yield notes


def _first_that_works(
    call: Call,
    ways: Sequence[str],
    mounting: Mounting | None,
    hot: Sequence[int],
    on_progress: Progress | None,
) -> Restored:
    last: BootseerError | None = None
    for way in ways:
        try:
            if way == THERE:
                if call.is_there():
                    return _done(call, THERE)
            elif way == MOUNT:
                if mounting is not None:
                    with _without_collections():
                        mounted = _mount(call, mounting)
                    return _done(call, MOUNT, mounted)
            elif way == UNPACK:
                with _without_collections():  # until all that was read of the tree is gone again
                    how = _unpack(call, hot, on_progress)
                return _done(call, how)
            else:
                raise ValueError(f"{way!r} is no way to restore an environment")
        except BootseerError as error:
            last = error
            call.failures.append(f"the environment is not restored by {way}: {error}")
            if way == MOUNT and _is_damaged(error):
                raise
    raise last or ConfigError(f"no way to restore the environment is left: {', '.join(ways) or 'none was given'}")


def _is_damaged(error: BootseerError) -> bool:
    """Of a mount that has failed: whether to unpack the tree would fail by the same block, after a while."""
    from bootseer.env.mounted import DamagedError

    return isinstance(error, DamagedError)


def _done(call: Call, how: str, mounted: MountedEnv | None = None) -> Restored:
    return Restored(
        how,
        time.monotonic() - call.began_s,
        mounted.prefix if mounted is not None else (),
        tuple(call.notes),
        mounted,
        tuple(call.failures),
        dict(call.skipped),
    )


def _mount(call: Call, mounting: Mounting) -> MountedEnv:
    from bootseer.env.mounted import mount_env

    if not call.tree.url:
        raise ConfigError("its tree is in no store that can be mounted")
    if call.targets != [os.path.realpath(target) for target in call.snapshot.targets]:
        raise ConfigError("it is for another path than its own, and files have to be rewritten for that")
    call.check_expected()
    return mount_env(
        call.tree.url,
        call.snapshot.tree,
        call.targets,
        mounting.holder,
        trust=mounting.trust,
        workload=mounting.workload,
        options=mounting.options,
        environ=call.environ,
    )


def _unpack(call: Call, hot: Sequence[int], on_progress: Progress | None) -> str:
    """Which way it was: another process may have been faster."""
    if not unpack(call, hot, on_progress):
        return THERE
    settle_later(call.targets, call.environ)
    return UNPACK


@contextmanager
def _without_collections() -> Iterator[None]:
    """An index is many objects, none of them garbage: looking at them again and again takes its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
