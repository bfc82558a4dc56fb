"""Nodes of a job that read one image: the store gives a byte about once, and it is right in any case."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.blocks.cache import Cache
from bootseer.errors import ConfigError
from bootseer.events import read_events
from bootseer.ipc.client import Client
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, mount_tree, unmount_tree
from bootseer.mounts.unpacked.tree import unpack_tree
from bootseer.peers import Origin
from bootseer.tree.index import PACKS
from tests import support
from tests.integration.image_roots import make_root
from tests.integration.mounted_trees import Built, need_mounts
from tests.integration.peer_processes import HONEST, LIAR, SECRET, held_until_met, peer_processes
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

pytestmark = pytest.mark.system

SIZE = 24 << 20


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("made")
    for number in range(3):
        (directory / f"file{number}").write_bytes(random.Random(number).randbytes(SIZE // 3))
    return Built(directory)


class Nodes:
    """Those of a job, on this machine: each has a cache, a runtime folder, a file of peers, and serves."""

    def __init__(self, folder: Path, server: FaultyHttpServer, built: Built, stack: ExitStack) -> None:
        self._directory, self._stack = folder, stack
        self.server, self.built = server, built
        self.files: dict[str, str] = {}

    def begin(self, kinds: dict[str, tuple[str, ...]], job: str = "job") -> None:
        """Each serves as it is said, and all know of each other."""
        origin = Origin(url=self.server.url, below=[PACKS])
        self.files = self._stack.enter_context(peer_processes(self._directory, kinds, origin, job))

    def environ(self, name: str) -> dict[str, str]:
        return {**os.environ, "BOOTSEER_RUNTIME": f"{self._directory}/run-{name}"}

    def cache(self, name: str) -> Cache:
        return Cache(f"{self._directory}/cache-{name}")

    def mount(self, name: str, whole_bytes: int = 1 << 30) -> MountedTree:
        environ = self.environ(name)
        tree = mount_tree(
            self.server.url,
            digest=self.built.digest,
            cache=self.cache(name),
            environ=environ,
            options=TreeOptions(peers=self.files.get(name, ""), whole_bytes=whole_bytes),
        )
        self._stack.callback(unmount_tree, self.built.digest, force=True, environ=environ)
        return tree

    @property
    def copies(self) -> float:
        sent = sum(count for path, count in self.server.served_bytes.items() if path.startswith(PACKS))
        return sent / sum(len(data) for path, data in self.built.files.items() if path.startswith(PACKS))


@pytest.fixture
def nodes(built: Built, tmp_path: Path) -> Iterator[Nodes]:
    need_mounts()
    with FaultyHttpServer(built.files) as server, ExitStack() as stack:
        yield Nodes(tmp_path, server, built, stack)
    aio.close()


def whole(tree: MountedTree) -> dict[str, float]:
    """Figures, when all of it is here."""
    status = tree.status()

    def is_here() -> bool:
        nonlocal status
        status = tree.status()
        return bool(status["cache"]["present"] == status["blocks"]["count"])

    support.wait_until(is_here, 60, "all of it")
    blocks: dict[str, float] = status["blocks"]
    return blocks


def is_right(tree: MountedTree, source: str) -> bool:
    return all(
        Path(tree.folder, name).read_bytes() == Path(source, name).read_bytes() for name in os.listdir(source)
    )


def test_what_two_nodes_bring_leaves_the_store_about_once(nodes: Nodes, built: Built) -> None:
    nodes.begin({"one": HONEST, "two": HONEST})
    trees = [nodes.mount(name) for name in ("one", "two")]
    found = [whole(tree) for tree in trees]
    assert all(is_right(tree, built.source) for tree in trees)
    assert nodes.copies < 1.5, found
    assert sum(each["peer_bytes"] for each in found) > SIZE / 2


def test_wrong_bytes_of_a_peer_are_had_from_the_store(nodes: Nodes, built: Built) -> None:
    nodes.begin({"one": HONEST, "liar": LIAR})
    tree = nodes.mount("one")
    whole(tree)
    assert is_right(tree, built.source)
    assert 1 < nodes.copies < 2.5, "what the liar gave is read once more"


def test_the_peers_of_the_next_job_are_asked_by_the_daemon_that_is_there(nodes: Nodes, built: Built) -> None:
    daemon = nodes.mount("one", whole_bytes=0)
    name = os.listdir(built.source)[0]
    assert Path(daemon.folder, name).read_bytes() == Path(built.source, name).read_bytes()
    assert daemon.status()["blocks"]["peer_bytes"] == 0
    nodes.begin({"one": HONEST, "two": HONEST}, "next")
    tree = nodes.mount("one", whole_bytes=0)
    assert tree.status()["pid"] == daemon.status()["pid"]
    tree.prefetch(whole=True)
    assert whole(tree)["peer_bytes"] > 0
    assert is_right(tree, built.source)


@pytest.mark.parametrize("peers", ["relative", 7, "/a\0b"])
def test_a_daemon_is_reported_a_path(nodes: Nodes, peers: object) -> None:
    tree = nodes.mount("one", whole_bytes=0)
    control = Client.connect(tree.control, timeout_s=10.0)
    assert control is not None
    with control, pytest.raises(ConfigError, match="peers: an absolute path"):
        control.ask("hello", timeout_s=10.0, peers=peers)


def test_a_job_that_ends_meanwhile_costs_the_store_and_nothing_else(nodes: Nodes, built: Built) -> None:
    nodes.begin({"one": HONEST, "two": HONEST})
    tree = nodes.mount("one", whole_bytes=0)
    os.remove(nodes.files["one"])
    tree.prefetch(whole=True)
    whole(tree)
    assert is_right(tree, built.source)


def test_an_image_that_is_unpacked_is_read_through_peers_too(
    nodes: Nodes, built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes.begin({"one": HONEST, "two": HONEST})
    for name in ("one", "two"):
        environ = {**nodes.environ(name), "BOOTSEER_CACHE": f"{tmp_path}/cache-{name}"}
        tree = unpack_tree(nodes.server.url, digest=built.digest, environ=environ, peers=nodes.files[name])
        for file in os.listdir(built.source):
            assert Path(tree.folder, file).read_bytes() == Path(built.source, file).read_bytes()
        tree.close()
    assert nodes.copies < 1.5


# The first step is made; figures are noted while the rank runs, so it ends when they are.
READS = """
import glob, hashlib, json, sys, time
sys.modules["_bootseer_rank"].heartbeat(1, {})
while not any("image_peer_bytes" in open(path).read() for path in glob.glob(sys.argv[1] + "/*/events/agent-*")):
    time.sleep(0.01)
"""


def test_nodes_of_a_job_give_each_other_what_their_ranks_read(
    bootrun: support.Programs, tmp_path: Path, free_port: int
) -> None:
    need_mounts()
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    make_root(os.fspath(root))
    built = Built(root)
    Path(bootrun.dir, "reads.py").write_text(READS)
    held = [HttpFault(HttpKind.HELD, "index/*")]
    with FaultyHttpServer(built.files, held) as server, ExitStack() as stack:
        stack.enter_context(held_until_met(server, Path(bootrun.dir, "tmp"), 2))
        programs = []
        for number in range(2):
            environ = {
                "BOOTSEER_SECRET": SECRET,
                "BOOTSEER_RUNTIME": f"{tmp_path}/run{number}",
                "BOOTSEER_CACHE": f"{tmp_path}/cache{number}",
            }
            stack.callback(unmount_tree, built.digest, force=True, environ={**os.environ, **environ})
            words = [
                *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "x"),
                *("--rdzv-endpoint", f"localhost:{free_port}", "--log-dir", f"{tmp_path}/log{number}"),
                *("--rdzv-conf", "mixed_arguments=1"),  # each rank writes into a folder of its own
                *(
                    "--image",
                    f"{server.url}@sha256:{built.digest}",
                    "--fork-ranks",
                    "off",
                    "reads.py",
                    f"{tmp_path}/log{number}",
                ),
            ]
            programs.append(bootrun.start(*words, env=environ))
        runs = [program.wait() for program in programs]
    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert not [line for run in runs for line in run.stderr.splitlines() if "peer sharing disabled" in line]
    figures = []
    for number in range(2):
        (path,) = (tmp_path / f"log{number}").glob("*/events/agent-*")
        found = {event.name: float(event.value or 0) for event in read_events(str(path)) if event.kind == "scalar"}
        figures.append(found)
    assert sum(each["image_peer_bytes"] for each in figures) > 0, figures
    assert not [name for name in os.listdir(Path(bootrun.dir, "tmp")) if name.startswith("bootseer-peers")]
