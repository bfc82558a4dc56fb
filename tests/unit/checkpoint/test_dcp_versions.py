"""Saves of torch 2.4 to 2.15 (recorded: dcp_saves/record.sh) are read by this torch, and by each other one."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint import dcp_metadata
from tests.unit.checkpoint.dcp_saves import program

SAVES = Path(program.__file__).parent
VERSIONS = sorted(path.name for path in SAVES.glob("2.*"))
# What each version has in the modules that reading stands on.
NAMES: dict[str, dict[str, list[str]]] = json.loads((SAVES / "names.json").read_text())
READING = ("dcp_items", "dcp_metadata", "dcp_reader", "dcp_writer")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


SIX_FIELDS = pytest.mark.xfail(strict=True, reason="tensors have six fields, five are read")
LATER_NAMES = pytest.mark.xfail(strict=True, reason="imports what came with torch 2.7")


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=SIX_FIELDS if each == "2.15.0" else ()) for each in VERSIONS]
)
def test_saves_of_all_versions_are_read(version: str) -> None:
    assert program.load(str(SAVES / version)) == ""


# ---- other versions of torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [pytest.param(each, marks=LATER_NAMES if each in ("dcp_reader", "dcp_writer") else ()) for each in READING],
)
def test_what_is_imported_every_version_has(module: str) -> None:
    path = Path(dcp_metadata.__file__).with_name(f"{module}.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "") in next(iter(NAMES.values())):
            for version, names in NAMES.items():
                missing = {each.name for each in node.names} - set(names[str(node.module)])
                assert not missing, f"torch {version} has no {node.module}.{missing}"
