"""Section `ckpt` of `bench gpu`: a checkpoint of 4 GB from a cold disk into the memory of a GPU.

Loaders: bootseer, safetensors and runai-model-streamer, each as its documentation has it, in processes of their
own that have made their context before. In each round all take turns, in an order that is shuffled; every loader's
tensors are compared by sums. On the CPU the tensors stay there.

`python -m bench.gpu_ckpt LOADER PATH DEVICE` is one load: "ready" when all is imported, then after a line of input
the load, and a line of JSON. `python -m bench.gpu_ckpt make PATH COUNT DEVICE` writes the file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bench.ckpt_pages import check_disk, make_cold
from bench.ckpt_run import Program, order
from bench.record import BenchError

if TYPE_CHECKING:
    import torch

    from bench.gpu_section import Section

COUNTS = {"full": 32, "small": 1}  # tensors of 128 MiB, as layers of large models have them
LOADERS = ("bootseer", "safetensors", "runai")
MIN_S = 20.0
LOAD_S = 60.0


def measure(section: Section) -> None:
    """Rounds, as many as there is time for."""
    if section.size == "tiny":
        section.say("no checkpoint without torch")
        return
    count = COUNTS[section.size]
    check_disk(section.folder, (count << 27) + (1 << 30))
    path = os.path.join(section.folder, "model.safetensors")
    made = [sys.executable, "-m", "bench.gpu_ckpt", "make", path, str(count), section.device]
    subprocess.run(made, check=True, timeout=max(1.0, section.left_s()), stdout=sys.stderr)
    size_bytes = os.path.getsize(path)
    there = [name for name in LOADERS if name != "runai" or importlib.util.find_spec("runai_model_streamer")]
    if len(there) < len(LOADERS):
        section.say("runai-model-streamer is not installed here")
    sums: dict[str, Any] = {}
    state = "ckpt"
    for number in range(section.rounds):
        if section.left_s() < MIN_S:
            section.say(f"no time for round {number + 1}")
            break
        seconds: dict[str, float] = {}
        for name in order(there, number):
            state = drop(section, path, state)
            answer = load(name, path, section.device)
            if answer["sums"] != sums.setdefault("right", answer["sums"]):
                raise BenchError(f"{name} has loaded other tensors")
            seconds[name] = answer["seconds"]
            section.sample(f"{state}_{name}_s", "s", answer["seconds"])
            section.sample(f"{state}_{name}_gb_s", "GB/s", size_bytes / 1e9 / answer["seconds"])
        for name in there[1:]:
            section.sample(f"{state}_vs_{name}", "ratio", seconds[name] / seconds["bootseer"])


def drop(section: Section, path: str, state: str) -> str:
    """Takes the file out of the page cache; what figures begin with: another word once that has failed."""
    try:
        if state == "ckpt":
            make_cold([path])
    except (BenchError, OSError) as error:  # not every kernel lets a program do so
        section.say(f"from the page cache, not the disk: {error}")
        return "ckpt_warm"
    return state


def load(name: str, path: str, device: str) -> dict[str, Any]:
    """One load; what it says."""
    program = Program([sys.executable, "-m", "bench.gpu_ckpt", name, path, device], os.environ)
    try:
        program.listen(lambda line: line == "ready\n", LOAD_S)
        program.say("go")
        answer: dict[str, Any] = json.loads(program.listen(lambda line: line.startswith("{"), LOAD_S))
        program.wait(LOAD_S)
        return answer
    finally:
        program.close()


# ---- in a process of its own -----------------------------------------------------------------------------------


def bootseer_loader(device: str) -> Callable[[str], Any]:
    """Ours."""
    from bootseer.checkpoint.safetensors import load_file

    return lambda path: load_file(path, device=device)


def safetensors_loader(device: str) -> Callable[[str], Any]:
    """safetensors' own, straight to the device."""
    from safetensors.torch import load_file

    return lambda path: load_file(path, device=device)


def runai_loader(device: str) -> Callable[[str], Any]:
    """runai-model-streamer, each tensor to the device as it comes."""
    from runai_model_streamer import SafetensorsStreamer

    streamer = SafetensorsStreamer()  # never closed: on the CPU it lives as long as the tensors

    def load_all(path: str) -> dict[str, torch.Tensor]:
        streamer.__enter__()
        streamer.stream_file(path)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

    return load_all


def make(path: str, count: int, device: str) -> None:
    """Writes the file, and has it on the disk."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {}
    for number in range(count):
        made = torch.randint(0, 1 << 15, (8192, 8192), dtype=torch.int16, device=device)
        state[f"layers.{number}.weight"] = made.cpu().view(torch.bfloat16)
        state[f"layers.{number}.norm"] = torch.full((8192,), float(number), dtype=torch.bfloat16)
    save_file(state, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def sums_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    """A sum of the bytes of each tensor, made where it is, and its device."""
    import torch

    return sorted(
        [name, int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)), str(tensor.device.type)]
        for name, tensor in tensors
    )


def main(argv: list[str]) -> int:
    """Loads once, or makes what is loaded."""
    if argv[0] == "make":
        make(argv[1], int(argv[2]), argv[3])
        return 0
    name, path, device = argv
    import torch

    loader = {"bootseer": bootseer_loader, "safetensors": safetensors_loader, "runai": runai_loader}[name](device)
    torch.ones(1, device=device).sum().item()  # the context
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 1  # the bench is gone
    began_s = time.monotonic()
    tensors = loader(path)
    if device == "cuda":
        torch.cuda.synchronize()
    else:  # what is only mapped has not been loaded
        for tensor in tensors.values():
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    seconds = time.monotonic() - began_s
    print(json.dumps({"seconds": seconds, "sums": sums_of(tensors.items())}), flush=True)
    os._exit(0)  # some readers keep threads that wait for ever


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
