"""Real programs, `bench fork --programs`: second start and restart of each, torchrun's time over bootrun's.

A loop like nanoGPT's, transformers' Trainer, accelerate, Lightning, and a script with torchmetrics, two ranks
each. A start counts from the launcher's begin to all ranks' first step; bootrun's is the second one, after
one that has shown what the program imports. A restart counts from the death of the last rank to the first
step of all in the next attempt. Both are of the same run. What is not installed is left out, with a line.
Ranks that wait for the death end by SIGTERM, whatever handler a framework has set, those of the next attempt by
themselves after their step.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.launch import Place, make_place
from bench.processes import run_all
from bench.record import Figures, Target, note

RANKS = 2
MINIMUM_ROUNDS = 3
# Packages that each needs, and its script.
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "nanogpt": (
        ("torch", "numpy"),
        """
import os
import time
import math
import pickle
from contextlib import nullcontext
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

def main(stepped):
    init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.from_numpy(np.ones((2, 8), dtype=np.float32))).sum().backward()
    optimizer.step()
    stepped()
    destroy_process_group()
""",
    ),
    "transformers": (
        ("torch", "transformers", "accelerate"),
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}

def main(stepped):
    class Stepped(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            stepped()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    how = dict(output_dir=folder + "/out", max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    args = TrainingArguments(**how, disable_tqdm=True)
    Trainer(model=model, args=args, train_dataset=Data(), callbacks=[Stepped()]).train()
""",
    ),
    "accelerate": (
        ("torch", "accelerate"),
        """
import torch
from accelerate import Accelerator

def main(stepped):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    stepped()
""",
    ),
    "lightning": (
        ("torch", "lightning"),
        """
import torch
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def main(stepped):
    class Stepped(L.Callback):
        def on_train_batch_end(self, *args, **kwargs):
            stepped()
    data = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=2)
    how = dict(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, enable_checkpointing=False)
    trainer = L.Trainer(**how, enable_progress_bar=False, enable_model_summary=False, callbacks=[Stepped()])
    trainer.fit(Module(), data)
""",
    ),
    "torchmetrics": (
        ("torch", "torchmetrics"),
        """
import torch
import torch.distributed as dist
import torchmetrics

def main(stepped):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    metric = torchmetrics.MeanMetric()
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    optimizer.step()
    metric.update(loss.detach())
    metric.compute()
    stepped()
    dist.destroy_process_group()
""",
    ),
}
HARNESS = """
import os as _os, signal as _signal, time as _time
folder, rank = _os.environ["BENCH_FORK_FOLDER"], _os.environ["RANK"]
attempt = _os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

def _write(name, text):
    with open(_os.path.join(folder, name + ".part"), "w") as file:
        file.write(text)
    _os.rename(_os.path.join(folder, name + ".part"), _os.path.join(folder, name))

def _stepped():
    _write("past-%s-%s" % (attempt, rank), "%d %d" % (_time.monotonic_ns(), _os.getpid()))
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)  # Lightning's has effect when its callback has returned
    while not all(_os.path.exists(_os.path.join(folder, "past-%s-%d" % (attempt, each))) for each in range(2)):
        _time.sleep(0.005)
    if attempt != "0":
        _os._exit(0)  # gloo may hang for good where a model goes just after its step
    if rank == "1":
        _time.sleep(float(_os.environ["BENCH_FORK_SETTLE_S"]))
        _write("death", str(_time.monotonic_ns()))
        _os.kill(_os.getpid(), _signal.SIGKILL)
    _time.sleep(300)

main(_stepped)
"""
# A job that restarts has run for a while: what its next attempt is forked from is there. After the first start
# of all it has to be made.
SETTLE_S, FIRST_SETTLE_S = 3.0, 12.0


def targets_of(names: Iterable[str] = ()) -> dict[str, Target]:
    """What these programs have to reach, by default all."""
    wanted = {
        "start": Target(at_least=1.5, samples=MINIMUM_ROUNDS),
        "restart": Target(at_least=8, samples=MINIMUM_ROUNDS),
    }
    return {
        f"fork.program_{kind}_ratio_{name}": target
        for name in names or PROGRAMS
        for kind, target in wanted.items()
    }


class Times(NamedTuple):
    """Of one run, in seconds."""

    start: float
    restart: float
    how: str  # ranks were started, where the launcher tells


KINDS = ("start", "restart")


def run_once(argv: Sequence[str], name: str, place: Place, cache: str, settle_s: float = SETTLE_S) -> Times:
    """One start with one restart."""
    from bench.fork import DEADLINE_S, NOT_FORKED, environ_of, read_events, read_moments

    directory = place.fresh()
    environ = {**environ_of(place, directory, cache), "BENCH_FORK_SETTLE_S": str(settle_s)}
    words = [
        *argv,
        "--max-restarts",
        "1",
        "--log-dir",
        os.path.join(directory, "logs"),
        place.script(f"program_{name}.py"),
    ]
    (ended,) = run_all([words], environ, place.folder, DEADLINE_S)
    first_ns = max(past for past, _ in read_moments(directory, "past-0", RANKS))
    again_ns = max(past for past, _ in read_moments(directory, "past-1", RANKS))
    with open(os.path.join(directory, "death"), encoding="ascii") as file:
        death_ns = int(file.read())
    events = read_events(os.path.join(directory, "logs"))
    hows = [str(event["attrs"].get("how")) for event in events if event["name"] == "rank_started"]
    why = [line.partition(NOT_FORKED)[2] for line in ended.output.splitlines() if NOT_FORKED in line]
    return Times((first_ns - ended.began_ns) / 1e9, (again_ns - death_ns) / 1e9, "".join([" ".join(hows), *why]))


def measure(figures: Figures, rounds: int, names: Sequence[str]) -> None:
    """Adds the figures of each program that can be run here."""
    from bench.fork import command

    for name in names:
        packages, text = PROGRAMS[name]
        missing = [each for each in packages if importlib.util.find_spec(each) is None]
        if missing:
            note(f"{name} is left out: {', '.join(missing)} not installed (pip install '.[bench]')")
            continue
        with tempfile.TemporaryDirectory(prefix="bench-programs-") as directory:
            place = make_place(directory)
            with open(place.script(f"program_{name}.py"), "w", encoding="utf-8") as file:
                file.write(text + HARNESS)
            cache = os.path.join(directory, "cache")
            ways = {"torchrun": command("torchrun", RANKS), "bootrun": command("bootrun", RANKS)}
            # bootrun shows itself what is imported, and all that is read comes into the page cache.
            tell(
                name, "bootrun, for the first time", run_once(ways["bootrun"], name, place, cache, FIRST_SETTLE_S)
            )
            found: dict[str, list[Times]] = {way: [] for way in ways}
            for number in range(rounds):
                for way in reversed(ways) if number % 2 else ways:
                    found[way].append(run_once(ways[way], name, place, cache))
                    tell(name, way, found[way][-1])
        add_figures(figures, name, found)


def tell(name: str, who: str, times: Times) -> None:
    """Those who watch."""
    how = f" ({times.how})" if times.how else ""
    note(f"{name}, {who}: start {times.start:.2f} s, restart {times.restart:.3f} s{how}")


def add_figures(figures: Figures, name: str, found: dict[str, list[Times]]) -> None:
    """Times of both, and their ratios within rounds."""
    for kind in KINDS:
        ours, theirs = ([getattr(each, kind) for each in found[way]] for way in ("bootrun", "torchrun"))
        figures.add(f"fork.program_{kind}_s_{name}", "s", ours)
        figures.add(f"fork.program_{kind}_torchrun_s_{name}", "s", theirs)
        figures.add_ratio(f"fork.program_{kind}_ratio_{name}", theirs, ours)
