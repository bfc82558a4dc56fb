"""Trees and their traces as artefacts of registries: pushed from any store, pulled into any store.

In: a tree's folder in a store, or its name in a registry. Out: the other. What is copied is verified by its
digests on the way; signatures are copied as they are, for whoever opens the tree. An image that a tree belongs to
is referred to and stays as it is.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.errors import AlreadyExists, ConfigError, DigestMismatch, IntegrityError, NotFound
from bootseer.image.registry import Registry
from bootseer.image.uploads import from_memory
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.storage.oci import OciStore
from bootseer.storage.oci_manifest import (
    EMPTY,
    EMPTY_CONFIG,
    MOST_TRACE_BYTES,
    TRACE,
    TREE,
    TREE_INDEX,
    TREE_PACK,
    Descriptor,
    digest_of,
    encode,
    is_tree,
    is_workload,
    to_trace_manifest,
    to_tree_manifest,
)
from bootseer.storage.oci_reference import Reference, tree_tag
from bootseer.tree.head import HEAD_NAME, MOST_HEAD_BYTES, Head
from bootseer.tree.head import decode as decode_head
from bootseer.tree.index import Index, index_path
from bootseer.tree.index import decode as decode_index
from bootseer.tree.opening import publish_index, read_index_bytes
from bootseer.trust import parse as parse_envelope

AT_ONCE = 4  # packs; each is up to 16 MiB of memory
PIECE_BYTES = 16 << 20
_NONE: Mapping[str, str] = {}

Progress = Callable[[int, int], None]  # bytes done, and in all


class StoredTree(NamedTuple):
    """A tree but for its packs; the index is that which the head names."""

    head_bytes: bytes  # tree.json as it is stored
    head: Head
    index_bytes: bytes  # as stored
    decoded: Index


class Pushed(NamedTuple):
    """What a push has made."""

    reference: Reference  # by digest
    tree: str  # the tree digest
    name: str  # that the tree goes by; readers ask for it by another one only with --name
    size: int  # bytes of the tree as it is stored
    sent_bytes: int  # the others were there, or were taken from another repository


class Pulled(NamedTuple):
    """What a pull has made."""

    tree: str  # the tree digest
    size: int  # bytes of the tree as it is stored
    received_bytes: int  # the others were there
    traces: int


class _Trace(msgspec.Struct, frozen=True):
    """Of a trace, what has to be known to push it."""

    tree: str
    workload: str


async def push_tree(
    registry: Registry,
    reference: Reference,
    source: Store,
    *,
    subject: Descriptor | Reference | None = None,
    annotations: Mapping[str, str] = _NONE,
    mount_from: str = "",
    head: bytes | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """The tree in the folder `source` under the tag of `reference`; without a tag as part of `subject`.

    Args:
        subject: the image that it is a tree of, by which it is found as well; in the same repository.
        mount_from: a repository of the same registry that may have the packs.
        head: a tree.json to push instead of the source's own: of the same tree under the name that it has there.

    The same tree has the same digest each time, as long as `annotations` have no time in them.

    Raises: AlreadyExists when the tag is that of something else than a tree; IntegrityError, StorageError.
    """
    if reference.digest or not (reference.tag or subject):
        raise ConfigError(f"{reference}: a tree is pushed under a tag, or as belonging to an image: name one")
    await _check_tag(registry, reference)
    tree = await read_tree(source, head)
    if isinstance(source, OciStore) and source.reference.host == reference.host and not mount_from:
        mount_from = source.reference.repository
    if isinstance(subject, Reference):
        subject = await _find_subject(registry, reference, subject)
    index = _blob(TREE_INDEX, tree.head.digest, tree.head.index_bytes)
    # Each once, should an index name one twice.
    packs = {digest.hex(): _blob(TREE_PACK, digest.hex(), size) for digest, size in tree.decoded.packs}
    top = Descriptor(media_type=TREE, digest=digest_of(tree.head_bytes), size=len(tree.head_bytes))
    manifest = to_tree_manifest(top, index, list(packs.values()), subject=subject, annotations=annotations)
    encode(manifest, str(reference))  # before anything is sent: too many packs?

    uploads = registry.uploads(reference, mount_from=mount_from)
    total = top.size + index.size + sum(blob.size for blob in packs.values())
    tally = _Tally(progress, total)
    reader = RangeReader(source)

    async def push(pack: tuple[str, Descriptor]) -> None:
        path = f"packs/{pack[0]}"

        async def fill(offset: int, target: memoryview) -> None:
            await reader.read([RangeRequest(path, offset, target)])

        await uploads.push(pack[1], fill, tally.add)

    await uploads.push(index, from_memory(tree.index_bytes), tally.add)
    await aio.map_bounded(push, packs.items(), width=AT_ONCE)
    await uploads.push(top, from_memory(tree.head_bytes), tally.add)
    made = await registry.push_manifest(reference, manifest)
    if subject is not None:  # manifests of trees have no times: this says which one is the newest
        await registry.point(reference, tree_tag(subject.digest), manifest)
    return Pushed(reference.at(made.digest), tree.head.digest, tree.head.name, total, uploads.sent_bytes)


async def pull_tree(
    registry: Registry,
    reference: Reference,
    target: Store,
    *,
    head: bytes | None = None,
    with_traces: bool = True,
    progress: Progress | None = None,
) -> Pulled:
    """The tree of that name, or of the image of that name, into the folder `target`; `tree.json` comes last.

    Args:
        head: the tree.json to publish, of somebody who believes it: the tree is the one that it names, whatever
            the registry says by then. Without it the registry's own is copied; nobody looks at its signatures.

    What is there already is not read again.

    Raises: NotFound when there is no tree; DigestMismatch, IntegrityError, StorageError.
    """
    found = await registry.store(reference).tree()
    source = registry.store(reference.at(found.manifest.digest))  # a tag may move meanwhile
    tree = await read_tree(source, head)
    packs = {f"packs/{digest.hex()}": (digest, size) for digest, size in tree.decoded.packs}
    for path, (_, size) in packs.items():
        if path not in found.files or found.files[path].size != size:
            raise IntegrityError(f"{reference}: its index names {path} with {size} bytes, its manifest does not")
    total = len(tree.head_bytes) + len(tree.index_bytes) + sum(size for _, size in packs.values())
    tally = _Tally(progress, total)
    reader = RangeReader(source)
    received = len(tree.head_bytes) + len(tree.index_bytes)

    async def pull(file: tuple[str, tuple[bytes, int]]) -> None:
        nonlocal received
        path, (digest, size) = file
        if await _is_there(target, path, size):
            tally.add(size)
            return
        await _copy(reader, path, digest, size, target, tally)
        received += size

    await aio.map_bounded(pull, packs.items(), width=AT_ONCE)
    await publish_index(target, tree.head.digest, tree.index_bytes)
    traces = await _pull_traces(source, tree.head.digest, target) if with_traces else 0
    await target.publish(HEAD_NAME, tree.head_bytes)
    tally.add(len(tree.head_bytes) + len(tree.index_bytes))
    return Pulled(tree.head.digest, total, received, traces)


async def push_trace(registry: Registry, reference: Reference, data: bytes) -> Descriptor:
    """A hot trace (the envelope as it is stored) as something that belongs to the tree of that name.

    Raises: IntegrityError when it is no trace, or one of another tree; NotFound when there is no tree.
    """
    payload = parse_envelope(data, TRACE, "the trace", most_bytes=MOST_TRACE_BYTES).payload
    try:
        trace = msgspec.json.decode(payload, type=_Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the trace is none: {error}") from error
    store = registry.store(reference)
    tree = await store.tree()
    if index_path(trace.tree) not in tree.files:
        raise IntegrityError(f"{reference}: the trace is one of tree {trace.tree[:64]!r}, not of this one")
    if not is_workload(trace.workload):
        raise IntegrityError(f"the trace is of workload {trace.workload[:64]!r}, which is none: 16 hex digits")
    await registry.push_bytes(reference, EMPTY_CONFIG, EMPTY)
    blob = await registry.push_bytes(reference, data, TRACE)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    manifest = to_trace_manifest(blob, tree.manifest, tree=trace.tree, workload=trace.workload, created=now)
    return await registry.push_manifest(Reference(reference.registry, reference.repository), manifest)


async def read_tree(source: Store, data: bytes | None = None) -> StoredTree:
    """The tree in the root of a store, with `data` in the place of its tree.json if given.

    Signatures are not looked at. Raises: NotFound when there is no tree; IntegrityError.
    """
    where = f"{source.url}: {HEAD_NAME}"
    data = await _read_small(source, HEAD_NAME, MOST_HEAD_BYTES) if data is None else data
    head = decode_head(parse_envelope(data, TREE, where, most_bytes=MOST_HEAD_BYTES).payload, where)
    index_bytes = await read_index_bytes(source, head.digest, size=head.index_bytes)
    index = await aio.run_io(decode_index, index_bytes, head.digest, f"{source.url}: {index_path(head.digest)}")
    return StoredTree(data, head, index_bytes, index)


# ---- parts ---------------------------------------------------------------------------------------------------


class _Tally:
    """Counts for a progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done = 0
        self._total = total

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


async def _check_tag(registry: Registry, reference: Reference) -> None:
    """An image must not lose its tag to a tree."""
    found = await registry.find(reference) if reference.tag else None
    if found is not None and not is_tree(found, str(reference)):
        raise AlreadyExists(
            f"{reference}: is an image or something else already: give the tree a tag of its own, or none and the"
            " image as its subject"
        )


async def _find_subject(registry: Registry, reference: Reference, subject: Reference) -> Descriptor:
    """What the tree is to refer to."""
    if subject.name != reference.name:
        raise ConfigError(f"{reference}: can only belong to an image of the same repository, not to {subject}")
    found = await registry.find(subject)
    if found is None:
        raise NotFound(f"{subject}: there is no such image that a tree could belong to")
    return found.descriptor


async def _read_small(source: Store, path: str, most_bytes: int) -> bytes:
    found = await source.stat(path)
    if found.size > most_bytes:
        raise IntegrityError(f"{source.url}: {path} has {found.size} bytes; at most {most_bytes}")
    data = memoryview(bytearray(found.size))
    await RangeReader(source).read([RangeRequest(path, 0, data, found.etag)])
    return bytes(data)


async def _is_there(target: Store, path: str, size: int) -> bool:
    try:
        found = await target.stat(path)
    except NotFound:
        return False
    if found.size != size:
        raise IntegrityError(f"{target.url}: {path} has {found.size} bytes instead of {size}: remove it")
    return True


async def _copy(reader: RangeReader, path: str, digest: bytes, size: int, target: Store, tally: _Tally) -> None:
    piece = memoryview(bytearray(min(PIECE_BYTES, size)))
    hashed = hashlib.sha256()
    async with target.create(path, size=size) as writer:
        for offset in range(0, size, PIECE_BYTES):
            view = piece[: min(PIECE_BYTES, size - offset)]
            await reader.read([RangeRequest(path, offset, view)])
            await aio.run_io(hashed.update, view)
            if offset + len(view) == size and hashed.digest() != digest:
                raise DigestMismatch(
                    f"{reader.store.url}: {path}: the registry sent other bytes than those of its name"
                )
            await writer.write(view)
            tally.add(len(view))


async def _pull_traces(source: OciStore, tree: str, target: Store) -> int:
    count = 0
    for entry in await source.list(f"traces/{tree}"):
        path = f"traces/{tree}/{entry.name}"
        try:
            data = await _read_small(source, path, MOST_TRACE_BYTES)
        except NotFound:
            continue  # replaced meanwhile
        await target.publish(path, data)
        count += 1
    return count


def _blob(media_type: str, digest: str, size: int) -> Descriptor:
    return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=size)
