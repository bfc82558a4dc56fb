"""What a node has of the environment that a job wants: its key, what is in place, what the store has.

In: the spec and the job's environment. Out: `Looked`. Only what an interrupted start has left is put in order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.env.keying import Keyed, make_key
from bootseer.env.markers import Entry, Marker, Markers, open_markers
from bootseer.env.restore import recover
from bootseer.env.spec import SetupSpec
from bootseer.env.store import EnvStore, Found
from bootseer.env.walk import walk
from bootseer.errors import BootseerError
from bootseer.storage import open_store
from bootseer.trust import Trust

MOST_UNPINNED_TOLD = 5

Say = Callable[[str], object]


class There(NamedTuple):
    """An environment in its place."""

    key: str
    tree: str  # "": set-up was run here, and what it made is in no store
    base: Mapping[str, str]  # what set-up began with
    made_s: float  # since the epoch


class Looked(NamedTuple):
    """See the module's docstring."""

    keyed: Keyed
    store: EnvStore | None
    found: Found | None  # in the store
    there: There | None  # with this key, and not too old
    cannot: str  # why nothing that is built here could be published; "" if it could

    @property
    def tree(self) -> str:
        """That a start would use; "" for none."""
        if self.found is not None:
            return self.found.snapshot.tree
        return "" if self.there is None else self.there.tree


def look(spec: SetupSpec, environ: Mapping[str, str], say: Say, wait_s: float) -> Looked:
    """Args: wait_s: for another process that is at the targets.

    Raises: ConfigError, LaunchError, StorageError: there can be no environment.
    """
    guessed = list(spec.targets) or default_targets(spec.python)
    keyed, there = _keyed(spec, environ, guessed, say, wait_s)
    if {os.path.realpath(each) for each in keyed.targets} != {os.path.realpath(each) for each in guessed}:
        keyed, there = _keyed(spec, environ, keyed.targets, say, wait_s)  # it has its environment elsewhere
    for note in keyed.notes:
        say(note)
    if keyed.unpinned:
        say(unpinned_line(keyed))
    if not spec.store:
        return Looked(keyed, None, None, there, "there is no --env-store")
    try:
        store = open_env_store(spec.store, environ, say)
        found = aio.run_sync(store.find(keyed.key, time.time()))
    except BootseerError as error:
        say(f"the environment store cannot be used: {error}")
        return Looked(keyed, None, None, there, str(error))
    if found is not None and there is not None and there.tree != found.snapshot.tree and keyed.unpinned:
        found = None  # other versions may be in place, and what is put over them leaves traces of both
    cannot = ""
    if there is not None and found is None:
        cannot = "it is in its place already, so it cannot be told what set-up did"
    elif not store.store.features.creates_if_absent:
        cannot = "this store cannot create a file exactly once"
        if found is None:
            say(f"{store.url}: {cannot}, so nothing is published there: every node installs for itself")
    return Looked(keyed, store, found, there, cannot)


def _keyed(
    spec: SetupSpec, environ: Mapping[str, str], targets: list[str], say: Say, wait_s: float
) -> tuple[Keyed, There | None]:
    """The key, and what is in place, if that has it: else the key is that of set-up on top of what is there."""
    for note in recover(targets, environ=environ, wait_s=wait_s):
        say(note)
    there = find_there(targets, environ)
    if there is not None:
        keyed = make_key(spec, environ, known_base=there.base)
        if is_current(there, keyed, time.time()):
            return keyed, there
    return make_key(spec, environ), None


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


def find_there(targets: list[str], environ: Mapping[str, str]) -> There | None:
    """What all targets have, as their markers say, if they are still like that."""
    found: There | None = None
    for target in map(os.path.realpath, targets):
        try:
            markers = open_markers(environ, target)
            marker = markers.read(target)
            if marker is None or not markers.is_there(marker, walk(target)):
                return None
        except BootseerError:
            return None
        this = There(marker.key, marker.tree, marker.base, markers.made_s(target))
        if found is not None and found[:3] != this[:3]:
            return None
        found = this
    return found


def is_current(there: There, keyed: Keyed, now_s: float) -> bool:
    """PURE: whether it is the environment of this key, and not too old."""
    return there.key == keyed.key and (keyed.max_age_s is None or now_s < there.made_s + keyed.max_age_s)


def mark(
    targets: Sequence[tuple[str, Mapping[bytes, Entry], Sequence[bytes]]],
    key: str,
    tree: str,
    base: Mapping[str, str],
    environ: Mapping[str, str],
) -> None:
    """Notes what targets have now; each with how it was walked, and the names that count. Raises: StorageError."""
    for target, after, paths in targets:
        real = os.path.realpath(target)
        markers: Markers = open_markers(environ, real)
        markers.write(Marker(target=real, key=key, tree=tree, base=dict(base)), after, paths)


def unpinned_line(keyed: Keyed) -> str:
    """PURE: a warning."""
    shown = ", ".join(keyed.unpinned[:MOST_UNPINNED_TOLD])
    more = len(keyed.unpinned) - MOST_UNPINNED_TOLD
    others = f" and {more} more" if more > 0 else ""
    age = "" if keyed.max_age_s is None else f", so what is kept is used for {keyed.max_age_s / 86400:.3g} days"
    return f"warning: set-up is not pinned ({shown}{others}): another day it may give another environment{age}"
