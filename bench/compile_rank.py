"""What the ranks of `bench compile` run: first steps of a compiled model, by a script that knows no cache.

    compile_rank.py FOLDER LAYERS WIDTH fsdp    a transformer whose blocks are compiled and sharded one by one, and
                                                its compiled loss, as large models are trained
    compile_rank.py FOLDER LAYERS WIDTH ddp     the same model, compiled as a whole, in DDP
    compile_rank.py FOLDER 0 WIDTH ddp          one linear layer, which compiles in seconds

Over gloo; without a launcher alone, and not distributed.

Writes `pid-RANK` before its first step, and `rank-RANK.json` at its end, into FOLDER.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3
WORDS, BATCH, LENGTH = 512, 4, 32


def write(name: str, text: str) -> None:
    path = os.path.join(sys.argv[1], name)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".part", path)


def make_model(layers: int, width: int) -> nn.Module:
    if not layers:
        return nn.Sequential(nn.Embedding(WORDS, width), nn.Linear(width, WORDS))
    inside = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(WORDS, width), *inside, nn.LayerNorm(width), nn.Linear(width, WORDS))


def shard(model: nn.Sequential) -> nn.Module:
    """Blocks are compiled before they are sharded: what gathers their parts stays outside of the graphs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, inside in enumerate(model):
        if isinstance(inside, nn.TransformerEncoderLayer):
            model[number] = fully_shard(torch.compile(inside), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    layers, width = int(sys.argv[2]), int(sys.argv[3])
    rank = os.environ.get("RANK", "0")
    torch.manual_seed(0)
    loss_of = nn.functional.cross_entropy
    is_alone = "WORLD_SIZE" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
    if sys.argv[4] == "fsdp":
        model, loss_of = shard(make_model(layers, width)), torch.compile(loss_of)
    else:
        model = torch.compile(make_model(layers, width))
        model = model if is_alone else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    write(f"pid-{rank}", str(os.getpid()))
    losses, took_s = [], []
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (BATCH, LENGTH))
        began_s = time.monotonic()
        loss = loss_of(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.monotonic() - began_s)
        losses.append(float(loss.detach()).hex())
    from torch._dynamo.utils import counters

    found = {name: count for group in ("inductor", "aot_autograd") for name, count in counters[group].items()}
    said = {
        "first_step_s": took_s[0],
        "later_step_s": took_s[-1],
        "losses": losses,
        "hits": found.get("autograd_cache_hit", 0) + found.get("fxgraph_cache_hit", 0),
        "misses": found.get("autograd_cache_miss", 0) + found.get("fxgraph_cache_miss", 0),
    }
    write(f"rank-{rank}.json", json.dumps(said))
    # Not the ordinary way out: now and then a rank does not come to its end there, and that is not measured.
    os._exit(0)


main()
