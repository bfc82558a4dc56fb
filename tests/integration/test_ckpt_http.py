"""Checkpoints over HTTP, from a real server: every way in, striped and plain; damage and change are errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save

import bootseer.checkpoint
from bootseer import aio
from bootseer.checkpoint import BootseerReader, load_file, load_pt, safe_open
from bootseer.checkpoint.fs import StripeFileSystem
from bootseer.errors import BootseerError, DigestMismatch, NotFound, SourceChanged
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.unit.bootseer.checkpoint.sources import stripe
from tests.unit.bootseer.checkpoint.test_pt import saved
from tests.unit.bootseer.checkpoint.test_safetensors import same, shards, state

TENSORS = {"big": torch.randn(1500, 1000), "small": torch.arange(9)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyHttpServer]:
    data = {"model.safetensors": save(TENSORS), "state.pt": saved(TENSORS)}
    for name, content in (data | {f"shards/{name}": content for name, content in shards().items()}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    stripe(str(tmp_path / "striped"), data, unit_bytes=1 << 20)
    files = {
        os.path.relpath(os.path.join(directory, name), tmp_path): (Path(directory) / name).read_bytes()
        for directory, _, names in os.walk(tmp_path)
        for name in names
    }
    with FaultyHttpServer(files) as made:
        yield made
    aio.close()


def test_every_way_in(server: FaultyHttpServer) -> None:
    for url in (
        f"{server.url}/model.safetensors",
        f"{server.url}/striped",
        f"{server.url}/striped/model.safetensors",
    ):
        assert same(load_file(url), TENSORS)
    assert same(load_file(f"{server.url}/shards/model.safetensors.index.json"), state())
    for url in (f"{server.url}/state.pt", f"{server.url}/striped/state.pt"):
        assert same(load_pt(url), TENSORS)
    with bootseer.checkpoint.open(f"{server.url}/striped") as checkpoint:
        assert sorted(checkpoint.files) == ["model.safetensors", "state.pt"]
        assert torch.equal(checkpoint.tensor("small"), TENSORS["small"])
    with safe_open(f"{server.url}/model.safetensors") as file:
        assert torch.equal(file.get_slice("big")[5:9], TENSORS["big"][5:9])
    fsspec.register_implementation("stripe", StripeFileSystem, clobber=True)
    for url in (f"stripe::{server.url}/striped/state.pt", f"stripe://{server.url}/state.pt"):
        with fsspec.open(url) as opened:
            assert same(torch.load(opened, weights_only=True), TENSORS)
    for made in StripeFileSystem._cache.values():
        made.close()
    with pytest.raises(NotFound):
        load_file(f"{server.url}/none")
    with pytest.raises(BootseerError):
        BootseerReader(f"{server.url}/none").read_metadata()


def test_only_wanted_bytes_are_fetched(server: FaultyHttpServer) -> None:
    before = server.served_bytes.total()
    assert same(load_file(f"{server.url}/model.safetensors", ["small"]), {"small": TENSORS["small"]})
    assert server.served_bytes.total() - before < 600_000


@pytest.mark.parametrize("kind", [HttpKind.SHORT, HttpKind.RESET, HttpKind.STATUS, HttpKind.LESS])
def test_what_passes_is_not_noticed(server: FaultyHttpServer, kind: HttpKind) -> None:
    server.plan.append(HttpFault(kind, keep_bytes=100_000, requests=range(2)))
    assert same(load_file(f"{server.url}/model.safetensors"), TENSORS)


def test_wrong_bytes_and_changed_files_are_errors(server: FaultyHttpServer) -> None:
    server.plan.append(HttpFault(HttpKind.WRONG, "striped/*.s0*", keep_bytes=5000, requests=[2]))
    assert same(load_file(f"{server.url}/striped"), TENSORS)  # read once more
    server.plan.append(HttpFault(HttpKind.WRONG, "striped/*.s0*", keep_bytes=5000))
    with pytest.raises(DigestMismatch, match="is damaged"):
        load_file(f"{server.url}/striped")
    with safe_open(f"{server.url}/model.safetensors") as file:
        server.change("model.safetensors")
        with pytest.raises(SourceChanged):
            file.get_tensor("big")
