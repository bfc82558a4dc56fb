"""Publishes what set-up did, while the ranks run.

In: a capture that has ended, the lease that its builder holds. Out: a snapshot in the store, and the marker that
says this node has it. Nobody but other nodes of the job, if there are any, waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted
from bootseer.env.capture import Built, Capture
from bootseer.env.document import encode
from bootseer.env.keying import Keyed
from bootseer.env.lease import Cannot, Lease
from bootseer.env.settling import settle_later
from bootseer.env.setup_keeper_look import Looked, mark
from bootseer.env.snapshot import Snapshot, listed
from bootseer.errors import ConfigError
from bootseer.storage.paths import redact
from bootseer.tree.index import Index

MOST_NAMED = 5


class Made(NamedTuple):
    """An environment that this node has published."""

    key: str
    digest: str  # of the tree
    built: Index
    targets: Sequence[str]


class Published(NamedTuple):
    """What is in the store."""

    tree: str  # digest
    made: Made | None  # None: another node's


def publish(
    capture: Capture,
    looked: Looked,
    lease: Lease,
    setup_s: float,
    environ: Mapping[str, str],
    *,
    is_urgent: bool,
    say: Callable[[str], object],
    replaces: int = 0,
) -> Published:
    """What counts from now on.

    Args: setup_s: how long the commands took. is_urgent: others wait; else it is done at idle priority.
        replaces: the generation of one that is damaged.
    Raises: SourceChanged, CaptureRefused, ConfigError, StorageError, IntegrityError: nothing was published.
    """
    keyed, store = looked.keyed, looked.store
    assert store is not None, "there is a lease of it"
    began_s = time.monotonic()
    document, reads = encode(keyed.document), keyed.reads
    assert reads is not None, "set-up has run"
    signing = store.trust.signing_key()
    cannot = aio.run_sync(store.prepare(keyed.key, document, signing))
    if cannot is not None:
        raise ConfigError(cannot.why)
    lease.tell("set-up has ended, its result is being published")
    built = capture.build(store.packs(keyed.key).put, codec=store.codec, is_idle=not is_urgent)
    snapshot = describe(keyed, built, setup_s, time.time())
    index_bytes = built.tree.index_bytes
    aio.run_sync(store.reads.publish(encode(keyed.guess), reads, signing))
    published = aio.run_sync(store.publish(snapshot, document, index_bytes, signing, replaces=replaces))
    if isinstance(published, Cannot):
        raise ConfigError(published.why)
    facts = built.facts
    for note in facts.notes:
        say(note)
    if facts.left_out:
        named = ", ".join(facts.left_out[:MOST_NAMED])
        say(f"warning: left out of the kept environment, as they look like credentials or are no files: {named}")
    if not published.is_ours:
        say("the environment was published by another node meanwhile")
        return Published(published.found.snapshot.tree, None)
    mark(capture.left(), keyed.key, snapshot.tree, keyed.document.base, environ, reads, snapshot.expires_s)
    settle_later(keyed.targets, environ)
    say(
        f"the environment is kept: {counted(facts.files, 'file')}, {facts.bytes / 1e6:.0f} MB, published in "
        f"{time.monotonic() - began_s:.1f} s; the next start takes it from {redact(store.url)}"
    )
    return Published(snapshot.tree, Made(keyed.key, snapshot.tree, built.tree.tree, keyed.targets))


def describe(keyed: Keyed, built: Built, setup_s: float, now_s: float) -> Snapshot:
    """PURE: the snapshot of a tree that was built at `now_s` (since the epoch)."""
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
        python=keyed.document.base.get("version", "").split(" ")[0],
        files=facts.files,
        bytes=facts.bytes,
        deleted=facts.deleted,
        left_out=listed(facts.left_out),
        outside=listed(facts.outside),
        relocatable=True,
    )
