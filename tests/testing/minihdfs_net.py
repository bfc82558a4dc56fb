"""The networks of a mini HDFS: its own loopback addresses, or namespaces with links of a set rate.

On the loopback no set-up is needed, and every process of the machine reaches the cluster. With rates (root) each
DataNode has its own network namespace, behind a link that is capped in both directions. The NameNode and the
clients are in another namespace, which is not reachable from outside.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bootseer.errors import ConfigError

_CLONE_NEWNET = 0x40000000
# One burst passes unshaped: small against any test file, large enough for the rate to be reached.
_TBF = ("burst", "512kb", "latency", "50ms")


class Traffic(NamedTuple):
    """Bytes of a host's link since its creation, with all headers."""

    received_bytes: int
    sent_bytes: int


class Net(Protocol):
    """A network; host 0 is that of the NameNode and the clients, DataNodes count from 1."""

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""

    def prefix(self, host: int) -> list[str]:
        """Return the prefix of a command that runs on the host."""

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Connect this process to a port there."""

    def close(self) -> None:
        """Remove the network; its processes must have ended."""


class Loopback:
    """The network 127.x.y.0/24: each host has an address, so the NameNode can separate DataNodes from clients."""

    def __init__(self) -> None:
        self._subnet = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host + 10}"

    def prefix(self, host: int) -> list[str]:
        del host
        return []

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((address, port), timeout_s)

    def close(self) -> None:
        pass


def why_not_capped() -> str:
    """Return why links of a set rate are not possible here, "" if they are."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)" if missing else ""


class CappedLinks:
    """A bridge in the clients' namespace, and one namespace for each DataNode; `rates_mbit` per DataNode."""

    def __init__(self, rates_mbit: Sequence[float]) -> None:
        if reason := why_not_capped():
            raise ConfigError(f"no capped HDFS can be started: {reason}")
        self._mark = os.urandom(3).hex()
        self._subnet = f"10.78.{int(self._mark[:2], 16)}"
        self._hosts = len(rates_mbit) + 1
        try:
            self._make(rates_mbit)
        except subprocess.CalledProcessError as error:
            self.close()
            said = error.stderr.strip() or "it said nothing"
            raise ConfigError(f"no capped HDFS can be started: {' '.join(error.cmd)}: {said}") from error

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host + 10}"

    def prefix(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._namespace(host)}"]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        # A socket belongs for ever to the namespace of the thread that creates it.
        made: list[socket.socket | OSError] = []

        def make() -> None:
            try:
                with open(f"/run/netns/{self._namespace(0)}", "rb") as namespace:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="minihdfs-setns")
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        made[0].settimeout(timeout_s)
        try:
            made[0].connect((address, port))
        except OSError:
            made[0].close()
            raise
        return made[0]

    def close(self) -> None:
        for host in range(self._hosts):
            subprocess.run(["ip", "netns", "del", self._namespace(host)], check=False, capture_output=True)

    def _namespace(self, host: int) -> str:
        return f"bshdfs{self._mark}-{host}"

    def _make(self, rates_mbit: Sequence[float]) -> None:
        for host in range(self._hosts):
            _ip("netns", "add", self._namespace(host))
            _ip("-n", self._namespace(host), "link", "set", "lo", "up")
        bridge = ("-n", self._namespace(0))
        _ip(*bridge, "link", "add", "br0", "type", "bridge")
        _ip(*bridge, "addr", "add", f"{self.address(0)}/24", "dev", "br0")
        _ip(*bridge, "link", "set", "br0", "up")
        for host, rate_mbit in enumerate(rates_mbit, start=1):
            link, there = f"node{host}", self._namespace(host)
            _ip(*bridge, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", there)
            _ip(*bridge, "link", "set", link, "master", "br0", "up")
            _ip("-n", there, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", there, "link", "set", "eth0", "up")
            # Each end shapes what it sends: this one the DataNode's input, the other one its output.
            for namespace, device in ((self._namespace(0), link), (there, "eth0")):
                rate = ("rate", f"{rate_mbit:g}mbit")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate, *_TBF)


def read_traffic(pid: int) -> Traffic:
    """Return the traffic of the capped link of a process's host."""
    with open(f"/proc/{pid}/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == "eth0":
                fields = counts.split()
                return Traffic(int(fields[0]), int(fields[8]))
    raise ConfigError(f"process {pid} is not behind a capped link")


def _ip(*args: str) -> None:
    _run("ip", *args)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)
