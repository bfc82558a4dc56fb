"""Which version is meant: the newest complete one, never a half-done save, also of other savers' folders."""

from __future__ import annotations

import json
import uuid

import pytest

from bootseer import aio
from bootseer.checkpoint.versions.resolve import PLAIN, STRIPED, NoCompleteCheckpoint, Pinned, pin, resolve
from bootseer.checkpoint.writing.writer import commit
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged, StorageError
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Entry, Stat, Store
from tests.unit.bootseer.checkpoint.made_files import dcp_metadata, pt_file, safetensors_file

OLD = f"{5:020d}-" + "a" * 12
NEW = f"{6:020d}-" + "b" * 12


def store_with(*names: str) -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    for name in names:
        put(store, name, content(name, names))
    return store


def content(name: str, others: tuple[str, ...] = ()) -> bytes:
    """A whole file of its format; metadata that promises the files beside it."""
    directory, _, base = name.rpartition("/")
    if base == ".metadata":
        beside = [each.rpartition("/")[2] for each in others if each.startswith(f"{directory}/__")]
        return dcp_metadata(dict.fromkeys(beside, 1))
    if base.endswith(".safetensors"):
        return safetensors_file(100, base)
    return pt_file() if base.endswith((".pt", ".ckpt")) else b"{}"


def put(store: Store, name: str, data: bytes) -> None:
    aio.run_sync(store.publish(name, data))


def put_version(store: Store, version: str) -> None:
    aio.run_sync(commit(store, "ckpt", version, []))


def found(store: Store, path: str = "ckpt") -> Pinned:
    return aio.run_sync(resolve(store, path))


def names(pinned: Pinned) -> list[str]:
    return [file.path for file in pinned.files]


def test_the_newest_complete_version() -> None:
    store = store_with(f"ckpt/v-{NEW}/00000.s000")
    put_version(store, OLD)
    assert (found(store).kind, found(store).version) == (STRIPED, OLD)
    put_version(store, NEW)
    assert found(store).version == NEW
    assert found(store, f"ckpt/v-{OLD}").version == OLD


def test_a_damaged_newest_version_is_no_reason_to_take_an_older_one() -> None:
    store = store_with()
    put_version(store, OLD)
    put(store, f"ckpt/v-{NEW}/manifest.json", b"{}")
    with pytest.raises(IntegrityError):
        found(store)


def test_who_asks_for_it_gets_an_older_version_and_the_reason() -> None:
    store = store_with()
    put_version(store, OLD)
    put(store, f"ckpt/v-{NEW}/manifest.json", b"{}")
    told: list[IntegrityError] = []
    assert aio.run_sync(resolve(store, "ckpt", on_damaged=told.append)).version == OLD
    assert NEW in str(told[0]) and len(told) == 1


def test_a_version_that_cannot_be_loaded_is_passed_over() -> None:
    """Each kind of them: the next older one is taken, and none for what is asked for itself."""
    store = store_with("plain/step-1/a.pt", "plain/step-2/a.pt", "plain/step-3/a.pt")
    put_version(store, OLD)
    put_version(store, NEW)
    for path, expected in (("ckpt", [NEW, OLD]), ("plain", ["step-3", "step-2", "step-1"])):
        without: list[str] = []
        for version in expected:
            pinned = aio.run_sync(resolve(store, path, without=without))
            assert pinned.version == version
            without.append(pinned.digest)
        with pytest.raises(NoCompleteCheckpoint):
            aio.run_sync(resolve(store, path, without=without))
    for path in (f"ckpt/v-{NEW}", "plain/step-3", "plain/step-3/a.pt"):
        with pytest.raises(NoCompleteCheckpoint, match="has no other version"):
            aio.run_sync(resolve(store, path, without=[found(store, path).digest]))


def test_a_manifest_of_another_version_is_refused() -> None:
    store = store_with()
    put_version(store, OLD)
    data = bytearray(aio.run_sync(store.stat(f"ckpt/v-{OLD}/manifest.json")).size)
    aio.run_sync(store.read_into(f"ckpt/v-{OLD}/manifest.json", 0, memoryview(data)))
    put(store, f"ckpt/v-{NEW}/manifest.json", bytes(data))
    with pytest.raises(IntegrityError, match=f"is that of version {OLD}"):
        found(store)


class Unlisted(MemoryStore):
    """As HTTP: it cannot list."""

    async def list(self, directory: str) -> list[Entry]:
        raise StorageError("cannot list")


def test_stores_that_cannot_list_have_a_pointer() -> None:
    name = uuid.uuid4().hex
    put_version(MemoryStore(name), OLD)
    put_version(MemoryStore(name), NEW)
    put(MemoryStore(name), "one.pt", pt_file())
    store = Unlisted(name)
    assert found(store).version == NEW
    assert names(found(store, "one.pt")) == ["one.pt"]
    assert aio.run_sync(pin(store, "ckpt", NEW, found(store).digest)).version == NEW
    put(MemoryStore(name), "ckpt/LATEST", b"../../etc/passwd\n")
    with pytest.raises(IntegrityError, match="names no version"):
        found(store)


@pytest.mark.parametrize(
    ("files", "version", "paths"),
    [
        (["model.safetensors", "config.json"], "", ["config.json", "model.safetensors"]),
        ([".metadata", "__0_0.distcp", "__1_0.distcp"], "", [".metadata", "__0_0.distcp", "__1_0.distcp"]),
        (["step-9/a.pt", "step-10/a.pt"], "step-10", ["a.pt"]),
        (["checkpoint-500/model.safetensors", "checkpoint-1000.tmp/model.safetensors"], "checkpoint-500",
         ["model.safetensors"]),
        (["global_step20/sub/a.pt", "global_step20/b.pt", "latest_x"], "global_step20", ["b.pt", "sub/a.pt"]),
        (["step-2/.metadata", "step-2/__0_0.distcp", "step-3/__0_0.distcp"], "step-2",
         [".metadata", "__0_0.distcp"]),
        (["epoch=1-step=20/a.ckpt", "epoch=2-step=10/a.ckpt"], "epoch=1-step=20", ["a.ckpt"]),
    ],
)  # fmt: skip
def test_plain_checkpoints(files: list[str], version: str, paths: list[str]) -> None:
    store = store_with(*(f"ckpt/{name}" for name in files))
    pinned = found(store)
    assert (pinned.kind, pinned.version, names(pinned)) == (PLAIN, version, paths)
    assert aio.run_sync(pin(store, "ckpt", version, pinned.digest)) == pinned


@pytest.mark.parametrize("pointer", [("latest", b"global_step10"), ("latest_checkpointed_iteration.txt", b"10\n")])
def test_a_savers_own_pointer_counts_more_than_numbers(pointer: tuple[str, bytes]) -> None:
    store = store_with("ckpt/global_step10/a.pt", "ckpt/global_step20/a.pt")
    put(store, f"ckpt/{pointer[0]}", pointer[1])
    assert found(store).version == "global_step10"


def test_striped_saves_in_directories_of_steps() -> None:
    store = store_with("ckpt/step-9/a.pt", f"ckpt/step-30/v-{NEW}/00000.s000")
    for step, version in ((10, OLD), (20, NEW)):
        aio.run_sync(commit(store, f"ckpt/step-{step}", version, []))
    pinned = found(store)
    assert (pinned.kind, pinned.version, pinned.step) == (STRIPED, f"step-20/v-{NEW}", 20)
    assert pinned.striped_version == NEW
    assert aio.run_sync(pin(store, "ckpt", pinned.version, pinned.digest)) == pinned
    put(store, f"ckpt/v-{OLD}/00000.s000", b"")
    assert found(store) == pinned
    aio.run_sync(commit(store, "ckpt", OLD, []))
    assert found(store).version == OLD


def test_an_index_whose_shards_are_not_all_there_is_half_done() -> None:
    store = store_with("ckpt/step-1/a.pt", "ckpt/step-2/1.safetensors")
    index = json.dumps({"weight_map": {"1.safetensors": "1.safetensors", "y": "2.safetensors"}}).encode()
    put(store, "ckpt/step-2/model.safetensors.index.json", index)
    assert found(store).version == "step-1"
    for half in (b"", safetensors_file(100, "y")[:-1], safetensors_file(100, "z")):
        put(store, "ckpt/step-2/2.safetensors", half)
        assert found(store).version == "step-1"
    put(store, "ckpt/step-2/2.safetensors", safetensors_file(100, "y"))
    assert found(store).version == "step-2"


def test_a_changed_plain_checkpoint_is_not_the_pinned_one() -> None:
    store = store_with("ckpt/a.pt")
    pinned = found(store)
    put(store, "ckpt/a.pt", pt_file((7,)))
    with pytest.raises(SourceChanged):
        aio.run_sync(pin(store, "ckpt", "", pinned.digest))
    with pytest.raises(IntegrityError):
        aio.run_sync(pin(store, "ckpt", "../other", pinned.digest))


class Pruned(MemoryStore):
    """Somebody removes files of some folders once they are listed."""

    going: tuple[str, ...] = ()

    async def stat(self, path: str) -> Stat:
        if path.startswith(self.going):
            raise NotFound(path)
        return await super().stat(path)


def test_what_is_removed_meanwhile_is_not_called_nothing() -> None:
    name = uuid.uuid4().hex
    store = Pruned(name)
    for path in ("ckpt/step-1/a.pt", "ckpt/step-2/a.pt", "one/a.pt"):
        put(MemoryStore(name), path, pt_file())
    store.going = ("ckpt/step-2/a", "one/a")
    assert found(store).version == "step-1"
    with pytest.raises(SourceChanged, match=r"a\.pt was removed while it was inspected"):
        found(store, "one")


def test_too_many_files_are_not_called_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.checkpoint.versions.plain.MAX_PLAIN_FILES", 2)
    with pytest.raises(CheckpointError, match="more than 2 files") as failure:
        found(store_with(*(f"ckpt/{name}.pt" for name in "abc")))
    assert not isinstance(failure.value, NoCompleteCheckpoint)


def test_nothing_there() -> None:
    with pytest.raises(NotFound, match="is empty or does not exist"):
        found(store_with("other/a.pt"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        found(store_with("ckpt/readme.txt"))
    with pytest.raises(CheckpointError, match="1 unfinished"):
        found(store_with(f"ckpt/v-{NEW}/00000.s000"))
