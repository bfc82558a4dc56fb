"""An endpoint that is no address of the node that hosts it: a Kubernetes service, or a name with two meanings.

Hosts are network namespaces; the service is one of them, which forwards the endpoint's port and no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import netns
from tests import support
from tests.support import lacking

PORT = "29511"
SERVICE = f"""
import socket, sys, threading
def pump(one, other):
    while data := one.recv(65536): other.sendall(data)
    other.shutdown(socket.SHUT_WR)
server = socket.create_server(("", {PORT}))
while True:
    one, _ = server.accept()
    try:
        other = socket.create_connection((sys.argv[1], {PORT}))
    except OSError:
        one.close()
        continue
    for pair in ((one, other), (other, one)): threading.Thread(target=pump, args=pair, daemon=True).start()
"""
RANK = """
import json, os, socket, sys, time
env = os.environ
address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
if env["RANK"] == "0":
    server = socket.create_server(("", address[1]))
    server.settimeout(20)
    server.accept()[0].sendall(b"hello")
else:
    end = time.monotonic() + 5
    while True:
        try:
            with socket.create_connection(address, timeout=1) as peer: assert peer.recv(5) == b"hello"
            break
        except OSError:
            if time.monotonic() > end: raise
            time.sleep(0.05)
with open(env["FOLDER"] + "/rank-" + env["RANK"], "w") as file: json.dump(address, file)
"""


@pytest.fixture
def hosts() -> Iterator[netns.Hosts]:
    reason = netns.why_not()
    if reason:
        lacking(reason)
    with netns.Hosts(3) as made:
        yield made


def start(hosts: netns.Hosts, number: int, endpoint: str, *flags: str, known: str = "") -> subprocess.Popen[bytes]:
    """bootrun on a host; `known`: what its /etc/hosts says beside localhost."""
    directory, host = hosts.folder, hosts.hosts[number]
    for name, text in (("rank.py", RANK), (f"hosts-{number}", f"127.0.0.1 localhost\n{known}\n")):
        with open(f"{directory}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    argv = [sys.executable, "-m", "launcher", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    argv += ["--nnodes", "2", "--node-rank", str(number), "--log-dir", f"{directory}/logs{number}", *flags]
    shell = ["sh", "-c", f'mount --bind {directory}/hosts-{number} /etc/hosts; exec "$@"', "sh"]
    environ = {**support.clean_environ(), "FOLDER": directory, "PYTHONPATH": os.getcwd()}
    return host.start([*shell, *argv, f"{directory}/rank.py"], environ, f"{directory}/out{number}")


def check(hosts: netns.Hosts, nodes: list[subprocess.Popen[bytes]], *names: str) -> None:
    """Both ranks have met, at the first host's own address, or a name."""
    statuses = [node.wait(40) for node in nodes]
    outputs = [Path(f"{hosts.folder}/out{number}").read_text(encoding="utf-8") for number in (0, 1)]
    assert statuses == [0, 0], outputs
    for rank in (0, 1):
        met_at = json.loads(Path(f"{hosts.folder}/rank-{rank}").read_text(encoding="utf-8"))
        assert met_at[0] in (hosts.hosts[0].address, *names)


@pytest.mark.system
def test_ranks_meet_at_the_nodes_own_address_behind_a_service(hosts: netns.Hosts) -> None:
    first, _, service = hosts.hosts
    service.start([sys.executable, "-c", SERVICE, first.address], os.environ, f"{hosts.folder}/service")
    endpoint = f"{service.address}:{PORT}"
    nodes = [start(hosts, number, endpoint, "--rdzv-conf", f"is_host={1 - number}") for number in (0, 1)]
    check(hosts, nodes)


@pytest.mark.system
def test_a_name_that_is_the_service_for_the_others(hosts: netns.Hosts) -> None:
    """As a pod has its own name in /etc/hosts."""
    first, _, service = hosts.hosts
    service.start([sys.executable, "-c", SERVICE, first.address], os.environ, f"{hosts.folder}/service")
    addresses = (first.address, service.address)
    nodes = [start(hosts, n, f"head:{PORT}", known=f"{addresses[n]} head") for n in (0, 1)]
    check(hosts, nodes)


@pytest.mark.system
def test_a_name_that_is_a_loopback_address_only_here(hosts: netns.Hosts) -> None:
    """As Debian has a host's own name in /etc/hosts, and other hosts know it by nothing."""
    first = hosts.hosts[0]
    known = ("127.0.1.1 head", f"{first.address} head")
    check(hosts, [start(hosts, n, f"head:{PORT}", known=known[n]) for n in (0, 1)], "head")


@pytest.mark.parametrize(
    "flags",
    [
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:{port}"),
        ("--master-addr", "127.0.0.1", "--master-port", "{port}", "--node-rank", "0"),
        ("--master-addr", "127.0.0.1", "--master-port", "{port}", "--node-rank", "1"),
    ],
    ids=["localhost", "ipv4", "ipv6", "static-0", "static-1"],
)
def test_an_endpoint_that_is_this_host_alone_is_reported_at_once(
    bootrun: support.Programs, script: Callable[..., str], free_port: int, flags: tuple[str, ...]
) -> None:
    words = [word.format(port=free_port) for word in flags]
    node = bootrun.start("--nnodes", 2, *words, script(""))
    support.wait_until(lambda: "reaches only this host" in node.stderr, 8.0)
    [line] = [line for line in node.stderr.splitlines() if "reaches only this host" in line]
    assert "warning: " in line and str(free_port) in line


def test_an_endpoint_that_refuses_is_reported_within_seconds(
    bootrun: support.Programs, script: Callable[..., str], free_port: int
) -> None:
    words = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--rdzv-conf", "is_host=false")
    node = bootrun.start("--nnodes", 2, *words, script(""))
    support.wait_until(lambda: "no coordinator is reachable" in node.stderr, 10.0)
    told = [line for line in node.stderr.splitlines() if "no coordinator is reachable" in line]
    assert len(told) == 1
    assert f"127.0.0.1:{free_port} yet: connection refused" in told[0]
    assert told[0].startswith("bootrun: warning: ")
