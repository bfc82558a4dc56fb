"""The private file of a job's peers: who may have written it, what it may say, and when it is read again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.peers import JobPeers, Node, Origin, PeerStore, write_peers
from bootseer.peers.auth import derive_key
from bootseer.peers.membership import PeersFile, may_share, read_peers
from bootseer.storage.memory import MemoryStore

KEY = derive_key(b"a secret of the job", "run-1").hex()
NODES = [Node("a", "10.0.0.1", 4000), Node("b", "fd00::1", 4001)]


def make(**other: object) -> JobPeers:
    values: dict[str, object] = {"job": "run-1", "own": "a", "key": KEY, "nodes": NODES, "origins": [], **other}
    return JobPeers(**values)  # type: ignore[arg-type]


def test_it_is_read_as_it_was_written_and_private(tmp_path: Path) -> None:
    path = str(tmp_path / "peers.json")
    peers = make(origins=[Origin(url="http://store/tree", options={"ca_file": "x"}, below=["packs"])])
    write_peers(path, peers)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert read_peers(path) == peers
    assert os.listdir(tmp_path) == ["peers.json"]
    assert read_peers(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"own": "c"},
        {"nodes": []},
        {"nodes": [NODES[0], NODES[0]]},
        {"nodes": [Node("a", "host.example", 4000)]},
        {"nodes": [Node("a", "10.0.0.1", 0)]},
        {"nodes": [Node("a", "10.0.0.1", 65536)]},
        {"own": "a b", "nodes": [Node("a b", "10.0.0.1", 1)]},
        {"key": "00"},
        {"key": "zz" * 32},
        {"origins": [Origin(url="http://store", below=["../up"])]},
        {"origins": [Origin(url="http://store", below=["/"])]},
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        write_peers(str(tmp_path / "peers.json"), make(**wrong))
    assert "peers.json" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "nonsense", '{"format": "bootseer-peers/9"}', '{"format": "bootseer-peers/1", "job": 1}'],
)
def test_another_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"peers\.json"):
        read_peers(str(path))


def test_what_others_could_read_or_replace_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "peers.json")
    write_peers(path, make())
    os.symlink(path, str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="cannot be opened"):
        read_peers(str(tmp_path / "link"))
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_peers(path)
    with pytest.raises(ConfigError):
        read_peers(str(tmp_path))


def test_it_is_read_again_when_it_was_replaced(tmp_path: Path, said: list[str]) -> None:
    path = str(tmp_path / "peers.json")
    file = PeersFile(path, look_s=0.0)
    assert file.current() is None
    write_peers(path, make())
    first = file.current()
    assert first == make()
    assert file.current() is first
    write_peers(path, make(nodes=NODES[:1]))
    assert file.current() == make(nodes=NODES[:1])
    os.chmod(path, 0o644)
    os.utime(path, (1, 1))
    assert file.current() is None
    assert file.current() is None
    assert len(said) == 1, "it is said once"
    own: list[str] = []
    assert PeersFile(path, log=own.append).current() is None
    assert (own, len(said)) == (said, 1), "a caller may take the line"
    os.remove(path)
    assert file.current() is None


def test_it_is_not_looked_at_all_the_time(tmp_path: Path) -> None:
    path = str(tmp_path / "peers.json")
    file = PeersFile(path, look_s=1e6)
    assert file.current() is None
    write_peers(path, make())
    assert file.current() is None
    assert file.current(is_urgent=True) == make()


def test_who_outlives_a_job_follows_the_file_of_the_next_one(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    for path, job in zip(paths, ("run-1", "run-2"), strict=True):
        write_peers(path, make(job=job))
    file = PeersFile("", look_s=1e6)
    assert file.current() is None
    for path, job in zip(paths, ("run-1", "run-2"), strict=True):
        file.follow(path)
        found = file.current()
        assert found is not None and found.job == job
        file.follow(path)
        assert file.current() is found, "it was not read again"
    file.follow("")
    assert file.current() is None


class Meeting:
    """A store that is read through peers, and the file that says who they are."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "peers.json")
        self.store = PeerStore(MemoryStore("meeting", ""), "memory://meeting", PeersFile(self.path))

    def waits(self, size_bytes: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Whether it waits until the file says more, which it does after two looks."""
        looks = 0

        async def run() -> None:
            await self.store.meet(size_bytes, over)

        def over() -> bool:
            nonlocal looks
            looks += 1
            if looks == 3:
                write_peers(self.path, make(origins=[Origin(url="memory://meeting")]))
            return is_over()

        asyncio.run(run())
        return looks >= 3


def test_who_reads_much_waits_until_its_store_is_known(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    write_peers(meeting.path, make(origins=[Origin(url="memory://other")]))
    assert meeting.waits(1 << 40)
    assert not meeting.waits(1 << 40), "it is known now"


def test_who_reads_little_or_no_more_does_not_wait(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    assert not meeting.waits(0)
    assert not meeting.waits(1 << 40, lambda: True)
    assert not os.path.exists(meeting.path)


def test_who_has_no_peers_does_not_wait() -> None:
    store = PeerStore(MemoryStore("alone", ""), "memory://alone", PeersFile(""))

    def never() -> bool:
        raise AssertionError("it looks")

    asyncio.run(store.meet(1 << 40, never))


def test_only_what_the_job_named_is_shared() -> None:
    some = Origin(url="x", below=["packs", "index/a"])
    assert may_share(some, "packs/1")
    assert may_share(some, "index/a/b")
    assert not may_share(some, "packs")
    assert not may_share(some, "packs2/1")
    assert not may_share(some, "tree.json")
    assert may_share(Origin(url="x"), "anything")
