"""What the ranks of `bench fork` run: a plain script that knows no launcher.

`fork_rank.py first|restart|memory [MODULE...]`: imports torch and the modules, joins a gloo group, all-reduces and
writes when it was past that to `past-ATTEMPT-RANK` in the folder BENCH_FORK_FOLDER. `restart`: the last rank of
attempt 0 then waits for the others and kills itself, writing when; the others wait in a collective, as ranks do
that lose one. `memory`: the ranks wait to be measured (file `measured`), train for 100 steps, and wait again.
"""

import importlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

DIRECTORY = os.environ["BENCH_FORK_FOLDER"]
RANK = os.environ["RANK"]
STEPS = 100


def write(name: str, text: str) -> None:
    path = os.path.join(DIRECTORY, name)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".part", path)


def wait_for(*names: str) -> None:
    while not all(os.path.exists(os.path.join(DIRECTORY, name)) for name in names):
        time.sleep(0.005)


def die(ranks: int) -> None:
    wait_for(*[f"past-0-{rank}" for rank in range(ranks)])
    time.sleep(float(os.environ["BENCH_FORK_SETTLE_S"]))  # the launcher has finished its start and waits
    write("death", str(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer, torch.nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(8, 16, 64)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if losses[-1] >= losses[0]:
        raise RuntimeError(f"{STEPS} steps brought the loss from {losses[0]} to {losses[-1]}")


def main() -> None:
    case, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    past_ns = time.monotonic_ns()
    ranks = dist.get_world_size()
    if total.item() != ranks:
        raise RuntimeError(f"the sum over {ranks} ranks is {total.item()}")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    write(f"past-{attempt}-{RANK}", f"{past_ns} {os.getpid()}")
    if case == "restart" and attempt == "0" and int(RANK) == ranks - 1:
        die(ranks)
    if case == "memory":
        wait_for("measured")
        train()
        write(f"trained-{attempt}-{RANK}", f"{time.monotonic_ns()} {os.getpid()}")
        wait_for("measured-again")
    dist.barrier()  # nobody ends, which takes CPU, before all are past the all-reduce
    dist.destroy_process_group()


main()
