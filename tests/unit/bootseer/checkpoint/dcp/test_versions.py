"""Saves of torch 2.4 to 2.15 (recorded: dcp_saves/record.sh) are read by this torch, and by each other one."""

from __future__ import annotations

import ast
import enum
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from bootseer.checkpoint import BootseerReader
from bootseer.checkpoint.dcp import metadata as dcp_metadata
from bootseer.errors import CheckpointError, FormatVersion, IntegrityError
from tests.unit.bootseer.checkpoint.dcp_saves import program

SAVES = Path(program.__file__).parent
VERSIONS = sorted(path.name for path in SAVES.glob("2.*"))
# What each version has in the modules that reading stands on.
NAMES: dict[str, dict[str, list[str]]] = json.loads((SAVES / "names.json").read_text())
READING = ("items", "metadata", "reader", "versions", "writer")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def test_the_oldest_and_the_newest_are_there() -> None:
    assert {"2.4.1", "2.6.0", "2.13.0", "2.14.1", "2.15.0"} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_saves_of_all_versions_are_read(version: str) -> None:
    assert program.load(str(SAVES / version)) == ""


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_records_are_those_of_this_torch(version: str, trusted: bool) -> None:
    found = dcp_metadata.load((SAVES / version / ".metadata").read_bytes(), "x", trusted=trusted)
    entry = found.state_dict_metadata["model.pixels"]
    assert type(entry.properties) is TensorProperties
    assert entry.properties.memory_format == torch.contiguous_format and entry.properties.dtype == torch.float32
    assert found.storage_meta is not None and isinstance(found.storage_meta.modules, list)
    assert found.version is None or isinstance(found.version, str)


def test_whole_tensors_of_the_newest() -> None:
    reader = BootseerReader(str(SAVES / VERSIONS[-1]))
    found = reader.read_tensors(["model.turned", "model.none"])
    assert torch.equal(found["model.turned"], program.state()["model"]["turned"])
    reader.close()


# ---- what comes after these ----------------------------------------------------------------------------------


def metadata_with(state: object) -> bytes:
    """Metadata in which the state of a tensor's properties is another one."""

    class Other(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, TensorProperties):
                made = value.__reduce_ex__(2)
                return (*made[:2], state, *made[3:])
            return NotImplemented

    found = dcp_metadata.load((SAVES / VERSIONS[-1] / ".metadata").read_bytes(), "x")
    data = io.BytesIO()
    Other(data, protocol=2).dump(found)
    return data.getvalue()


FIVE = TensorProperties(torch.float16, requires_grad=True).__getstate__()[:5]


@pytest.mark.parametrize("more", [(), (None,), ((4, 1),), ((4, 1), "a field of tomorrow")])
def test_further_fields_are_no_matter(more: tuple[object, ...]) -> None:
    found: Metadata = dcp_metadata.load(metadata_with((*FIVE, *more)), "x")
    properties = found.state_dict_metadata["model.weight"].properties
    assert (properties.dtype, properties.requires_grad) == (torch.float16, True)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_members_of_enums_are_read_as_each_python_writes_them(protocol: int) -> None:
    """By value, or by name (Python 3.11.2); protocol 2 names `__builtin__`."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    found = dcp_metadata.load((SAVES / VERSIONS[-1] / ".metadata").read_bytes(), "x")
    data = io.BytesIO()
    ByName(data, protocol).dump(found)
    assert b"getattr" in data.getvalue()
    assert dcp_metadata.load(data.getvalue(), "x") == found


@pytest.mark.parametrize("state", [FIVE[:4], (), {"dtype": 1}, 5])
def test_too_few_fields_are_damage(state: object) -> None:
    with pytest.raises(IntegrityError, match="damaged"):
        dcp_metadata.load(metadata_with(state), "x")


def named(module: str, name: str) -> bytes:
    """Metadata that names something, as pickles do."""
    return b"c" + f"{module}\n{name}\n".encode() + b"."


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("torch", "bcomplex32", "torch 2.14"),
        ("torch.distributed.checkpoint.metadata", "RecordOfTomorrow", "another torch"),
        ("torch.distributed.checkpoint.tomorrow", "Kind", "another torch"),
    ],
)
def test_what_this_torch_cannot_read_is_named_with_the_version(module: str, name: str, says: str) -> None:
    if hasattr(torch, name):
        pytest.skip("this torch has it")
    with pytest.raises(FormatVersion, match=says) as caught:
        dcp_metadata.load(named(module, name), "x")
    assert torch.__version__ in str(caught.value)


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("torch", "load"), ("torch.hub", "load")])
def test_other_names_stay_refused(module: str, name: str) -> None:
    with pytest.raises(CheckpointError, match="weights_only=False"):
        dcp_metadata.load(named(module, name), "x")


# ---- other versions of torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", READING)
def test_what_is_imported_every_version_has(module: str) -> None:
    path = Path(dcp_metadata.__file__).with_name(f"{module}.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "") in next(iter(NAMES.values())):
            for version, names in NAMES.items():
                missing = {each.name for each in node.names} - set(names[str(node.module)])
                assert not missing, f"torch {version} has no {node.module}.{missing}"
