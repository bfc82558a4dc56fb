"""Nodes of a job that load one striped checkpoint: the store gives it about once, and it is right in any case."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.peers import Origin
from tests import support
from tests.integration.peer_processes import HONEST, LIAR, SECRET, held_until_met, peer_processes
from tests.integration.served_checkpoint import ServedCheckpoint
from tests.integration.service_driver import Start, services
from tests.integration.test_load_checkpoint import loaded, reads
from tests.testing.faulty_http import HttpFault, HttpKind

SIZE = 48 << 20  # enough for a load to wait until its nodes know of each other
NODES = 3


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[ServedCheckpoint]:
    made = ServedCheckpoint(tmp_path / "stored", SIZE)
    yield made
    made.server.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    yield from services(tmp_path)


def run_nodes(
    bootrun: support.Programs, stored: ServedCheckpoint, port: int, *flags: str, secret: str = "", **environ: str
) -> list[str]:
    """What the nodes have said; all ranks have read the right bytes."""
    directory = Path(bootrun.dir)
    (directory / "reads.py").write_text(reads("/model.bin"))
    words = [
        *("--nnodes", str(NODES), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "x"),
        *("--rdzv-endpoint", f"localhost:{port}", "--load-checkpoint", stored.url, *flags, "reads.py"),
    ]
    environ |= {"BOOTSEER_SECRET": secret} if secret else {}
    programs = [bootrun.start(*words, env=environ) for _ in range(NODES)]
    said = []
    for program in programs:
        run = program.wait()
        assert run.status == 0, run.stderr
        said.append(run.stderr)
    right = hashlib.sha256(stored.data).hexdigest()
    assert [loaded(directory, f"read-{rank}")[0] for rank in range(NODES)] == [right] * NODES
    assert not [name for name in os.listdir(directory / "tmp") if name.startswith("bootseer-peers")]
    return said


def test_each_byte_leaves_the_store_about_once(
    bootrun: support.Programs, stored: ServedCheckpoint, free_port: int
) -> None:
    stored.server.plan = [HttpFault(HttpKind.HELD, "ckpt/LATEST")]
    with held_until_met(stored.server, Path(bootrun.dir, "tmp"), NODES):
        said = run_nodes(bootrun, stored, free_port, secret=SECRET)
    assert not [line for each in said for line in each.splitlines() if "help" in line], said
    assert stored.copies < 1.5, stored.copies


def test_without_a_secret_each_node_reads_the_store(
    bootrun: support.Programs, stored: ServedCheckpoint, free_port: int
) -> None:
    said = run_nodes(bootrun, stored, free_port)
    assert all("peer sharing disabled: no job secret is set" in each for each in said)
    assert stored.copies == pytest.approx(NODES)


@pytest.mark.parametrize(("flags", "environ"), [(("--peers", "off"), {}), ((), {"BOOTSEER_PEERS": "off"})])
def test_it_can_be_turned_off(
    flags: tuple[str, ...],
    environ: dict[str, str],
    bootrun: support.Programs,
    stored: ServedCheckpoint,
    free_port: int,
) -> None:
    said = run_nodes(bootrun, stored, free_port, *flags, secret=SECRET, **environ)
    assert not any("peer sharing disabled" in each for each in said)
    assert stored.copies == pytest.approx(NODES)


def test_wrong_bytes_of_a_peer_are_had_from_the_store(
    stored: ServedCheckpoint, service: Start, tmp_path: Path
) -> None:
    origin = Origin(url=stored.server.url, below=["ckpt"])
    with peer_processes(tmp_path, {"own": HONEST, "liar": LIAR}, origin) as files:
        started = service(stored.url, peers=files["own"])
        told = started.hear("origin")
        assert told["url"] == stored.server.url and told["folders"][0].startswith("ckpt/v-")
        answer = started.load()
        assert answer["did"] == "ready"
        assert (Path(answer["path"]) / "model.bin").read_bytes() == stored.data
        assert 1 < stored.copies < 2.5, "what the liar gave is read once more"
        started.close()
