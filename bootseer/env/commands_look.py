"""`bootseer env list`, `explain`, `verify` and `gc`: what a store has, and why a start found nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bootseer import aio
from bootseer.env import explain as explaining
from bootseer.env.collecting import Collected
from bootseer.env.commands import (
    Here,
    Progress,
    Say,
    check_document,
    find_key,
    key_here,
    load_document,
    opened,
    owner,
    shown,
)
from bootseer.env.document import KeyDocument
from bootseer.env.explain import Explanation
from bootseer.env.keying import Keyed
from bootseer.env.lease import BuilderLease
from bootseer.env.reads import GUESSED
from bootseer.env.resolving import with_each
from bootseer.env.spec import SetupSpec
from bootseer.env.store import EnvStore, Found, Listed
from bootseer.errors import EnvError, IntegrityError, NotFound
from bootseer.tree.verifying import Verified
from bootseer.trust import Trust

MOST_COMPARED = 256  # documents, the newest first
MOST_GUESSES = 8  # whose reads are looked at
MOST_SHOWN = 12  # names that are read
MOST_NAMED = 10_000  # faults that are listed; all are counted


# ---- list ----------------------------------------------------------------------------------------------------


def list_store(url: str, environ: Mapping[str, str], *, say: Say) -> tuple[list[Listed], float]:
    """Every key, those made last first, and the time that expiry was judged by. Raises: StorageError."""
    now_s = time.time()
    with opened(url, say, trust=Trust.load(environ)) as envs:
        listed = aio.run_sync(envs.list(now_s))
    return sorted(listed, key=lambda each: (-_made_s(each), each.key)), now_s


def to_record(listed: Listed) -> dict[str, Any]:
    """For JSON."""
    record: dict[str, Any] = {"key": listed.key, "refused": listed.refused, "stored_bytes": listed.stored_bytes}
    found = listed.found
    if found is not None:
        record |= msgspec.to_builtins(found.snapshot)
        record |= {"because": found.because, "generation": found.generation, "used_s": found.used_s}
    return record | {"is_usable": found is not None}


def _made_s(listed: Listed) -> float:
    return listed.found.snapshot.created_s if listed.found is not None else 0.0


# ---- explain -------------------------------------------------------------------------------------------------


class Explained(NamedTuple):
    """Whether a start here and now would find an environment, and if not, why."""

    keyed: Keyed
    found: Found | None
    refused: list[str]  # what is there and is not used
    builder: str  # who builds it at this moment, "" for nobody
    nearest: Explanation | None  # what differs from the nearest one, or from the one that was asked for
    compared: int  # documents
    candidates: int  # lists of what set-ups have read that are believed

    @property
    def lines(self) -> list[str]:
        """For people; none for a hit that is compared with nothing."""
        lines = [] if self.nearest is None else explaining.lines(self.nearest, 100)
        if self.found is not None:
            return [line.replace("missed because ", "", 1) for line in lines]
        if self.builder:
            return [f"missed because it is not finished: {self.builder} builds it"]
        if self.refused and not self.candidates:
            lines = ["missed although set-up with these commands was kept: what there is of it is not believed"]
        elif self.nearest is not None and self.nearest.key == self.keyed.key and not self.refused:
            lines = [f"missed although its document is there: {_NOTHING}"]
        return [*lines, *(f"not used: {each}" for each in self.refused)]

    @property
    def inputs(self) -> list[str]:
        """For people: what counts, as it was observed, and as the commands say."""
        guessed = f"the commands name (guessed): {_few(self.keyed.guessed_names)}"
        reads = self.keyed.reads
        if reads is None:
            return ["what set-up reads is known once it has run (observed): nothing yet", guessed]
        if reads.how == GUESSED:
            whole = ", and all of the working folder counts" if reads.is_whole else ""
            return [f"what set-up reads could not be watched (observed): nothing{whole}", guessed]
        return [f"set-up reads (observed): {_few(list(self.keyed.document.reads))}", guessed]


def _few(names: Sequence[str]) -> str:
    """The user's own first, not what was looked up above and in the system."""
    ordered = sorted(names, key=lambda name: (name.startswith(("/", "~/")) or name.endswith(" above)"), name))
    more = f" and {len(names) - MOST_SHOWN} more (--json has all)" if len(names) > MOST_SHOWN else ""
    return (", ".join(map(explaining.shown, ordered[:MOST_SHOWN])) or "nothing") + more


_NOTHING = "it has expired, or its builder ended before it was published"


def explain(spec: SetupSpec, environ: Mapping[str, str], other: str, *, say: Say) -> Explained:
    """Args: other: key of the environment that is to be compared with, "" for the nearest.

    Raises: as `make_key`; NotFound; StorageError.
    """
    refused: list[str] = []
    with opened(spec.store, refused.append, trust=Trust.load(environ), may_be_new=True) as envs:
        here = key_here(spec, environ, say, envs)
        keyed, found = here.keyed, here.found
        of_key, refused[:] = list(refused), []
        documents = []
        if other:
            documents = [_document_of(envs, find_key(envs, other))]
        elif found is None:
            documents = _documents(envs)
        others = [] if found is not None else _otherwise(envs, here, documents, environ)
        seen = aio.run_sync(BuilderLease(envs.store, owner=owner()).look(keyed.key)) if found is None else None
    for line in refused:  # of other keys
        say(line)
    start = keyed.document
    if keyed.reads is None:
        start = others[0] if others else keyed.guess
    nearest = explaining.explain(start, documents, others) if documents or found is None else None
    builder = seen.holder.owner if seen is not None and seen.is_working else ""
    return Explained(keyed, found, of_key, builder, nearest, len(documents), len(here.candidates))


def _otherwise(
    envs: EnvStore, here: Here, documents: Sequence[tuple[str, KeyDocument]], environ: Mapping[str, str]
) -> list[KeyDocument]:
    """What the start would ask for by what other set-ups have read, of other commands and bases, too."""
    keyed = here.keyed
    guesses = dict.fromkeys(document.guess for _, document in documents if document.guess != keyed.guess_key)
    lists = [
        reads
        for guess in [each for each in guesses if each][:MOST_GUESSES]
        for reads in aio.run_sync(envs.reads.find(guess))
    ]
    found = with_each(keyed, lists, keyed.look(environ))
    return [each.document for each in (*here.candidates, *found)]


def _documents(envs: EnvStore) -> list[tuple[str, KeyDocument]]:
    found = []
    for each in aio.run_sync(envs.documents(MOST_COMPARED)):
        try:
            found.append((each.key, check_document(each.key, each.data, shown(envs.url))))
        except IntegrityError:
            continue  # of another version
    return found


def _document_of(envs: EnvStore, key: str) -> tuple[str, KeyDocument]:
    return key, load_document(envs, key)


# ---- verify --------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What came of looking at every block of an environment."""

    key: str
    tree: str  # digest, "" where there is none to look at
    because: str  # why it is believed
    checked: Verified | None  # None: it could not be opened
    error: str  # why

    @property
    def is_right(self) -> bool:
        return self.checked is not None and not self.checked.faults


def verify(
    url: str, keys: Sequence[str], environ: Mapping[str, str], *, say: Say, progress: Progress
) -> list[Verdict]:
    """Reads every block from the store, past all caches. `keys`: or their beginnings; none: all that are usable.

    Raises: EnvError for a key without an environment; StorageError when the store cannot be read at all.
    """
    with opened(url, say, trust=Trust.load(environ)) as envs:
        now_s = time.time()
        chosen = [find_key(envs, each) for each in keys]
        if not keys:
            chosen = [each.key for each in aio.run_sync(envs.list(now_s)) if each.found is not None]
        found = {key: aio.run_sync(envs.find(key, now_s)) for key in chosen}
        for key, each in found.items():
            if each is None:
                raise EnvError(f"{shown(url)}: has no environment of the key {key} that can be used")
        return [_verify(envs, each, progress) for each in found.values() if each is not None]


def _verify(envs: EnvStore, found: Found, progress: Progress) -> Verdict:
    snapshot = found.snapshot
    try:
        checked = aio.run_sync(envs.verify(found, progress))
    except (IntegrityError, NotFound) as error:
        return Verdict(snapshot.key, snapshot.tree, found.because, None, str(error))
    return Verdict(snapshot.key, snapshot.tree, found.because, checked, "")


# ---- gc ------------------------------------------------------------------------------------------------------


def collect(
    url: str,
    environ: Mapping[str, str],
    *,
    most_bytes: int | None,
    unused_s: float | None,
    is_dry: bool,
    say: Say,
) -> Collected:
    """Args: most_bytes: of all trees; unused_s: what was not used for so long goes. None: no such limit.

    Raises: ConfigError for a store that is only read; StorageError.
    """
    with opened(url, say, trust=Trust.load(environ)) as envs:
        return aio.run_sync(envs.gc(most_bytes, unused_s, time.time(), is_dry=is_dry))
