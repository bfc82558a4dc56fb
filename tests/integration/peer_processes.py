"""Nodes of a job that serve bytes to each other, on this machine: their private files, and a process for each."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer.own_module import command_of
from bootseer.peers import JobPeers, Node, Origin, derive_key, write_peers
from bootseer.peers.membership import read_peers
from tests.support import find_free_port
from tests.testing.faulty_http import FaultyHttpServer

SECRET = "a secret of this test"
HONEST, LIAR = ("bootseer.peers.serve",), ("tests.testing.faulty_peer", "lies")


@contextmanager
def peer_processes(
    directory: Path, kinds: Mapping[str, tuple[str, ...]], origin: Origin, job: str = "job"
) -> Iterator[dict[str, str]]:
    """Each node of `kinds` serves by such a module, and all know of each other; paths of their files."""
    ports = {name: find_free_port() for name in kinds}
    nodes = [Node(name, "127.0.0.1", port) for name, port in ports.items()]
    key = derive_key(SECRET.encode(), job).hex()
    files = {}
    with ExitStack() as stack:
        for name, words in kinds.items():
            file = directory / f"{job}-{name}.json"
            write_peers(str(file), JobPeers(job=job, own=name, key=key, nodes=nodes, origins=[origin]))
            files[name] = str(file)
            stack.enter_context(_serving(file, ports[name], words))
        yield files


@contextmanager
def _serving(file: Path, port: int, words: tuple[str, ...]) -> Iterator[None]:
    argv = command_of(*words, str(file), "--spool", str(file.with_suffix(".spool")))
    process = subprocess.Popen(
        [*argv, "--port", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"port": port}
        yield
        process.stdin.close()


@contextmanager
def held_until_met(server: FaultyHttpServer, directory: Path, nodes: int) -> Iterator[None]:
    """What `server` holds back goes out when all nodes of the job that begins know of each other.

    Args: folder: the job's TMPDIR, where the private file of each node is.
    """
    is_over = threading.Event()

    def have_met() -> bool:
        found = [read_peers(str(path)) for path in directory.glob("bootseer-peers-*/peers.json")]
        return sum(each is not None and len(each.nodes) == nodes for each in found) == nodes

    def look() -> None:
        while not is_over.is_set() and not have_met():
            is_over.wait(0.02)
        server.let_go.set()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
