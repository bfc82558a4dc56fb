"""A training of `bench faults` on two hosts, under bootrun or torchrun: started, listened to, followed, ended.

Hosts are those of bench/netns.py. Everything that is started has a mark in its environment, by which it is found
afterwards whatever it has become.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from bench.faults_judge import GOES_ON_STEPS, Outcome
from bench.faults_plan import NODES, RANKS_OF_NODE, Injection
from bench.faults_said import Reader, Word, kept_report, ranks_of_report
from bench.kill import MARK, find_marked
from bench.netns import Host, Hosts
from bench.record import BenchError

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PORT = 29511
MAX_RESTARTS = 3
ENDLESS = 1 << 40  # steps
END_STEPS = 60  # of a job that comes to its end
MODULES = {"bootrun": "launcher", "torchrun": "torch.distributed.run"}
KILL_S = 10.0
# A small disk for checkpoints, and names for the nodes, without which torchrun does not start.
# A launcher that is the first process of its namespace would take everything along when it is killed, and signals
# are not for it what they are for others.
AS_NODE = """
mkdir -p "$0/small" && mount -t tmpfs -o size=1m none "$0/small" && mount --bind "$0/hosts" /etc/hosts || exit 99
"$@"
exit $?
"""


class Made(NamedTuple):
    """A step that a rank has done."""

    at_s: float
    started_ns: int  # its process
    step: int
    world: int
    pid: int  # in its namespace
    namespace: str


class Job:
    """`close` must be called."""

    def __init__(
        self, hosts: Hosts, injection: Injection, launcher: str, cache: str, flags: list[str], preload: str = ""
    ) -> None:
        self.hosts, self.injection, self.launcher = hosts, injection, launcher
        self.folder = hosts.folder
        self.began_s = time.monotonic()
        self.injected_s: float | None = None  # by the bench itself
        self.words: list[tuple[int, Word]] = []  # with the node whose launcher has said it
        self.rank_made: dict[int, list[Made]] = {}
        self._mark = os.urandom(8).hex()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._at_close: list[Callable[[], None]] = []
        self._read_bytes = dict.fromkeys(range(NODES), 0)
        self._progress_bytes: dict[int, int] = {}
        self._readers = [Reader(launcher) for _ in range(NODES)]
        self._ended_s: float | None = None
        self._write_plan()
        # Beside the modules of bench it would find bench/numbers.py where torch wants the standard library's.
        shutil.copyfile(f"{TOP}/bench/faults_train.py", f"{self.folder}/train.py")
        with open(f"{self.folder}/hosts", "w", encoding="ascii") as file:
            file.writelines(f"{host.address} {host.name}\n" for host in hosts.hosts)
            file.write("127.0.0.1 localhost\n")
        self.agents: list[subprocess.Popen[bytes]] = []
        environ = {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": TOP,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "BOOTSEER_CACHE_DIR": cache,
        }
        if preload:
            environ["LD_PRELOAD"] = preload
        for number, host in enumerate(hosts.hosts):
            clock = {"FAULTS_CLOCK": f"{self.folder}/clock-{number}"}
            shell = ["sh", "-c", AS_NODE, self.folder]
            self.agents.append(
                host.start([*shell, *self._argv(number, flags)], {**environ, **clock}, self._output(number))
            )

    def _argv(self, number: int, flags: list[str]) -> list[str]:
        steps = END_STEPS if self.injection.at_step < 0 else ENDLESS
        words = [sys.executable, "-m", MODULES[self.launcher], "--nproc-per-node", str(RANKS_OF_NODE)]
        words += [] if "--nnodes" in flags else ["--nnodes", str(NODES)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.hosts.hosts[0].address}:{PORT}"]
        words += ["--rdzv-id", "faults", "--node-rank", str(number), "--max-restarts", str(MAX_RESTARTS)]
        words += ["--log-dir", f"{self.folder}/logs-{number}", "--tee", "3", *flags]
        return [*words, f"{self.folder}/train.py", self.folder, str(self.injection.step_s), str(steps)]

    def _write_plan(self) -> None:
        injection, fault = self.injection, self.injection.fault
        is_outside = fault.by == "outside"
        plan = {
            "do": "reach" if is_outside else fault.do,
            "with": {} if is_outside else fault.arguments,
            # What comes from outside comes when one rank says that it has reached the step.
            "rank": max(injection.rank, 0) if is_outside else injection.rank,
            "node": injection.node if fault.where == "node" and not is_outside else -1,
            "at_step": injection.at_step,
            "offset": injection.offset,
            "heartbeats": fault.do == "jump",
        }
        with open(f"{self.folder}/fault.json", "w", encoding="utf-8") as file:
            json.dump(plan, file)

    def _output(self, number: int) -> str:
        return f"{self.folder}/output-{number}"

    def reached_s(self) -> float | None:
        """When the first rank came to the moment of the fault."""
        found = []
        for rank in range(NODES * RANKS_OF_NODE):
            try:
                with open(f"{self.folder}/injected-{rank}", encoding="ascii") as file:
                    first = file.readline()
            except FileNotFoundError:
                continue
            if first.endswith("\n"):
                found.append(int(first) / 1e9)
        return min(found, default=None)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls it after so many seconds, from `look`."""
        self._later.append((time.monotonic() + seconds, call))

    def at_close(self, call: Callable[[], None]) -> None:
        """Calls it when everything has ended."""
        self._at_close.append(call)

    def look(self) -> None:
        """Reads what has come, and calls what is due."""
        now_s = time.monotonic()
        due = [call for at_s, call in self._later if at_s <= now_s]
        self._later = [each for each in self._later if each[0] > now_s]
        for call in due:
            call()
        for number in range(NODES):
            self._listen(number, now_s)
        for rank in range(NODES * RANKS_OF_NODE):
            self._follow(rank)
        if self._ended_s is None and all(agent.poll() is not None for agent in self.agents):
            self._ended_s = now_s
            for number in range(NODES):
                self._listen(number, now_s)

    def _listen(self, number: int, now_s: float) -> None:
        try:
            with open(self._output(number), "rb") as file:
                file.seek(self._read_bytes[number])
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return
        self._read_bytes[number] += len(whole) + 1
        addresses = {host.address: host.name for host in self.hosts.hosts}
        for line in whole.decode(errors="replace").split("\n"):
            for word in self._readers[number].read(line, now_s):
                ranks, nodes = word.ranks or _kept_ranks(word), tuple(addresses.get(n, n) for n in word.nodes)
                self.words.append((number, word._replace(ranks=ranks, nodes=nodes)))

    def _follow(self, rank: int) -> None:
        try:
            with open(f"{self.folder}/progress-{rank}", "rb") as file:
                file.seek(self._progress_bytes.get(rank, 0))
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._progress_bytes[rank] = self._progress_bytes.get(rank, 0) + len(whole)
        made = self.rank_made.setdefault(rank, [])
        for line in whole.decode("ascii").splitlines():
            at_ns, started_ns, step, world, pid, namespace = line.split()
            made.append(Made(int(at_ns) / 1e9, int(started_ns), int(step), int(world), int(pid), namespace))

    def outcome(self, injected_s: float) -> Outcome:
        """So far."""
        fault = self.injection.fault
        # What a node says that is cut off for good is that all others are gone.
        deaf = self.injection.node if fault.do == "link" and not fault.is_harmless else -1
        words = tuple(word._replace(at_s=word.at_s - injected_s) for number, word in self.words if number != deaf)
        steps_after, later = 0, {}
        for rank, list_ in self.rank_made.items():
            steps_after += sum(
                made.started_ns < injected_s * 1e9 and made.at_s > injected_s + 1.0 for made in list_
            )
            later[rank] = [made for made in list_ if made.started_ns >= injected_s * 1e9]
        world = max((list_[-1] for list_ in later.values() if list_), default=None, key=lambda made: made.at_s)
        goes_on_s = None
        if world is not None:
            at_work = [list_ for list_ in later.values() if list_ and list_[-1].world == world.world]
            if len(at_work) >= world.world and min(map(len, at_work)) >= GOES_ON_STEPS:
                goes_on_s = max(list_[0].at_s for list_ in at_work) - injected_s
        return Outcome(
            words=words,
            goes_on_s=goes_on_s,
            nodes_after=world.world // RANKS_OF_NODE if world is not None else NODES,
            steps_after=steps_after,
            ended_s=None if self._ended_s is None else self._ended_s - injected_s,
            longest_gap_s=self._longest_gap_s(injected_s),
        )

    def _longest_gap_s(self, until_s: float) -> float:
        """Of the job: between two steps of whichever rank."""
        moments = sorted(made.at_s for list_ in self.rank_made.values() for made in list_ if made.at_s <= until_s)
        return max((b - a for a, b in pairwise(moments)), default=0.0)

    def pid_of(self, rank: int) -> int:
        """Of a live rank, as this process sees it."""
        last = self.rank_made[rank][-1]
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _is_inside(entry, last.namespace, last.pid):
                return int(entry)
        raise BenchError(f"rank {rank} (pid {last.pid} in {last.namespace}) is not there any more")

    def agent_pid(self, number: int) -> int:
        """Of the launcher on a node: below `unshare` and the shell."""
        [shell] = _children(self.agents[number].pid)
        return _children(shell)[0]

    def host(self, number: int) -> Host:
        return self.hosts.hosts[number]

    def text(self) -> str:
        """What all launchers have printed."""
        parts = []
        for number in range(NODES):
            with open(self._output(number), encoding="utf-8", errors="replace") as file:
                parts.append(f"== node{number + 1}\n{file.read()}")
        return "\n".join(parts)

    def close(self) -> int:
        """Ends everything. Returns: how many processes outlived that, which are killed."""
        for host in self.hosts.hosts:
            host.join()  # so that what is unmounted or closed does not wait
            host.kill()
        end_s = time.monotonic() + KILL_S
        while (left := find_marked(self._mark)) and time.monotonic() < end_s:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, 9)
        for call in self._at_close:
            call()
        return len(left)


def _kept_ranks(word: Word) -> tuple[int, ...]:
    path = kept_report(word.text)
    if not path:
        return ()
    with open(path, "rb") as file:
        return ranks_of_report(file.read())


def _is_inside(pid: str, namespace: str, inner: int) -> bool:
    """Whether this process is that one of a pid namespace."""
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
            return False
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            line = next(line for line in file if line.startswith("NSpid:"))
    except (OSError, StopIteration):
        return False
    return int(line.split()[-1]) == inner


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]
