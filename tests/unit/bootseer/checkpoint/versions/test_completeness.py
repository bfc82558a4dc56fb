"""Half-done saves are known by what their formats promise; no name and no marker makes one whole."""

from __future__ import annotations

import uuid
import zipfile
from io import BytesIO

import pytest

from bootseer import aio
from bootseer.checkpoint.versions.candidates import step_of
from bootseer.checkpoint.versions.completeness import inspect_file, reader_of
from bootseer.checkpoint.versions.resolve import NoCompleteCheckpoint, Pinned, resolve
from bootseer.errors import CheckpointError
from bootseer.storage.memory import MemoryStore
from tests.unit.bootseer.checkpoint.made_files import dcp_metadata, pt_file, safetensors_file

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 13221\n" % (b"a" * 64)
PAGE = b"<!DOCTYPE html>\n<html><head><title>502 Bad Gateway</title></head></html>\n"


def store_with(files: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    for name, data in files.items():
        aio.run_sync(store.publish(name, data))
    return store


def found(files: dict[str, bytes], path: str = "run") -> Pinned:
    return aio.run_sync(resolve(store_with({f"{path}/{name}": data for name, data in files.items()}), path))


def paths(pinned: Pinned) -> list[str]:
    return [file.path for file in pinned.files]


def fault_of(name: str, data: bytes) -> str:
    """Why a single file is not whole, "" if it is."""
    store = store_with({name: data})
    return aio.run_sync(inspect_file(name, len(data), reader_of(store, "")))[1]


@pytest.mark.parametrize(("name", "data"), [("a.safetensors", safetensors_file()), ("a.pt", pt_file())])
def test_a_file_that_ends_too_early_is_not_whole(name: str, data: bytes) -> None:
    assert fault_of(name, data) == ""
    assert all(fault_of(name, data[:end]) for end in range(len(data)))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.pth", "a.ckpt", "pytorch_model.bin", "a.json"])
@pytest.mark.parametrize(
    ("data", "why"),
    [(bytes(5000), "zeros"), (POINTER, "git-lfs"), (PAGE, "page"), (b"", "empty"), (b"\xff" * 50, ""), (b"x", "")],
)
def test_what_lies_in_the_place_of_a_file_is_named(name: str, data: bytes, why: str) -> None:
    found = fault_of(name, data)
    assert found and why in found


def test_raw_bytes_under_a_name_of_many_meanings_are_taken_as_they_are() -> None:
    assert fault_of("model.bin", b"\xff" * 50) == "" and fault_of("notes.txt", b"") == ""
    assert "zeros" in fault_of("model.bin", bytes(50))


def test_records_of_a_zip_file_have_the_sizes_that_its_pickle_names() -> None:
    def changed(change: dict[str, bytes | None]) -> bytes:
        memory = BytesIO()
        with zipfile.ZipFile(BytesIO(pt_file((25, 3)))) as old, zipfile.ZipFile(memory, "w") as new:
            for info in old.infolist():
                data = change.get(info.filename, old.read(info))
                if data is not None:
                    new.writestr(info.filename, data)
        return memory.getvalue()

    assert fault_of("a.pt", changed({})) == ""
    assert "0 bytes in the record data/1, not 12" in fault_of("a.pt", changed({"archive/data/1": b""}))
    assert "lacks a record" in fault_of("a.pt", changed({"archive/data/0": None}))
    for name in ("data.pkl", "version", "byteorder"):
        assert "empty record" in fault_of("a.pt", changed({f"archive/{name}": b""}))
    assert "pickle" in fault_of("a.pt", changed({"archive/data.pkl": b"\x80\x02}"}))


def test_no_code_of_a_pickle_runs(tmp_path: object) -> None:
    """A name in it is never looked up, so what it would do is not done."""
    call = b"\x80\x02cbuiltins\nopen\nX\x0f\x00\x00\x00/nowhere/at/allX\x01\x00\x00\x00w\x86R."
    assert fault_of("a.pkl", call) == ""
    assert fault_of("a.pkl", call[:-1])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-10", 10), ("checkpoint-500", 500), ("global_step20", 20), ("iter_0000010", 10), ("100", 100),
        ("epoch=2-step=30", 30), ("ckpt_7", 7), ("step10_20240101", 10), ("my-checkpoint_3", 3), ("steps12", 12),
        ("text_encoder_2", None), ("mp_rank_00", None), ("optimizer_0", None), ("pytorch_model_fsdp_0", None),
        ("runstep", None), ("footstep10", None), ("v2", None), ("ep0-ba10", 10), ("tp2-ep8", None),
        ("model--val_loss=1.23-step=9-consumed_samples=80.0-last", 9), ("iter-000010-ckpt", 10),
    ],
)  # fmt: skip
def test_numbers_of_steps(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_steps_are_in_the_order_of_their_numbers() -> None:
    files = {f"step-{step}/model.safetensors": safetensors_file() for step in (2, 9, 10, 100)}
    assert found(files).version == "step-100"
    assert found(files).step == 100


def test_a_half_written_save_is_not_chosen() -> None:
    for name, data in (("model.safetensors", safetensors_file()), ("model.pt", pt_file())):
        files = {f"step-1/{name}": data, f"step-2/{name}": data[: len(data) // 2]}
        assert found(files).version == "step-1"
        with pytest.raises(NoCompleteCheckpoint, match=f"no complete checkpoint: {name} "):
            found({name: data[: len(data) // 2]})


def test_directories_within_a_checkpoint() -> None:
    pipeline = {
        "model_index.json": b"{}",
        "unet/w.safetensors": safetensors_file(),
        "text_encoder_2/w.bin": b"\xff" * 9,
    }
    assert (found(pipeline).version, paths(found(pipeline))) == ("", sorted(pipeline))
    nested = {
        "fsdp_0/.metadata": dcp_metadata({"__0_0.distcp": 1}),
        "fsdp_0/__0_0.distcp": b"1",
        "scheduler.pt": pt_file(),
    }
    half = {name: data for name, data in nested.items() if name != "fsdp_0/.metadata"}
    steps = {f"step-1/{name}": data for name, data in nested.items()} | {
        f"step-2/{name}": data for name, data in half.items()
    }
    assert found(steps).version == "step-1"
    assert paths(found(nested)) == sorted(nested)
    with pytest.raises(CheckpointError):
        found(half)


def test_the_last_model_beside_its_steps_is_taken_without_them() -> None:
    files = {"model.safetensors": safetensors_file(), "step-5/model.safetensors": safetensors_file()}
    files["v-" + "0" * 20 + "-" + "a" * 12 + "/00000.s000"] = b"left by a save that was never finished"
    assert paths(found(files)) == ["model.safetensors"]


def test_a_pointer_names_any_directory() -> None:
    files = {"best/model.pt": pt_file(), "step-5/model.pt": pt_file(), "latest": b"best\n"}
    assert found(files).version == "best"
    assert found(files | {"latest": b"gone\n"}).version == "step-5"


@pytest.mark.parametrize(
    ("pointer", "text"),
    [("latest", b"step-30"), ("latest_checkpointed_iteration.txt", b"30\n"), ("latest", b"best")],
)
def test_where_the_pointer_names_no_whole_one_an_older_one_is_taken(pointer: str, text: bytes) -> None:
    whole, half = pt_file(), pt_file()[:-30]
    files = {f"step-{step}/model.pt": whole for step in (9, 10)} | {
        "step-30/model.pt": half,
        "best/model.pt": half,
    }
    assert found(files | {pointer: text}).version == "step-10"
    # What is newer than what the saver calls complete comes last.
    newer = files | {"step-40/model.pt": whole, pointer: text}
    assert found(newer).version == ("step-40" if text == b"best" else "step-10")
    only = {"step-30/model.pt": half, "step-40/model.pt": whole, pointer: text}
    assert found(only).version == "step-40"


def test_what_is_there_and_no_checkpoint_is_named() -> None:
    files = {"step-1/model.pt": pt_file()[:-30], "step-2/model.weights": b"x", "notes.txt": b"x"}
    with pytest.raises(NoCompleteCheckpoint, match=r"3 names: notes\.txt, step-1, step-2"):
        found(files)


def test_what_is_being_written_is_left_out() -> None:
    files = {"a.pt": pt_file(), "b.pt.tmp": b"1", "room_temp.pt": pt_file()}
    assert paths(found(files)) == ["a.pt", "room_temp.pt"]
    files = {f"{directory}/a.pt": pt_file() for directory in ("step-1", "step-2.tmp", "tmp-step-3")}
    assert found(files).version == "step-1"
