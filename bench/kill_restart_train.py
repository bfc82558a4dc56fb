"""The training of `bench kill_restart`: each step all ranks add up their gradients, rank 0 keeps how far it came.

    python kill_restart_train.py FOLDER KIND STEP_S SLOW_S

KIND `torch` is a model on gloo, `bare` the standard library over sockets. It knows no launcher. In FOLDER: `kept`
the steps that are done, `fail-N` makes the rank that it names fail in restart N, `enough` ends the training;
progress-RANK has a line a step: monotonic ns, pid, restart, world, step (-1: begun). A rank takes SLOW_S to end
when it gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

FAIL_STEPS = 3  # in an attempt, before a rank fails
CONNECT_S = 20.0
FAIL_STATUS = 3

# Adds up numbers over all ranks.
Exchange = Callable[[Sequence[float]], list[float]]


def join_bare(rank: int, world: int) -> Exchange:
    """A star of sockets around rank 0."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(address) as server:
            peers = [server.accept()[0] for _ in range(world - 1)]
    else:
        peers = [_connect(address)]

    def receive(peer: socket.socket, count: int) -> list[float]:
        data = b""
        while len(data) < 8 * count:
            part = peer.recv(8 * count - len(data))
            if not part:
                raise ConnectionError("a rank is gone")
            data += part
        return list(struct.unpack(f"{count}d", data))

    def exchange(numbers: Sequence[float]) -> list[float]:
        packed = struct.pack(f"{len(numbers)}d", *numbers)
        if rank:
            peers[0].sendall(packed)
            return receive(peers[0], len(numbers))
        each = [list(numbers), *(receive(peer, len(numbers)) for peer in peers)]
        total = [sum(column) for column in zip(*each, strict=True)]
        for peer in peers:
            peer.sendall(struct.pack(f"{len(total)}d", *total))
        return total

    return exchange


def _connect(address: tuple[str, int]) -> socket.socket:
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, CONNECT_S)
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def join_torch() -> tuple[Exchange, Callable[[], None]]:
    """Gloo, and a step of an optimizer."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def exchange(numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(number) for number in tensor]

    def learn() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return exchange, learn


def main() -> None:
    """Trains."""
    directory, kind, step_s, slow_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]

    def heed(*_: object) -> NoReturn:
        time.sleep(slow_s)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, heed)
    progress = os.open(f"{directory}/progress-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(step: int) -> None:
        os.write(progress, f"{time.monotonic_ns()} {os.getpid()} {restart} {world} {step}\n".encode())

    tell(-1)
    exchange, learn = join_torch() if kind == "torch" else (join_bare(rank, world), lambda: None)
    step, made = int(exchange([_read_number(f"{directory}/kept") if rank == 0 else 0])[0]), 0
    while True:
        learn()
        time.sleep(step_s)
        is_enough = rank == 0 and os.path.exists(f"{directory}/enough")
        if exchange([is_enough])[0]:
            return
        step, made = step + 1, made + 1
        if rank == 0:
            with open(f"{directory}/kept.new", "w", encoding="ascii") as file:
                file.write(str(step))
            os.replace(f"{directory}/kept.new", f"{directory}/kept")
        tell(step)
        if made >= FAIL_STEPS and _read_number(f"{directory}/fail-{restart}", -1) == rank:
            with open(f"{directory}/failing-{restart}", "w", encoding="ascii"):
                pass
            os._exit(FAIL_STATUS)


def _read_number(path: str, otherwise: int = 0) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read() or otherwise)
    except FileNotFoundError:
        return otherwise


if __name__ == "__main__":
    main()
