"""One rank of a job that saves or loads a sharded state: `python -m bench.ckpt_dcp_rank ACTION PATH SIZE`.

The state is that of a model with GPT-2 medium's layers (float32, 1.42 GB), sharded by FSDP over ranks of a gloo
group. RANK, WORLD_SIZE and BENCH_RENDEZVOUS (a new file) say which rank this is. ACTION: save (torch's writer),
torch (torch's reader), bootseer (ours), or arena (ours, of what the environment names). Speaks as
bench.ckpt_loader does; digests are of this rank's shards.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.ckpt_loader import cpu_s, digest, touch

# Width, layers, words, positions.
SHAPES = {"full": (1024, 24, 50257, 1024), "small": (64, 2, 1031, 64)}


def make_block(width: int) -> nn.Module:
    """One layer; nothing is computed with it."""
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return nn.Sequential(nn.LayerNorm(width), nn.LayerNorm(width), *(nn.Linear(*shape) for shape in shapes))


def make_model(width: int, layers: int, words: int, positions: int) -> nn.Module:
    """The tensors that GPT-2 has."""
    blocks = nn.Sequential(*(make_block(width) for _ in range(layers)))
    return nn.Sequential(nn.Embedding(words, width), nn.Embedding(positions, width), blocks, nn.LayerNorm(width))


def make_state(size: str, ranks: int) -> dict[str, Any]:
    """The sharded state, of memory that nobody has touched yet."""
    with torch.device("meta"):
        model = make_model(*SHAPES[size])
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model[2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return dict(model.state_dict())


def shards(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor."""
    return {name: tensor.to_local() for name, tensor in state.items()}


def fill(state: dict[str, Any], rank: int) -> None:
    """Random numbers, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    for tensor in shards(state).values():
        tensor.normal_(generator=generator)


def act(action: str, path: str, state: dict[str, Any]) -> None:
    """What is timed."""
    if action == "save":
        checkpoint.save(state, checkpoint_id=path)
    elif action == "torch":
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path))
    else:
        from bootseer.checkpoint.dcp.api import BootseerReader

        checkpoint.load(state, storage_reader=BootseerReader(path or None))


def main(argv: list[str]) -> int:
    """Saves or loads once."""
    action, path, size = argv
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{os.environ['BENCH_RENDEZVOUS']}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    state = make_state(size, ranks)
    if action == "save":
        fill(state, rank)
    elif action != "torch":
        import bootseer.checkpoint.dcp.api  # noqa: F401  (not timed)
    distributed.barrier()
    print("ready", flush=True)
    if not (line := sys.stdin.readline()):
        return 1  # the bench is gone
    os.environ.update(json.loads(line))
    began_cpu_s = cpu_s()
    began_ns = time.monotonic_ns()
    act(action, path, state)
    local = shards(state)
    touch(local)
    ended_ns = time.monotonic_ns()
    answer = {
        "seconds": (ended_ns - began_ns) / 1e9,
        "cpu_s": cpu_s() - began_cpu_s,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in local.values()),
        "began_ns": began_ns,
        "ended_ns": ended_ns,
        "digests": digest(local),
    }
    distributed.barrier()  # nobody leaves while another one still needs it
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
