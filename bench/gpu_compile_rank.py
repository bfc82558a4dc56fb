"""What the rank of `bench gpu` runs, section `compile`: a plain script that knows no cache.

`gpu_compile_rank.py DIRECTORY DEVICE LAYERS WIDTH LENGTH` writes `steps.json` into FOLDER. Blocks and loss are
compiled one by one, as large models are trained.
"""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

WORDS, STEPS = 8192, 3


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.back(functional.gelu(self.wide(self.norm2(x))))


def main() -> None:
    directory, kind = sys.argv[1:3]
    layers, width, length = map(int, sys.argv[3:])
    torch.manual_seed(0)
    device = torch.device(kind)
    blocks = [torch.compile(Block(width)) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS)).to(
        device
    )
    loss_of = torch.compile(functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, WORDS, (4, length), device=device)
    took_s, losses, stepped_ns = [], [], 0
    for _ in range(STEPS):
        began_s = time.monotonic()
        with torch.autocast(kind, torch.bfloat16):
            loss = loss_of(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        took_s.append(time.monotonic() - began_s)
        stepped_ns = stepped_ns or time.monotonic_ns()
    from torch._dynamo.utils import counters

    found = {name: count for group in ("inductor", "aot_autograd") for name, count in counters[group].items()}
    said = {
        "first_step_s": took_s[0],
        "later_step_s": took_s[-1],
        "loss": losses[0],
        "hits": found.get("autograd_cache_hit", 0) + found.get("fxgraph_cache_hit", 0),
        "misses": found.get("autograd_cache_miss", 0) + found.get("fxgraph_cache_miss", 0),
        "stepped_ns": stepped_ns,
    }
    with open(os.path.join(directory, "steps.json"), "w", encoding="ascii") as file:
        json.dump(said, file)
    os._exit(0)  # compilers' processes have not to be waited for


main()
