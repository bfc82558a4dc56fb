"""What the ranks of `bench compile` run: first steps of a compiled model, by a script that knows no cache.

    compile_rank.py FOLDER LAYERS WIDTH     a transformer; under a launcher with DDP over gloo
    compile_rank.py FOLDER 0 WIDTH          one linear layer, which compiles in seconds

Writes `pid-RANK` before its first step, and `rank-RANK.json` at its end, into FOLDER.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

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


def main() -> None:
    layers, width = int(sys.argv[2]), int(sys.argv[3])
    rank = os.environ.get("RANK", "0")
    torch.manual_seed(0)
    model = torch.compile(make_model(layers, width))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    write(f"pid-{rank}", str(os.getpid()))
    losses, took_s = [], []
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (BATCH, LENGTH))
        began_s = time.monotonic()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
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
