"""`bootseer image push` and `pull`: copies trees between stores and registries, with their access traces.

Copied data is verified in transit. The copy has its own place's name, or a given one, and the user who copies
signs
it: the source's signature names another place.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer import aio
from bootseer.errors import ConfigError, NotFound
from bootseer.image.artifacts import Pulled, Pushed, pull_tree, push_trace, push_tree
from bootseer.image.commands.common import (
    UNSIGNED,
    Progress,
    Signing,
    is_registry,
    opened_store,
    shown,
    tree_url,
)
from bootseer.image.commands.traces import known_traces
from bootseer.image.registry import Registry
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon.traces import MAX_ENVELOPE_BYTES
from bootseer.storage import Store
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.oci.store import OciStore
from bootseer.storage.small_files import read_small
from bootseer.tree import head as heads
from bootseer.tree.head import HEAD_NAME, MAX_HEAD_BYTES, PAYLOAD_TYPE, Head, wanted_name
from bootseer.tree.opening import open_tree, read_head
from bootseer.trust import SigningKey, Trust, parse, seal

_log = get_logger(__name__)


class TransferOptions(NamedTuple):
    source_name: str = ""  # of the tree at its source, if it is not the URL's
    name: str = ""  # of the copy; "": its URL's
    signing: Signing = Signing()
    as_is: bool = False  # tree.json is copied with its name and its signatures
    has_traces: bool = True
    subject: str = ""  # push: the image of the tree


class TransferResult(NamedTuple):
    digest: str
    name: str
    reference: str  # of a push: by the digest of its manifest
    size: int  # bytes of the tree
    moved_bytes: int  # the others were present
    traces: int


def push(source: str, target: str, options: TransferOptions, progress: Progress) -> TransferResult:
    """Push a tree of any store into a registry.

    Raises: Untrusted if no trusted key signed the source; ConfigError, AlreadyExists, StorageError,
    IntegrityError.
    """
    if not is_registry(target):
        raise ConfigError(f"{shown(target)}: is not a registry; push to oci://REGISTRY/NAME:TAG")
    source, target = tree_url(source), tree_url(target)
    trust = Trust.load()
    with opened_store(source) as store:
        tree = aio.run_sync(open_tree(store, source, trust, name=options.source_name))
        data = aio.run_sync(read_small(store, HEAD_NAME, MAX_HEAD_BYTES))
        there = _parsed_head(data, source)
        if there.digest != tree.digest:
            raise ConfigError(f"{shown(source)}: only the tree in its tree.json can be pushed: {there.digest}")
        head = _head_for(target, there, data, trust, options)

        async def send() -> Pushed:
            reference = parse_reference(target)
            subject = parse_reference(options.subject) if options.subject else None
            async with Registry() as registry:
                return await push_tree(registry, reference, store, subject=subject, head=head, progress=progress)

        pushed = aio.run_sync(send())
        traces = _push_traces(store, tree.index.block_count, pushed, trust) if options.has_traces else 0
    return TransferResult(pushed.tree, pushed.name, str(pushed.reference), pushed.size, pushed.sent_bytes, traces)


def pull(source: str, target: str, options: TransferOptions, progress: Progress) -> TransferResult:
    """Pull a tree of a registry into a directory, or any other store.

    Its tree.json is written once, from the head that was verified before any data was received: a place of this
    user's own needs no signature, so its content is trusted from then on.
    Raises: Untrusted if no trusted key signed the source; ConfigError; NotFound, StorageError, IntegrityError.
    """
    if not is_registry(source):
        raise ConfigError(f"{shown(source)}: is not a registry; pull from oci://REGISTRY/NAME:TAG")
    if is_registry(target):
        raise ConfigError(f"{shown(target)}: is a registry; copy trees between registries with push")
    source = tree_url(source)
    trust = Trust.load()
    name = wanted_name(target, options.name)
    key = None if options.as_is else options.signing.key(trust)
    with opened_store(target) as store:

        async def receive() -> tuple[Pulled, str]:
            reference = parse_reference(source)
            async with Registry() as registry:
                there = registry.store(reference)
                # Copies that were made as they are keep their names, at any place.
                own_name = options.source_name
                if options.as_is and not own_name:
                    own_name = _parsed_head(await read_small(there, HEAD_NAME, MAX_HEAD_BYTES), source).name
                trusted = await read_head(there, source, trust, name=own_name)
                assert isinstance(trusted.store, OciStore)
                found = await trusted.store.tree(is_current=False)
                pinned = reference.at(found.manifest.digest)  # a tag may move meanwhile
                head = trusted.data if options.as_is else _sealed(trusted.head, name, key)
                pulled = await pull_tree(
                    registry, pinned, store, head=head, with_traces=options.has_traces, progress=progress
                )
                return pulled, trusted.head.name if options.as_is else name

        pulled, name = aio.run_sync(receive())
        if key is None and not options.as_is:
            _log.info(UNSIGNED)
    return TransferResult(pulled.tree, name, "", pulled.size, pulled.received_bytes, pulled.traces)


def _head_for(target: str, there: Head, data: bytes, trust: Trust, options: TransferOptions) -> bytes:
    """Return the tree.json of a copy in a registry."""
    name = wanted_name(target, options.name)
    key = None if options.as_is else options.signing.key(trust)
    if key is not None:
        return _sealed(there, name, key)
    signatures = parse(data, PAYLOAD_TYPE, "tree.json", max_bytes=MAX_HEAD_BYTES).signatures
    if options.as_is or (signatures and not options.signing.is_unsigned):
        if there.name != name:
            _log.info("the copy keeps its name and signatures; open it with --name %s", there.name)
        return data
    _log.warning(
        "the tree is not signed, and unsigned trees in a registry are not trusted; create a"
        " key with `bootseer keys make`"
    )
    return _sealed(there, name, None)


def _sealed(head: Head, name: str, key: SigningKey | None) -> bytes:
    renamed = Head(format=head.format, name=name, digest=head.digest, index_bytes=head.index_bytes, kind=head.kind)
    return seal(heads.encode(renamed), PAYLOAD_TYPE, key)


def _parsed_head(data: bytes, url: str) -> Head:
    where = f"{shown(url)}: {HEAD_NAME}"
    return heads.decode(parse(data, PAYLOAD_TYPE, where, max_bytes=MAX_HEAD_BYTES).payload, where)


def _push_traces(store: Store, block_count: int, pushed: Pushed, trust: Trust) -> int:
    """Push the trusted traces, as stored; return their number."""
    known = known_traces(store, pushed.tree, block_count, trust)
    stored = [each for each in known if not each.is_own]

    async def send() -> int:
        count = 0
        async with Registry() as registry:
            for each in stored:
                path = f"traces/{pushed.tree}/{each.trace.workload}.json"
                try:
                    data = await read_small(store, path, MAX_ENVELOPE_BYTES)
                except NotFound:
                    continue  # removed meanwhile
                await push_trace(registry, pushed.reference, data)
                count += 1
        return count

    return aio.run_sync(send()) if stored else 0
