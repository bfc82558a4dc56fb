"""Trains a small decoder-only transformer on English text, byte by byte, with DDP on the CPU (gloo).

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/train.py --checkpoints DIR
    bootrun  --standalone --nproc-per-node 2 --max-restarts 1 examples/train.py --checkpoints DIR

The text is the documentation that CPython ships in `pydoc_data.topics` (about 700 kB). Every few steps rank 0
writes a checkpoint; a job that starts with checkpoints in DIR goes on from the newest one, with the same order of
the data and the same random numbers as if it had never stopped. DIR must be the same for all ranks.
`--die-rank 1 --die-at-step 130` lets one rank fail once, to see a restart.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256  # bytes
CHECKPOINT_NAME = re.compile(r"step_(\d{6})\.pt")
KEPT_CHECKPOINTS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer on CPython's documentation.")
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=96, help="bytes a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--die-rank", type=int, default=-1, help="this rank fails once ...")
    parser.add_argument("--die-at-step", type=int, default=-1, help="... before this step")
    parser.add_argument("--target-loss", type=float, help="fail when the final loss is above this")
    return parser.parse_args()


# ---- the model ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.forward_norm(x))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out; input and output share their embedding."""

    def __init__(self, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)
        for block in self.blocks:
            # The sum over the layers keeps its variance.
            for last in (block.mix, block.feed_forward[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position[: x.shape[1]]
        return functional.linear(self.norm(self.blocks(hidden)), self.embedding.weight)


# ---- the data ----------------------------------------------------------------------------------------------


class Text:
    """The text as windows of context + 1 bytes; every twentieth is kept for validation."""

    def __init__(self, context: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        whole = len(text) // (context + 1)
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: whole * (context + 1)]
        windows = windows.view(whole, context + 1)
        kept = torch.arange(whole) % 20 == 0
        self.training, self.validation = windows[~kept], windows[kept]

    def batches(self, seen: int, batch: int, rank: int, ranks: int, seed: int) -> Iterator[Tensor]:
        """This rank's batches once `seen` windows were used by all ranks; each epoch is shuffled anew."""
        together = batch * ranks
        each_epoch = len(self.training) // together
        # Other world size than before: the position within the epoch is rounded to whole batches.
        number = seen // together
        while True:
            epoch, place = divmod(number, each_epoch)
            order = torch.randperm(
                len(self.training), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            )
            for start in range(place * together, each_epoch * together, together):
                yield self.training[order[start + rank : start + together : ranks]].long()
                number += 1


# ---- checkpoints -------------------------------------------------------------------------------------------


def newest_checkpoint(directory: str) -> int:
    """The step of the newest checkpoint, -1 without one. A name that is there is complete: see `save`."""
    steps = [int(found[1]) for name in os.listdir(directory) if (found := CHECKPOINT_NAME.fullmatch(name))]
    return max(steps, default=-1)


def path_of(directory: str, step: int) -> str:
    return os.path.join(directory, f"step_{step:06d}.pt")


def save(directory: str, step: int, state: dict[str, object]) -> None:
    """Writes to another name, has it on the disk, then renames: a crash leaves no half checkpoint."""
    path = path_of(directory, step)
    with open(path + ".part", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    names = sorted(name for name in os.listdir(directory) if CHECKPOINT_NAME.fullmatch(name))
    for old in names[:-KEPT_CHECKPOINTS]:
        os.unlink(os.path.join(directory, old))


def gather_random_states() -> list[Tensor]:
    """The state of every rank's random numbers, which dropout uses."""
    own = torch.get_rng_state()
    states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(states, own)
    return states


# ---- training ----------------------------------------------------------------------------------------------


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


@torch.no_grad()
def validate(model: nn.Module, windows: Tensor) -> float:
    """The loss over the validation text, each rank computing its share."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for part in windows[dist.get_rank() :: dist.get_world_size()].long().split(32):
        total += torch.tensor([loss_of(model, part).item() * len(part), len(part)], dtype=torch.float64)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args: argparse.Namespace) -> float:
    """Trains to the last step, from the newest checkpoint if there is one; the final loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    os.makedirs(args.checkpoints, exist_ok=True)

    torch.manual_seed(args.seed)  # the same weights on all ranks
    bare = Transformer(args.context, args.width, args.layers, args.heads, args.dropout)
    optimizer = torch.optim.AdamW(bare.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    torch.manual_seed(args.seed + 1 + rank)  # other dropout on each rank
    step = seen = 0

    newest = torch.tensor(newest_checkpoint(args.checkpoints) if rank == 0 else -1)
    dist.broadcast(newest, 0)  # all ranks take the same one, also where a file system shows new files late
    if newest >= 0:
        state = torch.load(path_of(args.checkpoints, int(newest)), map_location="cpu", weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seen = state["step"], state["seen"]
        if len(state["random"]) == ranks:
            torch.set_rng_state(state["random"][rank])
        say(f"resumed from step {step}")
    else:
        count = sum(parameter.numel() for parameter in bare.parameters())
        say(f"training {count:,} parameters on {ranks} ranks, from the beginning")

    model = DistributedDataParallel(bare)
    text = Text(args.context)
    batches = text.batches(seen, args.batch, rank, ranks, args.seed)
    recent, since_step, since_s = torch.zeros(()), step, time.monotonic()
    while step < args.steps:
        if rank == args.die_rank and step == args.die_at_step and first_attempt:
            raise RuntimeError(f"rank {rank} was told to die before step {step}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        seen += args.batch * ranks
        recent += loss.detach()
        if step % args.print_every == 0:
            dist.all_reduce(recent)
            count = step - since_step  # fewer after a restart
            step_s = (time.monotonic() - since_s) / count
            say(f"step {step:4d}  loss {recent.item() / count / ranks:.3f}  {step_s * 1000:.0f} ms")
            recent, since_step, since_s = torch.zeros(()), step, time.monotonic()
        if step % args.save_every == 0 or step == args.steps:
            random = gather_random_states()
            if rank == 0:
                save(
                    args.checkpoints,
                    step,
                    {
                        "model": bare.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                        "seen": seen,
                        "random": random,
                    },
                )
    return validate(bare, text.validation)


@record
def main() -> int:
    args = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun or bootrun: see the first lines of this file")
    dist.init_process_group("gloo")
    try:
        loss = train(args)
        say(f"final loss {loss:.6f} nats a byte on text it has not seen")
        missed = args.target_loss is not None and loss > args.target_loss
        if missed:
            say(f"the final loss is above {args.target_loss}")
        # Nobody leaves before all are done. It also gives gloo's thread the moment that it needs to let go of the
        # last reduced tensor: if the interpreter ends before that, torch 2.13 aborts the process.
        dist.barrier()
        return int(missed)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
