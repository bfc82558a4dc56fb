"""Trees and their access traces as artifacts of registries: pushed from any store, pulled into any store.

In: a tree's directory in a store, or its name in a registry. Out: the other. Copied data is verified by its
digests in transit. Signatures are copied as they are, for readers that open the tree. A tree refers to its image,
which does not change.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.errors import AlreadyExists, ConfigError, DigestMismatch, IntegrityError, NotFound
from bootseer.image.registry import Registry
from bootseer.image.uploads import from_memory
from bootseer.storage import Entry, RangeReader, RangeRequest, Stat, Store
from bootseer.storage.oci.manifest import (
    EMPTY,
    EMPTY_CONFIG,
    MAX_TRACE_BYTES,
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
from bootseer.storage.oci.reference import Reference, tree_tag
from bootseer.storage.oci.store import OciStore
from bootseer.tree.head import HEAD_NAME, MAX_HEAD_BYTES, Head
from bootseer.tree.head import decode as decode_head
from bootseer.tree.index import Index, index_path
from bootseer.tree.index import decode as decode_index
from bootseer.tree.opening import publish_index, read_index_bytes
from bootseer.trust import parse as parse_envelope

AT_ONCE = 4  # packs; each is up to 16 MiB of memory
TRACES_AT_ONCE = 8  # small files
PIECE_BYTES = 16 << 20

Progress = Callable[[int, int], None]  # bytes done, and in total


class StoredTree(NamedTuple):
    """A tree without its packs; the index is the one that the head names."""

    head_bytes: bytes  # tree.json as stored
    head: Head
    index_bytes: bytes  # as stored
    decoded: Index


class Pushed(NamedTuple):
    reference: Reference  # by digest
    tree: str  # the tree digest
    name: str  # of the tree; readers request it by another one only with --name
    size: int  # bytes of the tree as stored
    sent_bytes: int  # the others were present, or were taken from another repository


class Pulled(NamedTuple):
    tree: str  # the tree digest
    size: int  # bytes of the tree as stored
    received_bytes: int  # the others were present
    traces: int


class _Trace(msgspec.Struct, frozen=True):
    """The fields of a trace that a push needs."""

    tree: str
    workload: str


async def push_tree(
    registry: Registry,
    reference: Reference,
    source: Store,
    *,
    subject: Descriptor | Reference | None = None,
    mount_from: str = "",
    head: bytes | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Push the tree in the directory `source` under the tag of `reference`; without a tag as part of `subject`.

    Args:
        subject: the image of the tree, by which it is found as well; in the same repository.
        mount_from: a repository of the same registry that may have the packs.
        head: a tree.json to push instead of the source's own: of the same tree under its name there.

    The same tree has the same digest each time.

    Raises: AlreadyExists if the tag belongs to another kind of artifact; IntegrityError, StorageError.
    """
    if reference.digest or not (reference.tag or subject):
        raise ConfigError(f"{reference}: a tree is pushed under a tag or for an image; name one")
    await _check_tag(registry, reference)
    tree = await read_tree(source, head)
    if isinstance(source, OciStore) and source.reference.host == reference.host and not mount_from:
        mount_from = source.reference.repository
    if isinstance(subject, Reference):
        subject = await _find_subject(registry, reference, subject)
    index = _blob(TREE_INDEX, tree.head.digest, tree.head.index_bytes)
    # Each only once, even if an index names one twice.
    packs = {digest.hex(): _blob(TREE_PACK, digest.hex(), size) for digest, size in tree.decoded.packs}
    top = Descriptor(media_type=TREE, digest=digest_of(tree.head_bytes), size=len(tree.head_bytes))
    manifest = to_tree_manifest(top, index, list(packs.values()), subject=subject)
    encode(manifest, str(reference))  # before anything is sent: fails for too many packs

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
    if subject is not None:  # manifests of trees have no times: this tag names the newest one
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
    """Pull the tree of that name, or of the image of that name, into `target`; `tree.json` comes last.

    Args:
        head: the tree.json to publish, if the caller trusts it: its tree is pulled, even if the registry changes
            meanwhile. Without it the registry's own is copied, and its signatures are not verified.

    Existing files are not read again.

    Raises: NotFound if there is no tree; DigestMismatch, IntegrityError, StorageError.
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
    """Push an access trace (the envelope as stored) that belongs to the tree of that name.

    Raises: IntegrityError if it is not a trace, or is of another tree; NotFound if there is no tree.
    """
    payload = parse_envelope(data, TRACE, "the trace", max_bytes=MAX_TRACE_BYTES).payload
    try:
        trace = msgspec.json.decode(payload, type=_Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the trace is invalid: {error}") from error
    store = registry.store(reference)
    tree = await store.tree()
    if index_path(trace.tree) not in tree.files:
        raise IntegrityError(f"{reference}: the trace belongs to tree {trace.tree[:64]!r}, not to this one")
    if not is_workload(trace.workload):
        raise IntegrityError(f"the trace has the workload {trace.workload[:64]!r}, not 16 hex digits")
    await registry.push_bytes(reference, EMPTY_CONFIG, EMPTY)
    blob = await registry.push_bytes(reference, data, TRACE)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    manifest = to_trace_manifest(blob, tree.manifest, tree=trace.tree, workload=trace.workload, created=now)
    return await registry.push_manifest(Reference(reference.registry, reference.repository), manifest)


async def read_tree(source: Store, data: bytes | None = None) -> StoredTree:
    """Read the tree in the root of a store, with `data` in place of its tree.json if given.

    Signatures are not verified. Raises: NotFound if there is no tree; IntegrityError.
    """
    where = f"{source.url}: {HEAD_NAME}"
    data = await _read_small(source, HEAD_NAME, MAX_HEAD_BYTES) if data is None else data
    head = decode_head(parse_envelope(data, TREE, where, max_bytes=MAX_HEAD_BYTES).payload, where)
    index_bytes = await read_index_bytes(source, head.digest, size=head.index_bytes)
    index = await aio.run_io(decode_index, index_bytes, head.digest, f"{source.url}: {index_path(head.digest)}")
    return StoredTree(data, head, index_bytes, index)


# ---- parts ---------------------------------------------------------------------------------------------------


class _Tally:
    """Counts bytes for a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done = 0
        self._total = total

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


async def _check_tag(registry: Registry, reference: Reference) -> None:
    """Refuse to take a tag from an image."""
    found = await registry.find(reference) if reference.tag else None
    if found is not None and not is_tree(found, str(reference)):
        raise AlreadyExists(
            f"{reference}: is already an image or another artifact; give the tree a tag of its own, or none and"
            " the image as its subject"
        )


async def _find_subject(registry: Registry, reference: Reference, subject: Reference) -> Descriptor:
    """Return the descriptor of the image that the tree refers to."""
    if subject.name != reference.name:
        raise ConfigError(f"{reference}: can only belong to an image of the same repository, not to {subject}")
    found = await registry.find(subject)
    if found is None:
        raise NotFound(f"{subject}: no such image for a tree to belong to")
    return found.descriptor


async def _read_small(source: Store, path: str, max_bytes: int) -> bytes:
    return await _read_sized(source, path, await source.stat(path), max_bytes)


async def _read_sized(source: Store, path: str, found: Stat, max_bytes: int) -> bytes:
    if found.size > max_bytes:
        raise IntegrityError(f"{source.url}: {path} has {found.size} bytes; at most {max_bytes}")
    data = memoryview(bytearray(found.size))
    await RangeReader(source).read([RangeRequest(path, 0, data, found.etag)])
    return bytes(data)


async def _is_there(target: Store, path: str, size: int) -> bool:
    try:
        found = await target.stat(path)
    except NotFound:
        return False
    if found.size != size:
        raise IntegrityError(f"{target.url}: {path} has {found.size} bytes instead of {size}; remove it")
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
                    f"{reader.store.url}: {path}: the bytes from the registry do not match the digest"
                )
            await writer.write(view)
            tally.add(len(view))


async def _pull_traces(source: OciStore, tree: str, target: Store) -> int:
    async def pull(entry: Entry) -> bool:
        path = f"traces/{tree}/{entry.name}"
        try:
            await target.publish(path, await _read_sized(source, path, Stat(entry.size, ""), MAX_TRACE_BYTES))
        except NotFound:
            return False  # replaced meanwhile
        return True

    return sum(await aio.map_bounded(pull, await source.list(f"traces/{tree}"), width=TRACES_AT_ONCE))


def _blob(media_type: str, digest: str, size: int) -> Descriptor:
    return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=size)
