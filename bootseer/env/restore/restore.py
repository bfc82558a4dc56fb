"""Restoring of an environment on this node, by the first method that works.

    there     a marker exists and the target is unchanged: no store is read
    mount     the tree is mounted over its targets, for the ranks alone; blocks are fetched on read (mounted.py)
    unpack    new files are made beside each target (unpack.py) and renamed into it (move.py);
              targets stay unchanged until all files are complete: no program ever sees half an environment

A failure is reported, and the next method is tried. One process at a time changes a target; a process that waits
for it finds the environment there. The next run completes or undoes an interrupted one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from bootseer.env.restore.call import RestoreCall
from bootseer.env.restore.claim import claimed_at
from bootseer.env.restore.staging import WAIT_S as WAIT_S
from bootseer.env.restore.sync import sync_later
from bootseer.errors import BootseerError, ConfigError

if TYPE_CHECKING:
    from bootseer.env.reads.read_list import Reads
    from bootseer.env.restore.mounted import MountedEnv
    from bootseer.env.store.env_tree import EnvTree
    from bootseer.env.store.snapshot import Snapshot
    from bootseer.mounts.sandbox.process import ImageSandbox
    from bootseer.mounts.tree_daemon.mount import TreeOptions
    from bootseer.tree.unpack.tree import Progress
    from bootseer.trust import Trust

THERE, MOUNT, UNPACK = "there", "mount", "unpack"
WAYS = (THERE, MOUNT, UNPACK)


class Restored(NamedTuple):
    """An environment that is ready for use."""

    how: str  # one of WAYS
    took_s: float
    prefix: tuple[str, ...]  # prefix of a rank's command; only of a mounted environment
    notes: tuple[str, ...]  # lines for the user: differences from the snapshot
    mounted: MountedEnv | None = None  # close it after the last start of ranks
    failures: tuple[str, ...] = ()  # lines for the user: methods that failed before
    skipped: Mapping[str, int] = {}  # counts of attributes that this user or the file system cannot set


class MountOptions(NamedTuple):
    """Arguments of the method `mount`."""

    sandbox: ImageSandbox  # the sandbox process, forked before this process had threads
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
    mounting: MountOptions | None = None,
    hot: Sequence[int] = (),
    on_progress: Progress | None = None,
    environ: Mapping[str, str] | None = None,
    wait_s: float = WAIT_S,
    before_move: Callable[[], object] = lambda: None,
) -> Restored:
    """Restore the environment of a trusted snapshot.

    Args:
        targets: other directories than the snapshot's, one for each: scripts and similar files are rewritten then.
        base: of the key document; stored in the markers, for the key of the next start, as is what set-up reads.
        expected: `state_of` targets when the key was made, by target; a target that has changed since stays.
        mounting: None: nothing is mounted.
        hot: blocks in the order of the access trace; files in them are unpacked first.
        on_progress: receives bytes and files since the last call.
        environ: gives the cache directory.
        wait_s: maximum time to wait for another process at a target.
        before_move: called when all is unpacked beside its target and no target has changed yet. An error
            other than BootseerError ends the call.
    Raises: the error of the last method: ConfigError, StorageError, IntegrityError. Targets are unchanged.
    """
    call = RestoreCall(
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
    """Complete or undo what a killed run has left at targets; call it before making keys of them.

    Wait for other processes at the targets. Return lines for the user. Raises: StorageError, ConfigError.
    """
    notes: list[str] = []
    environ = os.environ if environ is None else environ
    for target in sorted({os.path.realpath(each) for each in targets}):
        if os.path.isdir(os.path.dirname(target)):
            with claimed_at(target, environ, wait_s) as claimed:
                notes += claimed.notes
                if claimed.unsettled:
                    sync_later([target], environ)
    return notes


@contextmanager
def exclusive_at(
    targets: Sequence[str], *, environ: Mapping[str, str], wait_s: float = WAIT_S
) -> Iterator[list[str]]:
    """Hold exclusive access to targets, for changes by other means than `restore`; yield lines for the user.

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
    call: RestoreCall,
    ways: Sequence[str],
    mounting: MountOptions | None,
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
                with _without_collections():  # until the index of the tree is freed
                    how = _unpack(call, hot, on_progress)
                return _done(call, how)
            else:
                raise ValueError(f"{way!r} is not a method to restore an environment")
        except BootseerError as error:
            last = error
            call.failures.append(f"the environment is not restored by {way}: {error}")
            if way == MOUNT and _is_damaged(error):
                raise
    raise last or ConfigError(f"no method is left to restore the environment: {', '.join(ways) or 'none given'}")


def _is_damaged(error: BootseerError) -> bool:
    """Return whether a mount failed by a damaged block, on which unpacking would fail as well."""
    from bootseer.env.restore.mounted import DamagedError

    return isinstance(error, DamagedError)


def _done(call: RestoreCall, how: str, mounted: MountedEnv | None = None) -> Restored:
    return Restored(
        how,
        time.monotonic() - call.began_s,
        mounted.prefix if mounted is not None else (),
        tuple(call.notes),
        mounted,
        tuple(call.failures),
        dict(call.skipped),
    )


def _mount(call: RestoreCall, mounting: MountOptions) -> MountedEnv:
    from bootseer.env.restore.mounted import mount_env

    if not call.tree.url:
        raise ConfigError("its tree is not in a store that can be mounted")
    if call.targets != [os.path.realpath(target) for target in call.snapshot.targets]:
        raise ConfigError("it has to be relocated to another path, which requires rewriting files")
    call.check_expected()
    return mount_env(
        call.tree.url,
        call.snapshot.tree,
        call.targets,
        mounting.sandbox,
        trust=mounting.trust,
        workload=mounting.workload,
        options=mounting.options,
        environ=call.environ,
    )


def _unpack(call: RestoreCall, hot: Sequence[int], on_progress: Progress | None) -> str:
    """Return the method that was used: another process may have been faster."""
    from bootseer.env.restore.unpack import unpack  # not for what is mounted

    if not unpack(call, hot, on_progress):
        return THERE
    sync_later(call.targets, call.environ)
    return UNPACK


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: an index has many objects, all live, which slow down each collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
