"""load_file and safe_open give what safetensors gives, read only what is asked for, and never a damaged tensor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file as reference
from safetensors.torch import save, save_file

from bootseer.checkpoint import load_file, safe_open
from bootseer.checkpoint.format.tensor_index import DTYPE_BITS
from bootseer.checkpoint.opening import open_source
from bootseer.checkpoint.safetensors import DTYPES, TensorFiles
from bootseer.errors import BootseerError, CheckpointError, DigestMismatch, NotFound, Truncated
from tests.unit.bootseer.checkpoint.sources import put, stripe


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(equal(found[name], wanted[name]) for name in wanted)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return bool(torch.equal(*bits))


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 64, generator=made),
        "bias": torch.randn(7, generator=made).to(torch.bfloat16),
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(13, dtype=torch.uint8),
        "head": torch.randn(33, 5, 2, generator=made).to(torch.float16),
    }


@pytest.mark.parametrize("kind", ["local", "striped", "striped-1", "memory", "memory-striped"])
def test_gives_what_safetensors_gives(tmp_path: Path, kind: str) -> None:
    tensors = state()
    data = save(tensors, {"step": "5"})
    url = str(tmp_path) if not kind.startswith("memory") else f"memory://{tmp_path.name}-{kind}"
    if "striped" in kind:
        stripe(url, {"model.safetensors": data}, stripes=1 if kind == "striped-1" else 3)
    else:
        put(url, {"model.safetensors": data})
    for name in (url, f"{url}/model.safetensors"):
        for verify in (None, "full", "none"):
            assert same(load_file(name, verify=verify), tensors)
    assert same(load_file(url, ["head", "bias"]), {name: tensors[name] for name in ("head", "bias")})
    assert set(load_file(url, lambda key: "e" in key)) == {"embed", "empty", "bytes", "head"}
    with safe_open(url) as file:
        assert file.keys() == sorted(tensors)
        assert file.metadata() == {"step": "5"}
        assert same(file.get_tensors(), tensors)
        assert equal(file.get_tensor("scalar"), tensors["scalar"])
    with pytest.raises(NotFound, match="nothing"):
        load_file(url, ["nothing"])
    with pytest.raises(CheckpointError, match="list of names"):
        load_file(url, "embed")


def test_all_types(tmp_path: Path) -> None:
    tensors = {}
    for code, dtype in DTYPES.items():
        raw = torch.arange(32, dtype=torch.uint8).reshape(2, 16)
        tensors[code] = raw.bool() if code == "BOOL" else raw.view(dtype)
    save_file({code: each for code, each in tensors.items() if code != "F4"}, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert same(found, {code: each for code, each in tensors.items() if code != "F4"})
    assert set(DTYPE_BITS) - set(DTYPES) == {"F6_E2M3", "F6_E3M2"}
    raw = {"f4": {"dtype": "F4", "shape": [2, 32], "data_offsets": [0, 32]}}
    write_raw(tmp_path / "f4.safetensors", raw, bytes(range(32)))
    assert equal(load_file(tmp_path / "f4.safetensors")["f4"], tensors["F4"])
    write_raw(
        tmp_path / "f6.safetensors", {"f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123"
    )
    with pytest.raises(CheckpointError, match="no type for F6_E2M3"):
        load_file(tmp_path / "f6.safetensors")


def write_raw(path: Path, header: dict[str, Any], data: bytes, pad: int = 0) -> None:
    raw = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.mark.parametrize("pad", range(9))
def test_misaligned_tensors_are_copied(tmp_path: Path, pad: int) -> None:
    values = torch.arange(5, dtype=torch.float64)
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "b": {"dtype": "F64", "shape": [5], "data_offsets": [3, 43]}}  # fmt: skip
    write_raw(tmp_path / "m.safetensors", header, b"abc" + values.numpy().tobytes(), pad)
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["b"], values)
    assert found["b"].data_ptr() % 8 == 0
    found["b"] += 1  # writable, and private
    assert torch.equal(load_file(tmp_path / "m.safetensors")["b"], values)


def test_tensors_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    for each in load_file(tmp_path / "m.safetensors").values():
        each.zero_()
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_the_filter_comes_before_the_reading() -> None:
    large = {f"t{number}": torch.full((1 << 20,), float(number)) for number in range(8)}
    put("memory://filter", {"m.safetensors": save(large)})
    with safe_open("memory://filter/m.safetensors", keys=["t3"]) as file:
        assert file.keys() == ["t3"]
        assert torch.equal(file.get_tensor("t3"), large["t3"])
        read = file._opened.source.statistics()["read_bytes"]
        assert read <= (1 << 22) + (256 << 10)
        with pytest.raises(NotFound, match="leaves it out"):
            file.get_tensor("t4")
    with safe_open("memory://filter/m.safetensors") as file:
        rows = file.get_slice("t5")
        before = file._opened.source.statistics()["read_bytes"]
        assert torch.equal(rows[1000:2000], large["t5"][1000:2000])
        assert file._opened.source.statistics()["read_bytes"] - before == 4000


INDEXES = [
    5, -1, slice(None), slice(2, 9), slice(-4, None), slice(9, 2), slice(None, None, 3), slice(1, 30, 7), ...,
    (slice(3, 8), 2), (slice(None), slice(1, 4)), (4, slice(None), 1), (..., 0), (2, ...), None, (slice(5), None),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_slices(tmp_path: Path, index: Any) -> None:
    tensors = state()
    save_file(tensors, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors") as file:
        assert equal(file.get_slice("head")[index], tensors["head"][index])
        assert file.get_slice("head").get_shape() == [33, 5, 2]
        assert file.get_slice("head").get_dtype() == "F16"


def test_slices_at_the_edges(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors") as file:
        assert file.get_slice("empty")[:].shape == (0, 3)
        assert file.get_slice("scalar")[...] == 5.0
        for bad in (33, -34):
            with pytest.raises(IndexError):
                file.get_slice("head")[bad]
        with pytest.raises(IndexError):
            file.get_slice("head")[::-1]
        with pytest.raises(NotFound):
            file.get_slice("none")
    with pytest.raises(CheckpointError, match="framework"):
        safe_open(tmp_path / "m.safetensors", framework="tf")


# ---- sharded models -------------------------------------------------------------------------------------------


def shards(extra: dict[str, str] | None = None) -> dict[str, bytes]:
    tensors = state()
    first = {name: tensors[name] for name in ("embed", "bias", "scalar")}
    second = {name: tensors[name] for name in ("empty", "bytes", "head")}
    weight_map = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(second, "model-2.safetensors")
    return {
        "model-1.safetensors": save(first),
        "model-2.safetensors": save(second),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map | (extra or {})}).encode(),
        "config.json": b"{}",
    }


@pytest.mark.parametrize("url", ["memory://shards", "memory://shards-striped"])
def test_sharded_models(url: str) -> None:
    (stripe if url.endswith("striped") else put)(url, shards())
    assert same(load_file(url), state())
    assert same(load_file(f"{url}/model-1.safetensors"), {n: state()[n] for n in ("embed", "bias", "scalar")})
    with safe_open(url) as file:
        assert file.keys() == sorted(state())
    assert same(load_file(f"{url}/model.safetensors.index.json"), state())


def test_sharded_models_in_disk_directories(tmp_path: Path) -> None:
    put(str(tmp_path), shards())
    assert same(load_file(tmp_path / "model.safetensors.index.json"), state())
    assert same(load_file(tmp_path), state())
    assert same(load_file(tmp_path, ["head"]), {"head": state()["head"]})


def test_shards_that_do_not_fit_together() -> None:
    put("memory://twice", {"a.safetensors": save(state()), "b.safetensors": save(state())})
    with pytest.raises(CheckpointError, match=r"is in a\.safetensors and in b\.safetensors"):
        load_file("memory://twice")
    put("memory://promise", shards({"more": "model-1.safetensors"}))
    with pytest.raises(CheckpointError, match="has no tensor more"):
        load_file("memory://promise")
    lost = shards()
    del lost["model-2.safetensors"]
    stripe("memory://lost", lost)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors, named in .*, is missing"):
        load_file("memory://lost")
    stripe("memory://none", {"x.bin": b"1"})
    with pytest.raises(NotFound, match="no safetensors file"):
        load_file("memory://none")


# ---- damage ---------------------------------------------------------------------------------------------------


def test_truncated_files(tmp_path: Path) -> None:
    data = save(state())
    for size in [0, 4, 8, 100, 500, len(data) - 1]:
        (tmp_path / "m.safetensors").write_bytes(data[:size])
        with pytest.raises(Truncated, match=r"m\.safetensors"):
            load_file(tmp_path / "m.safetensors")


def test_no_tensor_is_returned_when_any_byte_is_wrong(tmp_path: Path) -> None:
    """A flipped bit anywhere in a striped file is an error, not a state with one wrong tensor."""
    data = save({**state(), "more": torch.zeros(3000)})
    pinned = stripe(str(tmp_path), {"m.safetensors": data}, stripes=2)
    chance = random.Random(3)
    for _ in range(60):
        at = chance.randrange(len(data))
        piece = next(pinned.files[0].layout.pieces(at, 1))
        path = tmp_path / pinned.files[0].stripes[piece.stripe]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[piece.stripe_offset] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(BootseerError):
            load_file(tmp_path)
        path.write_bytes(good)
    assert len(load_file(tmp_path)) == 7


def test_a_header_that_changes_between_two_reads(tmp_path: Path) -> None:
    """The header is parsed before its unit's sum is known; then it has to be the same one."""
    data = save(state())
    stripe("memory://twice-read", {"m.safetensors": data})
    with open_source("memory://twice-read") as opened:
        files = TensorFiles(opened.source)
        head = files._heads["m.safetensors"]
        files._heads["m.safetensors"] = head[:-1] + b"x"
        with pytest.raises(DigestMismatch, match="changed between two reads"):
            files.read(files.where)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_state(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kinds = st.tuples(
        st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.int64]),
        st.lists(st.integers(0, 40), max_size=3),
    )
    tensors = {
        f"t{number}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for number, (dtype, shape) in enumerate(data.draw(st.lists(kinds, min_size=1, max_size=6)))
    }
    directory = tmp_path_factory.mktemp("any")
    save_file(tensors, directory / "m.safetensors")
    keys = data.draw(st.lists(st.sampled_from(sorted(tensors)), unique=True))
    wanted = {name: each for name, each in reference(directory / "m.safetensors").items() if name in keys}
    assert same(load_file(directory / "m.safetensors", keys), wanted)
    url = f"memory://any-{directory.name}"
    stripe(url, {"m.safetensors": (directory / "m.safetensors").read_bytes()}, stripes=3)
    assert same(load_file(url, keys), wanted)
