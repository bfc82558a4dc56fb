"""`bootseer env restore`: restores an environment of the store to its targets, or to other directories.

A snapshot has the changes of set-up, so it needs the state before set-up: that is checked before anything is
written. Only bootrun starts ranks in mounted environments; this command unpacks files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted
from bootseer.env.commands.common import find_key, local_key, opened, read_document, shown
from bootseer.env.key.document import KeyDocument
from bootseer.env.key.explain import shown as plain
from bootseer.env.key.targets import check_target
from bootseer.env.reads.read_list import Reads
from bootseer.env.restore.restore import THERE, UNPACK, recover, restore
from bootseer.env.service.look import find_in_place
from bootseer.env.spec import SetupSpec
from bootseer.env.store.admissible import find_target_mismatch
from bootseer.env.store.env_tree import StoredTree
from bootseer.env.store.snapshot import Snapshot
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.errors import ConfigError, EnvError, IntegrityError
from bootseer.logs import get_logger
from bootseer.tree.index import Index
from bootseer.trust import Trust

_log = get_logger(__name__)

Count = Callable[[int, int], None]  # more bytes and files
_VENV = b"pyvenv.cfg"


class RestoreResult(NamedTuple):
    key: str
    found: FoundSnapshot
    targets: list[str]
    how: str  # there or unpack
    seconds: float
    skipped: dict[str, int]  # attributes that this user or the file system cannot set -> number of files


def restore_key(
    url: str, text: str, to: Sequence[str], environ: Mapping[str, str], *, count: Count
) -> RestoreResult:
    """Restore a key, or its first letters. `to`: absolute directories, one for each target; none: the targets.

    Raises: EnvError if there is none; ConfigError, StorageError, IntegrityError.
    """
    with opened(url, trust=Trust.load(environ)) as envs:
        key = find_key(envs, text)
        found = _find(envs, key, f"`bootseer env list --env-store {shown(url)}` lists the environments")
        return _put(envs, found, read_document(envs, key), to, environ, count, is_of_here=False)


def restore_spec(spec: SetupSpec, to: Sequence[str], environ: Mapping[str, str], *, count: Count) -> RestoreResult:
    """Restore the environment of a start now. Raises: as `restore_key`."""
    with opened(spec.store, trust=Trust.load(environ)) as envs:
        here = local_key(spec, environ, envs, recovers=True)
        keyed, there, found = here.keyed, here.there, here.found
        if found is None:
            found = _find(envs, keyed.key, "`bootseer env explain` with the same flags shows why")
        if there is not None and there.tree != found.snapshot.tree and keyed.unpinned and not to:
            raise ConfigError(
                f"{', '.join(keyed.targets)}: was set up on this node, maybe with other versions; recreate the"
                " directory, or name another one with --to"
            )
        # The key covers the state of the targets, so the environment fits on top of it.
        return _put(envs, found, keyed.document, to, environ, count, is_of_here=not to, reads=keyed.reads)


def _find(envs: EnvStore, key: str, way_out: str) -> FoundSnapshot:
    found = aio.run_sync(envs.find(key, time.time()))
    if found is None:
        raise EnvError(f"{shown(envs.url)}: has no environment of the key {key} that can be used; {way_out}")
    return found


def _put(
    envs: EnvStore,
    found: FoundSnapshot,
    document: KeyDocument | None,
    to: Sequence[str],
    environ: Mapping[str, str],
    count: Count,
    *,
    is_of_here: bool,
    reads: Reads | None = None,
) -> RestoreResult:
    snapshot = found.snapshot
    if document is not None and (reason := find_target_mismatch(snapshot.targets, document.targets)):
        raise IntegrityError(f"{shown(envs.tree_url(snapshot))}: {reason}")
    if to and len(to) != len(snapshot.targets):
        raise ConfigError(
            f"--to: {counted(len(to), 'path')} for {counted(len(snapshot.targets), 'target')}:"
            f" {', '.join(snapshot.targets)}"
        )
    targets = [check_target(each, environ, envs.url) for each in to or snapshot.targets]
    for line in recover(targets, environ=environ):
        _log.line(line)
    index = aio.run_sync(envs.open(snapshot)).index
    _check_began(snapshot, document, index, targets)
    if not is_of_here:
        _check_markers(snapshot, targets, environ)
    done = restore(
        snapshot,
        StoredTree(envs.tree_url(snapshot), snapshot.tree, environ=environ),
        targets=targets,
        base=document.base if document is not None else {},
        reads=reads,
        ways=(THERE, UNPACK),
        on_progress=count,
        environ=environ,
        wait_s=60.0,
    )
    for line in (*done.failures, *done.notes):
        _log.line(line)
    aio.run_sync(envs.touch(found, time.time(), document.guess if document is not None else ""))
    return RestoreResult(snapshot.key, found, targets, done.how, done.took_s, dict(done.skipped))


def _check_began(snapshot: Snapshot, document: KeyDocument | None, index: Index, targets: Sequence[str]) -> None:
    """Raise ConfigError if the virtual environment is missing with which set-up began."""
    if document is None or document.base.get("is_venv") != "true":
        return
    for number, (old, target) in enumerate(zip(snapshot.targets, targets, strict=True)):
        path = b"%d/%s" % (number, _VENV)
        has_venv = any(name == _VENV and index.path(entry) == path for entry, name in enumerate(index.names))
        is_prefix = document.base.get("prefix") == old
        if is_prefix and not has_venv and not os.path.lexists(os.path.join(target, os.fsdecode(_VENV))):
            version = plain(document.base.get("version", "3"), 20)
            raise ConfigError(
                f"{target}: set-up began with a virtual environment, which is missing; create it first with"
                f" `python{'.'.join(version.split('.')[:2])} -m venv {target}`"
            )


def _check_markers(snapshot: Snapshot, targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a target has another environment: the two must not be mixed."""
    for target in targets:
        there = find_in_place([target], environ)
        if there is not None and there.key != snapshot.key:
            raise ConfigError(
                f"{target}: has the environment {there.key[:12]} already, and this one would be mixed with it;"
                " recreate the directory, or name another one with --to"
            )
