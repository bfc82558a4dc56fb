"""`bootseer env restore`: an environment of the store is put into its targets, or into other folders.

A snapshot is what set-up changed, so it belongs over what set-up began with: that is looked at before anything is
written. Ranks are brought into mounted environments by bootrun alone; here files are unpacked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted
from bootseer.env.admissible import why_other_targets
from bootseer.env.commands import Say, find_key, key_here, opened, read_document, shown
from bootseer.env.document import KeyDocument
from bootseer.env.env_tree import StoredTree
from bootseer.env.explain import shown as plain
from bootseer.env.reads import Reads
from bootseer.env.restore import THERE, UNPACK, recover, restore
from bootseer.env.setup_keeper_look import find_there
from bootseer.env.snapshot import Snapshot
from bootseer.env.spec import SetupSpec
from bootseer.env.store import EnvStore, Found
from bootseer.env.targets import check_target
from bootseer.errors import ConfigError, EnvError, IntegrityError
from bootseer.tree.index import Index
from bootseer.trust import Trust

Count = Callable[[int, int], None]  # more bytes and files
_VENV = b"pyvenv.cfg"


class Put(NamedTuple):
    """What became of it."""

    key: str
    found: Found
    targets: list[str]
    how: str  # there or unpack
    seconds: float
    skipped: dict[str, int]  # attributes that this user or the file system cannot have, and how often


def restore_key(
    url: str, text: str, to: Sequence[str], environ: Mapping[str, str], *, say: Say, count: Count
) -> Put:
    """Of a key, or its first letters. `to`: absolute folders, one for each target; none: the targets themselves.

    Raises: EnvError when there is none; ConfigError, StorageError, IntegrityError.
    """
    with opened(url, say, trust=Trust.load(environ)) as envs:
        key = find_key(envs, text)
        found = _find(envs, key, f"`bootseer env list --env-store {shown(url)}` shows what there is")
        return _put(envs, found, read_document(envs, key, say), to, environ, say, count, is_of_here=False)


def restore_spec(spec: SetupSpec, to: Sequence[str], environ: Mapping[str, str], *, say: Say, count: Count) -> Put:
    """That of a start here and now. Raises: as `restore_key`."""
    with opened(spec.store, say, trust=Trust.load(environ)) as envs:
        here = key_here(spec, environ, say, envs, recovers=True)
        keyed, there, found = here.keyed, here.there, here.found
        if found is None:
            found = _find(envs, keyed.key, "`bootseer env explain` with the same flags says why")
        if there is not None and there.tree != found.snapshot.tree and keyed.unpinned and not to:
            raise ConfigError(
                f"{', '.join(keyed.targets)}: was set up here, maybe with other versions: make the folder anew, or"
                " name another one by --to"
            )
        # The key says what the targets have, and that the environment belongs on top of it.
        return _put(envs, found, keyed.document, to, environ, say, count, is_of_here=not to, reads=keyed.reads)


def _find(envs: EnvStore, key: str, way_out: str) -> Found:
    found = aio.run_sync(envs.find(key, time.time()))
    if found is None:
        raise EnvError(f"{shown(envs.url)}: has no environment of the key {key} that can be used: {way_out}")
    return found


def _put(
    envs: EnvStore,
    found: Found,
    document: KeyDocument | None,
    to: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
    count: Count,
    *,
    is_of_here: bool,
    reads: Reads | None = None,
) -> Put:
    snapshot = found.snapshot
    if document is not None and (reason := why_other_targets(snapshot.targets, document.targets)):
        raise IntegrityError(f"{shown(envs.tree_url(snapshot))}: {reason}")
    if to and len(to) != len(snapshot.targets):
        raise ConfigError(
            f"--to: {counted(len(to), 'folder')} for {counted(len(snapshot.targets), 'target')}:"
            f" {', '.join(snapshot.targets)}"
        )
    targets = [check_target(each, environ, envs.url) for each in to or snapshot.targets]
    for line in recover(targets, environ=environ):
        say(line)
    index = aio.run_sync(envs.open(snapshot)).index
    _check_began(snapshot, document, index, targets)
    if not is_of_here:
        _check_markers(snapshot, targets, environ)
    done = restore(
        snapshot,
        StoredTree(envs.tree_url(snapshot), snapshot.tree, environ=environ, log=lambda text: (say(text), None)[1]),
        targets=targets,
        base=document.base if document is not None else {},
        reads=reads,
        ways=(THERE, UNPACK),
        on_progress=count,
        environ=environ,
        wait_s=60.0,
    )
    for line in (*done.failures, *done.notes):
        say(line)
    aio.run_sync(envs.touch(found, time.time(), document.guess if document is not None else ""))
    return Put(snapshot.key, found, targets, done.how, done.took_s, dict(done.skipped))


def _check_began(snapshot: Snapshot, document: KeyDocument | None, index: Index, targets: Sequence[str]) -> None:
    """Raises ConfigError where the virtual environment is missing that set-up began with."""
    if document is None or document.base.get("is_venv") != "true":
        return
    for number, (old, target) in enumerate(zip(snapshot.targets, targets, strict=True)):
        path = b"%d/%s" % (number, _VENV)
        brings = any(name == _VENV and index.path(entry) == path for entry, name in enumerate(index.names))
        is_prefix = document.base.get("prefix") == old
        if is_prefix and not brings and not os.path.lexists(os.path.join(target, os.fsdecode(_VENV))):
            version = plain(document.base.get("version", "3"), 20)
            raise ConfigError(
                f"{target}: set-up began with a virtual environment, which is not there: make it first, by"
                f" `python{'.'.join(version.split('.')[:2])} -m venv {target}`"
            )


def _check_markers(snapshot: Snapshot, targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raises ConfigError where another environment is: the two together are neither."""
    for target in targets:
        there = find_there([target], environ)
        if there is not None and there.key != snapshot.key:
            raise ConfigError(
                f"{target}: has the environment {there.key[:12]} already, and this one would come on top of it:"
                " make the folder anew, or name another one by --to"
            )
