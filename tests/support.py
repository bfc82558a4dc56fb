"""What tests of real processes share: programs run to a deadline, conditions waited for, ports, process lists.

Output of a program goes to files, not to pipes: nothing that it leaves running can make a test wait, and a test
can read what was written so far. Everything started here has an end: `Programs.close` kills what still runs.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import pytest

from bootseer import tuning

SCRIPTS = sysconfig.get_path("scripts")
BOOTRUN = os.path.join(SCRIPTS, "bootrun")
TORCHRUN = os.path.join(SCRIPTS, "torchrun")
# Every process that a test starts carries it in its environment; /proc shows it also after a double fork.
MARK = "LEAK_CHECK_MARK"
NVIDIA_DRIVER = "/dev/nvidiactl"
# Variables of an outer job or of the developer's shell that would change what a launcher does.
_FOREIGN = ("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "BOOTSEER_", "PYTEST_", "GROUP_", "ROLE_", "SLURM_")
_OURS = "BOOTSEER_CACHE_DIR"  # of this test run (user_cache.py)
_FOREIGN_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "LOGLEVEL",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHON_EXEC",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}

T = TypeVar("T")


class Run(NamedTuple):
    """A program that has ended."""

    status: int  # exit status, or minus the number of the signal
    stdout: str
    stderr: str
    dir: str  # its working directory; its TMPDIR is below it
    seconds: float


class Process(NamedTuple):
    """A line of the process list."""

    pid: int
    ppid: int
    state: str
    command: str
    name: str = ""


class Program:
    """A program that runs; `wait` gives its Run."""

    def __init__(
        self, argv: Sequence[str], cwd: str, environ: Mapping[str, str], stdin: int | None, output: str
    ) -> None:
        self.argv = list(argv)
        self.dir = cwd
        self.stdout_path = output + ".stdout"
        self.stderr_path = output + ".stderr"
        self.started_s = time.monotonic()
        with open(self.stdout_path, "wb") as out, open(self.stderr_path, "wb") as err:
            self.process = subprocess.Popen(
                self.argv,
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out,
                stderr=err,
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _read(self.stdout_path)

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        return _read(self.stderr_path)

    def signal(self, signum: int) -> None:
        """Sends a signal to this one process."""
        self.process.send_signal(signum)

    def wait(self, deadline_s: float = 30.0) -> Run:
        """Waits for its end; past the deadline it is killed and the test fails with its output."""
        try:
            status = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(
                f"still running after {deadline_s} s: {' '.join(self.argv)}\n"
                f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
            ) from None
        return Run(status, self.stdout, self.stderr, self.dir, time.monotonic() - self.started_s)

    def close(self) -> None:
        """Kills it if it runs; what it leaves behind is the leak check's business."""
        if self.process.poll() is None:
            # Stopped first by request: torchrun ends its ranks only then.
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(3.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Programs:
    """Starts programs in one directory and ends them all; called, it runs one to its end."""

    def __init__(self, directory: str, prefix: Sequence[str] = ()) -> None:
        self.dir = directory
        self.prefix = tuple(prefix)
        self._started: list[Program] = []

    def start(
        self,
        *args: str | os.PathLike[str] | int | float,
        env: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
        stdin: int | None = None,
    ) -> Program:
        """Starts it; `env` is added to a clean environment (None takes a variable out)."""
        tmp = os.path.join(self.dir, "tmp")
        os.makedirs(tmp, exist_ok=True)
        environ = clean_environ()
        environ["TMPDIR"] = tmp
        for name, value in (env or {}).items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        argv = [*self.prefix, *(str(arg) for arg in args)]
        output = os.path.join(self.dir, f"output{len(self._started)}")
        program = Program(argv, cwd or self.dir, environ, stdin, output)
        self._started.append(program)
        return program

    def __call__(
        self,
        *args: str | os.PathLike[str] | int | float,
        env: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
        stdin: int | None = None,
        deadline_s: float = 30.0,
    ) -> Run:
        """Runs it to its end."""
        return self.start(*args, env=env, cwd=cwd, stdin=stdin).wait(deadline_s)

    def close(self) -> None:
        for program in self._started:
            program.close()


def lacking(reason: str) -> NoReturn:
    """Skips the test, as something is missing here; in CI that is an error."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def needs_program(name: str) -> pytest.MarkDecorator:
    """Marks tests that run a program; where CI lacks it they run, and fail."""
    is_missing = shutil.which(name) is None and not os.environ.get("CI")
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed")


def signal_mask(*signals: int) -> int:
    """Signals as /proc/PID/status writes them: bit n - 1 is signal n."""
    return sum(1 << (each - 1) for each in signals)


def ignored_signals() -> int:
    """What this process ignores, as a mask; also the signals that Python does not name."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))


def clean_environ() -> dict[str, str]:
    """The environment without what an outer job, pytest or the developer's shell put in."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == _OURS or (name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN))
    }


def tune(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Change limits of this process, also beyond their bounds: `tune(monkeypatch, peers__begin_s=0.1)`."""
    changed = tuning.current()
    for path, value in values.items():
        package, _, name = path.partition("__")
        changed = changed._replace(**{package: getattr(changed, package)._replace(**{name: value})})
    monkeypatch.setattr(tuning, "_last", (os.environ.get(tuning.VARIABLE, ""), changed))


def wait_until(condition: Callable[[], T], deadline_s: float = 10.0, what: str = "") -> T:
    """The first true value of `condition`; fails after the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        time.sleep(0.01)


def wait_threads_back() -> None:
    """Until no call hangs any more; idle threads end then."""

    from bootseer import aio

    def are_gone() -> bool:
        aio.close()
        counts = aio.statistics()
        return counts["abandoned"] == counts["apart_threads"] == counts["io_threads"] == 0

    wait_until(are_gone, 10.0)


def find_free_port() -> int:
    """A TCP port that nobody uses, below those that the kernel gives to connections in the meantime."""
    while True:
        port = 10000 + secrets.randbelow(22000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def processes() -> Iterator[Process]:
    """Every process that can be seen, zombies too."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := find_process(int(name))) is not None:
            yield found


def find_process(pid: int) -> Process | None:
    """A line of the process list; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            command = file.read().replace("\0", " ").strip()
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    state, ppid = rest.split()[:2]
    return Process(pid, int(ppid), state, command or f"[{name}]", name)


def open_descriptors() -> set[str]:
    """The descriptors of this process, without those of what nobody refers to any more."""
    gc.collect()  # else one of an earlier test may be closed between two looks
    return set(os.listdir("/proc/self/fd"))


def is_running(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    found = find_process(pid)
    return found is not None and found.state != "Z"


def marked_processes(mark: str) -> list[Process]:
    """Processes that were started, however indirectly, with this leak check mark; never this one."""
    wanted = f"{MARK}={mark}".encode()
    own = os.getpid()
    marked = [pid for pid in _pids() if pid != own and wanted in _read_proc(f"/proc/{pid}/environ").split(b"\0")]
    return [process for pid in marked if (process := find_process(pid)) is not None]


def descendants(pid: int) -> list[Process]:
    """Children of `pid`, their children and so on."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        # Of each process this is read alone: tests look at all of them often.
        _, _, rest = _read_proc(f"/proc/{each}/stat").rpartition(b")")
        if rest:
            children.setdefault(int(rest.split(None, 2)[1]), []).append(each)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(0), [])
        waiting += below
        found += [process for each in below if (process := find_process(each)) is not None]
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_proc(path: str) -> bytes:
    """b"" for a process that has ended, or is another user's."""
    parts = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while part := os.read(fd, 1 << 16):
                parts.append(part)
        finally:
            os.close(fd)
    except OSError:
        pass
    return b"".join(parts)


def python(*args: str) -> list[str]:
    """The command of this interpreter."""
    return [sys.executable, *args]


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
