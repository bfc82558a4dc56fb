"""The training of `bench faults`: a small model on gloo, collectives over all ranks and over pairs in each step.

    python faults_train.py FOLDER STEP_S STEPS

It knows no launcher. FOLDER/checkpoint.pt is resumed from; FOLDER/fault.json tells which rank does what to itself
at which step (bench/faults_inside.py). FOLDER/progress-RANK has a line a step, by the monotonic clock.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

from bench.faults_inside import Planned, Training, read_planned

STARTED_NS = time.monotonic_ns()
SAVE_EVERY_S = 1.0
BUSY_PART, MAX_BUSY_S = 0.1, 0.2  # of a step is computed here, the rest would be an accelerator's
SERVICE_PORT = 29700  # of each rank, as those that serve metrics have one
WIDTH = 64


class Gloo(Training):
    """A model that learns a linear map, data parallel."""

    def __init__(self, folder: str, step_s: float) -> None:
        environ = os.environ
        super().__init__(folder, step_s, int(environ["RANK"]), int(environ["WORLD_SIZE"]))
        self.node = int(environ["GROUP_RANK"])
        torch.manual_seed(self.rank)
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(WIDTH, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.path = f"{folder}/checkpoint.pt"
        self.progress = os.open(f"{folder}/progress-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.namespace = os.readlink("/proc/self/ns/pid")
        self.service = socket.socket()
        self.service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.service.bind(("127.0.0.1", SERVICE_PORT + int(environ["LOCAL_RANK"])))
        self.service.listen()

    def join(self) -> None:
        """Process groups, and the state that is kept."""
        dist.init_process_group("gloo")
        pairs = [list(range(low, min(low + 2, self.world))) for low in range(0, self.world, 2)]
        self.pair = [dist.new_group(pair) for pair in pairs][self.rank // 2]
        if os.path.exists(self.path):
            kept = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.step = kept["step"]
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)

    def compute(self) -> torch.Tensor:
        """Forward and backward; returns the loss."""
        began_s = time.monotonic()
        inputs = torch.randn(32, WIDTH)
        wanted = inputs.sum(1, keepdim=True) / WIDTH + 0.3 * torch.randn(32, 1)
        loss = ((self.model(inputs) - wanted) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.burn(min(BUSY_PART * self.step_s, MAX_BUSY_S) - (time.monotonic() - began_s))
        time.sleep(max(0.0, self.factor * self.step_s - (time.monotonic() - began_s)))
        return loss.detach()

    def evaluate(self, seconds: float) -> None:
        """Forward passes for that long."""
        end_s = time.monotonic() + seconds
        with torch.no_grad():
            while time.monotonic() < end_s:
                inputs = torch.randn(512, WIDTH)
                ((self.model(inputs) - inputs.sum(1, keepdim=True) / WIDTH) ** 2).mean()

    def exchange(self, loss: torch.Tensor) -> float:
        """Gradients over all ranks, the loss over the pair."""
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        self.reduce(gradients)
        at = 0
        for parameter in self.model.parameters():
            parameter.grad.copy_(gradients[at : at + parameter.numel()].view_as(parameter) / self.world)
            at += parameter.numel()
        dist.all_reduce(loss, group=self.pair)
        return float(loss) / int(dist.get_world_size(self.pair))

    def reduce(self, gradients: torch.Tensor) -> None:
        """The collective of a step, or what is done in its place for once."""
        instead, self.instead = self.instead, ""
        if instead == "broadcast":
            dist.broadcast(gradients, self.rank)
        elif instead == "larger":
            dist.all_reduce(torch.cat([gradients, gradients]))
        elif instead == "receive":
            dist.recv(gradients, (self.rank + 1) % self.world)
        elif instead != "nothing":
            dist.all_reduce(gradients)

    def spoil(self) -> None:
        """The weights become NaN, and the loss with them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def save(self) -> None:
        """Beside, then renamed."""
        torch.save({"model": self.model.state_dict(), "step": self.step}, f"{self.path}.tmp")
        os.replace(f"{self.path}.tmp", self.path)

    def train(self, steps: int, planned: Planned) -> None:
        """Until so many steps are done."""
        save_every = max(1, round(SAVE_EVERY_S / self.step_s))
        reported_s = 0.0
        while self.step < steps:
            planned.at(self, self.step)
            loss = self.exchange(self.compute())
            self.optimizer.step()
            self.step += 1
            if self.heartbeats:
                import bootseer

                bootseer.heartbeat(self.step, loss=loss * self.loss_factor)
            if self.rank == 0 and self.talks and time.monotonic() - reported_s >= 1.0:
                reported_s = time.monotonic()
                print(f"step {self.step} loss {loss:.4f}", flush=True)
            if self.rank == 0 and self.step % save_every == 0:
                self.save()
            line = f"{time.monotonic_ns()} {STARTED_NS} {self.step} {self.world} {os.getpid()} {self.namespace}\n"
            os.write(self.progress, line.encode())


def main() -> None:
    """Trains."""
    directory, step_s, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    training = Gloo(directory, step_s)
    planned = read_planned(directory, training)
    planned.before_joining(training)
    training.join()
    planned.at_start(training)
    training.train(steps, planned)
    planned.at_end(training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
