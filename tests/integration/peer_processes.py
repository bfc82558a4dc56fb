"""Nodes of a job that serve bytes to each other, on this machine: their private files, and a process for each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer.peers import JobPeers, Node, Origin, derive_key, write_peers
from tests.support import find_free_port

SECRET = "a secret of this test"
HONEST, LIAR = ("bootseer.peers.serve",), ("bootseer.testing.faulty_peer", "lies")


@contextmanager
def peer_processes(
    folder: Path, kinds: Mapping[str, tuple[str, ...]], origin: Origin, job: str = "job"
) -> Iterator[dict[str, str]]:
    """Each node of `kinds` serves by such a module, and all know of each other; paths of their files."""
    ports = {name: find_free_port() for name in kinds}
    nodes = [Node(name, "127.0.0.1", port) for name, port in ports.items()]
    key = derive_key(SECRET.encode(), job).hex()
    files = {}
    with ExitStack() as stack:
        for name, words in kinds.items():
            file = folder / f"{job}-{name}.json"
            write_peers(str(file), JobPeers(job=job, own=name, key=key, nodes=nodes, origins=[origin]))
            files[name] = str(file)
            stack.enter_context(_serving(file, ports[name], words))
        yield files


@contextmanager
def _serving(file: Path, port: int, words: tuple[str, ...]) -> Iterator[None]:
    argv = [sys.executable, "-P", "-m", *words, str(file), "--spool", str(file.with_suffix(".spool"))]
    process = subprocess.Popen(
        [*argv, "--port", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"port": port}
        yield
        process.stdin.close()
