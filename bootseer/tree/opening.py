"""Opening a tree in a store, and publishing one. Nothing of it is used before bootseer.trust has judged its head.

A digest binds everything below it: the head the index, the index the blocks. A caller that knows the digest (a
pinned URL, a cache) needs no head and no key.
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
from bootseer.tree import head as heads
from bootseer.tree import index as indexes
from bootseer.tree.head import HEAD_NAME, MOST_HEAD_BYTES, PAYLOAD_TYPE, Head, asked_name, split_pin
from bootseer.tree.index import MOST_INDEX_BYTES, Index, digest_of, index_path
from bootseer.trust import SigningKey, Trust, parse, seal
from bootseer.trust.reading import place_of, read_whole

HEAD_TRIES = 3  # a tree may be replaced, and its old index be taken away, while it is opened

Cached = Callable[[str], bytes | None]


class OpenedTree(msgspec.Struct, frozen=True):
    """A tree that may be used."""

    index: Index
    digest: str
    head: Head | None  # None of a pinned one: nobody had to say what it is
    store: Store
    index_bytes: bytes  # as stored: for a cache
    because: str  # why it is believed


class BelievedHead(NamedTuple):
    """A head, and why it is believed."""

    head: Head
    because: str
    data: bytes  # tree.json as it is stored
    store: Store  # whose root it is in: the one that was asked, or one of its `others`


@runtime_checkable
class HasOthers(Protocol):
    """A store whose URL may mean several trees, as the name of an image in a registry does."""

    async def others(self) -> Sequence[Store]:
        """Those beside its own, in the order in which they are to be tried; few, and closed with it."""
        ...


async def open_tree(
    store: Store, url: str, trust: Trust, *, name: str = "", digest: str = "", cached: Cached | None = None
) -> OpenedTree:
    """The tree in the root of `store`, which is what `url` means.

    Args:
        url: as the user wrote it; it may end in `@sha256:<tree digest>`.
        name: of the tree, where it was published under another one than this URL.
        digest: the tree digest, if it is known; tree.json is not read then.
        cached: gives the index object of a tree digest as it was stored before, or None. Called in a thread; what
            it gives is verified.
    Raises: Untrusted; NotFound when there is no tree; IntegrityError; StorageError; ConfigError.
    """
    digest = _wanted_digest(url, digest)
    if digest:
        data = await _find_index(store, digest, cached, 0)
        because = "the digest was asked for"
        return await _decoded(store, digest, None, data, because)
    seen = ""
    for _ in range(HEAD_TRIES):
        believed = await read_head(store, url, trust, name=name)
        head = believed.head
        try:
            data = await _find_index(store, head.digest, cached, head.index_bytes)
        except NotFound as error:
            if head.digest == seen:
                where = place_of(store, index_path(head.digest))
                raise NotFound(
                    f"{where}: the index that {HEAD_NAME} names is not there: publish the tree anew"
                ) from error
            seen = head.digest
            continue
        return await _decoded(store, head.digest, head, data, believed.because)
    raise SourceChanged(f"{place_of(store, HEAD_NAME)}: is replaced faster than it can be read")


async def read_head(store: Store, url: str, trust: Trust, *, name: str = "") -> BelievedHead:
    """What tree.json says, if it is believed and is about what was asked for.

    Raises: Untrusted; NotFound when there is no tree; IntegrityError; StorageError.
    """
    try:
        return await _read_head(store, url, trust, name)
    except Untrusted:
        # In a registry several trees may belong to an image, and anybody who may push there can add one.
        for other in await store.others() if isinstance(store, HasOthers) else ():
            try:
                return await _read_head(other, url, trust, name)
            except (Untrusted, IntegrityError, NotFound):
                continue
        raise


async def _read_head(store: Store, url: str, trust: Trust, name: str) -> BelievedHead:
    where = place_of(store, HEAD_NAME)
    try:
        data = await read_whole(store, HEAD_NAME, MOST_HEAD_BYTES)
    except NotFound as error:
        raise NotFound(
            f"{where}: there is no tree here (no {HEAD_NAME}); `bootseer image build SRC URL` makes one"
        ) from error
    return await judge_head(data, store, url, trust, name=name)


async def judge_head(data: bytes, store: Store, url: str, trust: Trust, *, name: str = "") -> BelievedHead:
    """The same of a tree.json that was read from the root of `store`."""
    where = place_of(store, HEAD_NAME)
    believed = await trust.judge(data, PAYLOAD_TYPE, store, HEAD_NAME, most_bytes=MOST_HEAD_BYTES)
    head = heads.decode(believed.payload, where)
    asked = asked_name(url, name)
    if head.name != asked:
        raise Untrusted(
            f"{where}: is the tree {head.name!r}, not {asked!r}: publish it under that name, or, if it is the"
            " one you mean, ask for it by its own name (--name)"
        )
    return BelievedHead(head, believed.because, data, store)


async def read_index_bytes(store: Store, digest: str, *, size: int = 0) -> bytes:
    """The index object of a tree digest, verified. `size` in bytes, 0 if it is not known; it need not be right.

    Raises: NotFound; IntegrityError when it is another one, or larger than any index; StorageError.
    """
    if not heads.is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is no tree digest: 64 hex digits")
    path = index_path(digest)
    where = place_of(store, path)
    if not size:
        size = (await store.stat(path)).size
    if not 0 < size <= MOST_INDEX_BYTES:
        raise IntegrityError(f"{where}: {size} bytes; an index has 1 to {MOST_INDEX_BYTES}")
    reader = RangeReader(store)
    for attempt in range(2):  # the second one by another way: a replica, a new connection
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
    """Makes a tree whose packs are there already: first the index, then tree.json in one step.

    Who reads meanwhile sees the old tree or the new one. Without a key it is not signed.
    Raises: IntegrityError for what no reader would take; StorageError.
    """
    payload = heads.encode(head)
    if (digest_of(index_bytes), len(index_bytes)) != (head.digest, head.index_bytes):
        raise IntegrityError(f"{place_of(store, HEAD_NAME)}: the head is that of another index")
    await aio.run_io(indexes.decode, index_bytes, head.digest, "this tree")
    envelope = seal(payload, PAYLOAD_TYPE, key)
    if len(envelope) > MOST_HEAD_BYTES:
        raise IntegrityError(f"{place_of(store, HEAD_NAME)}: {len(envelope)} bytes; at most {MOST_HEAD_BYTES}")
    await publish_index(store, head.digest, index_bytes)
    await store.publish(HEAD_NAME, envelope)


async def publish_index(store: Store, digest: str, index_bytes: bytes) -> None:
    """Before the tree.json that names it. One that another tree had replaced is as young as a new one.

    By the times of indexes `bootseer image gc --store` knows when a tree was the newest.
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
            is_current = False  # what has its name is not it
        if not is_current:
            await store.publish(path, index_bytes)


async def _is_named(store: Store, digest: str) -> bool:
    """Whether tree.json is that of this tree, by what it says; whether it is believed does not matter here."""
    try:
        data = await read_whole(store, HEAD_NAME, MOST_HEAD_BYTES)
    except NotFound:
        return False
    where = place_of(store, HEAD_NAME)
    payload = parse(data, PAYLOAD_TYPE, where, most_bytes=MOST_HEAD_BYTES).payload
    return heads.decode(payload, where).digest == digest


def _wanted_digest(url: str, digest: str) -> str:
    _, pin = split_pin(url)
    if digest and not heads.is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is no tree digest: 64 hex digits")
    if digest and pin and digest != pin:
        raise ConfigError(f"{redact(url)}: asks for another digest than {digest}")
    return digest or pin


async def _find_index(store: Store, digest: str, cached: Cached | None, size: int) -> bytes:
    """From the cache if it is there and right, else from the store."""
    if cached is not None:
        data = await aio.run_io(_take_cached, cached, digest)
        if data is not None:
            return data
    return await read_index_bytes(store, digest, size=size)


def _take_cached(cached: Cached, digest: str) -> bytes | None:
    data = cached(digest)
    if data is None or len(data) > MOST_INDEX_BYTES or digest_of(data) != digest:
        return None
    return data


async def _decoded(store: Store, digest: str, head: Head | None, data: bytes, because: str) -> OpenedTree:
    where = place_of(store, index_path(digest))
    index = await aio.run_io(indexes.decode, data, digest, where)
    return OpenedTree(index, digest, head, store, data, because)
