"""What a node has of the environment that a job wants: its key, what is in place, what the store has.

In: the spec and the job's environment. Out: `Looked`. Only what an interrupted start has left is put in order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.env.image_target import clear
from bootseer.env.keying import Keyed, make_key, unpinned_line
from bootseer.env.markers import Entry, Marker, Markers, is_clean, open_markers
from bootseer.env.reads import GUESSED, Reads
from bootseer.env.resolving import like, resolve, with_each
from bootseer.env.restore import recover
from bootseer.env.restore_there import paths_of, state_of
from bootseer.env.spec import SetupSpec
from bootseer.env.store import EnvStore, Found
from bootseer.env.subtree import subtree
from bootseer.env.unclean import why_unclean
from bootseer.env.used_folders import UsedFolder
from bootseer.env.walk import walk
from bootseer.errors import BootseerError, ConfigError, KeyUnknown, NoSuchPlace, StorageTimeout
from bootseer.storage import open_store
from bootseer.storage.paths import redact
from bootseer.storage.places import check_place
from bootseer.tree.index import Index
from bootseer.trust import Trust

Say = Callable[[str], object]
OnWait = Callable[[bool], object]


class There(NamedTuple):
    """An environment in its place."""

    key: str
    tree: str  # "": set-up was run here, and what it made is in no store
    base: Mapping[str, str]  # what set-up began with
    made_s: float  # since the epoch
    reads: Reads | None = None  # by which the key is made; None: that is not known
    expires_s: float | None = None  # since the epoch; None: when its key says so


class Looked(NamedTuple):
    """See the module's docstring."""

    keyed: Keyed
    store: EnvStore | None
    found: Found | None  # in the store
    there: There | None  # with this key, and not too old
    cannot: str  # why nothing that is built here could be published; "" if it could
    expected: Mapping[str, str] = {}  # `restore_there.state_of` each target, of just before the key was made
    unclean: str = ""  # why set-up does not begin with what the key says; "" if it does
    is_silent: bool = False  # the store did not answer

    @property
    def tree(self) -> str:
        """That a start would use; "" for none."""
        if self.found is not None:
            return self.found.snapshot.tree
        return "" if self.there is None else self.there.tree


def look(
    spec: SetupSpec,
    environ: Mapping[str, str],
    say: Say,
    wait_s: float,
    on_wait: OnWait = lambda _: None,
    fell_back: Say | None = None,
    used: UsedFolder | None = None,
    damaged: str = "",
) -> Looked:
    """Args: wait_s: for another process that is at the targets. on_wait: told when that begins (True) and ends.
    fell_back: told why what is kept cannot be used; by default `say` is. used: a folder of ours that the job has.
    damaged: a tree of the store that is not what it should be; who has it in its place cannot make it anew.

    Raises: KeyUnknown, LaunchError, StorageError when it cannot be told what there is; StorageTimeout when another
        process is at the targets; ConfigError: there can be no environment; NoSuchPlace: no such store.
    """
    guessed = list(spec.targets) or default_targets(spec.python)
    lists = _Lists(spec, environ)
    now = _keyed(spec, environ, guessed, say, wait_s, on_wait, used, lists)
    if {os.path.realpath(each) for each in now.keyed.targets} != {os.path.realpath(each) for each in guessed}:
        # it has its environment elsewhere
        now = _keyed(spec, environ, now.keyed.targets, say, wait_s, on_wait, used, lists)
    keyed, there, expected, unclean = now
    for note in keyed.notes:
        say(note)
    if keyed.unpinned:
        say(unpinned_line(keyed.unpinned, keyed.max_age_s))
    if not spec.store:
        return Looked(keyed, None, None, there, "there is no --env-store", expected, unclean)
    refused: list[str] = []
    try:
        store = open_env_store(spec.store, environ, say)
        if there is not None:
            found = aio.run_sync(store.find(keyed.key, time.time(), refused.append))
        else:
            resolved = aio.run_sync(resolve(store, keyed, keyed.look(environ, say), time.time(), refused.append))
            keyed, found = resolved.keyed, resolved.found
        if found is None and not refused:
            aio.run_sync(check_place(spec.store))
    except NoSuchPlace as error:
        raise NoSuchPlace(f"--env-store {error}") from error
    except BootseerError as error:
        for line in refused:
            say(line)
        (fell_back or say)(f"the environment store cannot be used: {error}")
        is_silent = isinstance(error, StorageTimeout)
        return Looked(keyed, None, None, there, str(error), expected, unclean, is_silent)
    for note in keyed.unknown if keyed.reads is not None and keyed.reads.how == GUESSED else ():
        say(note)
    for line in refused:
        (say if found is not None or there is not None else fell_back or say)(line)
    has_other = found is not None
    if found is not None and there is not None and there.tree != found.snapshot.tree:
        # Pinned or not: what they depend on may be of other versions, and one over the other gives both.
        if there.tree:
            say(
                f"{', '.join(keyed.targets)}: has another environment of this key than the store by now, and it is"
                " used: make the folder anew to get the store's"
            )
        found = None
    cannot = ""
    if there is not None and (found is None or (damaged and found.snapshot.tree == damaged)):
        cannot = "it is in its place already, so it cannot be told what set-up did"
        if not has_other:
            say(not_in_store_line(keyed, store))
    elif not store.store.features.creates_if_absent:
        cannot = "this store cannot create a file exactly once"
        if found is None:
            say(
                f"warning: {redact(store.url)}: {cannot}, so nothing is published there:"
                " every node installs for itself"
            )
    elif unclean and found is None:
        cannot = unclean
        say(f"warning: {cannot}, so what set-up makes is not kept")
    return Looked(keyed, store, found, there, cannot, expected, unclean)


def look_again(
    looked: Looked, spec: SetupSpec, environ: Mapping[str, str], used: UsedFolder | None = None
) -> Looked:
    """The same by who is alone at the targets now: another job may have been there, inputs may have changed.

    Raises: ConfigError, LaunchError, StorageError.
    """
    now = _key_now(spec, environ, looked.keyed.targets, used, _Lists(spec, environ))
    keyed = now.keyed
    if now.there is None:
        keyed = like(looked.keyed, keyed, keyed.look(environ))
    found = looked.found if keyed.key == looked.keyed.key else None
    return Looked(keyed, looked.store, found, now.there, looked.cannot, now.expected, now.unclean)


class _Now(NamedTuple):
    """Of targets; as in Looked."""

    keyed: Keyed
    there: There | None
    expected: Mapping[str, str]
    unclean: str


def _keyed(
    spec: SetupSpec,
    environ: Mapping[str, str],
    targets: list[str],
    say: Say,
    wait_s: float,
    on_wait: OnWait,
    used: UsedFolder | None,
    lists: _Lists,
) -> _Now:
    """What `_key_now` finds when no other process is at the targets any more."""
    try:
        try:
            notes = recover(targets, environ=environ, wait_s=0.0)
        except StorageTimeout:
            on_wait(True)
            notes = recover(targets, environ=environ, wait_s=wait_s)
            on_wait(False)
    except ConfigError as error:
        raise KeyUnknown(str(error)) from error  # nobody can be alone there
    for note in notes:
        say(note)
    return _key_now(spec, environ, targets, used, lists)


class _Lists:
    """What set-ups have read, of the store, for what is in place of which that is not known."""

    def __init__(self, spec: SetupSpec, environ: Mapping[str, str]) -> None:
        self._spec, self._environ = spec, environ

    def find(self, guess: str) -> list[Reads]:
        """None of a store that fails: it is told of later."""
        if not self._spec.store:
            return []
        try:
            store = open_env_store(self._spec.store, self._environ, lambda _: None)
            return aio.run_sync(store.reads.find(guess))
        except BootseerError:
            return []


def _key_now(
    spec: SetupSpec,
    environ: Mapping[str, str],
    targets: Sequence[str],
    used: UsedFolder | None,
    lists: _Lists,
) -> _Now:
    """The key, and what is in place, if that has it: else the key is that of set-up on top of what is there."""
    there = find_there(targets, environ)
    if there is not None:
        keyed = make_key(spec, environ, known_base=there.base)
        known = [there.reads] if there.reads is not None else lists.find(keyed.guess_key)
        for candidate in with_each(keyed, known, keyed.look(environ)):
            if is_current(there, candidate, time.time()):
                return _Now(candidate, there, {}, "")
    if spec.venv_of:
        # Set-up begins with nothing; if another job uses what is there, the key is that of set-up on top.
        clear(spec, used)
    # In this order: what changes while the key is made is seen by who compares later.
    expected = states_of(targets) if spec.store else {}
    return _Now(make_key(spec, environ), None, expected, why_unclean(targets, environ))


def states_of(targets: Sequence[str]) -> dict[str, str]:
    """`restore_there.state_of` each of them, by resolved path. Raises: StorageError, ConfigError."""
    return {real: state_of(real) for real in map(os.path.realpath, targets)}


def default_targets(python: str) -> list[str]:
    """PURE but for a look: the environment that an interpreter lies in."""
    prefix = os.path.dirname(os.path.dirname(python))
    has_own = os.path.isfile(f"{prefix}/pyvenv.cfg") or os.path.isdir(f"{prefix}/conda-meta")
    return [prefix] if python and has_own else []


def open_env_store(url: str, environ: Mapping[str, str], say: Say) -> EnvStore:
    """Raises: ConfigError."""
    trust = Trust.load(environ)

    async def begin() -> EnvStore:
        return EnvStore(open_store(url), url, trust, say=say)

    return aio.run_sync(begin())


def is_still_there(there: There, targets: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether no job has changed targets since they were found so: by their markers, mostly without a walk."""
    try:
        for target in map(os.path.realpath, targets):
            markers = open_markers(environ, target)
            if markers.unclean(target) is not None:
                now = find_there(targets, environ)
                return now is not None and now[:3] == there[:3]
            marker = markers.read(target)
            if marker is None or (marker.key, marker.tree, marker.base) != there[:3]:
                return False
    except BootseerError:
        return False
    return True


def covers(index: Index, targets: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a tree has something for each name that the environment in its place made, changed or took away.

    Then it can go over that one, and nothing is left of it.
    """
    for number, target in enumerate(map(os.path.realpath, targets)):
        markers = open_markers(environ, target)
        marker = markers.read(target)
        paths = None if marker is None else markers.paths(marker)
        if paths is None or not set(paths) <= set(paths_of(subtree(index, str(number).encode()))):
            return False
    return True


def find_there(targets: Sequence[str], environ: Mapping[str, str]) -> There | None:
    """What all targets have, as their markers say, if they are still like that."""
    found: There | None = None
    for target in map(os.path.realpath, targets):
        try:
            markers = open_markers(environ, target)
            marker = markers.read(target)
            if marker is None:
                return None
            now, unclean = walk(target), markers.unclean(target)
            if unclean is not None and not unclean.is_over and not is_clean(unclean, now):
                return None
            if not markers.is_there(marker, now):
                return None
        except BootseerError:
            return None
        this = There(marker.key, marker.tree, marker.base, markers.made_s(target), marker.reads, marker.expires_s)
        if found is not None and found[:3] != this[:3]:
            return None
        found = this
    return found


def is_current(there: There, keyed: Keyed, now_s: float) -> bool:
    """PURE: whether it is the environment of this key, and not too old."""
    if there.key != keyed.key or (there.expires_s is not None and now_s >= there.expires_s):
        return False
    return keyed.max_age_s is None or now_s < there.made_s + keyed.max_age_s


def mark(
    targets: Sequence[tuple[str, Mapping[bytes, Entry], Sequence[bytes]]],
    key: str,
    tree: str,
    base: Mapping[str, str],
    environ: Mapping[str, str],
    reads: Reads | None = None,
    expires_s: float | None = None,
) -> None:
    """Notes what targets have now; each with how it was walked, and the names that count. Raises: StorageError.

    Args: reads: by which the key is made. expires_s: since the epoch.
    """
    for target, after, paths in targets:
        real = os.path.realpath(target)
        markers: Markers = open_markers(environ, real)
        marker = Marker(target=real, key=key, tree=tree, base=dict(base), reads=reads, expires_s=expires_s)
        markers.write(marker, after, paths)


def not_in_store_line(keyed: Keyed, store: EnvStore) -> str:
    """PURE: why nothing is published although nothing is there."""
    return (
        f"warning: the environment is in its place here, but not in {redact(store.url)}, where nobody can put it"
        f" from here: make {', '.join(keyed.targets)} anew, and the next start, or `bootseer env snapshot`, puts"
        " it there"
    )
