"""Hosts made of network namespaces on one machine: own address, host name, process and time namespace.

Needs root, iproute2 and util-linux. A host can be killed as a whole, cut off from the others, given a slow link
or a monotonic clock that is some seconds ahead. Used by benches and by tests marked `system`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType

NEEDED = ("ip", "tc", "nsenter", "unshare")


def why_not() -> str:
    """Why hosts cannot be made here, "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Host:
    """One host; programs started on it run until they end, it is killed or the hosts are taken down."""

    def __init__(self, number: int, mark: str, subnet: str) -> None:
        self.name = f"node{number}"
        self.address = f"{subnet}.{number}"
        self.namespace = f"bs{mark}-{number}"
        self.link = f"bs{mark}v{number}"  # the bridge's end
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: str,
        clock_ahead_s: int = 0,
        cwd: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a program as this host; stdout and stderr go to the file `output`."""
        unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        if clock_ahead_s:
            unshare += ["--time", "--monotonic", str(clock_ahead_s), "--boottime", str(clock_ahead_s)]
        shell = ["bash", "-c", f'hostname {self.name}; exec "$@"', "bash", *argv]
        with open(output, "ab") as file:
            program = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace}", *unshare, *shell],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
            )
        self._programs.append(program)
        return program

    def kill(self) -> None:
        """Ends everything on the host at once, as a crash of the node would."""
        for program in self._programs:
            if program.poll() is None:
                program.kill()  # --kill-child: its pid namespace goes with it
                program.wait()

    def cut(self) -> None:
        """Takes the host off the network; connections stay open and hear nothing."""
        _ip("link", "set", self.link, "down")

    def join(self) -> None:
        """Puts it back."""
        _ip("link", "set", self.link, "up")


class Hosts:
    """`with Hosts(2) as hosts:` makes hosts that reach each other, and takes everything down at the end."""

    def __init__(self, count: int) -> None:
        self._mark = os.urandom(2).hex()
        self._subnet = f"10.77.{int(self._mark[:2], 16)}"
        self._bridge = f"bs{self._mark}br"
        self.hosts = [Host(number, self._mark, self._subnet) for number in range(1, count + 1)]
        self.folder = ""

    def __enter__(self) -> Hosts:
        self.folder = tempfile.mkdtemp(prefix="bootseer-hosts-")
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.hosts:
            inside = ("-n", host.namespace)
            _ip("netns", "add", host.namespace)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.link, "master", self._bridge)
            _ip("link", "set", host.link, "up")
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def shape(hosts: Sequence[Host], bytes_per_s: float, burst: str) -> None:
    """Each end shapes what it sends: the bridge's what the node receives, the node's what it sends."""
    limits = ("rate", f"{bytes_per_s * 8 / 1e6:g}mbit", "burst", burst, "latency", "50ms")
    for host in hosts:
        for at, device in (([], host.link), (["-n", host.namespace], "eth0")):
            argv = ["tc", *at, "qdisc", "add", "dev", device, "root", "tbf", *limits]
            subprocess.run(argv, check=True, capture_output=True, text=True)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
