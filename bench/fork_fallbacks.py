"""When ranks that were to be forked are exec'd: each cause injected into a real job, with what was printed.

Most cases preload a module called `culprit` that does something a rank would have to do for itself. In each the
job must run: exit status 0, all ranks of the last attempt at work, started in the way that the case says, and one
line that names the culprit (none where ranks are forked). The table goes to stdout before the figures. The same
cases are tests (tests/integration/test_fork_fallbacks.py).
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.record import BenchError, Figures, Target, note

ROUNDS = 1
TARGETS = {
    "fork_fallbacks.cases": Target(at_least=40),
    "fork_fallbacks.wrong": Target(at_most=0),
    "fork_fallbacks.slowest_s": Target(at_most=15),
}
DEADLINE_S = 30.0
PREFIX = "bootrun: warning: ranks are exec'd, not forked: "
BOOTRUN = os.path.join(sysconfig.get_path("scripts"), "bootrun")
# What an outer job or a developer's shell may have set.
FOREIGN = ("PET_", "TORCHELASTIC_", "BOOTSEER_", "PYTHON", "COV", "OMP_", "LD_PRELOAD")

RUNS = """\
import os
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open("ran-%s-%s" % (attempt, os.environ["RANK"]), "w").close()
"""
# The first attempt lasts until it is told to go, then fails.
FAILS_ONCE = (
    RUNS
    + """
import sys, time
while attempt == "0" and not os.path.exists("go"):
    time.sleep(0.005)
sys.exit(3 if attempt == "0" else 0)
"""
)
TWICE = ("--max-restarts", "1", "--restart-backoff", "0")


class Job:
    """A job that runs, for what is done to it meanwhile."""

    def __init__(self, folder: str, argv: list[str], environ: dict[str, str], stdin: str) -> None:
        self.folder = folder
        self.argv = argv
        self.environ = environ
        self.programs: list[subprocess.Popen[bytes]] = []
        self.write("stdin", stdin)
        self.start()

    def start(self) -> None:
        """Starts it, or its next node."""
        # What is done to a job is done to its first node, and is seen of rank 0: else whoever joins first.
        place = ["--node-rank", str(len(self.programs))] if "--nnodes" in self.argv else []
        with (
            open(os.path.join(self.folder, "stdin"), "rb") as stdin,
            open(self._output_path(len(self.programs)), "wb") as output,
        ):
            self.programs.append(
                subprocess.Popen(
                    [*self.argv[:1], *place, *self.argv[1:]],
                    env=self.environ,
                    cwd=self.folder,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _output_path(self, number: int) -> str:
        return os.path.join(self.folder, f"output{number}")

    def text(self) -> str:
        """What its nodes have written so far."""
        parts = []
        for number in range(len(self.programs)):
            with open(self._output_path(number), encoding="utf-8", errors="replace") as file:
                parts.append(file.read())
        return "".join(parts)

    def close(self) -> None:
        """Ends what still runs."""
        for program in self.programs:
            if program.poll() is None:
                program.kill()
                program.wait()

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end_s:
                raise BenchError(f"not within {DEADLINE_S:g} s: {what}\n{self.text()}")
            time.sleep(0.005)

    def has(self, *names: str) -> bool:
        """Whether the job has made these files."""
        return all(os.path.exists(os.path.join(self.folder, name)) for name in names)

    def write(self, name: str, text: str = "") -> None:
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)

    def find(self, name: str) -> list[int]:
        """Processes of the first node that bear this name in ps."""
        from bench.fork import with_descendants

        found = []
        for pid in with_descendants([self.programs[0].pid]):
            try:
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    if file.read().rstrip("\n") == name:
                        found.append(pid)
            except OSError:
                continue
        return found

    def preloads(self) -> int:
        """How often a preloaded process has become ready."""
        events = read_events(self.folder)
        return sum(event["name"] == "preload" and event["kind"] == "end" for event in events)

    def kill(self, name: str) -> None:
        """SIGKILL to all of this name, as soon as there is one; returns when they are gone."""
        self.wait_until(lambda: self.find(name), f"a process called {name}")
        pids = self.find(name)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # one that has only forked others
        self.wait_until(lambda: not set(pids) & set(self.find(name)), f"{name} is gone")

    def has_standby(self) -> bool:
        """Whether processes wait for the next attempt and the one that has forked them is gone."""
        return len(self.find("bootrun-parked")) == 2 and len(self.find("bootrun-preload")) == 1

    def await_first_attempt(self) -> None:
        self.wait_until(lambda: self.has("ran-0-0", "ran-0-1"), "both ranks run")


class Case(NamedTuple):
    """One cause."""

    name: str  # in the table
    says: str  # what the line has to say; "" for no line
    files: Mapping[str, str]  # beside the script; below modules/ they can be imported
    preload: str = "none,culprit"
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}  # {folder} stands for the job's folder
    entry: tuple[str, ...] = ("script.py",)
    stdin: str = ""
    ranks: int = 2
    how: tuple[str, ...] = ("exec",)  # the ranks of each attempt are started
    act: Callable[[Job], None] | None = None
    max_s: float = 10.0
    why_not: Callable[[], str] = str  # why it cannot be injected here


class Outcome(NamedTuple):
    """What came of it."""

    case: Case
    said: list[str]
    problem: str  # what was not as it should be; "" for nothing
    seconds: float
    output: str


# ---- what is done to jobs --------------------------------------------------------------------------------------


def change_file(job: Job) -> None:
    """As an upgrade of a library does."""
    job.await_first_attempt()
    job.write("modules/pkg/part.py", "VALUE = 'new'")
    job.write("go")


def change_file_later(job: Job) -> None:
    """When processes for the next attempt have been forked already."""
    job.await_first_attempt()
    job.wait_until(job.has_standby, "parked processes")
    change_file(job)


def remove_file(job: Job) -> None:
    job.await_first_attempt()
    os.unlink(os.path.join(job.folder, "modules/pkg/part.py"))
    job.write("go")


def kill_fork_server(job: Job) -> None:
    job.await_first_attempt()
    job.kill("bootrun-preload")
    job.write("go")


def kill_standby(job: Job) -> None:
    job.await_first_attempt()
    job.wait_until(job.has_standby, "parked processes")
    job.kill("bootrun-parked")
    job.write("go")


def kill_both(job: Job) -> None:
    job.await_first_attempt()
    job.wait_until(job.has_standby, "parked processes")
    job.kill("bootrun-preload")
    job.write("go")


def kill_while_importing(job: Job) -> None:
    job.wait_until(lambda: job.has("importing"), "the import begins")
    job.kill("bootrun-preload")


def stop_fork_server(job: Job) -> None:
    """It hangs: the guard must not wait for it for ever."""
    job.await_first_attempt()
    job.wait_until(job.has_standby, "parked processes")
    for pid in job.find("bootrun-preload"):
        os.kill(pid, signal.SIGSTOP)
    job.write("go")


def kill_before_start(job: Job) -> None:
    """While the first node waits for the second one."""
    job.wait_until(job.preloads, "the first node has preloaded")
    job.kill("bootrun-preload")
    job.start()


def wait_for_later(job: Job) -> None:
    job.await_first_attempt()
    job.wait_until(lambda: job.has("later"), "what the module does later")
    job.write("go")


# ---- the cases -------------------------------------------------------------------------------------------------


def _culprit(name: str, says: str, text: str, **more: object) -> Case:
    files = {"modules/culprit.py": text, "script.py": RUNS}
    return Case(name, says, files)._replace(**more)  # type: ignore[arg-type]


def _later(name: str, says: str, text: str) -> Case:
    """Something that happens after the import, between two attempts."""
    module = f"""
import os, signal
def later(*_):
{text}
    if os.getppid() != 1: open("later", "w").close()
signal.signal(signal.SIGALRM, later)
signal.setitimer(signal.ITIMER_REAL, 0.6)
"""
    files = {"modules/culprit.py": module, "script.py": FAILS_ONCE}
    return Case(name, says, files, options=TWICE, how=("fork", "exec"), act=wait_for_later)


def _twice(name: str, says: str, act: Callable[[Job], None], how: str, **more: object) -> Case:
    files = {
        "modules/pkg/__init__.py": "from pkg import part",
        "modules/pkg/part.py": "VALUE = 'old'",
        "script.py": FAILS_ONCE,
    }
    case = Case(name, says, files, preload="none,pkg", options=TWICE, how=("fork", how), act=act)
    return case._replace(**more)  # type: ignore[arg-type]


def _variable(name: str, value: str, says: str) -> Case:
    return Case(f"{name}={value}", says, {"script.py": RUNS}, preload="none", environ={name: value})


def _command(name: str, says: str, **more: object) -> Case:
    return Case(name, says, {"script.py": RUNS}, preload="none")._replace(**more)  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _needs_device(path: str) -> Callable[[], str]:
    def why_not() -> str:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            return f"{path} cannot be opened here: {error.strerror}"
        return ""

    return why_not


def _needs_torch() -> str:
    import importlib.util

    return "" if importlib.util.find_spec("torch") else "torch is not installed here"


NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
libc.pthread_create(ctypes.byref(thread), None, pause, None)
"""
DEVICE = "/dev/kmsg"  # stands for an accelerator: a character device that is none of the harmless ones
NO_TORCH = '#!/bin/sh\nexec "$REAL_PYTHON" -S "$@"\n'
CHILD_PYTHON = '#!/bin/sh\n"$REAL_PYTHON" "$@"\n'
SETS_LD = '#!/bin/sh\nLD_LIBRARY_PATH=/opt/lib exec "$REAL_PYTHON" "$@"\n'
SETS_PYTHON = '#!/bin/sh\nPYTHONHASHSEED=1 exec "$REAL_PYTHON" "$@"\n'
# As if it were Python to bootrun alone: takes the words and makes the ranks' files.
NO_PYTHON = """#!/bin/sh
test -z "$RANK" || : > "ran-$TORCHELASTIC_RESTART_COUNT-$RANK"
"""
DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
"""
CUDA = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
sys.modules["torch.cuda"] = torch.cuda = types.ModuleType("torch.cuda")
torch.cuda._initialized = True
"""
SAYS_READY = """
import os
data = b"forked\\0001\\0001"
os.write(4, len(data).to_bytes(4, "little") + data)
"""

CASES = [
    # what the user asks for
    _command(
        "--no-python",
        "--no-python",
        options=("--no-python",),
        entry=("sh", "-c", ': > "ran-$TORCHELASTIC_RESTART_COUNT-$RANK"'),
    ),
    _command("--rank-hooks off", "--rank-hooks off", options=("--rank-hooks", "off")),
    _command(
        "another script for each rank",
        "script-${local_rank}.py can be another file for each rank",
        files={"script-0.py": RUNS, "script-1.py": RUNS},
        entry=("script-${local_rank}.py",),
    ),
    _command("a script from stdin", "the script comes from standard input", entry=("-",), stdin=RUNS, ranks=1),
    _variable("COVERAGE_PROCESS_START", ".coveragerc", "COVERAGE_PROCESS_START requests coverage"),
    _variable("DEBUGPY_RUNNING", "true", "DEBUGPY_RUNNING requests a debugger"),
    _variable("NSYS_PROFILING_SESSION_ID", "1", "NSYS_PROFILING_SESSION_ID requests a profiler"),
    _variable("LD_PRELOAD", "libprofiler.so", "LD_PRELOAD contains a profiler"),
    # modules that do what each rank would have to do for itself
    _command("unknown module", "nosuch.module cannot be imported: no module", preload="none,nosuch.module"),
    _culprit("prints", "culprit prints when it is imported: hello", "print('hello')"),
    _culprit("warns on stderr", "culprit prints when it is imported", "import warnings; warnings.warn('old')"),
    _culprit(
        "prints in C, unflushed",
        "culprit prints when it is imported: hello",
        "import ctypes; ctypes.CDLL(None).printf(b'hello')",
    ),
    _command(
        "a .pth file or sitecustomize prints",
        "the start-up of the interpreter prints: hello",
        files={
            "script.py": RUNS,
            "modules/sitecustomize.py": "import sys; 'preload' in sys.orig_argv and print('hello')",
        },
    ),
    _culprit("sys.exit", "culprit exits when it is imported (3)", "import sys; sys.exit(3)"),
    _culprit(
        "os._exit", "culprit was being imported when the process ended with status 3", "import os; os._exit(3)"
    ),
    _culprit(
        "os._exit after a message",
        "culprit was being imported when the process ended with status 1 (no licence)",
        "import os; print('no licence'); os._exit(1)",
    ),
    _culprit(
        "SIGSEGV",
        "culprit was being imported when the process was ended by SIGSEGV",
        "import ctypes; ctypes.string_at(0)",
    ),
    _culprit("abort", "culprit was being imported when the process was ended by SIGABRT", "import os; os.abort()"),
    _culprit(
        "SIGKILL",
        "culprit was being imported when the process was ended by SIGKILL",
        "import os; os.kill(os.getpid(), 9)",
    ),
    _culprit(
        "stops itself",
        "culprit was not imported within 1 s",
        "import os; os.kill(os.getpid(), 19)",
        options=("--preload-timeout", "1"),
    ),
    _culprit("raises", "culprit raises when it is imported: ValueError: bad", "raise ValueError('bad\\nvalue')"),
    _culprit(
        "raises KeyboardInterrupt",
        "culprit raises when it is imported: KeyboardInterrupt",
        "raise KeyboardInterrupt",
    ),
    _culprit(
        "a broken import", "culprit cannot be imported: cannot import name 'x' from 'os'", "from os import x"
    ),
    _culprit("a missing library", "culprit cannot be imported: no module named nosuch", "import nosuch"),
    _culprit("a file that is not Python", "culprit raises when it is imported: SyntaxError", "this is no Python"),
    _culprit(
        "starts a thread",
        "culprit starts a thread when it is imported",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    ),
    _culprit("starts a native thread", "culprit leaves a thread", NATIVE_THREAD),
    _culprit(
        "starts a process",
        "culprit starts a process when it is imported",
        "import subprocess; p = subprocess.Popen(['sleep', '100'])",
    ),
    _culprit(
        "starts a daemon",
        "culprit starts a process when it is imported",
        "import subprocess; subprocess.run(['sh', '-c', 'setsid sleep 100 & exit 0'])",
    ),
    _culprit(
        "starts a daemon and ends",
        "culprit was being imported when the process ended with status 3",
        "import os, subprocess; subprocess.run(['sh', '-c', 'setsid sleep 100 & exit 0']); os._exit(3)",
    ),
    _culprit(
        "forks and continues in the child",
        "ended with status 0",
        "import os\nif os.fork(): os._exit(0)",
    ),
    _culprit(
        "becomes another program",
        "culprit was being imported when the process",
        "import os; os.execvp('true', ['true'])",
    ),
    _culprit("opens a socket", "culprit opens socket:", "import socket; s = socket.socket()"),
    _culprit(
        "opens an accelerator",
        f"culprit opens {DEVICE} when it is imported",
        f"import os; fd = os.open('{DEVICE}', os.O_RDONLY | os.O_NONBLOCK)",
        why_not=_needs_device(DEVICE),
    ),
    _culprit("reads RANK", "culprit reads RANK when it is imported", "import os; os.environ.get('RANK')"),
    _culprit(
        "takes forever",
        "culprit was not imported within 1 s (--preload-timeout)",
        "import time; time.sleep(100)",
        options=("--preload-timeout", "1"),
    ),
    _culprit(
        "spins and ignores signals",
        "culprit was not imported within 1 s (--preload-timeout)",
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass",
        options=("--preload-timeout", "1"),
    ),
    _culprit("no time at all", "within 0 s (--preload-timeout)", "", options=("--preload-timeout", "0")),
    _culprit("changes the directory", "culprit changes the working directory", "import os; os.chdir('/')"),
    _culprit(
        "closes all descriptors",
        "culprit was being imported when the process",
        "import os; os.closerange(0, 1000)",
    ),
    _culprit(
        "closes its console",
        "culprit closes or replaces descriptor 1",
        "import os; os.dup2(os.open('/dev/null', 1), 1)",
    ),
    _culprit(
        "writes garbage to descriptor 4",
        "culprit was being imported when the process sent an invalid message",
        "import os; os.write(4, b'garbage' * 1000)",
    ),
    _culprit(
        "writes half a frame to descriptor 4",
        "culprit",
        "import os; os.write(4, b'\\x01')",
        options=("--preload-timeout", "1"),
    ),
    _culprit(
        "sends its own answer",
        "culprit was being imported when the process sent an invalid message",
        SAYS_READY,
    ),
    _culprit("sets a tracer", "a debugger or profiler is active", "import sys; sys.settrace(lambda *_: None)"),
    _culprit("torch.distributed initialised", "culprit opens", DISTRIBUTED, why_not=_needs_torch),
    _culprit("torch.cuda initialised", "culprit initialises torch.cuda when it is imported", CUDA),
    # the interpreter
    _command(
        "an interpreter without torch",
        "",
        preload="json",
        how=("fork",),
        files={"script.py": RUNS, "python": NO_TORCH},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    _command(
        "torch requested, not installed",
        "torch cannot be imported: no module named torch",
        preload="torch",
        files={"script.py": RUNS, "python": NO_TORCH},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    _command(
        "a wrapper that stays the parent",
        "PYTHON_EXEC",
        files={"script.py": RUNS, "python": CHILD_PYTHON},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    _command(
        "a wrapper that sets LD_LIBRARY_PATH",
        "LD_LIBRARY_PATH differs from what modules were preloaded with",
        files={"script.py": RUNS, "python": SETS_LD},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    _command(
        "a wrapper that sets PYTHONHASHSEED",
        "PYTHONHASHSEED differs from what modules were preloaded with",
        files={"script.py": RUNS, "python": SETS_PYTHON},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    _command(
        "a wrapper that does not run Python",
        "it ended with status 0",
        files={"script.py": RUNS, "python": NO_PYTHON},
        environ={"PYTHON_EXEC": "{folder}/python"},
    ),
    # between attempts
    _twice(
        "a preloaded file changes", "modules/pkg/part.py has changed since it was preloaded", change_file, "exec"
    ),
    _twice(
        "a preloaded file changes, with standby processes",
        "modules/pkg/part.py has changed since it was preloaded",
        change_file_later,
        "exec",
    ),
    _twice(
        "a preloaded file is removed",
        "modules/pkg/part.py has changed since it was preloaded",
        remove_file,
        "exec",
    ),
    _twice(
        "kill -9 of the fork server",
        "the fork server has ended: it was ended by SIGKILL",
        kill_fork_server,
        "exec",
    ),
    _twice(
        "kill -9 with standby processes",
        "the fork server has ended: it was ended by SIGKILL",
        kill_both,
        "exec",
    ),
    _twice("kill -9 of standby processes", "", kill_standby, "fork"),
    _twice("SIGSTOP to the fork server", "it did not answer within 10 s", stop_fork_server, "exec", max_s=20.0),
    _culprit(
        "kill -9 while importing",
        "culprit was being imported when the process was ended by SIGKILL",
        "import time; open('importing', 'w').close(); time.sleep(100)",
        act=kill_while_importing,
    ),
    _culprit(
        "kill -9 while ranks wait for rank 0",
        "",
        "import os, time; own, sleep = os.getpid(), time.sleep\n"
        "time.sleep = lambda seconds: os.kill(own, 9) if os.getpid() == own else sleep(seconds)",
        how=("fork",),
    ),
    _command(
        "kill -9 before the first start",
        "the fork server has ended: it was ended by SIGKILL",
        options=("--nnodes", "2"),
        ranks=1,
        act=kill_before_start,
    ),
    _later(
        "a thread appears",
        "the fork server has a thread",
        "    import _thread, time; _thread.start_new_thread(time.sleep, (100,))",
    ),
    _later(
        "an accelerator is opened",
        f"the fork server has {DEVICE} open",
        f"    global fd; fd = os.open('{DEVICE}', os.O_RDONLY | os.O_NONBLOCK)",
    )._replace(why_not=_needs_device(DEVICE)),
]


# ---- running ---------------------------------------------------------------------------------------------------


def environ_of(case: Case, directory: str, base: Mapping[str, str]) -> dict[str, str]:
    environ = {name: value for name, value in base.items() if not name.startswith(FOREIGN)}
    environ["OMP_NUM_THREADS"] = "1"
    environ["BOOTSEER_CACHE_DIR"] = os.path.join(directory, "cache")
    environ["PYTHONPATH"] = os.path.join(directory, "modules")
    environ["PWD"] = directory  # or a shell that wraps the interpreter would change it
    environ["REAL_PYTHON"] = sys.executable
    for name, value in case.environ.items():
        environ[name] = value.replace("{folder}", directory)
    return environ


def run_case(case: Case, directory: str, base: Mapping[str, str] = os.environ) -> Outcome:
    """Runs a job in an empty folder and looks at what became of it."""
    for name, text in case.files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)
    options = ["--fork-ranks", "on", "--preload", case.preload, "--nproc-per-node", str(case.ranks)]
    options += ["--log-dir", os.path.join(directory, "logs"), *case.options]
    if "--nnodes" in case.options:
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}", "--rdzv-id", "job"]
    else:
        options.append("--standalone")
    began_s = time.monotonic()
    job = Job(directory, [BOOTRUN, *options, *case.entry], environ_of(case, directory, base), case.stdin)
    try:
        if case.act is not None:
            case.act(job)
        statuses = [program.wait(DEADLINE_S) for program in job.programs]
    except subprocess.TimeoutExpired:
        raise BenchError(f"{case.name}: still running after {DEADLINE_S:g} s\n{job.text()}") from None
    finally:
        job.close()
    seconds = time.monotonic() - began_s
    said = [line.removeprefix(PREFIX) for line in job.text().splitlines() if line.startswith(PREFIX)]
    return Outcome(case, said, find_problem(case, directory, statuses, said, seconds), seconds, job.text())


def find_problem(case: Case, directory: str, statuses: list[int], said: list[str], seconds: float) -> str:
    """What was not as the case says."""
    if any(statuses):
        return f"exit status {statuses}"
    attempt = len(case.how) - 1
    ranks = case.ranks * len(statuses)
    missing = [n for n in range(ranks) if not os.path.exists(f"{directory}/ran-{attempt}-{n}")]
    if missing:
        return f"ranks {missing} did not run"
    how = [started_by(directory, number, case.ranks) for number in range(len(case.how))]
    if tuple(how) != case.how:
        return f"ranks were started by {how}"
    if len(said) != bool(case.says) or any(case.says not in line for line in said):
        return f"said {said} and not {case.says!r}"
    return "" if seconds <= case.max_s else f"took {seconds:.1f} s"


def started_by(directory: str, attempt: int, ranks: int) -> str:
    """How the ranks of an attempt were started, on the first node."""
    how = [
        str(event["attrs"].get("how"))
        for event in read_events(directory)
        if event["name"] == "rank_started" and event["attempt"] == attempt and event["rank"] < ranks
    ]
    return how[0] if how == [how[0]] * ranks else ", ".join(how)


def read_events(directory: str) -> list[dict[str, Any]]:
    """bootrun's own events, the unfinished last line left out."""
    found = []
    for path in glob.glob(os.path.join(directory, "logs", "*", "events", "agent-*.jsonl")):
        with open(path, encoding="utf-8") as file:
            found += [json.loads(line) for line in file if line.endswith("\n")]
    return found


def format_row(outcome: Outcome) -> str:
    """A row of the table."""
    ran = "no: " + outcome.problem if outcome.problem else f"yes, by {', then '.join(outcome.case.how)}"
    printed = "<br>".join(outcome.said).replace("|", "\\|") or "(nothing)"
    return f"| {outcome.case.name} | {printed} | {ran} | {outcome.seconds:.2f} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--verbose", action="store_true", help="with all that the jobs printed")


def run(args: argparse.Namespace) -> Figures:
    """Runs all cases, prints the table."""
    outcomes = []
    print("| cause | printed | the job ran | seconds |\n|---|---|---|---:|")
    for case in [case for case in CASES if args.only in case.name]:
        reason = case.why_not()
        if reason:
            note(f"left out: {case.name}: {reason}")
            continue
        with tempfile.TemporaryDirectory(prefix="bench-fallbacks-") as directory:
            outcome = run_case(case, directory)
            row = format_row(outcome).replace(directory, "...").replace(os.path.dirname(os.__file__), "...")
        print(row, flush=True)
        if args.verbose or outcome.problem:
            note(outcome.output)
        outcomes.append(outcome)
    print()
    figures = Figures()
    figures.add("fork_fallbacks.cases", "cases", [float(len(outcomes))])
    figures.add("fork_fallbacks.wrong", "cases", [float(sum(bool(outcome.problem) for outcome in outcomes))])
    figures.add("fork_fallbacks.slowest_s", "s", [max(outcome.seconds for outcome in outcomes)])
    return figures
