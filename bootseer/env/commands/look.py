"""`bootseer env list`, `explain`, `verify`, `gc`, `rm`: inspect a store, and explain why a start found nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bootseer import aio
from bootseer.env.commands.common import (
    LocalKey,
    Progress,
    check_document,
    find_key,
    load_document,
    local_key,
    opened,
    owner,
    shown,
)
from bootseer.env.key import explain as explaining
from bootseer.env.key.document import ABSENT, KeyDocument
from bootseer.env.key.explain import Explanation
from bootseer.env.key.keying import Keyed
from bootseer.env.reads.read_list import GUESSED
from bootseer.env.service.resolving import apply_reads
from bootseer.env.spec import SetupSpec
from bootseer.env.store import collecting
from bootseer.env.store.collecting import GcResult, RemoveResult
from bootseer.env.store.lease import BuilderLease
from bootseer.env.store.store import EnvStore, FoundSnapshot, ListedKey
from bootseer.errors import EnvError, IntegrityError, NotFound
from bootseer.logs import get_logger, sent_to
from bootseer.tree.verifying import VerificationResult
from bootseer.trust import Trust

_log = get_logger(__name__)

MAX_COMPARED = 256  # documents, the newest first
MAX_GUESSES = 8  # whose lists of reads are fetched
MAX_SHOWN = 12  # names of reads
MAX_NAMED = 10_000  # faults that are listed; all are counted


# ---- list ----------------------------------------------------------------------------------------------------


def list_store(url: str, environ: Mapping[str, str]) -> tuple[list[ListedKey], float]:
    """List all keys, the newest first, and the time at which expiry was checked. Raises: StorageError."""
    now_s = time.time()
    with opened(url, trust=Trust.load(environ)) as envs:
        listed = aio.run_sync(envs.list(now_s))
    return sorted(listed, key=lambda each: (-_made_s(each), each.key)), now_s


def to_record(listed: ListedKey) -> dict[str, Any]:
    """Convert to a table for JSON."""
    record: dict[str, Any] = {"key": listed.key, "refused": listed.refused, "stored_bytes": listed.stored_bytes}
    found = listed.found
    if found is not None:
        record |= msgspec.to_builtins(found.snapshot)
        record |= {"because": found.because, "generation": found.generation, "used_s": found.used_s}
    return record | {"is_usable": found is not None}


def _made_s(listed: ListedKey) -> float:
    return listed.found.snapshot.created_s if listed.found is not None else 0.0


# ---- explain -------------------------------------------------------------------------------------------------


class StartExplanation(NamedTuple):
    """Whether a start now would find an environment, and if not, why."""

    keyed: Keyed
    found: FoundSnapshot | None
    refused: list[str]  # files that are not used, with reasons
    builder: str  # owner of the lease, if it is being built now, else ""
    nearest: Explanation | None  # differences from the nearest one, or from the requested one
    compared: int  # documents
    candidates: int  # trusted lists of set-up reads

    @property
    def lines(self) -> list[str]:
        """Lines for the user; none for a hit without a comparison."""
        lines = [] if self.nearest is None else explaining.explain_lines(self.nearest, 100)
        if self.found is not None:
            return [line.replace("missed because ", "", 1) for line in lines]
        if self.builder:
            return [f"missed because it is not finished: {self.builder} is building it"]
        if self.refused and not self.candidates:
            lines = ["missed although the store has an environment of these commands: it is not trusted"]
        elif self.nearest is not None and self.nearest.key == self.keyed.key and not self.refused:
            lines = [f"missed although the store has its document: {_NOTHING}"]
        return [*lines, *(f"not used: {each}" for each in self.refused)]

    @property
    def inputs(self) -> list[str]:
        """Lines for the user: the inputs as observed, and as named by the commands."""
        guessed = f"the commands name (guessed): {_few(self.keyed.guessed_names)}"
        reads = self.keyed.reads
        if reads is None:
            return ["set-up reads (observed): nothing yet, as it has not run; the key is a first guess", guessed]
        if reads.how == GUESSED:
            whole = "; the whole working directory counts" if reads.is_whole else ""
            return [f"set-up reads (observed): nothing, as it could not be watched{whole}", guessed]
        found = self.keyed.document.reads
        missing = [name for name, state in found.items() if state == ABSENT]
        lines = [f"set-up reads (observed): {_few([name for name in found if name not in missing])}"]
        if missing:
            lines.append(f"set-up looked for, and did not find (observed): {_few(missing)}")
        return [*lines, guessed]


def _few(names: Sequence[str]) -> str:
    """Join a few names, those of the user before those of parent directories and the system."""
    ordered = sorted(names, key=lambda name: (name.startswith(("/", "~/")) or name.endswith(" above)"), name))
    more = f" and {len(names) - MAX_SHOWN} more (--json has all)" if len(names) > MAX_SHOWN else ""
    return (", ".join(map(explaining.shown, ordered[:MAX_SHOWN])) or "nothing") + more


_NOTHING = "it has expired, or its builder ended before it was published"


def explain(spec: SetupSpec, environ: Mapping[str, str], other: str) -> StartExplanation:
    """Explain the hit or miss of a start now. Args: other: key of the environment to compare, "" for the nearest.

    Raises: as `make_key`; NotFound; StorageError.
    """
    of_key: list[str] = []
    of_others: list[str] = []
    with opened(spec.store, trust=Trust.load(environ), may_be_new=True) as envs:
        here = local_key(spec, environ, envs, refused=of_key.append)
        keyed, found = here.keyed, here.found
        documents = []
        with sent_to(of_others.append):
            if other:
                documents = [_document_of(envs, find_key(envs, other))]
            elif found is None:
                documents = _documents(envs)
            others = [] if found is not None else _other_documents(envs, here, documents, environ)
        leases = BuilderLease(envs.store, owner=owner())
        seen = aio.run_sync(leases.look(keyed.key, is_logged=False)) if found is None else None
    for line in of_others:
        _log.line(line)
    start = keyed.document
    if keyed.reads is None:
        start = others[0] if others else keyed.guess
    nearest = explaining.explain(start, documents, others) if documents or found is None else None
    builder = seen.holder.owner if seen is not None and seen.is_working else ""
    return StartExplanation(keyed, found, of_key, builder, nearest, len(documents), len(here.candidates))


def _other_documents(
    envs: EnvStore, here: LocalKey, documents: Sequence[tuple[str, KeyDocument]], environ: Mapping[str, str]
) -> list[KeyDocument]:
    """Return the documents of this start for the reads of other set-ups, also of other commands and bases."""
    keyed = here.keyed
    guesses = dict.fromkeys(document.guess for _, document in documents if document.guess != keyed.guess_key)
    lists = [
        reads
        for guess in [each for each in guesses if each][:MAX_GUESSES]
        for reads in aio.run_sync(envs.reads.find(guess))
    ]
    found = apply_reads(keyed, lists, keyed.look(environ))
    return [each.document for each in (*here.candidates, *found)]


def _documents(envs: EnvStore) -> list[tuple[str, KeyDocument]]:
    found = []
    for each in aio.run_sync(envs.documents(MAX_COMPARED)):
        try:
            found.append((each.key, check_document(each.key, each.data, shown(envs.url))))
        except IntegrityError:
            continue  # of another version
    return found


def _document_of(envs: EnvStore, key: str) -> tuple[str, KeyDocument]:
    return key, load_document(envs, key)


# ---- verify --------------------------------------------------------------------------------------------------


class VerifyResult(NamedTuple):
    """The result of verifying all blocks of an environment."""

    key: str
    tree: str  # digest, "" where there is none to verify
    because: str  # why it is trusted
    checked: VerificationResult | None  # None: it could not be opened
    error: str  # why not

    @property
    def is_right(self) -> bool:
        return self.checked is not None and not self.checked.faults


def verify(url: str, keys: Sequence[str], environ: Mapping[str, str], *, progress: Progress) -> list[VerifyResult]:
    """Verify all blocks in the store, without caches. `keys`: full or abbreviated; none: all usable ones.

    Raises: EnvError for a key without an environment; StorageError if the store cannot be read at all.
    """
    with opened(url, trust=Trust.load(environ)) as envs:
        now_s = time.time()
        chosen = [find_key(envs, each) for each in keys]
        if not keys:
            chosen = [each.key for each in aio.run_sync(envs.list(now_s)) if each.found is not None]
        found = {key: aio.run_sync(envs.find(key, now_s)) for key in chosen}
        for key, each in found.items():
            if each is None:
                raise EnvError(f"{shown(url)}: has no environment of the key {key} that can be used")
        return [_verify(envs, each, progress) for each in found.values() if each is not None]


def _verify(envs: EnvStore, found: FoundSnapshot, progress: Progress) -> VerifyResult:
    snapshot = found.snapshot
    try:
        checked = aio.run_sync(envs.verify(found, progress))
    except (IntegrityError, NotFound) as error:
        return VerifyResult(snapshot.key, snapshot.tree, found.because, None, str(error))
    return VerifyResult(snapshot.key, snapshot.tree, found.because, checked, "")


# ---- gc and rm -----------------------------------------------------------------------------------------------


def collect(
    url: str,
    environ: Mapping[str, str],
    *,
    max_bytes: int | None,
    unused_s: float | None,
    is_forced: bool = False,
    is_dry: bool,
) -> GcResult:
    """Collect garbage.

    Args: max_bytes: of all trees; unused_s: maximum time since the last use; None: no limit. is_forced: also what
        jobs use, or used within two hours.

    Raises: ConfigError for a read-only store; StorageError.
    """
    with opened(url, trust=Trust.load(environ)) as envs:
        return aio.run_sync(envs.gc(max_bytes, unused_s, time.time(), takes_recent=is_forced, is_dry=is_dry))


def remove(
    url: str, keys: Sequence[str], environ: Mapping[str, str], *, is_forced: bool, is_dry: bool
) -> RemoveResult:
    """Delete environments. `keys`: full or abbreviated. Raises: as bootseer.env.store.collecting.remove."""
    with opened(url, trust=Trust.load(environ)) as envs:
        chosen = [find_key(envs, each) for each in keys]
        return aio.run_sync(collecting.remove(envs.store, chosen, time.time(), is_forced=is_forced, is_dry=is_dry))
