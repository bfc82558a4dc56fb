"""A job of `bench kill_restart`: two nodes on this host, one process killed in a restart, what is left looked for.

Each job has folders of its own for everything that can be left: logs, temporary and runtime files. Processes are
found by a mark in their environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from bench import shm
from bench.fork import children_of, find_fork_server
from bench.kill import MARK, find_marked, find_supervisor
from bench.kill_restart_plan import (
    NODES,
    OF_LADDER,
    PAUSE_S,
    RANKS,
    RANKS_OF_NODE,
    End,
    Kill,
    Step,
    find_unclear,
    goes_on_ns,
    judge,
    parse_progress,
)
from bench.record import BenchError

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BOUND_S = 30.0  # from the kill until the job goes on, or all launchers have ended
START_S = 60.0  # until the moment of the kill
END_S = 20.0  # of a job that goes on and is told that it is enough
GONE_S = 10.0  # for all that is left, after the last launcher has ended
JOIN_S = 6.0  # a job that cannot go on waits so long for another node
STEP_S = {"torch": 0.02, "bare": 0.005}
# With how often they are said at each restart.
LADDER_WORDS = {
    "mending": ("before the restart: stop-time-checks on", 1),
    "measuring": ("bootrun: stop-time-checks on", NODES),
}
TELL_AFTER_S = 0.1  # a rank is told to fail so long after a kill that comes before that


class Came(NamedTuple):
    """What came of a kill."""

    kill: Kill
    verdict: str
    wrong: str  # "" for nothing
    seconds: float  # from the kill until the job went on, or had ended
    left: tuple[str, ...]
    text: str  # what all launchers have said


def try_kill(kill: Kill, kind: str, directory: str, cache: str) -> Came:
    """Runs one job. Args: folder: empty, its own; cache: shared by all jobs. Raises: BenchError."""
    job = _Job(kill, kind, directory, cache)
    try:
        job.reach()
        killed_ns = job.kill()
        went_on_ns, ended_ns = job.follow(killed_ns)
        ends = job.ends()
        unclear = find_unclear(kill, ends, job.agent_pid, job.endpoint)
        verdict, wrong = judge(kill, went_on_ns is not None, ends, unclear)
        if went_on_ns is not None and not job.is_ended:
            wrong = wrong or f"it did not end within {END_S:g} s"
        seconds = ((went_on_ns or ended_ns) - killed_ns) / 1e9
        return Came(kill, verdict, wrong, seconds, tuple(job.find_left()), job.text())
    except BenchError as error:
        raise BenchError(f"{kill}: {error}\n{job.text()[-6000:]}") from error
    finally:
        job.close()


class _Job:
    """`close` must be called."""

    def __init__(self, kill: Kill, kind: str, folder: str, cache: str) -> None:
        self._kill, self._kind, self._directory, self._cache = kill, kind, folder, cache
        self._mark = os.urandom(8).hex()
        self._programs: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the node
        self._sentinels: set[int] = set()
        self._killed: subprocess.Popen[bytes] | None = None
        self._shm = shm.files()
        self._has_reported = False
        self.agent_pid = 0  # of the node on which something is killed
        self.endpoint = f"127.0.0.1:{_free_port()}"
        for name in ("tmp", "run"):
            os.mkdir(f"{folder}/{name}", 0o700)
        # Beside the modules of bench it would find bench/numbers.py where torch wants the standard library's.
        shutil.copyfile(f"{TOP}/bench/kill_restart_train.py", f"{folder}/train.py")
        for number in range(kill.restart - 1):
            self._fail(number)
        for node in range(NODES):
            self._start(node)

    def _start(self, node: int) -> None:
        kill, directory = self._kill, self._directory
        environ = {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": TOP,
            "OMP_NUM_THREADS": "1",
            "BOOTSEER_CACHE_DIR": self._cache,
            "BOOTSEER_RUNTIME": f"{directory}/run",
            "TMPDIR": f"{directory}/tmp",
        }
        join_s = JOIN_S if kill.mode == "fixed" else START_S
        conf = f"is_host={int(node == kill.host)},join_timeout={join_s:g},last_call_timeout=30"
        argv = [sys.executable, "-m", "launcher", "--nproc-per-node", str(RANKS_OF_NODE), "--rdzv-backend", "c10d"]
        argv += ["--nnodes", "1:2" if kill.mode == "elastic" else "2", "--node-rank", str(node)]
        argv += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", "kill", "--rdzv-conf", conf]
        argv += ["--max-restarts", "5", "--restart-backoff", str(PAUSE_S), "--shutdown-timeout", "2"]
        argv += ["--fork-ranks", "on", *(["--preload", "none,json"] if self._kind == "bare" else [])]
        if kill.has_ladder:
            examine = f"touch {directory}/examining-$BOOTSEER_ATTEMPT; exec sleep 0.2"
            argv += ["--post-mortem", examine, "--stop-checks", "always", "--check-pairs", "always"]
        argv += ["--log-dir", f"{directory}/logs-{node}", "-r", "3"]
        argv += [f"{directory}/train.py", directory, self._kind, str(STEP_S[self._kind]), str(kill.slow_s)]
        with open(self._output(len(self._programs)), "wb") as file:
            program = subprocess.Popen(
                argv, env=environ, cwd=directory, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._programs.append((node, program))

    def _output(self, number: int) -> str:
        return f"{self._directory}/output-{number}"

    def _said(self, number: int) -> str:
        with open(self._output(number), encoding="utf-8", errors="replace") as file:
            return file.read()

    def _ranks(self) -> dict[int, list[Step]]:
        found = {}
        for rank in range(RANKS):
            try:
                with open(f"{self._directory}/progress-{rank}", encoding="ascii") as file:
                    found[rank] = parse_progress(file.read())
            except FileNotFoundError:
                continue
        return found

    def _fail(self, restart: int) -> None:
        """The rank fails in the attempt after so many restarts."""
        path = f"{self._directory}/fail-{restart}"
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write(str(self._kill.fail_rank))
        os.replace(f"{path}.new", path)

    # ---- the kill --------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Until the moment of the kill."""
        kill, last = self._kill, self._kill.restart - 1
        self._wait(lambda: self._have_made(last, 1), "all ranks make steps", START_S)
        if kill.stage == "before":
            time.sleep(kill.after_s)
            return
        self._fail(last)
        self._has_reported = True
        self._wait(lambda: os.path.exists(f"{self._directory}/failing-{last}"), "a rank fails", START_S)
        at_host = next(number for number, (node, _) in enumerate(self._programs) if node == kill.host)
        words = {"stopping": f"stopping attempt {last}", "gathering": f"restart {kill.restart} of "}
        words["starting"] = f"attempt {kill.restart} starts"
        if kill.stage == "examining":
            path = f"{self._directory}/examining-{last}"
            self._wait(lambda: os.path.exists(path), "the post-mortem command runs", START_S)
        elif kill.stage in OF_LADDER:
            word, each = LADDER_WORDS[kill.stage]
            count = each * last + 1
            self._wait(lambda: self._said(at_host).count(word) >= count, f"it says {word!r}", START_S)
        elif kill.stage in words:
            self._wait(lambda: words[kill.stage] in self._said(at_host), f"it says {words[kill.stage]!r}", START_S)
        elif kill.stage == "joining":
            self._wait(lambda: self._has_begun(kill.restart), "a rank of the next attempt runs", START_S)
        elif kill.stage == "after":
            self._wait(lambda: self._have_made(kill.restart, 1), "all ranks make steps again", START_S)
        time.sleep(kill.after_s)

    def _have_made(self, restart: int, count: int) -> bool:
        ranks = self._ranks()
        return len(ranks) == RANKS and all(
            sum(each.restart == restart and each.step >= 0 for each in steps) >= count for steps in ranks.values()
        )

    def _has_begun(self, restart: int) -> bool:
        return any(steps and steps[-1].restart == restart for steps in self._ranks().values())

    def _wait(self, condition: Callable[[], object], what: str, max_s: float) -> None:
        end_s = time.monotonic() + max_s
        while not condition():
            if time.monotonic() > end_s or any(program.poll() is not None for _, program in self._programs):
                raise BenchError(f"it was waited for in vain until {what}")
            time.sleep(0.001)

    def kill(self) -> int:
        """Kills the process; returns the moment of it, monotonic ns."""
        kill = self._kill
        program = next(program for node, program in self._programs if node == kill.node)
        self.agent_pid = program.pid
        for _, each in self._programs:
            self._sentinels.update(children_of(each.pid))
        if kill.target in ("agent0", "agent1", "coordinator"):
            self._killed = program
            pids = [program.pid]
        elif kill.target.startswith("guard"):
            pids = [pid for pid in [find_supervisor(program.pid)] if pid is not None]
        else:
            # It ends once it has forked, and another one is started: there may be none at this moment.
            pids = []
            end_s = time.monotonic() + BOUND_S
            while not pids and time.monotonic() < end_s:
                pids = find_fork_server(program.pid)
        killed_ns = time.monotonic_ns()
        for pid in pids[-1:]:
            os.kill(pid, signal.SIGKILL)
        if not pids:
            raise BenchError(f"there is no {kill.target}")
        return killed_ns

    # ---- what comes of it ------------------------------------------------------------------------------------

    def follow(self, killed_ns: int) -> tuple[int | None, int]:
        """Until the job goes on, or all launchers have ended, or it takes too long.

        Returns: when it went on, None if it did not; and when this was over.
        """
        kill = self._kill
        has_replaced = kill.mode != "replaced" or kill.target == "fork_server" or kill.node == kill.host
        while time.monotonic_ns() < killed_ns + BOUND_S * 1e9:
            if not self._has_reported and time.monotonic_ns() > killed_ns + TELL_AFTER_S * 1e9:
                self._has_reported = True
                self._fail(kill.restart - 1)
            if not has_replaced and self._program(kill.node).poll() is not None:
                has_replaced = True
                self._start(kill.node)
            if self._has_reported and has_replaced:
                on_ns = goes_on_ns(self._ranks(), killed_ns, kill)
                if on_ns is not None:
                    with open(f"{self._directory}/enough", "w", encoding="ascii"):
                        pass
                    self._await_end()
                    return on_ns, time.monotonic_ns()
            if self.is_ended:
                break
            time.sleep(0.005)
        return None, time.monotonic_ns()

    def _program(self, node: int) -> subprocess.Popen[bytes]:
        return next(program for at, program in self._programs if at == node)

    @property
    def is_ended(self) -> bool:
        """Whether all launchers have."""
        return all(program.poll() is not None for _, program in self._programs)

    def _await_end(self) -> None:
        end_s = time.monotonic() + END_S
        while not self.is_ended and time.monotonic() < end_s:
            time.sleep(0.005)

    def ends(self) -> list[End]:
        """Of the launchers that have ended, but for the killed one."""
        found = []
        for number, (node, program) in enumerate(self._programs):
            status = program.poll()
            if status is not None and program is not self._killed:
                found.append(End(node, status, self._said(number)))
        return found

    def text(self) -> str:
        """What all launchers have printed."""
        return "\n".join(
            f"== node {node} (pid {program.pid}), status {program.poll()}\n{self._said(number)}"
            for number, (node, program) in enumerate(self._programs)
        )

    # ---- what is left ----------------------------------------------------------------------------------------

    def find_left(self) -> list[str]:
        """What is still there a while after the end; processes among it are ended."""
        for _, program in self._programs:
            if program.poll() is None:
                program.kill()  # it was told of
                program.wait()
        end_s = time.monotonic() + GONE_S
        while (left := self._look()) and time.monotonic() < end_s:
            time.sleep(0.02)
        return left

    def _look(self) -> list[str]:
        found = [f"process {pid} ({_name(pid)})" for pid in find_marked(self._mark)]
        found += [f"{shm.DIRECTORY}/{name}" for name in shm.left(self._shm)]
        for name in ("tmp", "run"):
            for above, _, files in os.walk(f"{self._directory}/{name}"):
                found += [os.path.join(above, file) for file in files]
        found += find_cgroups(self._sentinels)
        for what in ("/proc/net/unix", "/proc/self/mounts"):
            with open(what, encoding="utf-8", errors="replace") as file:
                found += [f"{what}: {line.strip()}" for line in file if self._directory in line]
        return found

    def close(self) -> None:
        """Ends what may still run."""
        for _, program in self._programs:
            if program.poll() is None:
                program.kill()
                program.wait()
        for pid in find_marked(self._mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "gone"


def find_cgroups(sentinels: set[int]) -> list[str]:
    """Those that these sentinels have made, in the hierarchy of version 2."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        tops = [line.split()[1] for line in file if line.split()[2] == "cgroup2"]
    names = tuple(f"bootseer-{pid}-" for pid in sentinels)
    found = []
    for top in tops:
        for above, directories, _ in os.walk(top):
            found += [f"{above}/{name}" for name in directories if name.startswith(names)]
    return found if names else []
