"""Runs a probe through a launcher command in a private directory and gives what was observed.

Bounded in time: what still runs at the probe's deadline, and whatever it left running, is killed. Processes are
found by a mark in their environment, so that also those in sessions of their own are found.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence

from tests.parity import observe
from tests.parity.model import Agent, End, Lose, Make, Observation, Probe, Send, Settle, Start, Step, Until
from tests.support import BOOTRUN, MARK, TORCHRUN, Process, marked_processes

TELL = os.path.join(os.path.dirname(__file__), "tell.py")
STARTER = "import ctypes, os, resource, signal, sys; exec(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
LEFTOVER_GRACE_S = 2.0


class Running:
    """An agent of a probe."""

    def __init__(self, run: ProbeRun, number: int, agent: Agent) -> None:
        self.number = number
        self.stdout_path = f"{run.dir}/stdout.{number}"
        self.stderr_path = f"{run.dir}/stderr.{number}"
        self.lost = False
        self.started_s = time.monotonic()
        environ = run.environ(number, agent)
        with open(f"{run.dir}/environ.{number}.json", "w", encoding="utf-8") as file:
            json.dump(environ, file)
        stdin_path = f"{run.dir}/stdin.{number}"
        with open(stdin_path, "w", encoding="utf-8") as file:
            file.write(agent.stdin)
        with (
            open(stdin_path, "rb") as stdin,
            open(self.stdout_path, "wb") as out,
            open(self.stderr_path, "wb") as err,
        ):
            self.process = subprocess.Popen(
                run.argv(agent), cwd=run.work, env=environ, stdin=stdin, stdout=out, stderr=err
            )

    def status(self) -> int | str:
        """Its exit status, or why it has none."""
        if self.lost:
            return "lost"
        status = self.process.poll()
        return "still running" if status is None else status


class ProbeRun:
    """One run of a probe: the directory, the agents and the steps."""

    def __init__(self, probe: Probe, launcher: Sequence[str]) -> None:
        self.probe = probe
        self.launcher = list(launcher)
        self.dir = os.path.realpath(tempfile.mkdtemp(prefix="parity-"))
        self.work, self.out = f"{self.dir}/job", f"{self.dir}/out"
        for name in ("job", "out", "tmp", "home"):
            os.mkdir(f"{self.dir}/{name}")
        self.ports = [_free_port(), _free_port()]
        self.mark = os.environ.get(MARK) or uuid.uuid4().hex
        self.agents: dict[int, Running] = {}
        self.end_s = time.monotonic() + probe.deadline_s
        self.began_s = time.monotonic()
        self.missed: list[str] = []
        shutil.copy(TELL, self.work)
        for name, text in {"script.py": probe.script, **probe.files}.items():
            if text:
                self._write(f"{self.work}/{name}", text)

    def _write(self, path: str, text: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def fill(self, text: str) -> str:
        """The text with its placeholders replaced."""
        values = {
            "port": str(self.ports[0]),
            "port2": str(self.ports[1]),
            "logs": f"{self.dir}/logs",
            "script": f"{self.work}/script.py",
            "dir": self.dir,
            "work": self.work,
            "out": self.out,
            "python": sys.executable,
        }
        for name, value in values.items():
            # `${local_rank}` is the launcher's own placeholder and none of these.
            text = text.replace("{" + name + "}", value)
        return text

    def argv(self, agent: Agent) -> list[str]:
        """The command line of an agent."""
        texts = [*self.probe.args, *agent.args, *self.probe.rank_args]
        starter = [sys.executable, "-c", STARTER, self.probe.starter] if self.probe.starter else []
        return [*starter, *self.launcher, *(self.fill(text) for text in texts)]

    def environ(self, number: int, agent: Agent) -> dict[str, str]:
        """The whole environment of an agent: nothing of ours by chance."""
        environ = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": f"{self.dir}/home",
            "TMPDIR": f"{self.dir}/tmp",
            "LANG": "C.UTF-8",
            "PROBE_OUT": self.out,
            "PROBE_AGENT": str(number),
            "PROBE_LAUNCHER": json.dumps(self.launcher),
            MARK: self.mark,
        }
        if os.environ.get("PYTHONPATH"):
            environ["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for name, value in {**self.probe.environ, **agent.environ}.items():
            environ[name] = self.fill(value)
        return environ

    # ---- steps

    def play(self) -> None:
        """All steps, then the end of all agents."""
        numbers = range(len(self.probe.agents))
        for step in self.probe.steps or [Start(number) for number in numbers]:
            self._step(step)
        for number in self.agents:
            self._step(End(number))

    def _step(self, step: Step) -> None:
        match step:
            case Start(agent):
                self.agents[agent] = Running(self, agent, self.probe.agents[agent])
            case Until(mark, deadline_s):
                if not self._wait(lambda: self._has(mark), deadline_s):
                    self.missed.append(mark)
            case Send(name, agent):
                if self.agents[agent].process.poll() is None:
                    self.agents[agent].process.send_signal(signal.Signals[name])
            case Lose(agent):
                self.agents[agent].lost = True
                self._kill(self._processes_of(agent))
                self.agents[agent].process.wait()
            case Make(mark):
                self._write(f"{self.out}/{mark}.mark", "")
            case Settle(seconds):
                time.sleep(seconds)
            case End(agent):
                process = self.agents[agent].process
                self._wait(lambda: process.poll() is not None, self.end_s - time.monotonic())

    def _has(self, mark: str) -> bool:
        if mark == "listens":
            return _listens(self.ports[0])
        return any(os.path.exists(f"{self.out}/{mark}{suffix}") for suffix in (".mark", ".json"))

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end_s = min(time.monotonic() + seconds, self.end_s)
        while not condition():
            if time.monotonic() > end_s or self._all_ended():
                return condition()
            time.sleep(0.005)
        return True

    def _all_ended(self) -> bool:
        return bool(self.agents) and all(agent.process.poll() is not None for agent in self.agents.values())

    # ---- processes

    def _processes_of(self, agent: int) -> list[Process]:
        wanted = f"PROBE_AGENT={agent}".encode()
        found = []
        for process in marked_processes(self.mark):
            try:
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(process)
            except OSError:
                continue
        return found

    def _kill(self, processes: Sequence[Process]) -> None:
        for process in processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def left(self) -> list[Process]:
        """What runs although all agents have ended; some moments are allowed for it to go."""
        end_s = time.monotonic() + LEFTOVER_GRACE_S
        while True:
            found = [process for process in marked_processes(self.mark) if process.state != "Z"]
            if not found or time.monotonic() > end_s:
                return found
            time.sleep(0.02)

    def close(self, keep: bool = False) -> None:
        """Kills what is left and takes the directory away."""
        end_s = time.monotonic() + 5.0
        while (found := marked_processes(self.mark)) and time.monotonic() < end_s:
            self._kill(found)
            for agent in self.agents.values():
                agent.process.poll()
            time.sleep(0.01)
        for agent in self.agents.values():
            agent.process.wait()
        if not keep:
            shutil.rmtree(self.dir, ignore_errors=True)


def _free_port() -> int:
    """A free port below those that the kernel gives to connections, which may come at any moment."""
    while True:
        port = 10000 + secrets.randbelow(6000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _listens(port: int) -> bool:
    """Whether a socket of this machine listens on the port; a connection to find out would be noticed."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name, encoding="utf-8") as file:
                for line in file.readlines()[1:]:
                    _number, local, _remote, state = line.split()[:4]
                    if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                        return True
        except OSError:
            continue
    return False


def run(probe: Probe, launcher: Sequence[str], keep: bool = False) -> Observation:
    """Runs the probe to its end; the result holds only JSON values."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup launchers, and so ranks, would ignore it
    current = ProbeRun(probe, launcher)
    try:
        current.play()
        seconds = time.monotonic() - current.began_s
        statuses = {str(number): agent.status() for number, agent in current.agents.items()}
        agents_run = any(agent.process.poll() is None for agent in current.agents.values())
        left = [] if agents_run else current.left()
        seen = observe.Seen(
            dir=current.dir,
            ports=tuple(current.ports),
            statuses=statuses,
            missed=tuple(current.missed),
            seconds=seconds,
            left=tuple(process.command for process in left),
            stdout=tuple(_read(agent.stdout_path) for agent in current.agents.values()),
            stderr=tuple(_read(agent.stderr_path) for agent in current.agents.values()),
        )
        return observe.observe(probe, seen)
    finally:
        current.close(keep)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


if __name__ == "__main__":
    from tests.parity.probes import PROBES

    chosen = {probe.name: probe for probe in PROBES}[sys.argv[1]]
    command = [TORCHRUN] if sys.argv[2:] == ["torchrun"] else [BOOTRUN, *sys.argv[2:]]
    print(json.dumps(run(chosen, command), indent=1, sort_keys=True))
