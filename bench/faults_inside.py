"""What a rank of `bench faults` does to itself, told by FOLDER/fault.json: each way by its name in faults.toml.

Nothing here imports torch before it has to. The moment goes to FOLDER/injected-RANK before anything is done.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import mmap
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

LEAKED: list[Any] = []  # what is held stays held
BURSTS = ("evaluation", "all-evaluate", "checkpoint", "stall", "all-pause")
MAX_WAITING_S = 10.0  # of a burst in which nobody computes: longer ones are no different from a hang
MAX_BURST_S = 25.0
MAX_FILLED_MIB = 1024


class Training:
    """What faults change of a training."""

    def __init__(self, folder: str, step_s: float, rank: int, world: int) -> None:
        self.folder, self.step_s, self.rank, self.world = folder, step_s, rank, world
        self.node = 0
        self.step = 0
        self.factor = 1.0  # of the time of a step's computation
        self.loss_factor = 1.0  # of what is told by heartbeat
        self.heartbeats = False
        self.talks = True
        self.instead = ""  # of the next all-reduce

    @staticmethod
    def burn(seconds: float) -> None:
        """Computes for that long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            sum(range(2000))

    def evaluate(self, seconds: float) -> None:
        """The model on other data, for that long; nothing is printed, read or written."""
        raise NotImplementedError

    def spoil(self) -> None:
        """The weights become NaN."""
        raise NotImplementedError


class Planned:
    """What this rank does, and when."""

    def __init__(self, plan: dict[str, Any], is_hit: bool) -> None:
        self._is_hit = is_hit
        self._do: str = plan.get("do", "")
        self._with: dict[str, Any] = plan.get("with", {})
        self._at_step: int = plan.get("at_step", 0)
        self._offset: float = plan.get("offset", 0.0)
        self._each: Callable[[Training], None] | None = None

    def before_joining(self, training: Training) -> None:
        """Before the process group is there."""
        if self._at_step == 0 and self._do != "autotune":
            self._act(training)

    def at_start(self, training: Training) -> None:
        """Before the first step."""
        if self._at_step == 0 and self._do == "autotune":
            self._act(training)

    def at(self, training: Training, step: int) -> None:
        """At the begin of a step."""
        if step == self._at_step > 0:
            time.sleep(self._offset * training.step_s)
            self._act(training)
        if self._each is not None:
            self._each(training)
        growing = f"{training.folder}/grow-{training.rank}"
        if os.path.exists(growing):
            os.unlink(growing)  # once: the next attempt has no limit
            fill_memory()

    def at_end(self, training: Training) -> None:
        """After the last step."""
        if self._at_step < 0:
            self._act(training)

    def _act(self, training: Training) -> None:
        path = f"{training.folder}/injected-{training.rank}"
        if not self._is_hit or not self._do or (os.path.exists(path) and not self._with.get("always")):
            return
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{time.monotonic_ns()}\n")
        if self._do != "reach":  # the bench does it, from outside
            self._each = WAYS[self._do](training, self._with)


def read_planned(directory: str, training: Training) -> Planned:
    """From the file; nothing is done where there is none."""
    try:
        with open(f"{directory}/fault.json", encoding="utf-8") as file:
            plan = json.load(file)
    except FileNotFoundError:
        return Planned({}, False)
    training.heartbeats = bool(plan.get("heartbeats"))
    is_hit = plan["rank"] in (-1, training.rank) and plan["node"] in (-1, training.node)
    return Planned(plan, is_hit)


Way = Callable[[Training, dict[str, Any]], Callable[[Training], None] | None]


def _exit(_: Training, given: dict[str, Any]) -> NoReturn:
    sys.exit(given["status"])


def _leave(_: Training, given: dict[str, Any]) -> NoReturn:
    os._exit(given["status"])


def _segv(_: Training, _given: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _abort(_: Training, _given: dict[str, Any]) -> NoReturn:
    os.abort()


def _bus(training: Training, _: dict[str, Any]) -> None:
    with open(f"{training.folder}/data-{training.rank}", "w+b") as file:
        file.write(bytes(4 * mmap.PAGESIZE))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        os.truncate(file.name, 0)
        sum(mapped[mmap.PAGESIZE : 2 * mmap.PAGESIZE])


def _raise(_: Training, given: dict[str, Any]) -> NoReturn:
    raise getattr(builtins, given["kind"])(given["text"])


def _raise_truncated(_: Training, _given: dict[str, Any]) -> NoReturn:
    """The error file is there as torch's `record` writes it, and half of it."""
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    text = "ValueError: a sample of the wrong shape"
    record = {
        "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    }
    data = json.dumps(record).encode()

    def cut(*_raised: Any) -> None:
        sys.__excepthook__(*_raised)
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        os._exit(1)  # nothing completes the file

    sys.excepthook = cut
    raise ValueError("a sample of the wrong shape")


def _memory(_: Training, _given: dict[str, Any]) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    LEAKED.append(bytearray(4 << 30))


def fill_memory() -> NoReturn:
    """Takes memory until there is none."""
    for _ in range(MAX_FILLED_MIB // 16):
        LEAKED.append(bytearray(os.urandom(1 << 20) * 16))
    raise RuntimeError("the limit of memory does not hold")


def _disk_full(training: Training, _: dict[str, Any]) -> None:
    with open(f"{training.folder}/small/checkpoint-{training.rank}", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()


def _descriptors(_training: Training, _: dict[str, Any]) -> NoReturn:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), most))
    while True:
        LEAKED.append(open(os.devnull, "rb"))  # noqa: SIM115


def _sleep(_: Training, _given: dict[str, Any]) -> NoReturn:
    while True:
        time.sleep(3600)


def _busy(_: Training, _given: dict[str, Any]) -> NoReturn:
    count = 0
    while True:
        count += 1


def _busy_native(_: Training, _given: dict[str, Any]) -> None:
    import re

    re.match(r"(a+)+$", "a" * 80 + "b")


class _Stuck:
    """A data set whose samples never come."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> int:
        while True:
            time.sleep(3600)


def _loader(_: Training, _given: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    next(iter(DataLoader(_Stuck(), num_workers=1)))


def _lock(_: Training, _given: dict[str, Any]) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _mount(training: Training, _: dict[str, Any]) -> None:
    """A FUSE mount whose server never says a word: who looks at it waits in the kernel and can only be killed."""
    path = f"{training.folder}/mount-{training.rank}"
    os.makedirs(path, exist_ok=True)
    LEAKED.append(server := os.open("/dev/fuse", os.O_RDWR))
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"faults", path.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount", path)
    os.listdir(path)


def _instead(what: str) -> Way:
    def way(training: Training, _: dict[str, Any]) -> None:
        training.instead = what

    return way


def _all_wait(training: Training, _: dict[str, Any]) -> None:
    while not os.path.exists(f"{training.folder}/never"):
        time.sleep(0.5)


def _slow(training: Training, given: dict[str, Any]) -> None:
    training.factor = float(given["factor"])


def _nan(training: Training, _: dict[str, Any]) -> None:
    training.spoil()


def _jump(training: Training, given: dict[str, Any]) -> None:
    training.loss_factor = float(given["factor"])


def _grandchild(_: Training, _given: dict[str, Any]) -> NoReturn:
    """It has the descriptor of this rank's port, as children without exec have."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(100_000)
        os._exit(0)
    os.wait()
    sys.exit(1)


def _close_stdout(training: Training, _: dict[str, Any]) -> None:
    training.talks = False
    sys.stdout.flush()
    os.close(1)


def _autotune(training: Training, given: dict[str, Any]) -> None:
    training.burn(given["seconds"])


def _evaluate(_training: Training, _: dict[str, Any]) -> Callable[[Training], None]:
    def each(now: Training) -> None:
        if now.rank == 0 and now.step % 10 == 0:
            now.evaluate(10 * now.step_s)

    return each


def _bursty(_training: Training, given: dict[str, Any]) -> Callable[[Training], None]:
    """Silences as healthy jobs have them, the same for all ranks by the seed."""
    chance = random.Random(given["seed"])
    every_s = given["every_s"]

    def each(now: Training) -> None:
        if chance.random() > now.step_s / every_s:
            return
        what = chance.choice(BURSTS)
        for_s = min(MAX_BURST_S, chance.lognormvariate(1.0, 0.9))
        one = chance.randrange(now.world)
        if what == "all-evaluate" or (what == "evaluation" and now.rank == 0):
            now.evaluate(for_s)
        elif what == "checkpoint" and now.rank == 0:
            _write(f"{now.folder}/burst", for_s)
        elif what == "all-pause" or (what == "stall" and now.rank == one):
            time.sleep(min(for_s, MAX_WAITING_S))

    return each


def _write(path: str, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    with open(path, "wb") as file:
        while time.monotonic() < end_s:
            file.seek(0)
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)


WAYS: dict[str, Way] = {
    "exit": _exit,
    "leave": _leave,
    "segv": _segv,
    "abort": _abort,
    "bus": _bus,
    "raise": _raise,
    "raise-truncated": _raise_truncated,
    "memory": _memory,
    "disk-full": _disk_full,
    "descriptors": _descriptors,
    "sleep": _sleep,
    "busy": _busy,
    "busy-native": _busy_native,
    "loader": _loader,
    "lock": _lock,
    "mount": _mount,
    "mismatch-operation": _instead("broadcast"),
    "mismatch-size": _instead("larger"),
    "skip-collective": _instead("nothing"),
    "receive": _instead("receive"),
    "all-wait": _all_wait,
    "slow": _slow,
    "nan": _nan,
    "jump": _jump,
    "grandchild": _grandchild,
    "close-stdout": _close_stdout,
    "autotune": _autotune,
    "evaluate": _evaluate,
    "bursty": _bursty,
}
