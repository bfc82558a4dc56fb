"""Lookup of the environment of a job: its key, what is in place, what the store has.

In: the spec and the job's environment variables. Out: `LookupResult`. It changes nothing, except that it completes
or undoes an interrupted start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.env.capture.subtree import subtree
from bootseer.env.capture.walk import walk
from bootseer.env.key.keying import Keyed, make_key, unpinned_line
from bootseer.env.reads.read_list import GUESSED, Reads
from bootseer.env.restore.in_place import paths_of, state_of
from bootseer.env.restore.markers import Entry, Marker, Markers, is_clean, open_markers
from bootseer.env.restore.restore import recover
from bootseer.env.restore.used_directories import UsedDirectory
from bootseer.env.service.image_target import clear
from bootseer.env.service.resolving import apply_reads, resolve, with_reads_of
from bootseer.env.service.unclean import why_unclean
from bootseer.env.spec import SetupSpec
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.env.store.unwritable import why_unwritable
from bootseer.errors import BootseerError, ConfigError, KeyUnknown, NoSuchLocation, StorageTimeout
from bootseer.logs import get_logger
from bootseer.storage import open_store
from bootseer.storage.paths import redact
from bootseer.storage.places import check_url
from bootseer.tree.index import Index
from bootseer.trust import Trust

_log = get_logger(__name__)

OnWait = Callable[[bool], object]


class InstalledEnv(NamedTuple):
    """An environment in place."""

    key: str
    tree: str  # "": made by set-up on this node, and in no store
    base: Mapping[str, str]  # the state before set-up
    made_s: float  # since the epoch
    reads: Reads | None = None  # the reads of its key; None: unknown
    expires_s: float | None = None  # since the epoch; None: by the rule of its key


class LookupResult(NamedTuple):
    keyed: Keyed
    store: EnvStore | None
    found: FoundSnapshot | None  # in the store
    there: InstalledEnv | None  # with this key, and not too old
    cannot: str  # why nothing that is built here could be published; "" if it could
    expected: Mapping[str, str] = {}  # `in_place.state_of` each target, before the key was made
    unclean: str = ""  # why the state before set-up differs from the key; "" if it does not
    is_silent: bool = False  # the store did not answer
    is_on_top: bool = False  # the targets have another environment, and set-up would begin with it
    unwritable: str = ""  # why this node cannot write to the store; "" if it can, or if that is not known

    @property
    def tree(self) -> str:
        """The tree that a start would use; "" for none."""
        if self.found is not None:
            return self.found.snapshot.tree
        return "" if self.there is None else self.there.tree


def look_up(
    spec: SetupSpec,
    environ: Mapping[str, str],
    wait_s: float,
    on_wait: OnWait = lambda _: None,
    fell_back: Callable[[str], object] | None = None,
    used: UsedDirectory | None = None,
    damaged: str = "",
) -> LookupResult:
    """Look up the environment of a job.

    Args: wait_s: maximum time to wait for another process at the targets. on_wait: called with True when a wait
        begins, and with False when it ends. fell_back: receives why a stored environment cannot be used (default:
        it is logged). used: a directory of Bootseer that the job uses. damaged: a damaged tree of the store; a
        node that has it in place cannot build it again.
    Raises: KeyUnknown, LaunchError, StorageError if the lookup fails; StorageTimeout if another process is at the
        targets; ConfigError: no environment is possible; NoSuchLocation: no such store.
    """
    guessed = list(spec.targets) or default_targets(spec.python)
    lists = _StoredReadsOf(spec, environ)
    now = _keyed(spec, environ, guessed, wait_s, on_wait, used, lists)
    if {os.path.realpath(each) for each in now.keyed.targets} != {os.path.realpath(each) for each in guessed}:
        # its environment is elsewhere
        now = _keyed(spec, environ, now.keyed.targets, wait_s, on_wait, used, lists)
    keyed, there, expected, unclean = now[:4]
    for note in keyed.notes:
        _log.line(note)
    if keyed.unpinned:
        _log.line(unpinned_line(keyed.unpinned, keyed.max_age_s))
    if not spec.store:
        return LookupResult(keyed, None, None, there, "--env-store is not set", expected, unclean)
    refused: list[str] = []
    try:
        store = open_env_store(spec.store, environ)
        if there is not None:
            found = aio.run_sync(store.find(keyed.key, time.time(), refused.append))
        else:
            resolved = aio.run_sync(
                resolve(store, keyed, keyed.look(environ, is_logged=True), time.time(), refused.append)
            )
            keyed, found = resolved.keyed, resolved.found
        if found is None and not refused:
            aio.run_sync(check_url(spec.store))
    except NoSuchLocation as error:
        raise NoSuchLocation(f"--env-store {error}") from error
    except BootseerError as error:
        for line in refused:
            _log.info("%s", line)
        (fell_back or _log.info)(f"the environment store cannot be used: {error}")
        is_silent = isinstance(error, StorageTimeout)
        return LookupResult(keyed, None, None, there, str(error), expected, unclean, is_silent)
    for note in keyed.unknown if keyed.reads is not None and keyed.reads.how == GUESSED else ():
        _log.line(note)
    for line in refused:
        (_log.info if found is not None or there is not None else fell_back or _log.info)(line)
    has_other = found is not None
    unwritable = "" if has_other else why_unwritable(spec.store, checks_space=there is not None)
    if found is not None and there is not None and there.tree != found.snapshot.tree:
        # Dependencies may have other versions even if packages are pinned; both environments would be mixed.
        if there.tree:
            _log.info(
                "%s: has another environment of this key than the store, and it is used; recreate the"
                " directory to use the store's",
                ", ".join(keyed.targets),
            )
        found = None
    cannot = ""
    if there is not None and (found is None or (damaged and found.snapshot.tree == damaged)):
        cannot = "it is in place already, so the changes of set-up are unknown"
        if not has_other:
            _log.line(not_in_store_line(keyed, store, unwritable))
    elif not store.store.features.creates_if_absent:
        cannot = "this store cannot create a file exactly once"
        if found is None:
            _log.warning("%s: publishing disabled: %s; each node installs on its own", redact(store.url), cannot)
    elif unwritable:
        cannot = unwritable  # reported when set-up runs here: another node may build
    elif unclean and found is None:
        cannot = unclean
        _log.warning("%s; the result of set-up is not stored", cannot)
    return LookupResult(
        keyed, store, found, there, cannot, expected, unclean, is_on_top=now.is_on_top, unwritable=unwritable
    )


def look_again(
    looked: LookupResult, spec: SetupSpec, environ: Mapping[str, str], used: UsedDirectory | None = None
) -> LookupResult:
    """Repeat the lookup with exclusive access: other jobs may have changed the targets, inputs may have changed.

    Raises: ConfigError, LaunchError, StorageError.
    """
    now = _key_now(spec, environ, looked.keyed.targets, used, _StoredReadsOf(spec, environ))
    keyed = now.keyed
    if now.there is None:
        keyed = with_reads_of(looked.keyed, keyed, keyed.look(environ))
    found = looked.found if keyed.key == looked.keyed.key else None
    return looked._replace(
        keyed=keyed,
        found=found,
        there=now.there,
        expected=now.expected,
        unclean=now.unclean,
        is_silent=False,
        is_on_top=now.is_on_top,
    )


class _TargetState(NamedTuple):
    """The lookup result of targets, as in Looked."""

    keyed: Keyed
    there: InstalledEnv | None
    expected: Mapping[str, str]
    unclean: str
    is_on_top: bool = False


def _keyed(
    spec: SetupSpec,
    environ: Mapping[str, str],
    targets: list[str],
    wait_s: float,
    on_wait: OnWait,
    used: UsedDirectory | None,
    lists: _StoredReadsOf,
) -> _TargetState:
    """Return the result of `_key_now` once no other process is at the targets."""
    try:
        try:
            notes = recover(targets, environ=environ, wait_s=0.0)
        except StorageTimeout:
            on_wait(True)
            notes = recover(targets, environ=environ, wait_s=wait_s)
            on_wait(False)
    except ConfigError as error:
        raise KeyUnknown(str(error)) from error  # exclusive access is not possible there
    for note in notes:
        _log.line(note)
    return _key_now(spec, environ, targets, used, lists)


class _StoredReadsOf:
    """Lists of reads in the store, for environments in place without known reads."""

    def __init__(self, spec: SetupSpec, environ: Mapping[str, str]) -> None:
        self._spec, self._environ = spec, environ

    def find(self, guess: str) -> list[Reads]:
        """Return the lists; none if the store fails, which is reported later."""
        if not self._spec.store:
            return []
        try:
            store = open_env_store(self._spec.store, self._environ)
            return aio.run_sync(store.reads.find(guess, lambda _: None))
        except BootseerError:
            return []


def _key_now(
    spec: SetupSpec,
    environ: Mapping[str, str],
    targets: Sequence[str],
    used: UsedDirectory | None,
    lists: _StoredReadsOf,
) -> _TargetState:
    """Return the key of the environment in place, if it is current; else the key of set-up on top of it."""
    there = find_in_place(targets, environ)
    if there is not None:
        keyed = make_key(spec, environ, known_base=there.base)
        known = [there.reads] if there.reads is not None else lists.find(keyed.guess_key)
        for candidate in apply_reads(keyed, known, keyed.look(environ)):
            if is_current(there, candidate, time.time()):
                return _TargetState(candidate, there, {}, "")
    if spec.venv_of:
        # Set-up starts from an empty directory, unless another job uses it.
        clear(spec, used)
    # This order matters: a later comparison detects changes that happen while the key is made.
    expected = states_of(targets) if spec.store else {}
    unclean = why_unclean(targets, environ)
    return _TargetState(make_key(spec, environ), None, expected, unclean, is_on_top=there is not None)


def states_of(targets: Sequence[str]) -> dict[str, str]:
    """Return `in_place.state_of` each target, by resolved path. Raises: StorageError, ConfigError."""
    return {real: state_of(real) for real in map(os.path.realpath, targets)}


def default_targets(python: str) -> list[str]:
    """Return the environment that contains an interpreter. PURE but for file checks."""
    prefix = os.path.dirname(os.path.dirname(python))
    has_own = os.path.isfile(f"{prefix}/pyvenv.cfg") or os.path.isdir(f"{prefix}/conda-meta")
    return [prefix] if python and has_own else []


def open_env_store(url: str, environ: Mapping[str, str]) -> EnvStore:
    """Open an environment store. Raises: ConfigError."""
    trust = Trust.load(environ)

    async def begin() -> EnvStore:
        return EnvStore(open_store(url), url, trust)

    return aio.run_sync(begin())


def is_unchanged(there: InstalledEnv, targets: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether targets are unchanged since they were found, by their markers and mostly without a walk."""
    try:
        for target in map(os.path.realpath, targets):
            markers = open_markers(environ, target)
            if markers.unclean(target) is not None:
                now = find_in_place(targets, environ)
                return now is not None and now[:3] == there[:3]
            marker = markers.read(target)
            if marker is None or (marker.key, marker.tree, marker.base) != there[:3]:
                return False
    except BootseerError:
        return False
    return True


def covers(index: Index, targets: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a tree has an entry for each name that the environment in place created, changed or deleted.

    If so, it can replace that environment, and nothing of it remains.
    """
    for number, target in enumerate(map(os.path.realpath, targets)):
        markers = open_markers(environ, target)
        marker = markers.read(target)
        paths = None if marker is None else markers.paths(marker)
        if paths is None or not set(paths) <= set(paths_of(subtree(index, str(number).encode()))):
            return False
    return True


def find_in_place(targets: Sequence[str], environ: Mapping[str, str]) -> InstalledEnv | None:
    """Return the environment that all targets have by their markers, if they are unchanged."""
    found: InstalledEnv | None = None
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
        this = InstalledEnv(
            marker.key, marker.tree, marker.base, markers.made_s(target), marker.reads, marker.expires_s
        )
        if found is not None and found[:3] != this[:3]:
            return None
        found = this
    return found


def is_current(there: InstalledEnv, keyed: Keyed, now_s: float) -> bool:
    """PURE: return whether it is the environment of this key, and not too old."""
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
    """Write the markers of targets, each with its walk, and the names that count. Raises: StorageError.

    Args: reads: by which the key is made. expires_s: since the epoch.
    """
    for target, after, paths in targets:
        real = os.path.realpath(target)
        markers: Markers = open_markers(environ, real)
        marker = Marker(target=real, key=key, tree=tree, base=dict(base), reads=reads, expires_s=expires_s)
        markers.write(marker, after, paths)


def not_in_store_line(keyed: Keyed, store: EnvStore, unwritable: str) -> str:
    """PURE: return the warning for an environment that is in place but missing in the store.

    Args: unwritable: why the store cannot be written; "" if it can be.
    """
    if unwritable:
        return f"warning: the environment is in place here, but cannot be stored: {unwritable}"
    return (
        f"warning: the environment is in place here but not in {redact(store.url)}, and cannot be published from"
        f" here; recreate {', '.join(keyed.targets)}, and the next start, or `bootseer env snapshot`, publishes it"
    )
