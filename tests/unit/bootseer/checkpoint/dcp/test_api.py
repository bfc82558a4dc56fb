"""DCP without a process group: items found without torch.load, metadata read as data, saves that are versions."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan

from bootseer.checkpoint import BootseerReader, BootseerWriter
from bootseer.checkpoint.dcp import items as dcp_items
from bootseer.checkpoint.dcp import metadata as dcp_metadata
from bootseer.checkpoint.dcp import writer as dcp_writer
from bootseer.checkpoint.dcp.items import copy_bytes
from bootseer.checkpoint.format.saved_tensor import EndsFile, find_layout, find_tensor
from bootseer.checkpoint.io import fetching
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.opening import open_source
from bootseer.errors import BootseerError, CheckpointError, ConfigError, IntegrityError, NotFound, SourceChanged
from tests.unit.bootseer.checkpoint.sources import stripe
from tests.unit.bootseer.checkpoint.test_pt import Evil, saved


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield


def view(value: Any, **options: Any) -> memoryview:
    return memoryview(bytearray(saved(value, **options)))


# ---- items ----------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 4), (1, 1)])
def test_plain_tensors_are_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = (torch.arange(count) % 2).to(torch.uint8).view(dtype).reshape(shape)
    found = find_tensor(view(tensor))
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, shape)
    assert bytes(found.data) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.arange(12.0)[3:],
        torch.empty(0, 4),
        {"a": torch.ones(3)},
        [torch.ones(3), torch.ones(4)],
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
        5,
        "text",
        Evil(Path("/nonexistent/mark")),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore")
def test_everything_else_is_left_to_torch(value: Any) -> None:
    assert find_tensor(view(value)) is None
    assert find_tensor(view(torch.ones(3), _use_new_zipfile_serialization=False)) is None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 7))
def test_damage_never_gives_memory_that_is_not_there(at: int, bit: int) -> None:
    item = view(torch.arange(100.0).reshape(10, 10))
    item[at % len(item)] ^= 1 << bit
    found = find_tensor(item)
    if found is not None:
        assert len(found.data) == torch.Size(found.shape).numel() * found.dtype.itemsize
        found.as_bytes().sum()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_parts_are_copied_as_torch_narrows(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64]))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    offsets, lengths = [], []
    for size in shape:
        offset = data.draw(st.integers(0, size - 1))
        offsets.append(offset)
        lengths.append(data.draw(st.integers(1, size - offset)))
    index = MetadataIndex("x")
    read = ReadItem(LoadItemType.TENSOR, index, torch.Size([]), index, torch.Size(offsets), torch.Size(lengths))
    # at an odd address, as items of a file have it
    raw = saved(tensor)
    item = memoryview(bytearray(raw + b"-----"))[: len(raw)]
    start = data.draw(st.integers(0, 5))
    item = memoryview(bytearray(start) + bytearray(raw))[start:]
    found = find_tensor(item)
    assert found is not None
    wanted = tensor
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        wanted = wanted.narrow(dim, offset, length)
    target = torch.zeros(lengths, dtype=dtype)
    if data.draw(st.booleans()) and len(lengths) > 1:
        target = torch.zeros([*lengths[:-1], lengths[-1] * 2], dtype=dtype)[..., : lengths[-1]]
    assert copy_bytes(found, read, target)
    assert torch.equal(target, wanted)
    assert not copy_bytes(found, read, torch.zeros([*lengths, 1], dtype=dtype))
    assert not copy_bytes(found, read, torch.zeros(lengths, dtype=torch.float64))
    if lengths and lengths[-1] > 1:
        assert not copy_bytes(found, read, torch.zeros([*lengths[:-1], lengths[-1] * 2], dtype=dtype)[..., ::2])


# ---- metadata -------------------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(40, 30), "b": torch.randn(7).to(torch.bfloat16), "s": torch.tensor(2.5)},
        "optimizer": {"step": 5, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "exp": torch.randn(3, 3, 3)},
        "empty": torch.empty(0),
        "transposed": torch.randn(5, 6).t(),
        "name": "run",
    }


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return type(value)() if not isinstance(value, list) else [blank(each) for each in value]


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_metadata_of_torch_is_read(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = (tmp_path / "dcp" / ".metadata").read_bytes()
    found = dcp_metadata.load(data, "x")
    assert found == pickle.loads(data) or found.state_dict_metadata == pickle.loads(data).state_dict_metadata
    assert found.storage_data == pickle.loads(data).storage_data
    for size in (0, 1, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(IntegrityError, match=r"^x: is not metadata"):
            dcp_metadata.load(data[:size], "x")
    with pytest.raises(IntegrityError):
        dcp_metadata.load(pickle.dumps({"a": 1}), "x")
    with pytest.raises(IntegrityError):
        dcp_metadata.load(pickle.dumps(Metadata(state_dict_metadata=5)), "x")


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "pickle.loads"])
def test_metadata_cannot_run_code(name: str, tmp_path: Path) -> None:
    module, _, function = name.rpartition(".")
    argument = f"mkdir {tmp_path}/mark" if name == "os.system" else f"__import__('os').mkdir('{tmp_path}/mark')"
    raw = f"c{module}\n{function}\n(V{argument}\ntR.".encode()
    with pytest.raises((CheckpointError, IntegrityError)):
        dcp_metadata.load(raw, "x")
    assert not (tmp_path / "mark").exists()


def test_other_classes_need_the_users_word() -> None:
    data = pickle.dumps(Metadata(state_dict_metadata={}, planner_data=SavePlan([])))
    with pytest.raises(CheckpointError, match=r"planner\.SavePlan.*weights_only=False"):
        dcp_metadata.load(data, "x")
    assert dcp_metadata.load(data, "x", trusted=True).planner_data == SavePlan([])


# ---- loading and saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [20_000, fetching.SLOT_BYTES])
def test_torchs_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
    for module in (fetching, dcp_items):
        monkeypatch.setattr(module, "SLOT_BYTES", slot_bytes)
    wanted = state()
    dcp.save(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = blank(wanted)
    reader = BootseerReader(tmp_path / "dcp")
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, wanted)
    dcp.load(found, storage_reader=reader, no_dist=True)  # again with the same reader
    assert_same(found, wanted)


@pytest.mark.parametrize("base", ["disk", "memory"])
@pytest.mark.parametrize("file_bytes", [1000, dcp_writer.FILE_BYTES])
def test_saves_are_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, file_bytes: int) -> None:
    monkeypatch.setattr(dcp_writer, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(dcp_writer, "SMALL_BYTES", 100)
    url = str(tmp_path / "ck") if base == "disk" else f"memory://saves-{tmp_path.name}-{file_bytes}"
    first, second = state(), state()
    dcp.save(first, storage_writer=BootseerWriter(url, step=1), no_dist=True)
    with open_source(url) as opened:
        old = opened.source.version
    dcp.save(second, storage_writer=BootseerWriter(url, step=2), no_dist=True)
    found = blank(second)
    dcp.load(found, storage_reader=BootseerReader(url), no_dist=True)
    assert_same(found, second)
    dcp.load(found, storage_reader=BootseerReader(url, version=old, verify="full"), no_dist=True)
    assert_same(found, first)
    dcp.save(second, storage_writer=BootseerWriter(url, keep=1), no_dist=True)
    with pytest.raises(BootseerError):
        open_source(url, version=old)


def test_torchs_own_reader_reads_what_is_inside(tmp_path: Path) -> None:
    wanted = state()
    dcp.save(wanted, storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True)
    (tmp_path / "plain").mkdir()
    with open_source(tmp_path / "ck") as opened:
        for name, file in opened.source.files.items():
            data = bytearray(file.size)
            opened.source.read([Request(name, 0, memoryview(data))])
            (tmp_path / "plain" / name).write_bytes(data)
    found = blank(wanted)
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "plain"), no_dist=True)
    assert_same(found, wanted)


def test_the_same_writer_again_and_cached_plans(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = BootseerWriter(tmp_path / "ck")
    versions = set()
    for _ in range(3):
        wanted = state()
        dcp.save(wanted, storage_writer=writer, planner=planner, no_dist=True)
        found = blank(wanted)
        dcp.load(found, storage_reader=BootseerReader(tmp_path / "ck", verify="full"), no_dist=True)
        assert_same(found, wanted)
        with open_source(tmp_path / "ck") as opened:
            versions.add(opened.source.version)
    assert len(versions) == 3


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = state()
    dcp.save(wanted, storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True)

    def fail(*args: Any) -> None:
        raise OSError("full")

    for name in ("_serialise", "pickle"):
        with monkeypatch.context() as patch:
            patch.setattr(dcp_writer, name, fail)
            with pytest.raises(CheckpointException, match=r"full|no attribute"):
                dcp.save(state(), storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True)
        found = blank(wanted)
        dcp.load(found, storage_reader=BootseerReader(tmp_path / "ck"), no_dist=True)
        assert_same(found, wanted)


class Custom:
    """Not plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_objects_run_no_code_unless_reported(tmp_path: Path) -> None:
    dcp.save(
        {"w": torch.ones(3), "custom": Custom()}, storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True
    )
    with pytest.raises(CheckpointException, match="more than plain data"):
        dcp.load(
            {"w": torch.zeros(3), "custom": None}, storage_reader=BootseerReader(tmp_path / "ck"), no_dist=True
        )
    found: dict[str, Any] = {"w": torch.zeros(3), "custom": None}
    dcp.load(found, storage_reader=BootseerReader(tmp_path / "ck", weights_only=False), no_dist=True)
    assert found["custom"] == Custom()


def test_damage_is_found(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    url = f"memory://dcp-damage-{tmp_path.name}"
    files = {name: (tmp_path / "dcp" / name).read_bytes() for name in os.listdir(tmp_path / "dcp")}
    pinned = stripe(url, files)
    from tests.unit.bootseer.checkpoint.sources import flip

    file = next(each for each in pinned.files if each.path.endswith(".distcp"))
    flip(url, file.stripes[0], 100)
    with pytest.raises(CheckpointException, match="is damaged"):
        dcp.load(blank(state()), storage_reader=BootseerReader(url, verify="full"), no_dist=True)


def test_clear_errors(tmp_path: Path) -> None:
    stripe("memory://no-dcp", {"x": b"1"})
    reader = BootseerReader("memory://no-dcp")
    with pytest.raises(NotFound, match="was not saved by torch"):
        reader.read_metadata()
    with pytest.raises(NotFound):
        reader.read_metadata(rank=3)
    reader.close()
    plans = [LoadPlan([], storage_data=("v1", "d1")), LoadPlan([], storage_data=("v2", "d2"))]
    with pytest.raises(SourceChanged, match="v1 and v2"):
        reader.prepare_global_plan(plans)
    with pytest.raises(ConfigError, match="use_collectives"):
        BootseerWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(CheckpointError, match="did not receive the version"):
        BootseerWriter(tmp_path / "a").write_data(SavePlan([]), dcp.DefaultSavePlanner())
    for kind in (BootseerReader, BootseerWriter):
        assert kind.validate_checkpoint_id("hdfs://nn/x")
        assert kind.validate_checkpoint_id(tmp_path)
        assert not kind.validate_checkpoint_id("")
    dcp.save({"a": torch.ones(2)}, storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True)
    with pytest.raises(CheckpointException, match=r"(?i)size"):
        dcp.load({"a": torch.ones(3)}, storage_reader=BootseerReader(tmp_path / "ck"), no_dist=True)


def test_reads_into_other_types_and_strides(tmp_path: Path) -> None:
    wanted = {"a": torch.randn(6, 8), "b": torch.arange(5)}
    dcp.save(wanted, storage_writer=BootseerWriter(tmp_path / "ck"), no_dist=True)
    found = {"a": torch.zeros(8, 6).t(), "b": torch.zeros(5, dtype=torch.int32)}
    dcp.load(found, storage_reader=BootseerReader(tmp_path / "ck"), no_dist=True)
    assert torch.equal(found["a"], wanted["a"])
    assert torch.equal(found["b"], wanted["b"].int())


def test_what_a_writer_holds_in_memory_is_the_tensors_own(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 18, dtype=torch.float32)
    sink = dcp_writer._Sink()
    sink.save(tensor)
    sink.save(tensor[5:])  # only the part
    buffers = sink.finish()
    assert sink.size == sum(map(len, buffers))
    large = [each for each in buffers if len(each) > 100_000]
    assert [len(each) for each in large] == [1 << 20, (1 << 20) - 20]
    assert len(buffers) == 5
    first = torch.frombuffer(large[0], dtype=torch.uint8)
    assert first.data_ptr() == tensor.data_ptr()
    whole = b"".join(buffers)
    second = whole.index(b"PK\5\6") + 22
    assert torch.equal(torch.load(io.BytesIO(whole[:second])), tensor)
    assert torch.equal(torch.load(io.BytesIO(whole[second:])), tensor[5:])


class Rows(dcp.DefaultLoadPlanner):
    """Wants some rows, and columns, of a saved tensor, as resharding does."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offsets, lengths = read_item.dest_offsets, read_item.lengths
        return self.target.narrow(0, offsets[0], lengths[0]).narrow(1, offsets[1], lengths[1])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_that_are_wanted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(dcp_items, "NARROW_BYTES", 10_000)
    wanted = torch.randn(1000, 512).to(dtype)
    url = f"memory://rows-{tmp_path.name}"
    dcp.save({"w": wanted, "small": torch.ones(3)}, storage_writer=BootseerWriter(url), no_dist=True)
    reader = BootseerReader(url)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    index = MetadataIndex("w", chunk.offsets)
    target = torch.zeros(1000, 512, dtype=dtype)

    def read(offsets: list[int], lengths: list[int]) -> ReadItem:
        place = torch.Size(offsets)
        return ReadItem(LoadItemType.TENSOR, index, place, index, place, torch.Size(lengths))

    opened = reader._open()
    before = opened.source.statistics()["read_bytes"]
    reader.read_data(LoadPlan([read([100, 0], [50, 512]), read([180, 7], [20, 100])]), Rows(target))
    assert torch.equal(target[100:150], wanted[100:150])
    assert torch.equal(target[180:200, 7:107], wanted[180:200, 7:107])
    assert int((target != 0).sum()) <= 50 * 512 + 20 * 100
    read_bytes = opened.source.statistics()["read_bytes"] - before
    assert 100 * 512 * dtype.itemsize <= read_bytes <= 100 * 512 * dtype.itemsize + 20_000
    reader.read_data(LoadPlan([read([0, 0], [1000, 512])]), Rows(target))  # most of them: all
    assert torch.equal(target, wanted)


def test_ends_are_enough_to_find_a_tensor() -> None:
    tensor = torch.arange(50_000.0).reshape(100, 500)
    item = view(tensor)
    layout = find_layout(EndsFile(item[:8192], item[-8192:], len(item)), len(item))
    assert layout is not None
    assert (layout.dtype, layout.shape) == (torch.float32, (100, 500))
    assert item[layout.start : layout.start + layout.size] == bytes(tensor.numpy().tobytes())
    for head, tail in ((8192, 50), (20, 8192)):
        assert find_layout(EndsFile(item[:head], item[-tail:], len(item)), len(item)) is None
