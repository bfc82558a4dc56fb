"""Shared parts of the commands of `bootseer env`: the store, the key of a start now, keys by their first letters.

The commands themselves are in commands_*.py, functions with plain results; bootseer.cli.env is their interface.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from bootseer import aio
from bootseer.env.key.document import KeyDocument, decode
from bootseer.env.key.keying import Keyed, make_key, unpinned_line
from bootseer.env.reads.read_list import GUESSED
from bootseer.env.restore.restore import recover
from bootseer.env.service.look import InstalledEnv, find_in_place, is_current
from bootseer.env.service.resolving import Resolved, apply_reads, resolve
from bootseer.env.spec import SetupSpec
from bootseer.env.store.reads_store import Refused
from bootseer.env.store.store import MAX_DOCUMENT_BYTES, EnvStore, FoundSnapshot
from bootseer.env.store_layout import document_path, is_key
from bootseer.errors import ConfigError, IntegrityError, NotFound, StorageError, UsageError
from bootseer.logs import get_logger
from bootseer.storage import open_store, redact
from bootseer.storage.local_stores import directory_of
from bootseer.storage.small_files import read_small
from bootseer.tree.head import split_pin
from bootseer.trust import Trust

_log = get_logger(__name__)

Progress = Callable[[int, int], object]  # bytes done, and in total
MIN_LETTERS = 6  # of an abbreviated key


@contextmanager
def opened(url: str, *, trust: Trust | None = None, may_be_new: bool = False) -> Iterator[EnvStore]:
    """Open the environment store at a URL, for any number of calls of `aio.run_sync`.

    Args: may_be_new: a missing directory is an empty store; else it is taken for a typing error.
    Raises: UsageError without a URL; NotFound; ConfigError.
    """
    if not url:
        raise UsageError("no environment store is named; give --env-store URL, or set BOOTSEER_ENV_STORE")
    directory = directory_of(url)
    if directory and not may_be_new and not os.path.isdir(directory):
        raise NotFound(f"{directory}: there is no such directory, so no environment store; check --env-store")
    trusted = Trust.load() if trust is None else trust

    async def begin() -> EnvStore:
        return EnvStore(open_store(split_pin(url)[0]), url, trusted)

    envs = aio.run_sync(begin())
    try:
        yield envs
    finally:
        aio.run_sync(envs.store.aclose())


class LocalKey(NamedTuple):
    """The key of a start now, and its environment."""

    keyed: Keyed
    there: InstalledEnv | None  # the environment of this key, if the targets have it already
    found: FoundSnapshot | None  # in the store
    candidates: list[Keyed]  # the key for each list of reads in the store


def local_key(
    spec: SetupSpec,
    environ: Mapping[str, str],
    envs: EnvStore | None = None,
    *,
    recovers: bool = False,
    is_logged: bool = True,
    refused: Refused | None = None,
) -> LocalKey:
    """Return the key of a start now; for targets that have its environment already, the key before set-up.

    Args: envs: has the lists of set-up reads. recovers: first complete or undo the work of a killed run at the
    targets. is_logged: also notes on facts that the key cannot contain. refused: gets why items of the store are
    skipped (default: it is logged).
    Raises: as `make_key` and `recover`; StorageError.
    """
    fresh = make_key(spec, environ)
    if recovers:
        lines = recover(fresh.targets, environ=environ)
        for line in lines:
            _log.line(line)
        if lines:
            fresh = make_key(spec, environ)
    here: LocalKey | None = None
    there = find_in_place(fresh.targets, environ)
    if there is not None:
        # Another set-up would begin with the present state: then that state counts.
        known = make_key(spec, environ, known_base=there.base)
        lists = [] if envs is None else aio.run_sync(envs.reads.find(known.guess_key, refused))
        candidates = apply_reads(
            known, lists if there.reads is None else [there.reads, *lists], known.look(environ)
        )
        for candidate in candidates:
            if is_current(there, candidate, time.time()):
                found = None if envs is None else aio.run_sync(envs.find(candidate.key, time.time(), refused))
                here = LocalKey(candidate, there, found, candidates)
                break
    if here is None:
        resolved = Resolved(fresh, None)
        if envs is not None:
            resolved = aio.run_sync(
                resolve(envs, fresh, fresh.look(environ, is_logged=True), time.time(), refused)
            )
        here = LocalKey(resolved.keyed, None, resolved.found, list(resolved.candidates))
    if not is_logged:
        return here
    for note in here.keyed.notes:
        _log.line(note)
    if here.keyed.reads is not None and here.keyed.reads.how == GUESSED:
        for note in here.keyed.unknown:
            _log.line(note)
    if here.keyed.unpinned:
        _log.line(unpinned_line(here.keyed.unpinned, here.keyed.max_age_s))
    return here


def key_of_start(spec: SetupSpec, environ: Mapping[str, str]) -> Keyed:
    """Return the key of a start now; without a usable store, from the files that commands name.

    Raises: as `make_key`.
    """
    directory = directory_of(spec.store) if spec.store else ""
    if not spec.store or (directory and not os.path.isdir(directory)):
        return local_key(spec, environ).keyed
    try:
        with opened(spec.store) as envs:
            return local_key(spec, environ, envs).keyed
    except StorageError as error:
        _log.warning("environment store disabled: %s; the key is that of the first guess", error)
        return local_key(spec, environ, is_logged=False).keyed


def find_key(envs: EnvStore, text: str) -> str:
    """Return the full key for a key or its first letters.

    Raises: ConfigError; NotFound if no key of the store begins with them.
    """
    if is_key(text):
        return text
    if re.fullmatch(f"[0-9a-f]{{{MIN_LETTERS},63}}", text) is None:
        raise ConfigError(
            f"{text[:80]!r} is not a key of an environment; give 64 hex digits, or {MIN_LETTERS} and more of them"
        )
    found = sorted(entry.name for entry in aio.run_sync(envs.keys()) if entry.name.startswith(text))
    if not found:
        raise NotFound(f"{shown(envs.url)}: has no key that begins with {text}; `bootseer env list` shows them")
    if len(found) > 1:
        raise ConfigError(f"{text}: {len(found)} keys of {shown(envs.url)} begin with it; give more digits")
    return found[0]


def read_document(envs: EnvStore, key: str) -> KeyDocument | None:
    """Read the document of a key, verified by its digest; None if it is missing or a different one."""
    try:
        return load_document(envs, key)
    except (StorageError, IntegrityError) as error:
        _log.warning("the document of the key is not used: %s", error)
        return None


def load_document(envs: EnvStore, key: str) -> KeyDocument:
    """Read the document of a key. Raises: NotFound; IntegrityError; StorageError."""
    data = aio.run_sync(read_small(envs.store, document_path(key), MAX_DOCUMENT_BYTES))
    return check_document(key, data, f"{shown(envs.url)}: {document_path(key)}")


def check_document(key: str, data: bytes, where: str) -> KeyDocument:
    """Verify and decode the document of a key. Raises: IntegrityError."""
    if hashlib.sha256(data).hexdigest() != key:
        raise IntegrityError(f"{where}: is not the document of this key")
    return decode(data, where)


def shown(url: str) -> str:
    """Return a URL for messages, without secrets."""
    return redact(url)


def owner() -> str:
    """Return the owner of a lease for messages: host and process."""
    return f"{os.uname().nodename} (bootseer env, process {os.getpid()})"
