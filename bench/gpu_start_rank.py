"""What the ranks of `bench gpu` run, section `start`: a plain script that knows no launcher.

`gpu_start_rank.py DIRECTORY DEVICE BACKEND [MODULE...]`: imports torch and the modules, makes a context on the
device, joins, all-reduces there, and writes when it was past that to `past-ATTEMPT-RANK`. The last rank of attempt
0 waits for the others and kills itself. DEVICE none: without torch.
"""

import importlib
import os
import signal
import sys
import time

DIRECTORY, DEVICE, BACKEND, *MODULES = sys.argv[1:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if DEVICE != "none":  # before any call of this script's: what runs before an import may decide what it sees
    import torch
    import torch.distributed as dist


def write(name: str, text: str) -> None:
    path = os.path.join(DIRECTORY, name)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".part", path)


def reduce_on_device() -> None:
    for name in MODULES:
        importlib.import_module(name)
    device = torch.device(DEVICE)
    if DEVICE == "cuda":
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if BACKEND == "nccl" and torch.cuda.device_count() < SIZE:
        os.environ.update(NCCL_HOSTID=str(RANK), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group(BACKEND)
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    if total.tolist() != [SIZE] * 4:
        raise RuntimeError(f"the sum over {SIZE} ranks is {total.tolist()}")


def main() -> None:
    if DEVICE != "none":
        reduce_on_device()
    write(f"past-{ATTEMPT}-{RANK}", f"{time.monotonic_ns()} {os.getpid()}")
    others = [os.path.join(DIRECTORY, f"past-{ATTEMPT}-{rank}") for rank in range(SIZE)]
    while not all(map(os.path.exists, others)):
        time.sleep(0.005)
    if ATTEMPT == "0":
        if RANK == SIZE - 1:
            time.sleep(float(os.environ["BENCH_SETTLE_S"]))  # the launcher has finished its start and waits
            write("death", str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # as in a collective that will not end
    os._exit(0)  # all are past it: how they end is not measured


main()
