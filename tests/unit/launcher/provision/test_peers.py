"""bootrun's side of peers: the private file is there when nodes know of each other, and gone with the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bootseer.peers import derive_key
from bootseer.peers.membership import read_peers
from launcher.base.loop import Loop
from launcher.cli.parser import parse
from launcher.provision import peers as module
from launcher.provision.peers import NodePeers
from launcher.rendezvous.messages import PeerNode, PeerNodes
from launcher.spec import build_spec

SECRET = b"a secret of this test"
NODES = PeerNodes("b.1", (PeerNode("a.0", "10.0.0.1", 7000), PeerNode("b.1", "10.0.0.2", 7001)))


class Process:
    """In place of the one that serves."""

    def __init__(self, _loop: object, argv: list[str], environ: dict[str, str], take: Any, on_end: Any) -> None:
        self.argv, self.environ, self.take, self.on_end = argv, environ, take, on_end
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Bed:
    def __init__(self, *flags: str) -> None:
        spec = build_spec(parse(["--nnodes", "2", "--rdzv-endpoint", "h", *flags, "-m", "x"], {}), {})
        self.spec = spec._replace(run_id="j")
        self.said: list[str] = []
        self.told: list[int] = []
        self.peers = NodePeers(Loop(), self.spec, SECRET, ("BOOTSEER_SECRET",), self.said.append)
        self.peers.begin()
        process = self.peers._process
        assert isinstance(process, Process)
        self.process = process


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ServiceProcess", Process)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("BOOTSEER_SECRET", SECRET.decode())


@pytest.mark.usefixtures("served")
def test_the_file_is_written_when_all_is_known_and_goes_with_the_job(tmp_path: Path) -> None:
    bed = Bed()
    path = bed.peers.path
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert not any(SECRET.decode() in text for text in (*bed.process.argv, *bed.process.environ.values()))
    bed.process.take({"port": 7001})
    bed.peers.connect(bed.told.append)
    assert bed.told == [7001]
    bed.peers.meet(NODES)
    found = read_peers(path)
    assert found is not None and found.origins == []  # nothing is shared yet
    bed.peers.add_origin("http://store/x", ["ckpt/v-1"])
    bed.peers.add_origin("http://store/x", ["ckpt/v-2"])
    bed.peers.add_origin("http://store/x", ["ckpt/v-2"])
    found = read_peers(path)
    assert found is not None
    assert (found.job, found.own, found.key_bytes()) == ("j", "b.1", derive_key(SECRET, "j"))
    assert [(node.id, node.address, node.port) for node in found.nodes] == list(NODES.nodes)
    assert [(origin.url, origin.below) for origin in found.origins] == [
        ("http://store/x", ["ckpt/v-1", "ckpt/v-2"])
    ]
    bed.peers.close()
    assert bed.process.is_closed and os.listdir(tmp_path) == []


@pytest.mark.usefixtures("served")
def test_when_its_process_ends_nobody_is_asked_and_the_job_goes_on() -> None:
    bed = Bed()
    bed.peers.connect(bed.told.append)
    assert bed.told == []
    bed.process.take({"port": 7001})
    bed.peers.meet(NODES)
    bed.peers.add_origin("http://store/x", ["ckpt"])
    path = bed.peers.path
    bed.process.on_end("it was killed")
    assert bed.told == [7001, 0] and bed.peers.path == "" and not os.path.exists(path)
    assert bed.said == ["peer sharing disabled on this node: the peer process has failed: it was killed"]
    bed.peers.add_origin("http://store/x", ["other"])
    bed.peers.meet(NODES)
    assert not os.path.exists(path)


@pytest.mark.usefixtures("served")
def test_what_the_user_asked_for_reaches_the_process() -> None:
    bed = Bed("--peers-upload", "5MB", "--local-addr", "10.0.0.2")
    words = bed.process.argv
    assert words[words.index("--upload-bytes-per-s") + 1] == "5000000"
    assert words[words.index("--address") + 1] == "10.0.0.2"
    assert "--address" not in Bed("--local-addr", "head").process.argv


@pytest.mark.usefixtures("served")
def test_nonsense_of_the_process_is_no_port() -> None:
    bed = Bed()
    bed.peers.connect(bed.told.append)
    for answer in ({}, {"port": "7"}, {"port": 0}, {"port": 70000}, {"statistics": {}}):
        bed.process.take(answer)
    assert bed.told == []


def test_without_a_place_for_its_files_nobody_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    spec = build_spec(parse(["--nnodes", "2", "--rdzv-endpoint", "h", "-m", "x"], {}), {})
    said: list[str] = []
    peers = NodePeers(Loop(), spec, SECRET, (), said.append)
    peers.begin()
    assert peers.path == "" and "cannot be started: No such file or directory" in said[0]
    peers.close()
