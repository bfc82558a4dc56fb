"""Publishing of the result of set-up, while the ranks run.

In: a finished capture, the lease of its builder. Out: a snapshot in the store, and this node's marker for it. Only
other nodes of the job wait for it, if at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted, format_bytes
from bootseer.env.capture.capture import Built, Capture
from bootseer.env.key.document import encode
from bootseer.env.key.keying import Keyed
from bootseer.env.restore.sync import sync_later
from bootseer.env.service.look import LookupResult, mark
from bootseer.env.store.lease import Lease, LeaseUnavailable
from bootseer.env.store.snapshot import Snapshot, listed
from bootseer.errors import BootseerError, ConfigError
from bootseer.logs import get_logger
from bootseer.storage.paths import redact
from bootseer.tree.index import Index

_log = get_logger(__name__)

MAX_NAMED = 5


class PublishedTree(NamedTuple):
    """An environment that this node has published."""

    key: str
    digest: str  # of the tree
    built: Index
    targets: Sequence[str]


class PublishResult(NamedTuple):
    tree: str  # digest
    made: PublishedTree | None  # None: another node's


def publish(
    capture: Capture,
    looked: LookupResult,
    lease: Lease,
    setup_s: float,
    environ: Mapping[str, str],
    *,
    is_urgent: bool,
    replaces: int = 0,
) -> PublishResult:
    """Publish an environment. Return what is in the store now.

    Args: setup_s: duration of set-up. is_urgent: other nodes wait; otherwise runs at idle priority.
        replaces: the generation of a damaged snapshot.
    Raises: SourceChanged, CaptureRefused, ConfigError, StorageError, IntegrityError: nothing was published.
    """
    keyed, store = looked.keyed, looked.store
    assert store is not None, "a lease needs a store"
    began_s = time.monotonic()
    document, reads = encode(keyed.document), keyed.reads
    assert reads is not None, "set-up has run"
    signing = store.trust.signing_key()
    cannot = aio.run_sync(store.prepare(keyed.key, document, signing))
    if cannot is not None:
        raise ConfigError(cannot.why)
    lease.tell("set-up has ended; publishing its result")
    built = capture.build(store.packs(keyed.key).put, codec=store.codec, is_idle=not is_urgent)
    python = keyed.document.base.get("version", "").split(" ")[0]
    snapshot = describe(keyed, built, setup_s, time.time(), python)
    index_bytes = built.tree.index_bytes
    aio.run_sync(store.reads.publish(encode(keyed.guess), reads, signing))
    published = aio.run_sync(store.publish(snapshot, document, index_bytes, signing, replaces=replaces))
    if isinstance(published, LeaseUnavailable):
        raise ConfigError(published.why)
    facts = built.facts
    for note in facts.notes:
        _log.line(note)
    if facts.left_out:
        named = ", ".join(facts.left_out[:MAX_NAMED])
        _log.warning("left out of the environment, as they look like credentials or are not files: %s", named)
    if not published.is_ours:
        _log.info("the environment was published by another node meanwhile")
        return PublishResult(published.found.snapshot.tree, None)
    try:
        mark(capture.left(), keyed.key, snapshot.tree, keyed.document.base, environ, reads, snapshot.expires_s)
        sync_later(keyed.targets, environ)
    except BootseerError as error:  # it is in the store
        _log.warning("this node is not marked as set up: %s", error)
    _log.info(
        "the environment is stored in %s: %s, %s, published in %.1f s; %s",
        redact(store.url),
        counted(facts.files, "file"),
        format_bytes(facts.bytes),
        time.monotonic() - began_s,
        readers_of(keyed.targets, is_on_top=looked.is_on_top),
    )
    return PublishResult(snapshot.tree, PublishedTree(keyed.key, snapshot.tree, built.tree.tree, keyed.targets))


def readers_of(targets: Sequence[str], *, is_on_top: bool) -> str:
    """PURE: return which starts fetch it, for a line. Args: is_on_top: set-up began with another environment."""
    names = ", ".join(targets)
    if is_on_top:
        return f"only nodes with the previous environment in {names} fetch it; a new directory needs another one"
    return f"other nodes fetch it if {names} is there as it was before set-up"


def describe(keyed: Keyed, built: Built, setup_s: float, now_s: float, python: str) -> Snapshot:
    """PURE: return the snapshot of a tree that was built at `now_s` (since the epoch)."""
    facts, tree = built.facts, built.tree
    return Snapshot(
        key=keyed.key,
        tree=tree.digest,
        index_bytes=len(tree.index_bytes),
        targets=keyed.targets,
        created_s=now_s,
        expires_s=None if keyed.max_age_s is None else now_s + keyed.max_age_s,
        setup_s=setup_s,
        distributions="",
        python=python,
        files=facts.files,
        bytes=facts.bytes,
        deleted=facts.deleted,
        left_out=listed(facts.left_out),
        outside=listed(facts.outside),
        relocatable=True,
    )
