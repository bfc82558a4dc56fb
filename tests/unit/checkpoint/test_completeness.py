"""Half-done saves of other savers are known by what their formats write last, or by what they promise first."""

from __future__ import annotations

import io
import json
import uuid
import zipfile

import pytest

from bootseer import aio
from bootseer.checkpoint.completeness import is_whole, step_of
from bootseer.checkpoint.versions import NoneComplete, Pinned, resolve
from bootseer.errors import CheckpointError
from bootseer.storage.memory import MemoryStore


def store_with(files: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    for name, data in files.items():
        aio.run_sync(store.publish(name, data))
    return store


def found(files: dict[str, bytes], path: str = "run") -> Pinned:
    return aio.run_sync(resolve(store_with({f"{path}/{name}": data for name, data in files.items()}), path))


def paths(pinned: Pinned) -> list[str]:
    return [file.path for file in pinned.files]


def safetensors_file(size: int = 100) -> bytes:
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "x": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def zip_file() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(300))
    return memory.getvalue()


@pytest.mark.parametrize(("name", "data"), [("a.safetensors", safetensors_file()), ("a.pt", zip_file())])
def test_a_file_that_ends_too_early_is_not_whole(name: str, data: bytes) -> None:
    wholes = []
    for end in range(len(data) + 1):
        store = store_with({name: data[:end]})
        wholes.append(aio.run_sync(is_whole(store, name, end)))
    assert wholes[-1] and not wholes[0]
    # Fewer bytes than a zip ends with say nothing.
    assert not any(wholes[30:-1])


def test_formats_that_do_not_tell_are_taken_for_whole() -> None:
    for name, data in (("a.pt", b"\x80\x02old pickle, longer than a zip ends"), ("a.safetensors", b"\xff" * 50)):
        assert aio.run_sync(is_whole(store_with({name: data}), name, len(data)))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-10", 10), ("checkpoint-500", 500), ("global_step20", 20), ("iter_0000010", 10), ("100", 100),
        ("epoch=2-step=30", 30), ("ckpt_7", 7), ("step10_20240101", 10), ("my-checkpoint_3", 3), ("steps12", 12),
        ("text_encoder_2", None), ("mp_rank_00", None), ("optimizer_0", None), ("pytorch_model_fsdp_0", None),
        ("runstep", None), ("footstep10", None), ("v2", None),
    ],
)  # fmt: skip
def test_numbers_of_steps(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_steps_are_in_the_order_of_their_numbers() -> None:
    files = {f"step-{step}/model.safetensors": safetensors_file() for step in (2, 9, 10, 100)}
    assert found(files).version == "step-100"
    assert found(files).step == 100


def test_a_half_written_save_is_not_chosen() -> None:
    for name, data in (("model.safetensors", safetensors_file()), ("model.pt", zip_file())):
        files = {f"step-1/{name}": data, f"step-2/{name}": data[: len(data) // 2]}
        assert found(files).version == "step-1"
        with pytest.raises(CheckpointError, match="no whole files of weights"):
            found({name: data[: len(data) // 2]})


def test_folders_within_a_checkpoint() -> None:
    pipeline = {"model_index.json": b"{}", "unet/w.safetensors": b"\xff" * 9, "text_encoder_2/w.bin": b"\xff" * 9}
    assert (found(pipeline).version, paths(found(pipeline))) == ("", sorted(pipeline))
    nested = {"fsdp_0/.metadata": b"1", "fsdp_0/__0_0.distcp": b"1", "scheduler.bin": b"1"}
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


def test_a_pointer_names_any_folder() -> None:
    files = {"best/model.pt": zip_file(), "step-5/model.pt": zip_file(), "latest": b"best\n"}
    assert found(files).version == "best"
    assert found(files | {"latest": b"gone\n"}).version == "step-5"


@pytest.mark.parametrize(
    ("pointer", "text"),
    [("latest", b"step-30"), ("latest_checkpointed_iteration.txt", b"30\n"), ("latest", b"best")],
)
def test_where_the_pointer_names_no_whole_one_an_older_one_is_taken(pointer: str, text: bytes) -> None:
    whole, half = zip_file(), zip_file()[:-30]
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
    files = {"step-1/model.pt": zip_file()[:-30], "step-2/model.weights": b"x", "notes.txt": b"x"}
    with pytest.raises(NoneComplete, match=r"3 names: notes\.txt, step-1, step-2"):
        found(files)


def test_what_is_being_written_is_left_out() -> None:
    files = {"a.pt": zip_file(), "b.pt.tmp": b"1", "room_temp.pt": zip_file()}
    assert paths(found(files)) == ["a.pt", "room_temp.pt"]
    assert found({"step-1/a.pt": b"1", "step-2.tmp/a.pt": b"1", "tmp-step-3/a.pt": b"1"}).version == "step-1"
