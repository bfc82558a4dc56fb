"""Opening and publishing trees: what is read, in which order, and that nothing else is ever taken for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from bootseer.errors import (
    BootseerError,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    NotFound,
    SourceChanged,
    StorageError,
    Unavailable,
    Untrusted,
)
from bootseer.storage import open_store
from bootseer.storage.memory import forget
from bootseer.tree import compression, index
from bootseer.tree.head import PAYLOAD_TYPE, Head, make_head
from bootseer.tree.index import Index, digest_of, index_path
from bootseer.tree.opening import OpenedTree, open_tree, publish_tree, read_head, read_index_bytes
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey, seal
from tests.testing.faulty_store import Fault, FaultyStore, Kind

T = TypeVar("T")

numbers = itertools.count()
ADA = SigningKey.make(name="ada")
ADAS = Trust([TrustedKey(PublicKey(ADA.public, "ada"), "/keys/ada.pub")])


def index_bytes(source: str = "") -> bytes:
    """A tree with nothing in it but a name of its own."""
    empty = Index(
        tool="test", source=source, packs=[], blocks=b"", parents=[0], names=[b""], modes=[0o40755], uids=[0],
        gids=[0], mtimes_ns=[0], sizes=[0], runs=[[]], targets=[b""], links=[-1],
    )  # fmt: skip
    return compression.compress(index.encode(empty))


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    """Not this user's own: something stands between."""
    name = f"opening{next(numbers)}"
    yield FaultyStore(open_store(f"memory://{name}/tree"))
    forget(name)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def published(store: FaultyStore, source: str = "a", *, name: str = "", key: SigningKey | None = ADA) -> Head:
    data = index_bytes(source)
    head = make_head(data, "image", store.url, name)
    run(publish_tree(store, data, head, key))
    store.calls.clear()
    return head


def opened(store: FaultyStore, url: str = "", trust: Trust = ADAS, **more: Any) -> OpenedTree:
    return run(open_tree(store, url or store.url, trust, **more))


def test_a_published_tree_is_opened(store: FaultyStore) -> None:
    head = published(store)
    tree = opened(store)
    assert (tree.index.source, tree.digest, tree.head) == ("a", head.digest, head)
    assert digest_of(tree.index_bytes) == head.digest
    assert tree.because.startswith("signed by ada")
    assert tree.store is store
    assert [call.operation for call in store.calls] == ["stat", "read_into", "read_into"]
    assert [call.path for call in store.calls] == ["tree.json", "tree.json", index_path(head.digest)]


def test_a_tree_is_opened_by_its_name(store: FaultyStore) -> None:
    published(store, name="https://mirror/tree")
    with pytest.raises(Untrusted, match=r"is the tree 'https://mirror/tree', not 'memory://.*--name"):
        opened(store)
    assert opened(store, "https://ada:secret@MIRROR/tree/?sig=1").index.source == "a"
    assert opened(store, name="https://MIRROR/tree/").index.source == "a"
    published(store, name="torch")
    assert opened(store, name="torch").head is not None
    for name in ("Torch", "torch ", "tor", "torch/x"):
        with pytest.raises(Untrusted, match="is the tree 'torch', not"):
            opened(store, name=name)


def test_what_is_signed_for_another_place_is_refused(store: FaultyStore) -> None:
    """All of one signed tree, put in the place of another."""
    published(store, name="memory://other/tree")
    with pytest.raises(Untrusted, match="is the tree 'memory://other/tree', not"):
        opened(store)
    with pytest.raises(Untrusted):
        run(read_head(store, store.url, ADAS))


def test_unsigned_trees_and_those_of_strangers(store: FaultyStore) -> None:
    for key in (None, SigningKey.make()):
        published(store, key=key)
        with pytest.raises(Untrusted, match="`bootseer keys make`"):
            opened(store)
        assert store.count("read_into", "index/*") == 0, "nothing else was looked at"
        tree = run(open_tree(store.inner, store.url, Trust()))
        assert (tree.because, tree.index.source) == ("unsigned, but only you can write there", "a")


def test_pinned_trees_need_no_head(store: FaultyStore) -> None:
    head = published(store, key=None)
    run(store.delete("tree.json"))
    store.calls.clear()
    for tree in (
        opened(store, f"{store.url}@sha256:{head.digest}", Trust()),
        opened(store, digest=head.digest, trust=Trust()),
        opened(store, f"{store.url}@sha256:{head.digest}", Trust(), digest=head.digest),
    ):
        assert (tree.index.source, tree.digest, tree.head) == ("a", head.digest, None)
        assert tree.because == "the digest was requested"
    assert {call.path for call in store.calls} == {index_path(head.digest)}
    with pytest.raises(ConfigError, match="names another digest than"):
        opened(store, f"{store.url}@sha256:{head.digest}", digest="0" * 64)
    with pytest.raises(ConfigError, match="is not a tree digest"):
        opened(store, digest="../../etc/passwd")
    with pytest.raises(NotFound):
        opened(store, digest="0" * 64)


def test_a_pin_binds_the_index(store: FaultyStore) -> None:
    head = published(store)
    run(store.publish(index_path(head.digest), index_bytes("evil")))
    with pytest.raises(IntegrityError, match="its SHA-256 is not its name"):
        opened(store, digest=head.digest, trust=Trust())
    with pytest.raises(IntegrityError):
        opened(store)


def test_what_is_cached_is_not_read_again(store: FaultyStore) -> None:
    head = published(store)
    kept = {head.digest: opened(store).index_bytes}
    store.calls.clear()
    assert opened(store, cached=kept.get).index.source == "a"
    assert {call.path for call in store.calls} == {"tree.json"}
    store.calls.clear()
    assert opened(store, digest=head.digest, cached=kept.get).index.source == "a"
    assert store.calls == []
    newer = published(store, "b")
    assert opened(store, cached=kept.get).index.source == "b", "the cache does not decide which one"
    assert newer.digest not in kept


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: bytes([d[0] ^ 1]) + d[1:], lambda _: b"", lambda _: None]
)
def test_a_damaged_cache_is_as_none(store: FaultyStore, damage: Callable[[bytes], bytes | None]) -> None:
    head = published(store)
    data = opened(store).index_bytes
    for options in ({}, {"digest": head.digest}):
        assert opened(store, cached=lambda _: damage(data), **options).index_bytes == data


def test_errors_of_a_cache_come_through(store: FaultyStore) -> None:
    published(store)

    def cached(_: str) -> bytes | None:
        raise DigestMismatch("the cache says no")

    with pytest.raises(DigestMismatch, match="the cache says no"):
        opened(store, cached=cached)


def test_no_tree(store: FaultyStore) -> None:
    with pytest.raises(NotFound, match=r"tree\.json: there is no tree here"):
        opened(store)
    run(store.publish("tree.json", b"{}"))
    with pytest.raises(IntegrityError, match="is not a DSSE envelope"):
        opened(store)
    run(store.publish("tree.json", b" " * (64 << 10) + b"{}"))
    with pytest.raises(IntegrityError, match="at most 65536"):
        opened(store)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"format": "bootseer-tree/9"}, IntegrityError),
        ({"more": 1}, IntegrityError),
        ({"digest": "x"}, IntegrityError),
    ],
)
def test_a_signed_head_is_checked_too(
    store: FaultyStore, fields: dict[str, Any], kind: type[BootseerError]
) -> None:
    head = published(store)
    payload = json.dumps(
        {"format": head.format, "name": head.name, "digest": head.digest, "index_bytes": head.index_bytes,
         "kind": "image"} | fields
    ).encode()  # fmt: skip
    run(store.publish("tree.json", seal(payload, PAYLOAD_TYPE, ADA)))
    with pytest.raises(kind, match=r"tree\.json: "):
        opened(store)


def test_a_signature_of_something_else_is_none(store: FaultyStore) -> None:
    """What Ada signed as a trace is no tree, whatever is in it."""
    head = published(store)
    payload = json.dumps({"format": head.format, "name": head.name, "digest": head.digest}).encode()
    sealed = seal(payload, "application/vnd.bootseer.trace.v1+json", ADA)
    run(store.publish("tree.json", sealed))
    with pytest.raises(IntegrityError, match=r"instead of application/vnd\.bootseer\.tree"):
        opened(store)
    renamed = json.loads(sealed) | {"payloadType": PAYLOAD_TYPE}
    run(store.publish("tree.json", json.dumps(renamed).encode()))
    with pytest.raises(Untrusted, match="was changed after ada"):
        opened(store)


@pytest.mark.parametrize("size", [1, -1, 100])
def test_a_head_that_lies_about_the_size(store: FaultyStore, size: int) -> None:
    head = published(store)
    lying = Head(
        format=head.format, name=head.name, digest=head.digest, index_bytes=head.index_bytes + size, kind="image"
    )
    run(store.publish("tree.json", seal(json.dumps(_fields(lying)).encode(), PAYLOAD_TYPE, ADA)))
    with pytest.raises(IntegrityError, match=r"has less than the|its SHA-256 is not its name"):
        opened(store)


def _fields(head: Head) -> dict[str, Any]:
    return {name: getattr(head, name) for name in head.__struct_fields__}


def test_a_store_that_lies_about_sizes(store: FaultyStore) -> None:
    head = published(store)
    for size in (0, 300 << 20):
        lying = FaultyStore(store)

        async def stat(path: str, size: int = size) -> Any:
            return (await store.stat(path))._replace(size=size)

        lying.stat = stat  # type: ignore[method-assign]
        with pytest.raises(IntegrityError, match="an index has 1 to 268435456"):
            run(read_index_bytes(lying, head.digest))
    with pytest.raises(ConfigError, match="is not a tree digest"):
        run(read_index_bytes(store, "../tree.json"))


def test_a_wrong_byte_is_read_once_more_another_way(store: FaultyStore) -> None:
    head = published(store)
    store.plan = [Fault(Kind.WRONG, path="index/*", attempts=[0])]
    assert opened(store).index.source == "a"
    assert [call.attempt for call in store.calls if call.path == index_path(head.digest)] == [0, 1]
    store.plan = [Fault(Kind.WRONG, path="index/*")]
    with pytest.raises(IntegrityError, match="is damaged, or another one"):
        opened(store)


def test_a_store_that_fails_is_asked_again(store: FaultyStore) -> None:
    published(store)
    store.plan = [Fault(Kind.ERROR, calls=[0]), Fault(Kind.ERROR, path="index/*", calls=[0])]
    assert opened(store).index.source == "a"
    store.plan = [Fault(Kind.ERROR, path="index/*", error=StorageError)]
    with pytest.raises(StorageError):
        opened(store)


# ---- replaced while it is opened ---------------------------------------------------------------------------


def test_a_tree_that_is_replaced_while_it_is_opened(store: FaultyStore) -> None:
    """The old index is gone when it is asked for: the new tree is opened."""
    old = published(store, "old")

    class Replacing(FaultyStore):
        async def read_into(self, path: str, *args: Any, **more: Any) -> None:
            await super().read_into(path, *args, **more)
            if path == "tree.json" and self.count("read_into", path) == 1:
                data = index_bytes("new")
                await publish_tree(store, data, make_head(data, "image", store.url), ADA)
                await store.delete(index_path(old.digest))

    assert opened(Replacing(store)).index.source == "new"


def test_a_tree_that_never_stays(store: FaultyStore) -> None:
    count = itertools.count()

    class Replacing(FaultyStore):
        async def read_into(self, path: str, *args: Any, **more: Any) -> None:
            if path.startswith("index/"):
                await store.delete(path)
                data = index_bytes(f"tree {next(count)}")
                await publish_tree(store, data, make_head(data, "image", store.url), ADA)
            await super().read_into(path, *args, **more)

    published(store, "first")
    with pytest.raises(SourceChanged, match="is replaced faster than it can be read"):
        opened(Replacing(store))


def test_an_index_that_is_missing(store: FaultyStore) -> None:
    head = published(store)
    run(store.delete(index_path(head.digest)))
    with pytest.raises(NotFound, match=r"the index that tree\.json names does not exist: publish the tree anew"):
        opened(store)


# ---- publishing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LOST])
@pytest.mark.parametrize("at", range(6))
def test_a_crash_leaves_the_old_tree_or_the_new_one(store: FaultyStore, kind: Kind, at: int) -> None:
    published(store, "old")
    data = index_bytes("new")
    count = itertools.count()

    class Crashing(FaultyStore):
        def _find(self, call: Any) -> Fault | None:
            if next(count) == at:
                self.crashed = True
            return Fault(kind, call.operation, error=Unavailable) if self.crashed else None

        crashed = False

    crashing = Crashing(store)
    try:
        run(publish_tree(crashing, data, make_head(data, "image", store.url), ADA))
    except BootseerError:
        assert opened(store).index.source in ("old", "new")
    else:
        assert opened(store).index.source == "new"
        assert not crashing.crashed


def test_the_index_is_there_before_the_head(store: FaultyStore) -> None:
    data = index_bytes()
    head = make_head(data, "image", store.url)
    run(publish_tree(store, data, head, ADA))
    writes = [(call.operation, call.path) for call in store.calls if call.operation in ("create", "publish")]
    assert writes == [("create", index_path(head.digest)), ("publish", "tree.json")]


def test_publishing_again_changes_nothing(store: FaultyStore) -> None:
    head = published(store)
    before = run(store.stat(index_path(head.digest)))
    assert published(store) == head
    assert run(store.stat(index_path(head.digest))) == before
    assert opened(store).index.source == "a"


def test_a_damaged_index_is_repaired_by_publishing(store: FaultyStore) -> None:
    head = published(store)
    for damaged in (b"x", b"", bytes(head.index_bytes)):
        run(store.publish(index_path(head.digest), damaged))
        published(store)
        assert opened(store).index.source == "a"


def test_what_no_reader_would_take_is_not_published(store: FaultyStore) -> None:
    data = index_bytes()
    head = make_head(data, "image", store.url)
    for index_object, wrong in (
        (index_bytes("other"), head),
        (data + b"x", head),
        (b"no index", make_head(b"no index", "image", store.url)),
        (data, Head(**_fields(head) | {"kind": "other"})),
        (data, Head(**_fields(head) | {"index_bytes": 1})),
    ):
        with pytest.raises(IntegrityError):
            run(publish_tree(store, index_object, wrong, ADA))
    assert store.calls == [] and run(store.list("")) == []
