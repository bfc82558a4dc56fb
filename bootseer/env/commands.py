"""What the commands of `bootseer env` share: the store, the key of a start here and now, keys by their beginnings.

The commands themselves are in commands_*.py, plain functions with plain results; bootseer.cli.env is their face.
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
from bootseer.env.document import KeyDocument, decode
from bootseer.env.keying import Keyed, make_key, unpinned_line
from bootseer.env.layout import document_path, is_key
from bootseer.env.reads import GUESSED
from bootseer.env.resolving import Resolved, resolve, with_each
from bootseer.env.restore import recover
from bootseer.env.setup_keeper_look import There, find_there, is_current
from bootseer.env.spec import SetupSpec
from bootseer.env.store import MOST_DOCUMENT_BYTES, EnvStore, Found
from bootseer.errors import ConfigError, IntegrityError, NotFound, StorageError, UsageError
from bootseer.storage import open_store, redact
from bootseer.storage.near import folder_of
from bootseer.tree.head import split_pin
from bootseer.trust import Trust
from bootseer.trust.reading import read_whole

Say = Callable[[str], object]  # a line for people
Progress = Callable[[int, int], object]  # bytes done, and in all
LEAST_LETTERS = 6  # of a key that is given by its beginning


@contextmanager
def opened(url: str, say: Say, *, trust: Trust | None = None, may_be_new: bool = False) -> Iterator[EnvStore]:
    """The environment store at a URL, for any number of calls of `aio.run_sync`.

    Args: may_be_new: a folder that is not there yet is an empty store; else somebody has mistyped it.
    Raises: UsageError without a URL; NotFound; ConfigError.
    """
    if not url:
        raise UsageError("no environment store is named: give --env-store URL, or set BOOTSEER_ENV_STORE")
    folder = folder_of(url)
    if folder and not may_be_new and not os.path.isdir(folder):
        raise NotFound(f"{folder}: there is no such folder, so no environment store; is that --env-store right?")
    believed = Trust.load() if trust is None else trust

    async def begin() -> EnvStore:
        return EnvStore(open_store(split_pin(url)[0]), url, believed, say=say)

    envs = aio.run_sync(begin())
    try:
        yield envs
    finally:
        aio.run_sync(envs.store.aclose())


class Here(NamedTuple):
    """A start here and now."""

    keyed: Keyed
    there: There | None  # the environment of this key, in its place already
    found: Found | None  # in the store
    candidates: list[Keyed]  # the same by each list of reads that the store has


def key_here(
    spec: SetupSpec,
    environ: Mapping[str, str],
    say: Say,
    envs: EnvStore | None = None,
    *,
    recovers: bool = False,
    refused: Say | None = None,
) -> Here:
    """The key of a start here and now: of targets that have its environment already it is that of before set-up.

    Args: say: also gets what the key cannot know. envs: knows what set-ups have read. recovers: what a killed run
    has left at the targets is completed, or undone, before. refused: as `EnvStore.find` has it.
    Raises: as `make_key` and `recover`; StorageError.
    """
    fresh = make_key(spec, environ)
    if recovers:
        lines = recover(fresh.targets, environ=environ)
        for line in lines:
            say(line)
        if lines:
            fresh = make_key(spec, environ)
    here: Here | None = None
    there = find_there(fresh.targets, environ)
    if there is not None:
        # Set-up of something else would begin with what is there: then that counts.
        known = make_key(spec, environ, known_base=there.base)
        lists = [] if envs is None else aio.run_sync(envs.reads.find(known.guess_key))
        candidates = with_each(known, lists if there.reads is None else [there.reads, *lists], known.look(environ))
        for candidate in candidates:
            if is_current(there, candidate, time.time()):
                found = None if envs is None else aio.run_sync(envs.find(candidate.key, time.time(), refused))
                here = Here(candidate, there, found, candidates)
                break
    if here is None:
        resolved = Resolved(fresh, None)
        if envs is not None:
            resolved = aio.run_sync(resolve(envs, fresh, fresh.look(environ, say), time.time(), refused))
        here = Here(resolved.keyed, None, resolved.found, list(resolved.candidates))
    for note in here.keyed.notes:
        say(note)
    if here.keyed.reads is not None and here.keyed.reads.how == GUESSED:
        for note in here.keyed.unknown:
            say(note)
    if here.keyed.unpinned:
        say(unpinned_line(here.keyed.unpinned, here.keyed.max_age_s))
    return here


def key_of_start(spec: SetupSpec, environ: Mapping[str, str], say: Say) -> Keyed:
    """The key of a start here and now; without a store, or one that fails, by what commands name.

    Raises: as `make_key`.
    """
    folder = folder_of(spec.store) if spec.store else ""
    if not spec.store or (folder and not os.path.isdir(folder)):
        return key_here(spec, environ, say).keyed
    try:
        with opened(spec.store, say) as envs:
            return key_here(spec, environ, say, envs).keyed
    except StorageError as error:
        say(f"warning: the environment store cannot be used, so the key is that of the first guess: {error}")
        return key_here(spec, environ, lambda _: None).keyed


def find_key(envs: EnvStore, text: str) -> str:
    """The key that a user means: all of it, or its first letters.

    Raises: ConfigError; NotFound when no key of the store begins so.
    """
    if is_key(text):
        return text
    if re.fullmatch(f"[0-9a-f]{{{LEAST_LETTERS},63}}", text) is None:
        raise ConfigError(
            f"{text[:80]!r} is no key of an environment: 64 hex digits, or at least the first {LEAST_LETTERS}"
        )
    found = sorted(entry.name for entry in aio.run_sync(envs.keys()) if entry.name.startswith(text))
    if not found:
        raise NotFound(f"{shown(envs.url)}: has no key that begins with {text}; `bootseer env list` shows them")
    if len(found) > 1:
        raise ConfigError(f"{text}: {len(found)} keys of {shown(envs.url)} begin so: give more of it")
    return found[0]


def read_document(envs: EnvStore, key: str, say: Say) -> KeyDocument | None:
    """The document of a key, which binds it by its sum; None when it is not there, or is another one."""
    try:
        return load_document(envs, key)
    except (StorageError, IntegrityError) as error:
        say(f"warning: the document of the key is not used: {error}")
        return None


def load_document(envs: EnvStore, key: str) -> KeyDocument:
    """Raises: NotFound; IntegrityError; StorageError."""
    data = aio.run_sync(read_whole(envs.store, document_path(key), MOST_DOCUMENT_BYTES))
    return check_document(key, data, f"{shown(envs.url)}: {document_path(key)}")


def check_document(key: str, data: bytes, where: str) -> KeyDocument:
    """Raises: IntegrityError."""
    if hashlib.sha256(data).hexdigest() != key:
        raise IntegrityError(f"{where}: is not the document of this key")
    return decode(data, where)


def shown(url: str) -> str:
    """For messages."""
    return redact(url)


def owner() -> str:
    """Of a lease: host and process, for people."""
    return f"{os.uname().nodename} (bootseer env, process {os.getpid()})"
