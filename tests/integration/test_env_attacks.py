"""Attacks on an environment store, by somebody who may write to all of it: refused with one line, nothing touched.

The store is one of which nobody can tell who wrote to it; Ada's key is trusted, Eve's is not. What is signed by
Ada all the same was signed for another key, or is what a stolen key of hers could have made.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.restore.restore import restore
from bootseer.env.store.env_tree import StoredTree
from bootseer.env.store.lease import BuilderLease, Lease
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.errors import IntegrityError, Untrusted
from bootseer.storage import open_store
from bootseer.tree import compression
from bootseer.tree.index import BLOCK, BLOCK_BYTES, Index, digest_of
from tests import made_trees as made
from tests.env_parts import (
    ADA,
    ADAS,
    EVE,
    NOW_S,
    document,
    everything,
    make_snapshot,
    publish,
    put_index,
    put_raw,
    write_environment,
)
from tests.testing.faulty_store import FaultyStore

KEY, DOCUMENT = document()
OTHER_KEY, _ = document("b")


class Victim:
    """Somebody who uses the store; `folder` has the store, and what must not be touched."""

    def __init__(self, folder: Path, said: list[str]) -> None:
        self.folder = folder
        self.root = folder / "envs"
        self.said = said
        self.store = FaultyStore(open_store(str(self.root)))
        self.env = EnvStore(self.store, str(self.root), ADAS)
        self.key = self.root / "keys" / KEY
        self.tree = self.root / "trees" / KEY
        self.environ = {"BOOTSEER_CACHE": str(self.root / "cache"), "HOME": str(folder / "home")}

    def finds(self) -> FoundSnapshot | None:
        self.said.clear()
        return aio.run_sync(self.env.find(KEY, NOW_S))

    def finds_nothing(self, text: str) -> None:
        assert self.finds() is None
        assert self.said, "it is told why"
        for line in self.said:
            assert line.isprintable()
            assert len(line) < 1500
        assert text in self.said[-1], self.said

    def opens(self, **more: Any) -> Any:
        found = self.finds()
        assert found is not None, self.said
        return aio.run_sync(self.env.open(found.snapshot, **more))

    def cannot_open(self, *texts: str) -> None:
        with pytest.raises(IntegrityError) as caught:
            self.opens()
        text = str(caught.value)
        assert text.isprintable(), "one line"
        assert len(text) < 1500
        for each in texts:
            assert each in text, text

    def cannot_restore(self, *texts: str) -> None:
        """The way of a job, which opens the tree itself."""
        found = self.finds()
        assert found is not None, self.said
        snapshot = found.snapshot
        tree = StoredTree(self.env.tree_url(snapshot), snapshot.tree, environ=self.environ)
        targets = [str(self.root / f"target{number}") for number in range(len(snapshot.targets))]
        with pytest.raises(IntegrityError) as caught:
            restore(snapshot, tree, targets=targets, environ=self.environ)
        assert all(each in str(caught.value) for each in texts), caught.value
        assert not list(self.root.glob("target*"))


@pytest.fixture
def victim(tmp_path: Path, said: list[str]) -> Iterator[Victim]:
    """What is around the store stays as it was, whatever the test puts into it."""
    before = os.umask(0o022)
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "authorized_keys").write_text("mine\n")
    (tmp_path / "home" / "secret").write_text("secret\n")
    (tmp_path / "home" / "keys").mkdir()
    found = Victim(tmp_path, said)
    found.root.mkdir()
    there = everything(tmp_path, [found.root])
    yield found
    assert everything(tmp_path, [found.root]) == there
    os.umask(before)
    aio.close()


@pytest.fixture
def published(victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> FoundSnapshot:
    files = write_environment(tmp_path_factory.mktemp("files"))
    found: FoundSnapshot = publish(victim.env, files).found
    return found


# ---- env-NNNNNN.json -----------------------------------------------------------------------------------------


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_signatures(victim: Victim, published: FoundSnapshot) -> None:
    path = victim.key / "env-000001.json"
    right = path.read_bytes()
    sealed = json.loads(right)
    signature = sealed["signatures"][0]
    payload = base64.b64decode(sealed["payload"])
    elsewhere = base64.b64encode(payload.replace(b"/opt/venv", b"/usr/venv")).decode()
    for fields, text in (
        ({"signatures": []}, "is not signed"),
        ({"payload": elsewhere}, "was changed after ada"),
        ({"payload": elsewhere, "signatures": []}, "is not signed"),
        ({"signatures": [signature | {"keyid": "0" * 64}]}, "is signed by no trusted key"),
        ({"signatures": [signature | {"sig": "AAAA" + signature["sig"][4:]}]}, "was changed after ada"),
        (
            {"payloadType": "application/vnd.bootseer.tree.v1+json"},
            "holds 'application/vnd.bootseer.tree.v1+json'",
        ),
        ({"payload": "\x1b[2J"}, "is not a DSSE envelope"),
        ({"signatures": [signature] * 17}, "has 17 signatures"),
    ):
        path.write_bytes(right)
        change(path, **fields)
        victim.finds_nothing(text)
    put_raw(victim.store, KEY, published.snapshot, EVE)
    victim.finds_nothing("is signed by no trusted key")
    path.write_bytes(right)
    assert victim.finds() == published


def test_replays(victim: Victim, published: FoundSnapshot, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything is signed by Ada, and nothing of it is what was asked for."""
    other = publish(victim.env, write_environment(tmp_path_factory.mktemp("other"), "other"), "b").found
    envelope = (victim.root / "keys" / OTHER_KEY / "env-000001.json").read_bytes()
    (victim.key / "env-000002.json").write_bytes(envelope)
    found = victim.finds()
    assert found == published
    assert f"is the snapshot of another key, {OTHER_KEY}" in victim.said[0]
    (victim.key / "env-000001.json").write_bytes(envelope)
    victim.finds_nothing("is the snapshot of another key")
    # An index that is signed, but by another snapshot.
    put_raw(victim.store, KEY, published.snapshot)
    (victim.key / "env-000002.json").unlink()
    index = (victim.root / "trees" / OTHER_KEY / "index" / other.snapshot.tree).read_bytes()
    (victim.tree / "index" / published.snapshot.tree).write_bytes(index)
    victim.cannot_open(published.snapshot.tree)
    # An expired one that is put where the newest was.
    put_raw(
        victim.store, KEY, make_snapshot(KEY, published.snapshot.tree, 100, expires_s=NOW_S + 1, created_s=1.0)
    )
    assert victim.finds() is not None
    assert aio.run_sync(victim.env.find(KEY, NOW_S + 1)) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"targets": ["opt/venv"]}, "is not absolute"),
        ({"targets": ["/opt/../../etc"]}, "is not a normalized path"),
        ({"targets": ["/"]}, "is not a normalized path"),
        ({"targets": ["/opt", "/opt/venv"]}, "equals, or is inside, another one"),
        ({"targets": ["/opt", "/opt"]}, "equals, or is inside, another one"),
        ({"targets": ["/opt/\x1b]0;owned\x07"]}, "not printable"),
        ({"targets": []}, "has 0 targets"),
        ({"tree": "../../../../etc/passwd"}, "is not a SHA-256"),
        ({"index_bytes": 1 << 40}, "an index of"),
        ({"left_out": ["a"] * 1001}, "lists 1001 paths"),
        ({"outside": ["\x1b[2J"]}, "not a printable path"),
        ({"format": "bootseer-env/9"}, "take a newer one"),
    ],
)
def test_payloads_of_a_stolen_key(
    victim: Victim, published: FoundSnapshot, fields: dict[str, Any], text: str
) -> None:
    snapshot = make_snapshot(KEY, published.snapshot.tree, 100)
    import msgspec

    put_raw(victim.store, KEY, msgspec.structs.replace(snapshot, **fields), number=2)
    assert victim.finds() == published, "the one before it still counts"
    assert text in victim.said[0]
    assert victim.said[0].isprintable()
    victim.key.joinpath("env-000001.json").unlink()
    victim.finds_nothing(text)


def test_files_that_are_too_large_or_too_many(victim: Victim, published: FoundSnapshot) -> None:
    with open(victim.key / "env-000002.json", "wb") as file:
        file.truncate(1 << 40)  # takes no room
    assert victim.finds() == published
    assert "at most" in victim.said[0]
    with open(victim.key / "key.json", "wb") as file:
        file.truncate(1 << 40)
    assert aio.run_sync(victim.env.documents(10)) == []
    (victim.key / "key.json").write_bytes(b"{" * (1 << 20))
    assert aio.run_sync(victim.env.documents(10)) == []
    assert "is not the document of this key" in victim.said[-1]
    for number in range(3, 300):
        (victim.key / f"env-{number:06d}.json").write_bytes(b"rubbish")
    victim.store.calls.clear()
    victim.finds_nothing("is not a DSSE envelope")
    assert victim.store.count("stat") <= 32, "not all of them are looked at"


def test_names_that_are_none_of_ours(victim: Victim, published: FoundSnapshot) -> None:
    for name in ("env-000002.json.tmp", "env-2.json", "env-999999999.json", "ENV-000009.json", " env-000003.json"):
        (victim.key / name).write_bytes(b"rubbish")
    for name in ("..data", "A" * 64, "x" * 200, KEY[:-1]):
        (victim.root / "keys" / name).mkdir()
    (victim.root / "keys" / ("e" * 64)).write_bytes(b"a file in the place of a folder")
    assert victim.finds() == published
    assert victim.said == []
    assert [each.key for each in aio.run_sync(victim.env.list(NOW_S))] == [KEY]


# ---- leases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"[" * 8000, b"x" * 100_000, b'{"nonce":"' + b"\xff" * 32 + b'"}', b'{"owner":"\x1b[2J"}'],
)
def test_rubbish_for_a_lease_holds_nobody_for_long(victim: Victim, data: bytes) -> None:
    victim.key.mkdir(parents=True)
    (victim.key / "lease-000001.json").write_bytes(data)
    (victim.key / "lease-999999999.json").write_bytes(data)

    async def nothing() -> None:
        return None

    leases = BuilderLease(victim.store, owner="node", beat_s=0.05)
    lease = aio.run_sync(leases.acquire(KEY, nothing, 30))
    assert isinstance(lease, Lease)
    assert lease.number == 2
    assert all(line.isprintable() and len(line) < 1500 for line in victim.said)


# ---- links in the store --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "keys", f"keys/{KEY}", f"keys/{KEY}/env-000001.json", "trees", f"trees/{KEY}", f"trees/{KEY}/index",
        f"trees/{KEY}/packs",
    ],
)  # fmt: skip
def test_links_that_lead_outside(victim: Victim, published: FoundSnapshot, place: str, tmp_path: Path) -> None:
    """Even to what would be right: nothing is read, written or deleted through them."""
    path = victim.root / place
    kept = tmp_path / "kept"
    path.rename(kept)
    path.symlink_to(kept)
    outside = everything(kept) if kept.is_dir() else {}
    if place.startswith("keys"):
        victim.finds_nothing("is a symbolic link")
    else:
        victim.cannot_open("is a symbolic link")
    if not place.endswith(".json"):
        with pytest.raises(Untrusted, match="is a symbolic link"):
            aio.run_sync(victim.env.prepare(KEY, DOCUMENT, ADA))
        try:
            aio.run_sync(victim.env.gc(0, 0, NOW_S + 1e9, takes_recent=True))
        except Untrusted as error:
            assert "is a symbolic link" in str(error)
    assert (everything(kept) if kept.is_dir() else {}) == outside
    assert kept.exists()
    path.unlink()
    kept.rename(path)


def test_garbage_collection_deletes_nothing_outside(victim: Victim, published: FoundSnapshot) -> None:
    """Links below folders that go: the link goes, and not what it leads to."""
    home = victim.folder / "home"
    (victim.key / "more").symlink_to(home)
    (victim.tree / "packs" / ("e" * 64)).symlink_to(home / "secret")
    (victim.tree / "packs" / ("f" * 64)).symlink_to(home)
    (victim.root / "trees" / ("d" * 64)).symlink_to(home)
    done = aio.run_sync(victim.env.gc(0, 0, NOW_S + 1e9))
    assert [each.key for each in done.removals] == [KEY]
    assert not victim.key.exists()
    assert not victim.tree.exists()
    assert (home / "secret").read_text() == "secret\n"


def test_a_pipe_or_a_device_in_the_place_of_a_file(victim: Victim, published: FoundSnapshot) -> None:
    os.mkfifo(victim.key / "env-000003.json")
    (victim.key / "env-000002.json").mkdir()
    assert victim.finds() == published
    assert "env-000003.json" in victim.said[0]

    async def nothing() -> None:
        return None

    for number, make in ((1, os.mkfifo), (2, os.mkdir)):
        make(victim.key / f"lease-{number:06d}.json")
        leases = BuilderLease(victim.store, owner="node", beat_s=0.05)
        lease = aio.run_sync(leases.acquire(KEY, nothing, 30))
        assert isinstance(lease, Lease), lease
        assert lease.number > number
        aio.run_sync(lease.release())
        for path in victim.key.glob("lease-*"):
            path.unlink()


# ---- the index -----------------------------------------------------------------------------------------------


def tree(*more: made.Entry) -> Index:
    return made.make([made.folder(b"0"), made.file(b"0/a.py", b"print()"), *more]).index


def opened_by(victim: Victim, index: Index, **more: Any) -> None:
    digest, size = put_index(victim.store, KEY, index)
    put_raw(victim.store, KEY, make_snapshot(KEY, digest, size, **more))


def test_a_tree_that_is_fine(victim: Victim) -> None:
    """Links out are data that nobody follows, deletions are devices 0:0, and both belong to environments."""
    index = tree(
        made.symlink(b"0/python", b"/usr/bin/python3"),
        made.symlink(b"0/up", b"../../../etc/passwd"),
        made.whiteout(b"0/gone"),
        made.folder(b"0/shared", mode=0o2775, is_opaque=True),
    )
    opened_by(victim, index)
    assert len(victim.opens().index) == 7


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([made.file(b"0/su", b"x", mode=0o4755)], "'0/su' is setuid or setgid"),
        ([made.file(b"0/sg", b"x", mode=0o2755)], "'0/sg' is setuid or setgid"),
        ([made.file(b"0/ping", b"x", xattrs=((b"security.capability", b"x"),))], "'0/ping' has capabilities"),
        ([made.folder(b"0/r", xattrs=((b"trusted.overlay.redirect", b"/etc"),))], "has an attribute of overlays"),
        ([made.folder(b"0/r", xattrs=((b"user.overlay.opaque", b"y"),))], "has an attribute of overlays"),
        ([made.Entry(b"0/sda", stat.S_IFBLK | 0o660, rdev=(8, 0))], "'0/sda' is a block device"),
        ([made.Entry(b"0/null", stat.S_IFCHR | 0o666, rdev=(1, 3))], "'0/null' is a device"),
        ([made.Entry(b"0/zero", stat.S_IFBLK | 0o666, rdev=(0, 0))], "'0/zero' is a block device"),
        ([made.Entry(b"0/pipe", stat.S_IFIFO | 0o666)], "'0/pipe' is a pipe"),
        ([made.Entry(b"0/sock", stat.S_IFSOCK | 0o666)], "'0/sock' is a socket"),
        ([made.folder(b"1")], "instead of one directory for each of 1 targets"),
        ([made.file(b"etc", b"x")], "instead of one directory for each of 1 targets"),
        ([made.folder(b"\x1b[2J")], "instead of one directory for each of 1 targets"),
    ],
)
def test_trees_that_are_no_environments(victim: Victim, entries: list[made.Entry], text: str) -> None:
    opened_by(victim, tree(*entries))
    victim.cannot_open(text)
    victim.cannot_restore(text)


def test_targets_that_are_no_directories(victim: Victim) -> None:
    for entry in (made.symlink(b"0", b"/etc"), made.file(b"0", b"x"), made.whiteout(b"0")):
        opened_by(victim, made.make([entry]).index)
        victim.cannot_open("'0' is not a directory")
        victim.cannot_restore("'0' is not a directory")
    opened_by(victim, made.make([]).index)
    victim.cannot_open("instead of one directory for each of 1 targets")
    victim.cannot_restore("instead of one directory for each of 1 targets")


def hostile(change: Callable[[Index], dict[str, Any]]) -> bytes:
    """An index that no builder makes, as it is stored."""
    import msgspec

    index = tree(made.symlink(b"0/link", b"/etc"), made.file(b"0/z", b"z"))
    return compression.compress(msgspec.msgpack.encode(msgspec.structs.replace(index, **change(index))))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda index: {"names": [*index.names[:-1], b"../../../etc/cron.d/x"]}, "is not a valid name"),
        (lambda index: {"names": [*index.names[:-1], b".."]}, "is not a valid name"),
        (lambda index: {"names": [*index.names[:-1], b"/etc/passwd"]}, "is not a valid name"),
        (lambda index: {"names": [*index.names[:-1], b"z\0"]}, "is not a valid name"),
        (lambda index: {"names": [*index.names[:-1], b""]}, "is not a valid name"),
        (lambda index: {"names": [*index.names[:-1], index.names[-2]]}, "duplicated or out of order"),
        (lambda index: {"parents": [*index.parents[:-1], len(index) - 2]}, "is in no directory"),  # below a link
        (lambda index: {"parents": [*index.parents[:-1], len(index) + 5]}, "is in no directory"),
        (lambda index: {"links": [*index.links[:-1], 1]}, "entry 4"),  # a second name of a folder
        (lambda index: {"links": [*index.links[:-1], 999]}, "is a link to no file"),
        (lambda index: {"sizes": [*index.sizes[:-1], 1 << 50]}, "pieces of files"),
        (lambda index: {"sizes": [*index.sizes[:-1], 1 << 60]}, "entry 4"),
        (lambda index: {"runs": [*index.runs[:-1], [-1, 1 << 40]]}, "entry 4"),
        (lambda index: {"modes": [*index.modes[:-1], 0o1000000]}, "has mode"),
        (lambda index: {"blocks": index.blocks * 3 + b"x"}, "list of blocks"),
        (lambda index: {"blocks": BLOCK.pack(b"\0" * 32, 0, 0, 16, BLOCK_BYTES * 2)}, "block 0"),
        (lambda index: {"packs": [(b"../../../x", 5)]}, "impossible digest or size"),
        (lambda index: {"format": "bootseer-tree/2"}, "take a newer one"),
    ],
)
def test_indexes_that_lead_out(victim: Victim, change: Callable[[Index], dict[str, Any]], text: str) -> None:
    data = hostile(change)
    digest = digest_of(data)
    aio.run_sync(victim.store.publish(f"trees/{KEY}/index/{digest}", data))
    put_raw(victim.store, KEY, make_snapshot(KEY, digest, len(data)))
    victim.cannot_open(text)
    victim.cannot_restore(text)


def test_bombs(victim: Victim, published: FoundSnapshot) -> None:
    import zstandard

    # An index that becomes more than any index has.
    compressor = zstandard.ZstdCompressor().compressobj()
    parts = [compressor.compress(bytes(1 << 24)) for _ in range(70)]
    bomb = b"".join([*parts, compressor.flush()])
    assert len(bomb) < 1 << 20
    digest = digest_of(bomb)
    aio.run_sync(victim.store.publish(f"trees/{KEY}/index/{digest}", bomb))
    put_raw(victim.store, KEY, make_snapshot(KEY, digest, len(bomb)), number=2)
    victim.cannot_open(digest)
    victim.cannot_restore(digest)
    # A block that becomes more than it says.
    more = compression.compress(bytes(4 << 20))
    import hashlib

    index = tree()
    import msgspec

    blocks = BLOCK.pack(hashlib.sha256(more).digest(), 0, 0, len(more), BLOCK_BYTES)
    packs = [(hashlib.sha256(more).digest(), len(more))]
    digest, size = put_index(victim.store, KEY, msgspec.structs.replace(index, blocks=blocks, packs=packs))
    aio.run_sync(victim.store.publish(f"trees/{KEY}/packs/{packs[0][0].hex()}", more))
    put_raw(victim.store, KEY, make_snapshot(KEY, digest, size), number=3)
    opened = victim.opens()
    with pytest.raises(IntegrityError) as caught:
        list(opened.blocks.read_blocks([0]))
    assert str(caught.value).isprintable()
    found = victim.finds()
    assert found is not None
    assert "cannot be decompressed" in aio.run_sync(victim.env.verify(found)).faults[0].what


def test_packs_and_indexes_that_were_exchanged(victim: Victim, published: FoundSnapshot) -> None:
    (pack,) = (victim.tree / "packs").iterdir()
    right = pack.read_bytes()
    for data in (right[:-1], bytes(len(right)), b"", right[::-1]):
        pack.write_bytes(data)
        opened = victim.opens()
        with pytest.raises(IntegrityError) as caught:
            list(opened.blocks.read_blocks(range(opened.index.block_count)))
        assert str(caught.value).isprintable()
    pack.write_bytes(right)
    index = victim.tree / "index" / published.snapshot.tree
    whole = index.read_bytes()
    for data in (whole[:-1], b"", whole[:-1] + b"\0"):
        index.write_bytes(data)
        victim.cannot_open(published.snapshot.tree)
        victim.cannot_restore(published.snapshot.tree)
    with open(index, "wb") as file:
        file.truncate(1 << 40)
    victim.cannot_open(published.snapshot.tree)
    victim.cannot_restore(published.snapshot.tree)
    index.write_bytes(whole)
    assert victim.opens().digest == published.snapshot.tree
