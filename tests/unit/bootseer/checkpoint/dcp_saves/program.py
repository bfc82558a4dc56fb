"""Makes a DCP save by this torch, or loads one: run by record.sh under each version of torch, and by the tests.

python program.py save FOLDER       one process: FOLDER/.metadata and its file
python program.py load FOLDER ...   by BootseerReader; a line for each, status 1 if one is not as it was
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def state(*, empty: bool = False) -> dict[str, Any]:
    """What is saved; `empty`: the same with nothing in it, to load into."""
    base = torch.arange(96, dtype=torch.float32)
    found: dict[str, Any] = {
        "model": {
            "weight": base[:12].reshape(3, 4).clone(),
            "half": base[:6].reshape(2, 3).to(torch.bfloat16),
            "turned": base[:12].reshape(3, 4).t(),
            "pixels": base.reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(7),
            "none": torch.empty(0, 4),
            "grad": torch.nn.Parameter(base[:5].clone()),
        },
        "optimizer": {"state": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4.0)}], "name": "adam"},
        "steps": 41,
    }
    if empty:
        for each in found["model"].values():
            each.data.zero_()
        for each in found["optimizer"]["state"]:
            each["step"].zero_()
        found["optimizer"]["name"], found["steps"] = "", 0
    return found


def save(directory: str) -> None:
    dcp.save(state(), checkpoint_id=directory)


def load(directory: str) -> str:
    """ "" if all is as it was."""
    from bootseer.checkpoint.dcp.reader import BootseerReader

    found = state(empty=True)
    dcp.load(found, storage_reader=BootseerReader(directory))
    wanted = state()
    for name, tensor in wanted["model"].items():
        if not torch.equal(found["model"][name], tensor):
            return f"model.{name} is {found['model'][name]}"
    steps = [float(each["step"]) for each in found["optimizer"]["state"]]
    rest = (steps, found["optimizer"]["name"], found["steps"])
    return "" if rest == ([3.0, 4.0], "adam", 41) else f"the rest is {rest}"


def main() -> int:
    warnings.simplefilter("ignore")
    what, *directories = sys.argv[1:]
    if what == "save":
        save(directories[0])
        return 0
    status = 0
    for directory in directories:
        try:
            wrong = load(directory)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        status |= bool(wrong)
        print(f"torch {torch.__version__} loads {os.path.basename(directory)}: {wrong or 'as it was'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
