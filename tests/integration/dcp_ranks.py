"""Ranks of a job that saves or loads the state of an FSDP model by torch.distributed.checkpoint. Run by path.

dcp_ranks.py save CKPT REFERENCE [more saves]    trains two steps; rank 0 puts the whole state into REFERENCE
dcp_ranks.py load CKPT REFERENCE [bootseer|torch]    loads, and compares with REFERENCE to the last bit
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bootseer.checkpoint import BootseerReader, BootseerWriter

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sizes that four ranks do not divide evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(103, 37),
        nn.Linear(37, 61),
        nn.ReLU(),
        nn.LayerNorm(61),
        nn.Linear(61, 3, dtype=torch.float32),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randint(0, 103, (8,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FULL)
    return {"model": model_state, "optimizer": optimizer_state, **extra}


def compare(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        same = found.dtype == wanted.dtype and found.shape == wanted.shape
        assert same and torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), (
            where
        )
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), where
        for key in wanted:
            compare(found[key], wanted[key], f"{where}/{key}")
    else:
        assert found == wanted, where


def save(url: str, reference: str, saves: int) -> None:
    model, optimizer = build(seed=1)
    for number in range(saves):
        train(model, optimizer, 2)
        extra = {"step": 2 * number + 2, "note": "words", "plain": torch.arange(11.0) + number}
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, **extra}
        dcp.save(state, storage_writer=BootseerWriter(url, step=extra["step"]))
    full = whole(model, optimizer, extra)
    if dist.get_rank() == 0:
        torch.save(full, reference)


def load(url: str, reference: str, kind: str) -> None:
    model, optimizer = build(seed=2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {
        "model": model_state, "optimizer": optimizer_state, "step": 0, "note": "", "plain": torch.zeros(11),
    }  # fmt: skip
    reader = BootseerReader(url) if kind == "bootseer" else dcp.FileSystemReader(url)
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = whole(model, optimizer, {name: state[name] for name in ("step", "note", "plain")})
    if dist.get_rank() == 0:
        compare(found, torch.load(reference, weights_only=True))
        print("equal")


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    order, url, reference, *rest = sys.argv[1:]
    if order == "save":
        save(url, reference, int(rest[0]) if rest else 1)
    else:
        load(url, reference, rest[0] if rest else "bootseer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
