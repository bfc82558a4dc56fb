"""Opening and publishing of trees in stores. Nothing of a tree is used before bootseer.trust has judged its head.

A digest binds everything below it: the head binds the index, the index the blocks. A caller with the digest (from
a pinned URL or a cache) needs no head and no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    ConfigError,
    IntegrityError,
    NotFound,
    SourceChanged,
    Truncated,
    Untrusted,
)
from bootseer.storage import RangeReader, RangeRequest, Store, redact
from bootseer.storage.small_files import read_small, url_of
from bootseer.tree import head as heads
from bootseer.tree import index as indexes
from bootseer.tree.head import HEAD_NAME, MAX_HEAD_BYTES, PAYLOAD_TYPE, Head, split_pin, wanted_name
from bootseer.tree.index import MAX_INDEX_BYTES, Index, digest_of, index_path
from bootseer.trust import SigningKey, Trust, parse, seal

HEAD_TRIES = 3  # a tree may be replaced, and its old index be deleted, while it is opened

Cached = Callable[[str], bytes | None]


class OpenedTree(msgspec.Struct, frozen=True):
    """A tree that may be used."""

    index: Index
    digest: str
    head: Head | None  # None for a pinned tree, which needs none
    store: Store
    index_bytes: bytes  # as stored: for a cache
    because: str  # why it is trusted


class TrustedHead(NamedTuple):
    head: Head
    because: str
    data: bytes  # tree.json as stored
    store: Store  # the store of the head: the given one, or one of its `others`


@runtime_checkable
class HasOthers(Protocol):
    """A store whose URL may mean several trees, such as the name of an image in a registry."""

    async def others(self) -> Sequence[Store]:
        """Return the other trees' stores, in the order to try them; a few, which close with this store."""
        ...


async def open_tree(
    store: Store, url: str, trust: Trust, *, name: str = "", digest: str = "", cached: Cached | None = None
) -> OpenedTree:
    """Open the tree in the root of `store`, which `url` names.

    Args:
        url: as the user wrote it; it may end in `@sha256:<tree digest>`.
        name: of the tree, if it was published under another name than this URL.
        digest: the tree digest, if known; tree.json is not read then.
        cached: returns the stored index object of a tree digest from a cache, or None. Called in a thread; its
        result     is verified.
    Raises: Untrusted; NotFound when there is no tree; IntegrityError; StorageError; ConfigError.
    """
    digest = _wanted_digest(url, digest)
    if digest:
        data = await _find_index(store, digest, cached, 0)
        because = "the digest was requested"
        return await _decoded(store, digest, None, data, because)
    seen = ""
    for _ in range(HEAD_TRIES):
        trusted = await read_head(store, url, trust, name=name)
        head = trusted.head
        try:
            data = await _find_index(store, head.digest, cached, head.index_bytes)
        except NotFound as error:
            if head.digest == seen:
                where = url_of(store, index_path(head.digest))
                raise NotFound(
                    f"{where}: the index that {HEAD_NAME} names does not exist: publish the tree anew"
                ) from error
            seen = head.digest
            continue
        return await _decoded(store, head.digest, head, data, trusted.because)
    raise SourceChanged(f"{url_of(store, HEAD_NAME)}: is replaced faster than it can be read")


async def read_head(store: Store, url: str, trust: Trust, *, name: str = "") -> TrustedHead:
    """Read tree.json, if it is trusted and names the requested tree.

    Raises: Untrusted; NotFound when there is no tree; IntegrityError; StorageError.
    """
    try:
        return await _read_head(store, url, trust, name)
    except Untrusted:
        # In a registry an image may have several trees, and anyone with push access can add one.
        for other in await store.others() if isinstance(store, HasOthers) else ():
            try:
                return await _read_head(other, url, trust, name)
            except (Untrusted, IntegrityError, NotFound):
                continue
        raise


async def _read_head(store: Store, url: str, trust: Trust, name: str) -> TrustedHead:
    where = url_of(store, HEAD_NAME)
    try:
        data = await read_small(store, HEAD_NAME, MAX_HEAD_BYTES)
    except NotFound as error:
        raise NotFound(
            f"{where}: there is no tree here (no {HEAD_NAME}); `bootseer image build SRC URL` makes one"
        ) from error
    return await check_head_trust(data, store, url, trust, name=name)


async def check_head_trust(data: bytes, store: Store, url: str, trust: Trust, *, name: str = "") -> TrustedHead:
    """Do the same with a tree.json that was read from the root of `store`."""
    where = url_of(store, HEAD_NAME)
    trusted = await trust.judge(data, PAYLOAD_TYPE, store, HEAD_NAME, max_bytes=MAX_HEAD_BYTES)
    head = heads.decode(trusted.payload, where)
    asked = wanted_name(url, name)
    if head.name != asked:
        raise Untrusted(
            f"{where}: is the tree {head.name!r}, not {asked!r}: publish it under that name, or, if it is the"
            " one you mean, request it by its own name (--name)"
        )
    return TrustedHead(head, trusted.because, data, store)


async def read_index_bytes(store: Store, digest: str, *, size: int = 0) -> bytes:
    """Read and verify the index object of a tree digest. `size`: in bytes, 0 if unknown; it may be wrong.

    Raises: NotFound; IntegrityError when the digest differs, or it is larger than any index; StorageError.
    """
    if not heads.is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is not a tree digest: 64 hex digits")
    path = index_path(digest)
    where = url_of(store, path)
    if not size:
        size = (await store.stat(path)).size
    if not 0 < size <= MAX_INDEX_BYTES:
        raise IntegrityError(f"{where}: {size} bytes; an index has 1 to {MAX_INDEX_BYTES}")
    reader = RangeReader(store)
    for attempt in range(2):  # the second one by another route: a replica, a new connection
        target = bytearray(size)
        try:
            await reader.read([RangeRequest(path, 0, memoryview(target))], attempt=attempt)
        except SourceChanged:
            continue  # published again, with the same bytes
        except Truncated as error:
            raise IntegrityError(f"{where}: has less than the {size} bytes that it should have") from error
        data = bytes(target)
        if await aio.run_io(digest_of, data) == digest:
            return data
    raise IntegrityError(f"{where}: is damaged, or another one: its SHA-256 is not its name")


async def publish_tree(store: Store, index_bytes: bytes, head: Head, key: SigningKey | None) -> None:
    """Publish a tree whose packs are stored already: first the index, then tree.json in one step.

    Concurrent readers see the old tree or the new one. Without a key it is not signed.
    Raises: IntegrityError for a tree that no reader would accept; StorageError.
    """
    payload = heads.encode(head)
    if (digest_of(index_bytes), len(index_bytes)) != (head.digest, head.index_bytes):
        raise IntegrityError(f"{url_of(store, HEAD_NAME)}: the head is that of another index")
    await aio.run_io(indexes.decode, index_bytes, head.digest, "this tree")
    envelope = seal(payload, PAYLOAD_TYPE, key)
    if len(envelope) > MAX_HEAD_BYTES:
        raise IntegrityError(f"{url_of(store, HEAD_NAME)}: {len(envelope)} bytes; at most {MAX_HEAD_BYTES}")
    await publish_index(store, head.digest, index_bytes)
    await store.publish(HEAD_NAME, envelope)


async def publish_index(store: Store, digest: str, index_bytes: bytes) -> None:
    """Publish an index before the tree.json that names it; publish anew an index that had been replaced.

    `bootseer image gc --store` uses the times of indexes to determine when a tree was the newest.
    Raises: StorageError.
    """
    path = index_path(digest)
    try:
        async with store.create(path, size=len(index_bytes)) as writer:
            await writer.write(index_bytes)
    except AlreadyExists:
        try:
            await read_index_bytes(store, digest, size=len(index_bytes))
            is_current = await _is_named(store, digest)
        except IntegrityError:
            is_current = False  # the file of this name has other contents
        if not is_current:
            await store.publish(path, index_bytes)


async def _is_named(store: Store, digest: str) -> bool:
    """Return whether tree.json names this tree, regardless of trust."""
    try:
        data = await read_small(store, HEAD_NAME, MAX_HEAD_BYTES)
    except NotFound:
        return False
    where = url_of(store, HEAD_NAME)
    payload = parse(data, PAYLOAD_TYPE, where, max_bytes=MAX_HEAD_BYTES).payload
    return heads.decode(payload, where).digest == digest


def _wanted_digest(url: str, digest: str) -> str:
    _, pin = split_pin(url)
    if digest and not heads.is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is not a tree digest: 64 hex digits")
    if digest and pin and digest != pin:
        raise ConfigError(f"{redact(url)}: names another digest than {digest}")
    return digest or pin


async def _find_index(store: Store, digest: str, cached: Cached | None, size: int) -> bytes:
    """Return the index from the cache if it is valid there, else from the store."""
    if cached is not None:
        data = await aio.run_io(_take_cached, cached, digest)
        if data is not None:
            return data
    return await read_index_bytes(store, digest, size=size)


def _take_cached(cached: Cached, digest: str) -> bytes | None:
    data = cached(digest)
    if data is None or len(data) > MAX_INDEX_BYTES or digest_of(data) != digest:
        return None
    return data


async def _decoded(store: Store, digest: str, head: Head | None, data: bytes, because: str) -> OpenedTree:
    where = url_of(store, index_path(digest))
    index = await aio.run_io(indexes.decode, data, digest, where)
    return OpenedTree(index, digest, head, store, data, because)
