"""The commit when its answer is lost, its stripes are gone, or other writers are at the same point."""

from __future__ import annotations

import uuid

import pytest

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import list_versions, resolve
from bootseer.checkpoint.writing import committing
from bootseer.checkpoint.writing.committing import collect_garbage, commit, new_version
from bootseer.checkpoint.writing.writer import Geometry, VersionWriter, write_version
from bootseer.errors import AlreadyExists, CheckpointError, NotFound, StorageError, StorageTimeout, Truncated
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Entry, Stat, Store

DAY_S = 86_400.0


def new_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def save(store: Store) -> str:
    source = ("f", MemoryInput([b"x" * 9000]))
    return aio.run_sync(write_version(store, "ckpt", [source], geometry=Geometry(4096))).version


def versions(store: Store) -> list[tuple[str, bool]]:
    return [(found.version, found.is_complete) for found in aio.run_sync(list_versions(store, "ckpt"))]


def pointer(store: Store) -> str:
    data = bytearray(33 + 1)
    aio.run_sync(store.read_into("ckpt/LATEST", 0, memoryview(data)))
    return data.decode().strip()


class LosingStore(MemoryStore):
    """Publishes, and loses the answer, so many times; `gets_there` says whether it publishes at all."""

    def __init__(self, name: str, times: int, *, gets_there: bool = True, what: str = "manifest.json") -> None:
        super().__init__(name)
        self.times = times
        self.gets_there = gets_there
        self.what = what

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        if self.times and path.endswith(self.what):
            self.times -= 1
            if self.gets_there:
                await super().publish(path, data, if_absent=if_absent)
            raise StorageTimeout("no answer")
        return await super().publish(path, data, if_absent=if_absent)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "PUBLISHING", committing.PUBLISHING._replace(base_s=0.002))


@pytest.mark.parametrize("gets_there", [True, False])
@pytest.mark.parametrize("what", ["manifest.json", "LATEST"])
def test_a_lost_answer(what: str, gets_there: bool) -> None:
    store = LosingStore(uuid.uuid4().hex, 2, gets_there=gets_there, what=what)
    version = save(store)
    assert versions(store) == [(version, True)]
    assert pointer(store) == version


def test_a_commit_of_which_nobody_knows_keeps_its_stripes() -> None:
    name = uuid.uuid4().hex
    with pytest.raises(StorageTimeout):
        save(LosingStore(name, 1000, gets_there=False))
    store = MemoryStore(name)
    [(version, is_complete)] = versions(store)
    assert not is_complete
    assert [entry.name for entry in aio.run_sync(store.list(f"ckpt/v-{version}"))] == ["00000.s000"]


def test_a_version_whose_pointer_fails_is_there_and_the_error_says_so() -> None:
    store = LosingStore(uuid.uuid4().hex, 1000, gets_there=False, what="LATEST")
    with pytest.raises(CheckpointError, match=r"is complete, but .* cannot write LATEST"):
        save(store)
    [(version, is_complete)] = versions(store)
    assert is_complete and aio.run_sync(resolve(store, "ckpt")).version == version


def test_somebody_elses_manifest_is_not_ours() -> None:
    store = new_store()
    version = aio.run_sync(new_version(store, "ckpt"))
    aio.run_sync(commit(store, "ckpt", version, [], step=1))
    aio.run_sync(commit(store, "ckpt", version, [], step=1))  # the very same one
    with pytest.raises(AlreadyExists):
        aio.run_sync(commit(store, "ckpt", version, [], step=2))
    assert aio.run_sync(resolve(store, "ckpt")).step == 1


@pytest.mark.parametrize("damage", ["gone", "short", "all gone"])
def test_stripes_that_are_gone_make_no_version(damage: str) -> None:
    store = new_store()

    async def run() -> None:
        version = await new_version(store, "ckpt")
        writer = VersionWriter(store, "ckpt", version, geometry=Geometry(4096))
        await writer.add("a", MemoryInput([b"x" * 9000]))
        await writer.add("b", MemoryInput([b"y" * 9000]))
        if damage == "all gone":
            await store.delete(writer.folder)
        else:
            await store.delete(f"{writer.folder}/00001.s000")
        if damage == "short":
            await store.publish(f"{writer.folder}/00001.s000", b"y" * 8999)
        await commit(store, "ckpt", version, writer.files)

    with pytest.raises(Truncated if damage == "short" else NotFound):
        aio.run_sync(run())
    assert not any(is_complete for _, is_complete in versions(store))


class OvertakenStore(MemoryStore):
    """Another writer commits between our look at LATEST and our writing it."""

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        if path.endswith("LATEST") and not self.other:
            self.other = f"{2**63:020d}-" + "f" * 12
            await commit(MemoryStore(self.name), "ckpt", self.other, [])
        return await super().publish(path, data, if_absent=if_absent)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.other = ""


def test_the_pointer_never_stays_at_an_older_version() -> None:
    store = OvertakenStore(uuid.uuid4().hex)
    save(store)
    assert pointer(store) == store.other != ""


class TimedStore(MemoryStore):
    """All files were written at one time."""

    def __init__(self, name: str, mtime_s: float) -> None:
        super().__init__(name)
        self.mtime_s = mtime_s

    async def list(self, directory: str) -> list[Entry]:
        return [
            entry if entry.is_folder else entry._replace(mtime_s=self.mtime_s)
            for entry in await super().list(directory)
        ]


def test_a_long_save_is_not_taken_away_while_it_is_written() -> None:
    name = uuid.uuid4().hex
    begun_s = 1_000_000.0
    version = f"{int(begun_s * 1e9):020d}-" + "a" * 12
    aio.run_sync(MemoryStore(name).publish(f"ckpt/v-{version}/00000.s000", b"x"))
    now_s = begun_s + 3 * DAY_S
    for mtime_s, gone in ((now_s - 10, []), (now_s - DAY_S - 10, [version])):
        assert aio.run_sync(collect_garbage(TimedStore(name, mtime_s), "ckpt", keep=1, now_s=now_s)) == gone
    # Where times of files are not known, that in the name counts.
    aio.run_sync(MemoryStore(name).publish(f"ckpt/v-{version}/00000.s000", b"x"))
    for after_s, gone in ((DAY_S - 10, []), (DAY_S + 10, [version])):
        found = collect_garbage(TimedStore(name, 0.0), "ckpt", keep=1, now_s=begun_s + after_s)
        assert aio.run_sync(found) == gone


def test_a_store_that_cannot_be_listed_now_is_not_taken_for_an_empty_one() -> None:
    class Failing(MemoryStore):
        async def list(self, directory: str) -> list[Entry]:
            raise StorageTimeout("no answer")

    with pytest.raises(StorageTimeout):
        aio.run_sync(new_version(Failing(uuid.uuid4().hex), "ckpt"))

    class Unlisted(MemoryStore):
        async def list(self, directory: str) -> list[Entry]:
            raise StorageError("cannot list")

    assert aio.run_sync(new_version(Unlisted(uuid.uuid4().hex), "ckpt"))
