"""What `bench image` starts, and how: one Python in a tree as its root folder, the same for every way.

The root is entered by chroot in a mount namespace of its own; /dev, /proc and /sys are the machine's, /tmp is
empty memory. What a program prints tells that it was served what was built: the sum over the byte code of all that
it has imported, or the losses of its first steps.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from bench.ckpt_run import BOUND, DEADLINE_S
from bench.record import BenchError

IMPORT, TRAIN = "import", "train"
DIRECTORIES = ("dev", "proc", "sys", "tmp")  # that a root has to have
ENTER = """\
mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && mount --rbind /sys "$0/sys" &&
mount -t tmpfs tmpfs "$0/tmp" && exec chroot "$0" "$@"
"""
_IMPORT = """\
import hashlib, importlib, json, os, sys
for name in {names!r}:
    importlib.import_module(name)
found = hashlib.sha256()
for name, module in sorted(sys.modules.items()):
    path = getattr(module, "__cached__", None)
    found.update(name.encode())
    if isinstance(path, str) and os.path.isfile(path):
        with open(path, "rb") as file:  # it is in memory: it was just imported
            found.update(file.read())
print(json.dumps({{"checksum": found.hexdigest(), "count": len(sys.modules)}}))
"""
_TRAIN = """\
import json, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128),
                            torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
for values, labels in DataLoader(data, batch_size=64, num_workers=2):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(values), labels)
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(float(loss.detach()).hex())
print(json.dumps({"checksum": " ".join(losses), "count": len(losses)}))
"""


class Program(NamedTuple):
    """What is started, and its interpreter."""

    name: str  # import or train
    python: str  # path in the root
    search_path: str  # in the root
    code: str

    def command(self, root: str) -> list[str]:
        """The whole command."""
        inner = [self.python, "-s", "-B", "-c", self.code]
        return [
            *BOUND, "unshare", "--mount", "--propagation", "private", "sh", "-ec", ENTER, root, *inner,
        ]  # fmt: skip

    def environ(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/tmp",  # of its own root
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": self.search_path,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }


def import_program(python: str, search_path: str, names: Sequence[str]) -> Program:
    return Program(IMPORT, python, search_path, _IMPORT.format(names=list(names)))


def train_program(python: str, search_path: str) -> Program:
    return Program(TRAIN, python, search_path, _TRAIN)


def run_program(program: Program, root: str) -> str:
    """Runs it to its end; what it found. Raises: BenchError."""
    try:
        ran = subprocess.run(
            program.command(root),
            env=program.environ(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{program.name} in {root}: still running after {DEADLINE_S:g} s") from None
    lines = ran.stdout.splitlines()
    try:
        found = json.loads(lines[-1])
        if not ran.returncode and found["count"] > 0:
            return str(found["checksum"])
    except (IndexError, ValueError, KeyError, TypeError):
        pass
    raise BenchError(f"{program.name} in {root}: status {ran.returncode}\n{ran.stdout[-500:]}{ran.stderr[-3000:]}")


def is_root_ready(root: str) -> bool:
    """Whether a folder has what `run_program` needs of it."""
    return all(os.path.isdir(os.path.join(root, name)) for name in DIRECTORIES)
