"""Makes a model's state as the files that loaders load: `python -m bench.ckpt_model SIZE DIRECTORY FORMAT...`.

full: the parameters of GPT-2 medium (transformers' configuration, random weights, float32, 1.42 GB). small: a
few tensors of several types, for tests. Formats: safetensors, pt (torch.save), dcp (a folder).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZES = ("full", "small")
FILES = {"safetensors": "model.safetensors", "pt": "model.pt", "dcp": "model.dcp"}


def make_state(size: str) -> dict[str, torch.Tensor]:
    """The tensors; tied ones once, as safetensors wants it."""
    import torch

    torch.manual_seed(0)
    if size == "small":
        return {
            "weight": torch.randn(512, 4096),
            "bias": torch.randn(4099),
            "half": torch.randn(300, 1001).to(torch.bfloat16),
            "mask": torch.rand(999) > 0.5,
            "step": torch.tensor(7),
        }
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))
    return {name: parameter.detach().to(torch.float32) for name, parameter in model.named_parameters()}


def write(state: dict[str, torch.Tensor], path: str, kind: str) -> None:
    """Writes the state in one format."""
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    elif kind == "pt":
        import torch

        torch.save(state, path)
    else:
        from torch.distributed import checkpoint

        checkpoint.save(state, checkpoint_id=path, no_dist=True)


def main(argv: list[str]) -> int:
    """Makes and writes it."""
    size, directory, *kinds = argv
    state = make_state(size)
    for kind in kinds:
        write(state, os.path.join(directory, FILES[kind]), kind)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
