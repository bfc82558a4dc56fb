"""The environment store on a disk, behind a web server and with faults: what it refuses, says and survives."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.service.mounted_use import MountedUse
from bootseer.env.store.collecting import remove
from bootseer.env.store.held_lease import Lease
from bootseer.env.store.lease import BuilderLease, LeaseUnavailable
from bootseer.env.store.store import EnvStore, PublishedSnapshot
from bootseer.errors import EnvError, IntegrityError, NotFound, SourceChanged, StorageError, Unavailable, Untrusted
from bootseer.storage import Store, open_store
from bootseer.tree.opening import open_tree
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey
from tests.contract import servers
from tests.env_parts import (
    ADA,
    ADAS,
    EVE,
    NOW_S,
    build_into,
    document,
    make_snapshot,
    publish,
    write_environment,
)
from tests.support import wait_until
from tests.testing.faulty_store import Fault, FaultyStore, Kind

KEY, DOCUMENT = document()


class Sides:
    """A store, and another way to it."""

    def __init__(self, store: Store, url: str, trust: Trust = ADAS) -> None:
        self.store = store
        self.env = EnvStore(store, url, trust)

    def find(self, now_s: float = NOW_S) -> Any:
        return aio.run_sync(self.env.find(KEY, now_s))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
    aio.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_environment(tmp_path / "files")


@pytest.fixture
def local(tmp_path: Path) -> Sides:
    return Sides(open_store(str(tmp_path / "envs")), str(tmp_path / "envs"))


@pytest.fixture
def anybodys(tmp_path: Path) -> Sides:
    """As local, but nobody can tell who wrote to it."""
    return Sides(FaultyStore(open_store(str(tmp_path / "envs"))), str(tmp_path / "envs"))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Callable[..., Sides]]:
    (tmp_path / "envs").mkdir()
    stores: list[Store] = []
    with servers.serve_directory(tmp_path / "envs") as url:

        def open_(trust: Trust = ADAS) -> Sides:
            async def begin() -> Store:
                stores.append(open_store(url))
                return stores[-1]

            return Sides(aio.run_sync(begin()), url, trust)

        yield open_
        for store in stores:
            aio.run_sync(store.aclose())


def test_a_web_server_is_read(local: Sides, web: Callable[..., Sides], files: Path, said: list[str]) -> None:
    reader = web()
    assert reader.find() is None
    for number in range(1, 4):
        assert publish(local.env, files, replaces=number - 1).found.generation == number
    found = reader.find()
    assert found.generation == 3
    opened = aio.run_sync(reader.env.open(found.snapshot))
    assert aio.run_sync(reader.env.verify(found)).faults == []
    assert opened.url.startswith("http://")
    # Other processes open it by its URL alone.

    async def again() -> Any:
        store = open_store(opened.url.partition("@sha256:")[0])
        try:
            return await open_tree(store, opened.url, Trust())
        finally:
            await store.aclose()

    assert aio.run_sync(again()).digest == found.snapshot.tree
    assert said == []
    aio.run_sync(reader.env.touch(found, NOW_S))  # not written, and no error
    # A gap ends what can be seen without a listing.
    aio.run_sync(local.store.delete(f"keys/{KEY}/env-000002.json"))
    assert reader.find().generation == 1


def test_a_web_server_is_not_written(web: Callable[..., Sides], files: Path, tmp_path: Path) -> None:
    sides = web()
    found = aio.run_sync(sides.env.prepare(KEY, DOCUMENT, ADA))
    assert isinstance(found, LeaseUnavailable)
    assert "each node installs on its own" in found.why
    assert list((tmp_path / "envs").iterdir()) == []
    with pytest.raises(StorageError, match="is a web server, which is read-only"):
        try:
            aio.run_sync(sides.env.gc(0, 0, NOW_S))
        except Exception as error:
            raise StorageError(str(error)) from error


def test_nothing_is_published_that_nobody_would_believe(anybodys: Sides, files: Path, tmp_path: Path) -> None:
    for key in (None, EVE):
        found = aio.run_sync(anybodys.env.prepare(KEY, DOCUMENT, key))
        assert isinstance(found, LeaseUnavailable)
        assert "the next start would not trust it" in found.why
        assert "bootseer keys" in found.why
        assert "\n" not in found.why
        assert isinstance(publish(anybodys.env, files, key=key), LeaseUnavailable)
    assert not list((tmp_path / "envs").rglob("env-*"))
    assert aio.run_sync(anybodys.env.prepare(KEY, DOCUMENT, ADA)) is None


def test_a_place_of_ones_own_needs_no_key(local: Sides, files: Path) -> None:
    published = publish(local.env, files, key=None)
    assert published.is_ours
    assert published.found.because == "unsigned, but only you can write there"


def test_what_no_reader_would_take_is_not_published(local: Sides, files: Path, tmp_path: Path) -> None:
    built = build_into(local.env, KEY, files)
    right = make_snapshot(KEY, built.digest, len(built.index_bytes))

    def refused(snapshot: Any, data: bytes, index: bytes, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            aio.run_sync(local.env.publish(snapshot, data, index, ADA))
        assert not list((tmp_path / "envs").rglob("env-*"))

    refused(right, DOCUMENT + b" ", built.index_bytes, IntegrityError, "does not match the key")
    refused(right, b"x" * (2 << 20), built.index_bytes, IntegrityError, "does not match the key")
    refused(right, DOCUMENT, built.index_bytes[:-1], IntegrityError, "is damaged")
    two = make_snapshot(KEY, built.digest, len(built.index_bytes), targets=["/a", "/b"])
    refused(two, DOCUMENT, built.index_bytes, IntegrityError, "one directory for each of 2 targets")
    other = make_snapshot("b" * 64, built.digest, len(built.index_bytes))
    refused(other, DOCUMENT, built.index_bytes, IntegrityError, "does not match the key")
    bad = make_snapshot(KEY, built.digest, len(built.index_bytes), targets=["../x"])
    refused(bad, DOCUMENT, built.index_bytes, IntegrityError, "is not absolute")
    (pack,) = (tmp_path / "envs" / "trees" / KEY / "packs").iterdir()
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-1])
    refused(right, DOCUMENT, built.index_bytes, SourceChanged, "was removed during the build")
    pack.unlink()
    refused(right, DOCUMENT, built.index_bytes, SourceChanged, "was removed during the build")
    build_into(local.env, KEY, files)
    assert aio.run_sync(local.env.publish(right, DOCUMENT, built.index_bytes, ADA)).is_ours


def test_a_pack_that_only_has_the_name_is_written_again(local: Sides, files: Path, tmp_path: Path) -> None:
    build_into(local.env, KEY, files)
    (pack,) = (tmp_path / "envs" / "trees" / KEY / "packs").iterdir()
    whole = pack.read_bytes()
    pack.write_bytes(bytes(len(whole)))
    found = publish(local.env, files).found
    assert pack.read_bytes() == whole
    assert aio.run_sync(local.env.verify(found)).faults == []


def test_a_foreign_document_in_the_place_of_ours(local: Sides, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "envs" / "keys" / KEY / "key.json"
    path.parent.mkdir(parents=True)
    for data in (b"{}", b"x" * (2 << 20)):
        path.write_bytes(data)
        assert aio.run_sync(local.env.documents(10)) == []
        publish(local.env, files)
        assert path.read_bytes() == DOCUMENT
        assert [each.data for each in aio.run_sync(local.env.documents(10))] == [DOCUMENT]


def test_documents_have_a_limit_and_an_order(local: Sides, tmp_path: Path) -> None:
    for number in range(5):
        key, data = document(f"package{number}")
        assert aio.run_sync(local.env.prepare(key, data, ADA)) is None
        os.utime(tmp_path / "envs" / "keys" / key, (NOW_S + number, NOW_S + number))
    found = aio.run_sync(local.env.documents(3))
    assert [each.data for each in found] == [document(f"package{number}")[1] for number in (4, 3, 2)]
    assert all(hashlib.sha256(each.data).hexdigest() == each.key for each in found)
    assert found[0].made_s == NOW_S + 4


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_answers_to_publishing_are_lost(local: Sides, files: Path, lost: int, tmp_path: Path) -> None:
    store = FaultyStore(local.store)
    sides = Sides(store, local.env.url)
    store.plan = [Fault(Kind.LOST, "publish", path="*/env-*", calls=range(lost))]
    published = publish(sides.env, files)
    assert isinstance(published, PublishedSnapshot)
    assert published.is_ours
    assert [each.name for each in (tmp_path / "envs" / "keys" / KEY).glob("env-*")] == ["env-000001.json"]


def test_a_store_that_fails_is_an_error_and_no_miss(local: Sides, files: Path) -> None:
    publish(local.env, files)
    store = FaultyStore(local.store)
    sides = Sides(store, local.env.url)
    for operation in ("list", "stat"):
        store.plan = [Fault(Kind.ERROR, operation)]
        with pytest.raises(Unavailable):
            sides.find()
    store.plan = [Fault(Kind.ERROR, "publish")]
    found = sides.find()
    aio.run_sync(sides.env.touch(found, NOW_S))
    assert found.generation == 1


def test_damage_is_found_by_verifying(local: Sides, files: Path, tmp_path: Path) -> None:
    found = publish(local.env, files).found
    (pack,) = (tmp_path / "envs" / "trees" / KEY / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[10] ^= 1
    pack.write_bytes(data)
    steps: list[tuple[int, int]] = []
    done = aio.run_sync(local.env.verify(found, lambda *step: steps.append(step)))
    assert done.right_blocks == done.blocks - 1
    assert done.faults[0].block == 0
    assert steps[-1][0] == steps[-1][1]
    opened = aio.run_sync(local.env.open(found.snapshot))
    with pytest.raises(IntegrityError, match="block 0 at byte 0"):
        list(opened.blocks.read_blocks([0]))


def test_a_key_that_is_not_trusted_any_more(anybodys: Sides, files: Path, said: list[str]) -> None:
    assert publish(anybodys.env, files).is_ours
    bob = SigningKey.make(name="bob")
    bobs = Sides(anybodys.store, anybodys.env.url, Trust([TrustedKey(PublicKey(bob.public, "bob"), "/keys/bob")]))
    assert bobs.find() is None
    assert "is signed by no trusted key" in said[0]
    published = publish(bobs.env, files, key=bob)
    assert (published.is_ours, published.found.generation) == (True, 2)
    assert anybodys.find().generation == 1, "each finds what it believes"


def test_links_in_a_store_are_refused(local: Sides, files: Path, tmp_path: Path) -> None:
    """A store of several users: none of them can make another one write elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "envs"
    for above in ("keys", f"keys/{KEY}", "trees", f"trees/{KEY}", f"trees/{KEY}/packs", f"trees/{KEY}/index"):
        link = root / above
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        with pytest.raises(Untrusted, match="is a symbolic link, which an environment store must not contain"):
            aio.run_sync(local.env.prepare(KEY, DOCUMENT, ADA))
        link.unlink()
    assert list(outside.iterdir()) == []
    publish(local.env, files)


# ---- garbage and use -----------------------------------------------------------------------------------------


async def no_pause(_: float, __: asyncio.Event) -> None:
    return None


def test_a_mounted_tree_stays_although_its_generation_has_expired(local: Sides, tmp_path: Path) -> None:
    """A job of many days reads it, while later starts have made, and use, the next generation."""
    now_s, day_s = time.time(), 86_400.0
    old = publish(
        local.env,
        write_environment(tmp_path / "old", "old"),
        created_s=now_s - 9 * day_s,
        expires_s=now_s - 2 * day_s,
    )
    new = publish(local.env, write_environment(tmp_path / "new", "new"), created_s=now_s, replaces=1)
    assert (old.found.generation, new.found.generation) == (1, 2)
    trees = tmp_path / "envs" / "trees" / KEY
    for entry in (*(trees / "packs").iterdir(), *(trees / "index").iterdir()):
        os.utime(entry, (now_s - 9 * day_s, now_s - 9 * day_s))

    def collect() -> list[str]:
        done = aio.run_sync(local.env.gc(None, None, now_s, is_dry=True, pause=no_pause))
        return [path for each in done.removals for path in each.paths]

    gone = collect()
    assert f"trees/{KEY}/index/{old.found.snapshot.tree}" in gone
    aio.run_sync(local.env.hold(old.found, now_s))
    assert collect() == []
    stamp = trees / "used" / old.found.snapshot.tree
    os.utime(stamp, (now_s - 7200, now_s - 7200))
    assert collect() == gone


def test_a_mounted_tree_is_in_use(local: Sides, files: Path, tmp_path: Path) -> None:
    """Its stamps are renewed as long as it is mounted, by the first node whose turn it is."""
    found = publish(local.env, files, created_s=NOW_S - 1e6).found
    stamp = tmp_path / "envs" / "trees" / KEY / "used" / found.snapshot.tree
    aio.run_sync(local.env.hold(found, time.time()))
    before = stamp.stat().st_mtime_ns
    aio.run_sync(local.env.hold(found, time.time()))
    assert stamp.stat().st_mtime_ns == before, "a new one is enough"
    os.utime(stamp, (NOW_S - 1e6, NOW_S - 1e6))
    uses = [MountedUse(local.env, found, "", every_s=0.01, retry_s=0.01) for _ in range(2)]
    wait_until(lambda: stamp.stat().st_mtime > time.time() - 600)
    os.utime(stamp, (NOW_S - 1e6, NOW_S - 1e6))
    wait_until(lambda: stamp.stat().st_mtime > time.time() - 600)
    for use in uses:
        use.close()
    wait_until(lambda: not any(thread.name == "env-use" for thread in threading.enumerate()))
    used = tmp_path / "envs" / "keys" / KEY / "used"
    assert used.stat().st_mtime > time.time() - 600, "also for other versions, which know only this one"
    with pytest.raises(
        EnvError, match="not deleted: it was used or stored within 2 h, so a job may have it mounted"
    ):
        aio.run_sync(remove(local.store, [KEY], time.time(), pause=no_pause))
    assert aio.run_sync(local.env.gc(0, 0.0, time.time(), pause=no_pause)).recent == 1
    done = aio.run_sync(remove(local.store, [KEY], time.time(), is_forced=True, pause=no_pause))
    assert [each.key for each in done.removals] == [KEY]
    aio.run_sync(local.env.hold(found, time.time()))  # of a job that goes on
    assert not any((tmp_path / "envs" / place / KEY).exists() for place in ("keys", "trees"))


def test_what_is_being_built_is_not_removed(local: Sides, files: Path) -> None:
    publish(local.env, files, created_s=NOW_S - 1e6)
    lease = aio.run_sync(BuilderLease(local.store, owner="builder").try_take(KEY))
    assert isinstance(lease, Lease)

    async def heartbeats(_: float, __: asyncio.Event) -> None:
        await local.store.publish(f"keys/{KEY}/lease-{lease.number:06d}.json", lease.next_record("working"))

    with pytest.raises(EnvError, match="not deleted: it is being built; repeat this after the build"):
        aio.run_sync(remove(local.store, [KEY], time.time() + 1e6, is_forced=True, pause=heartbeats))
    assert local.find() is not None
    done = aio.run_sync(remove(local.store, [KEY], time.time() + 1e6, pause=no_pause))
    assert [each.why for each in done.removals] == ["was named"], "the builder is dead"
    with pytest.raises(NotFound, match="has no environment of the key"):
        aio.run_sync(remove(local.store, [KEY], time.time(), is_forced=True, pause=no_pause))
