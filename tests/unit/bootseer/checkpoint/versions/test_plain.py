"""Which of several plain saves is taken, and what is said of those that are not."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.convert import stripe
from bootseer.checkpoint.versions.resolve import NoCompleteCheckpoint, Pinned, pin, resolve
from bootseer.checkpoint.versions.verify import verify
from bootseer.errors import BootseerError, IntegrityError
from bootseer.storage.memory import MemoryStore
from tests.unit.bootseer.checkpoint.made_files import dcp_metadata, pt_file, safetensors_file
from tests.unit.bootseer.checkpoint.sources import put
from tests.unit.bootseer.checkpoint.sources import stripe as put_striped

MODEL = safetensors_file()
INDEX = json.dumps(
    {"weight_map": {"x": "sub/model-00001-of-00002.safetensors", "y": "model-2.safetensors"}}
).encode()


def taken(files: dict[str, bytes], path: str = "run") -> tuple[str, list[str]]:
    """The version, "" for none, and what was said of newer ones. Another node finds the same."""
    store, lines = MemoryStore(uuid.uuid4().hex), list[str]()

    async def look() -> Pinned:
        for name, data in files.items():
            await store.publish(f"run/{name}", data)
        found = await resolve(store, path, on_passed=lines.append)
        assert await pin(store, path, found.version, found.digest) == found
        return found

    try:
        return aio.run_sync(look()).version or ".", lines
    except NoCompleteCheckpoint:
        return "", lines


def test_a_marker_in_a_save_or_beside_it() -> None:
    files = {"checkpoint-1/model.safetensors": MODEL, "checkpoint-2/model.safetensors": MODEL}
    assert taken(files) == ("checkpoint-2", [])
    version, lines = taken(files | {"checkpoint-2/checkpoint-is-incomplete.txt": b"Checkpoint started"})
    assert version == "checkpoint-1" and "checkpoint-is-incomplete.txt" in lines[0]
    names = [f"m--val_loss=0.1-step={step}-consumed_samples={step}.0" for step in (9, 19)]
    for suffix, content in (("", "weights/model.safetensors"), (".ckpt", "")):
        path = f"/{content}" if content else ""
        saves = {f"{name}{suffix}{path}": MODEL if content else pt_file() for name in names}
        assert taken(saves) == (names[1] + suffix, [])
        version, lines = taken(saves | {f"{names[1]}-unfinished": b""})
        assert version == names[0] + suffix and "-unfinished" in lines[0]


def test_deepspeed_within_a_save_of_another_trainer() -> None:
    zero = {"global_step500/mp_rank_00_model_states.pt": pt_file()}
    save = {"config.json": b"{}", "trainer_state.json": b"{}", "latest": b"global_step500", **zero}
    save |= {"training_args.bin": pt_file(), "rng_state.pth": pt_file()}
    run = {f"checkpoint-500/{name}": data for name, data in save.items()}
    store = MemoryStore(uuid.uuid4().hex)
    for name, data in run.items():
        aio.run_sync(store.publish(f"run/{name}", data))
    for path in ("run", "run/checkpoint-500"):
        names = {file.path for file in aio.run_sync(resolve(store, path)).files}
        assert names == set(save), path
    assert taken({name: data for name, data in run.items() if not name.endswith("latest")})[0] == ""
    torn = run | {
        "checkpoint-500/global_step500/mp_rank_00_model_states.pt": b"",
        "checkpoint-400/model.safetensors": MODEL,
    }
    assert taken(run | torn)[0] == "checkpoint-400"


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"], "epoch=1-step=20.ckpt"),
        (["ep0-ba10-rank0.pt", "ep0-ba20-rank0.pt"], "ep0-ba20-rank0.pt"),
        (["checkpoint_1_100.pt", "checkpoint_2_90.pt", "checkpoint_2_200.pt"], "checkpoint_2_200.pt"),
        (["epoch=0-step=10.ckpt", "last.ckpt"], "last.ckpt"),
        (["best.ckpt", "epoch=0-step=10.ckpt"], "epoch=0-step=10.ckpt"),
        (["best.ckpt", "last.ckpt"], "last.ckpt"),
        (["step-9.pt", "step-10.pt"], "step-10.pt"),
    ],
)
def test_single_files(names: list[str], newest: str) -> None:
    files = dict.fromkeys(names, pt_file())
    assert taken(files) == (newest, [])
    for torn in (pt_file()[:-30], b"", bytes(500)):
        version, lines = taken(files | {newest: torn})
        assert version in names and version != newest
        assert lines and lines[0].startswith(newest)


def test_files_of_all_ranks_are_one_save() -> None:
    files = {f"ep0-ba{step}-rank{rank}.pt": pt_file() for step in (10, 20) for rank in (0, 1)}
    assert taken(files) == (".", [])
    version, lines = taken(files | {"ep0-ba20-rank1.pt": b""})
    assert version == "." and lines == ["ep0-ba20-rank1.pt is empty"]


def test_metadata_of_each_rank() -> None:
    size = len(MODEL)
    files = {
        f"step-{step}/{name}": data
        for step in (1, 2)
        for rank in (0, 1)
        for name, data in (
            (f"__{rank}.metadata", dcp_metadata({f"__{rank}_0.distcp": size})),
            (f"__{rank}_0.distcp", MODEL),
        )
    }
    assert taken(files) == ("step-2", [])
    for name in files:
        if name.startswith("step-2"):
            assert taken({each: data for each, data in files.items() if each != name})[0] == "step-1", name
            assert taken(files | {name: files[name][: len(files[name]) // 2]})[0] == "step-1", name


def test_shards_and_their_index() -> None:
    old = {"step-1/model.safetensors": MODEL}
    first, second = safetensors_file(9, "x"), safetensors_file(9, "y")
    new = {"sub/model-00001-of-00002.safetensors": first, "sub/model-00002-of-00002.safetensors": MODEL,
           "model-2.safetensors": second, "model.safetensors.index.json": INDEX}  # fmt: skip

    def found(changes: dict[str, bytes | None]) -> str:
        save = {name: data for name, data in (new | changes).items() if data is not None}
        return taken(old | {f"step-2/{name}": data for name, data in save.items()})[0]

    assert found({"sub/model-00002-of-00002.safetensors": None}) == "step-1"
    only = {"model.safetensors.index.json": INDEX.replace(b"sub/model-00001-of-00002", b"sub/model-1"),
            "sub/model-1.safetensors": first, "sub/model-00001-of-00002.safetensors": None,
            "sub/model-00002-of-00002.safetensors": None}  # fmt: skip
    assert found(only) == "step-2"
    assert found(only | {"sub/model-1.safetensors": second}) == "step-1"  # another tensor than the index says
    assert found(only | {"sub/model-1.safetensors": b""}) == "step-1"
    assert found(only | {"model.safetensors.index.json": INDEX[:-9]}) == "step-1"
    for name in ("model-00001-of-00003.safetensors", "pytorch_model-00001-of-00001.bin"):
        assert taken(old | {f"step-2/{name}": MODEL if name.endswith("s") else pt_file()})[0] == "step-1"


def test_what_the_saves_before_it_have() -> None:
    files = {
        f"step-{step}/{name}": pt_file() for step in (1, 2, 3) for name in ("model.pt", "optim.pt", "rng_0.pt")
    }
    version, lines = taken({name: data for name, data in files.items() if name != "step-3/optim.pt"})
    assert (version, lines) == ("step-2", ["step-3: has no optim.pt, which older saves have"])
    # Two such saves are what the saver does now; and a save that is asked for itself is asked for.
    fewer = {name: data for name, data in files.items() if name not in ("step-3/optim.pt", "step-2/optim.pt")}
    assert taken(fewer)[0] == "step-3"
    assert taken(fewer, "run/step-3")[0] == "."
    other = files | {"step-4/model.safetensors": MODEL}  # of another saver
    assert taken(other)[0] == "step-4"


def test_saves_further_down() -> None:
    files = {f"checkpoints/checkpoint_{number}/model.safetensors": MODEL for number in (1, 2)} | {"log.txt": b"x"}
    assert taken(files) == ("checkpoints/checkpoint_2", [])
    files |= {f"other/checkpoint_{number}/model.safetensors": MODEL for number in (1, 2)}
    with pytest.raises(BootseerError, match="name one of them"):
        taken(files)


def test_a_save_newer_than_its_pointer_is_reported() -> None:
    files = {f"global_step{step}/model.pt": pt_file() for step in (1, 2)} | {"latest": b"global_step1"}
    assert taken(files) == (
        "global_step1",
        ["global_step2: is newer than global_step1, which its saver marked complete"],
    )


@pytest.mark.parametrize(
    "data", [bytes(500), MODEL[:-1], b"version https://git-lfs.github.com/spec/v1\n", b"<html>"]
)
def test_what_is_not_whole_is_not_striped_and_verify_finds_it(data: bytes, tmp_path: Path) -> None:
    put(str(tmp_path / "plain"), {"model.safetensors": data})
    for source in ("plain", "plain/model.safetensors"):
        with pytest.raises((NoCompleteCheckpoint, IntegrityError), match=r"model\.safetensors"):
            stripe(str(tmp_path / source), str(tmp_path / "striped"))
    assert not (tmp_path / "striped").exists()
    url = f"memory://{uuid.uuid4().hex}"
    pinned = put_striped(url, {"model.safetensors": data})  # by a program that did not look
    store = MemoryStore(url.removeprefix("memory://"))
    verdict = aio.run_sync(verify(store, pinned))
    assert verdict.fault_count == 1 and "is incomplete: model.safetensors" in verdict.faults[0].what
    with pytest.raises(NoCompleteCheckpoint):
        aio.run_sync(resolve(store))
