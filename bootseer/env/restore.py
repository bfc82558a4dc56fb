"""Puts an environment in its place on this node, by the first way that works.

    there     a marker says so, and the target is still as it was left: nothing is read of any store
    mount     the tree lies over its targets, for the ranks alone; blocks come as they are read (mounted.py)
    unpack    new files are made beside each target and moved there by renames (apply.py); the target is as it was
              until all of them are whole, so that no program ever sees half an environment

What fails is told, and the next way is tried. A target is changed by one process at a time; who waits for it finds
the environment there. An interrupted run is completed, or undone, by the next one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bootseer.blocks.present import read_boot_id
from bootseer.env import apply_journal
from bootseer.env.admissible import why_no_environment
from bootseer.env.apply import HalfChangedError, Moving, fill_journal, finish
from bootseer.env.apply_journal import Journal
from bootseer.env.known_walk import is_as_known, known_walk
from bootseer.env.markers import Marker, Markers, digest_of, open_markers
from bootseer.env.on_disk import NOTHING, identity
from bootseer.env.owning import owned_by
from bootseer.env.relocate import relocate, why_not
from bootseer.env.settling import settle_later
from bootseer.env.staging import WAIT_S as WAIT_S
from bootseer.env.staging import Claim, Staging, claim
from bootseer.env.subtree import Subtree, subtree
from bootseer.env.unpack_helpers import UnpackHelpers, unpack_helpers
from bootseer.env.walk import Walk, walk
from bootseer.errors import BootseerError, ConfigError, IntegrityError
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.page_cache import is_remote
from bootseer.tree.materialise import Materialised, Progress, materialise
from bootseer.tree.materialise_helpers import HelperFailedError
from bootseer.tree.reading import BlockSource

if TYPE_CHECKING:
    from bootseer.env.env_tree import EnvTree
    from bootseer.env.mounted import MountedEnv
    from bootseer.env.snapshot import Snapshot
    from bootseer.mounts.holder import Holder
    from bootseer.mounts.tree_mount import TreeOptions
    from bootseer.trust import Trust

THERE, MOUNT, UNPACK = "there", "mount", "unpack"
WAYS = (THERE, MOUNT, UNPACK)
MOST_THREADS = 8  # two for a core: one waits for a store or a lock of the file system


class Restored(NamedTuple):
    """An environment that can be used."""

    how: str  # one of WAYS
    took_s: float
    prefix: tuple[str, ...]  # words before a rank's command; only of a mounted one
    notes: tuple[str, ...]  # lines for people: what was tried and failed, what is not as it was
    mounted: MountedEnv | None = None  # to be closed when no rank is to be started any more
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
        base: of the key document; kept in the markers, for the key of the next start.
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
    return _Restoring(
        snapshot,
        tree,
        targets or snapshot.targets,
        base or {},
        expected or {},
        environ or os.environ,
        wait_s,
        before_move,
    ).run(ways, mounting, hot, on_progress)


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
            with _claimed(target, environ, wait_s) as claimed:
                notes += claimed.notes
                if claimed.unsettled:
                    settle_later([target], environ)
    return notes


def is_there(targets: Sequence[str], key: str, tree: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Whether all targets have this environment, as their markers and a look at them say. Raises: StorageError."""
    environ = os.environ if environ is None else environ
    for target in map(os.path.realpath, targets):
        markers = open_markers(environ, target)
        marker = markers.read(target)
        if marker is None or (marker.key, marker.tree) != (key, tree):
            return False
        if not markers.is_there(marker, walk(target)):
            return False
    return True


def state_of(target: str) -> str:
    """All that is in a target, as one digest; an empty folder is as none. Raises: StorageError, ConfigError."""
    found = walk(target)
    return digest_of(found if len(found) > 1 else {})


class _Restoring:
    """One call of `restore`."""

    def __init__(
        self,
        snapshot: Snapshot,
        tree: EnvTree,
        targets: Sequence[str],
        base: Mapping[str, str],
        expected: Mapping[str, str],
        environ: Mapping[str, str],
        wait_s: float,
        before_move: Callable[[], object],
    ) -> None:
        if len(targets) != len(snapshot.targets):
            raise ConfigError(f"{len(targets)} targets are given for an environment with {len(snapshot.targets)}")
        self._snapshot, self._tree = snapshot, tree
        self._targets = [os.path.realpath(target) for target in targets]
        if len(set(self._targets)) != len(self._targets):
            raise ConfigError("two targets of an environment are one folder")
        self._base = dict(base)
        self._expected = {os.path.realpath(target): digest for target, digest in expected.items()}
        self._environ, self._wait_s = environ, wait_s
        self._before_move = before_move
        self._notes: list[str] = []
        self._skipped: dict[str, int] = {}
        self._began_s = time.monotonic()

    def run(
        self,
        ways: Sequence[str],
        mounting: Mounting | None,
        hot: Sequence[int],
        on_progress: Progress | None,
    ) -> Restored:
        last: BootseerError | None = None
        for way in ways:
            try:
                if way == THERE:
                    if self._is_there():
                        return self._done(THERE)
                elif way == MOUNT:
                    if mounting is not None:
                        return self._done(MOUNT, self._mount(mounting))
                elif way == UNPACK:
                    with _without_collections():  # until all that was read of the tree is gone again
                        how = self._unpack(hot, on_progress)
                    return self._done(how)
                else:
                    raise ValueError(f"{way!r} is no way to restore an environment")
            except BootseerError as error:
                last = error
                self._notes.append(f"the environment is not restored by {way}: {error}")
        raise last or ConfigError(
            f"no way to restore the environment is left: {', '.join(ways) or 'none was given'}"
        )

    def _done(self, how: str, mounted: MountedEnv | None = None) -> Restored:
        return Restored(
            how,
            time.monotonic() - self._began_s,
            mounted.prefix if mounted is not None else (),
            tuple(self._notes),
            mounted,
            dict(self._skipped),
        )

    def _is_there(self) -> bool:
        return is_there(self._targets, self._snapshot.key, self._snapshot.tree, environ=self._environ)

    def _mount(self, mounting: Mounting) -> MountedEnv:
        from bootseer.env.mounted import mount_env

        if not self._tree.url:
            raise ConfigError("its tree is in no store that can be mounted")
        if self._targets != [os.path.realpath(target) for target in self._snapshot.targets]:
            raise ConfigError("it is for another path than its own, and files have to be rewritten for that")
        self._check_expected(self._targets)
        return mount_env(
            self._tree.url,
            self._snapshot.tree,
            self._targets,
            mounting.holder,
            trust=mounting.trust,
            workload=mounting.workload,
            options=mounting.options,
            environ=self._environ,
        )

    # ---- unpacking ---------------------------------------------------------------------------------------------

    def _unpack(self, hot: Sequence[int], on_progress: Progress | None) -> str:
        """Which way it was: another process may have been faster."""
        with ExitStack() as stack:
            claims = {
                target: stack.enter_context(_claimed(target, self._environ, self._wait_s))
                for target in sorted(self._targets)  # in one order: nobody waits for somebody who waits for him
            }
            for claimed in claims.values():
                self._notes += claimed.notes
            if self._is_there():
                return THERE
            self._check_expected(self._targets)
            # They begin while the tree is opened, and are ready when it is.
            helpers = stack.enter_context(
                unpack_helpers(
                    self._tree, self._snapshot, self._environ, is_wanted=not hot and len(self._targets) == 1
                )
            )
            opened = stack.enter_context(self._tree.open())
            reason = why_no_environment(opened.tree, len(self._targets))
            if reason:
                raise IntegrityError(f"{self._tree.url or 'its tree'}: {reason}")
            parts = [
                _Part(claims[target], _at_home(subtree(opened.tree, str(number).encode()), claims[target]))
                for number, target in enumerate(self._targets)
            ]
            moves = self._moves()
            if moves:
                reason = why_not(opened.tree, is_relocatable=self._snapshot.relocatable)
                if reason:
                    raise ConfigError(f"{self._targets[0]}: the environment of {moves[0][0].decode()}: {reason}")
            try:
                for part in parts:
                    self._fill(part, opened.blocks, hot, helpers, on_progress)
                    if moves:
                        relocate(part.below.tree, part.staged.tree_fd, moves, part.claim.target)
                self._before_move()
                self._move(parts)
            finally:
                for part in parts:
                    if part.staging is not None and not part.is_kept:
                        part.staging.throw_away()
        settle_later(self._targets, self._environ)
        return UNPACK

    def _fill(
        self,
        part: _Part,
        blocks: BlockSource,
        hot: Sequence[int],
        helpers: UnpackHelpers | None,
        on_progress: Progress | None,
    ) -> None:
        """Makes the files of a target, beside it."""

        def fill(helpers: UnpackHelpers | None) -> Materialised:
            part.staging = part.claim.stage()
            try:
                return materialise(
                    part.below.tree,
                    part.staging.tree,
                    blocks,
                    hot=hot,
                    threads=_threads(),
                    on_progress=on_progress,
                    is_private=True,
                    helpers=helpers,
                    meanwhile=part.look_ahead,
                )
            finally:
                if helpers is not None:
                    helpers.close()  # whatever happened: nobody else writes there any more

        try:
            done = fill(helpers)
        except HelperFailedError as error:
            self._notes.append(f"the environment is unpacked by one process alone: {error}")
            part.staged.throw_away()
            done = fill(None)
        for what, count in done.skipped.items():
            self._skipped[what] = self._skipped.get(what, 0) + count

    def _moves(self) -> list[tuple[bytes, bytes]]:
        """Only of an environment that goes elsewhere; also targets that stay, for paths that lead there."""
        pairs = list(zip(self._snapshot.targets, self._targets, strict=True))
        if all(os.path.realpath(old) == new for old, new in pairs):
            return []
        return [(os.fsencode(old), os.fsencode(new)) for old, new in pairs]

    def _check_expected(self, targets: Sequence[str]) -> None:
        for target in targets:
            wanted = self._expected.get(target)
            if wanted is not None and state_of(target) != wanted:
                raise ConfigError(f"{target}: was changed since its environment was looked for: start again")

    def _move(self, parts: Sequence[_Part]) -> None:
        """All targets, or none. From the first journal on a killed run is completed by the next one."""
        for part in parts:
            self._markers(part).remove(part.claim.target)
            part.prepare(self._marker(part))
        done: list[_Part] = []
        try:
            for part in parts:
                part.carry_out()
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part.undo()
            for part in parts:
                if not part.is_kept:
                    part.forget()
            raise
        for part in parts:
            self._mark(part)
        for part in parts:
            part.end()

    def _mark(self, part: _Part) -> None:
        """A target that has just got its environment."""
        target, markers, marker = part.claim.target, self._markers(part), self._marker(part)
        if part.claim.is_fresh and not self._skipped and not self._moves():
            known = part.known
            if known is not None and is_as_known(known.walk, target):
                markers.write(marker, known.walk, part.paths, walk_sha256=known.sha256)
                return
        markers.write(marker, walk(target), part.paths)

    def _markers(self, part: _Part) -> Markers:
        return open_markers(self._environ, part.claim.target)

    def _marker(self, part: _Part) -> Marker:
        target = part.claim.target
        return Marker(
            target=target,
            key=self._snapshot.key,
            tree=self._snapshot.tree,
            base=self._base,
            is_durable=is_remote(target),  # a server has what was closed
        )


class _Known(NamedTuple):
    """A folder that was not walked."""

    walk: Walk
    sha256: str  # of it, by `digest_of`


class _Part:
    """One target, from unpacked files to moved ones."""

    def __init__(self, claimed: Claim, below: Subtree) -> None:
        self.claim, self.below = claimed, below
        self.staging: Staging | None = None
        self._moving: Moving | None = None
        self._is_shown = False
        self.is_kept = False  # what it has staged is still needed when this process is done

    @cached_property
    def paths(self) -> list[bytes]:
        """All names that the tree says something about."""
        return paths_of(self.below)

    @cached_property
    def known(self) -> _Known | None:
        """What is there when only the tree is."""
        found = known_walk(self.below.tree)
        return None if found is None else _Known(found, digest_of(found, self.paths))

    def look_ahead(self) -> None:
        """Finds out meanwhile what is needed when all is there."""
        if self.claim.is_fresh:
            _ = self.known
        _ = self.paths

    def prepare(self, marker: Marker) -> None:
        """Writes down what is to be done."""
        staging, claimed = self.staged, self.claim
        journal = Journal(
            target=claimed.target,
            boot=read_boot_id(),
            is_fresh=claimed.is_fresh,
            has_owners=os.geteuid() == 0,
            moves=[],
            folders=[],
            marker=marker,
            paths=self.paths,
        )
        if not claimed.is_fresh:
            journal = fill_journal(journal, self.below, claimed.target_fd, staging.tree_fd)
            self._moving = Moving(journal, claimed.target_fd, staging.fd)
        else:
            journal = msgspec.structs.replace(journal, place=identity(staging.tree_fd) or NOTHING)
        with map_os_errors(staging.folder):
            apply_journal.write(staging.fd, journal)

    def carry_out(self) -> None:
        if self._moving is None:
            self.claim.show(self.staged)
            self._is_shown = self.is_kept = True
            return
        self.is_kept = True  # what the target had
        try:
            self._moving.carry_out()
        except HalfChangedError:
            raise
        except BaseException:  # it was undone
            self.is_kept = False
            raise

    def undo(self) -> None:
        if self._moving is not None:
            self._moving.undo()
        elif self._is_shown:
            self.claim.hide(self.staged)
        self.is_kept = False

    def end(self) -> None:
        """All is moved. Until it is on disk the next start can undo it."""
        if is_remote(self.claim.target):  # a server has what was closed
            self.forget()
            self.is_kept = False
            return
        with map_os_errors(self.staged.folder):
            apply_journal.end(self.staged.fd)

    def forget(self) -> None:
        """There is nothing to complete any more."""
        finish(self.staged.fd, self.claim.target)

    @property
    def staged(self) -> Staging:
        assert self.staging is not None, "it is unpacked first"
        return self.staging


@contextmanager
def alone_at(targets: Sequence[str], *, environ: Mapping[str, str], wait_s: float = WAIT_S) -> Iterator[list[str]]:
    """Alone at targets, for who changes them by other means than `restore`; gives lines for people.

    Raises: StorageError, ConfigError.
    """
    with ExitStack() as stack:
        notes: list[str] = []
        for target in sorted({os.path.realpath(each) for each in targets}):
            claimed = stack.enter_context(_claimed(target, environ, wait_s))
            claimed.settle()
            notes += claimed.notes
        yield notes


@contextmanager
def _claimed(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[Claim]:
    """The claim of a target. The marker of a run that is completed now is written as that run would have."""

    def mark(journal: Journal, is_complete: bool) -> None:
        markers = open_markers(environ, journal.target)
        markers.remove(journal.target)
        if is_complete:
            markers.write(journal.marker, walk(journal.target), journal.paths)

    with claim(target, environ=environ, boot=read_boot_id(), wait_s=wait_s, on_recovered=mark) as claimed:
        if claimed.is_doubtful:
            open_markers(environ, claimed.target).doubt(claimed.target, walk(claimed.target))
        yield claimed


def _at_home(below: Subtree, claimed: Claim) -> Subtree:
    """In the hands of who has the target; a new one is the caller's."""
    if claimed.is_fresh:
        return owned_by(below, os.geteuid(), os.getegid())
    found = os.fstat(claimed.target_fd)
    return owned_by(below, found.st_uid, found.st_gid)


def paths_of(below: Subtree) -> list[bytes]:
    """All names that a tree says something about, those that it takes away too."""
    paths = [b""] * len(below.tree)
    for entry in range(1, len(below.tree)):
        above = paths[below.tree.parents[entry]]
        name = below.tree.names[entry]
        paths[entry] = above + b"/" + name if above else name
    return [*paths, *below.deleted]


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


def _threads() -> int:
    return min(MOST_THREADS, 2 * len(os.sched_getaffinity(0)))
