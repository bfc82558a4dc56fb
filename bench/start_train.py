"""The training of `bench start`: a language model whose backbone is frozen, and adapters that are trained.

    python start_train.py FOLDER STEPS [DIE_AT_STEP]

Standard training code: process group, checkpoint, model, steps; it knows no launcher. The checkpoint's files are
in the folder that BOOTSEER_CHECKPOINT or CHECKPOINT names. FOLDER/moments-RANK-ATTEMPT.json tells when what was
done, by the monotonic clock. With DIE_AT_STEP rank 1 is killed there, in its first attempt.
"""

import json
import os
import signal
import sys
import time

MOMENTS = {"script": time.monotonic_ns()}

import einops  # noqa: E402
import numpy  # noqa: E402
import requests  # noqa: E402, F401  as clients of trackers do
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import yaml  # noqa: E402, F401  as configurations are read
from safetensors.torch import load_file  # noqa: E402
from torch.nn.functional import cross_entropy, scaled_dot_product_attention  # noqa: E402
from tqdm import tqdm  # noqa: E402

MOMENTS["imported"] = time.monotonic_ns()
CONFIG = {"vocabulary": 150000, "width": 512, "layers": 2, "heads": 8, "rank": 8, "batch": 2, "length": 16}


class Adapted(torch.nn.Module):
    """A frozen linear map and a trained one of low rank."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, out, bias=False, device="meta")
        self.base.weight.requires_grad_(False)
        self.down = torch.nn.Linear(width, CONFIG["rank"], bias=False)
        self.up = torch.nn.Linear(CONFIG["rank"], out, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, elementwise_affine=False)
        self.mixed = Adapted(width, 3 * width)
        self.out = Adapted(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(self.norm(x))
        heads = einops.rearrange(mixed, "b t (three h d) -> three b h t d", three=3, h=CONFIG["heads"])
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(einops.rearrange(seen, "b h t d -> b t (h d)"))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = CONFIG["width"]
        self.words = torch.nn.Embedding(CONFIG["vocabulary"], width, device="meta")
        self.words.weight.requires_grad_(False)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(CONFIG["layers"])))
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens)))


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    die_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    MOMENTS["joined"] = time.monotonic_ns()
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = Model()
    place = os.environ.get("BOOTSEER_CHECKPOINT") or os.environ["CHECKPOINT"]
    state = load_file(os.path.join(place, "model.safetensors"))
    model.load_state_dict(state, strict=False, assign=True)
    MOMENTS["loaded"] = time.monotonic_ns()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    chance = numpy.random.default_rng(rank)
    losses, took_s = [], []
    for step in tqdm(range(steps), disable=True):
        began_s = time.monotonic()
        tokens = torch.from_numpy(chance.integers(0, 256, (CONFIG["batch"], CONFIG["length"])))
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        for each in trained:
            dist.all_reduce(each.grad)
        optimizer.step()
        losses.append(loss.item())
        took_s.append(time.monotonic() - began_s)
        if step == 0:
            MOMENTS["first_step"] = time.monotonic_ns()
            write(directory, rank, attempt, {})
        if step == die_at and rank == dist.get_world_size() - 1 and attempt == 0:
            MOMENTS["died"] = time.monotonic_ns()
            write(directory, rank, attempt, {})
            os.kill(os.getpid(), signal.SIGKILL)
    write(directory, rank, attempt, {"losses": losses, "step_s": sorted(took_s)[len(took_s) // 2]})
    dist.destroy_process_group()


def write(directory: str, rank: int, attempt: int, more: dict[str, object]) -> None:
    path = os.path.join(directory, f"moments-{rank}-{attempt}.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"moments": MOMENTS, **more}, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    main()
