"""Nodes of a job that restore one environment: the store gives it about once, and it is right in any case.

Nodes are namespaces of their own (test_setup_nodes.py), the store is a web server that counts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from pathlib import Path

import pytest

from bench import netns
from tests.integration.peer_processes import SECRET, held_until_met
from tests.integration.test_setup_nodes import Nodes, two_hosts
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

__all__ = ["two_hosts"]  # a fixture
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]

SIZE = 40 << 20  # enough for nodes to wait until they know of each other
MAX_COPIES = 1.7  # of 2: on a busy machine a node is bypassed now and then
SCRIPT = """
import hashlib, os, sys, small
with open(sys.prefix + "/lib/big.bin", "rb") as file:
    print("rank", os.environ["RANK"], "has", hashlib.file_digest(file, "sha256").hexdigest(), flush=True)
"""


@functools.cache
def right() -> str:
    return hashlib.sha256(random.Random(0).randbytes(SIZE)).hexdigest()


@pytest.fixture
def nodes(two_hosts: netns.Hosts, tmp_path: Path) -> Nodes:
    """One environment is in their store."""
    nodes = Nodes(two_hosts, tmp_path)
    machine = nodes.machine
    nodes.make_keys()
    machine.environ["BOOTSEER_RUNTIME"] = os.fspath(machine.folder / "cache" / "run")  # each node's own
    machine.script.write_text(SCRIPT)
    python = machine.venv / "bin" / "python"
    big = f"import random; open('{machine.venv}/lib/big.bin', 'wb').write(random.Random(0).randbytes({SIZE}))"
    nodes.command = f'{machine.pip} && {python} -c "{big}"'
    store = os.fspath(machine.store)
    statuses, outputs = nodes.run((store, store))
    assert statuses == [0, 0], "\n".join(outputs)
    return nodes


def start(nodes: Nodes, *flags: str, secret: str = "") -> tuple[float, str]:
    """How often the packs have left the store, and what both nodes have said.

    With a secret the index is held until the nodes know of each other.
    """
    host = nodes.hosts.hosts[0].address.rpartition(".")[0] + ".254"
    nodes.machine.environ["BOOTSEER_SECRET"] = secret or None
    files = nodes.stored()
    held = [HttpFault(HttpKind.HELD, "store/trees/*/index/*")] if secret and "--peers" not in flags else []
    with (
        FaultyHttpServer({f"store/{name}": data for name, data in files.items()}, held, host=host) as server,
        held_until_met(server, nodes.machine.folder / "tmp", 2),
    ):
        statuses, outputs = nodes.run((f"{server.url}/store", f"{server.url}/store"), *flags)
        sent = sum(count for name, count in server.served_bytes.items() if "/packs/" in name)
    both = "\n".join(outputs)
    assert statuses == [0, 0], both
    assert both.count(f"has {right()}") == 2, both
    assert "set-up runs" not in both, both
    assert not list((nodes.machine.folder / "tmp").glob("bootseer-peers-*"))
    return sent / sum(len(data) for name, data in files.items() if "/packs/" in name), both


def test_each_byte_leaves_the_store_about_once(nodes: Nodes) -> None:
    copies, said = start(nodes, secret=SECRET)
    assert "peer sharing disabled" not in said
    assert copies < MAX_COPIES, said
    copies, said = start(nodes)
    assert said.count("peer sharing disabled: no job secret is set") == 2, said
    assert copies == pytest.approx(2, abs=0.1)
    copies, said = start(nodes, "--peers", "off", secret=SECRET)
    assert "help" not in said
    assert copies == pytest.approx(2, abs=0.1)


def test_mounted_ones_are_read_through_peers_too(nodes: Nodes) -> None:
    copies, said = start(nodes, "--env-way", "mount", secret=SECRET)
    assert copies < MAX_COPIES, said
