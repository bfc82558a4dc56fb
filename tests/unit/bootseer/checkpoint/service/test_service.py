"""What the keeper decides, in this process: its children are played by the test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.checkpoint.io.arena import READY
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.service.loading import State
from bootseer.checkpoint.service.process import Child
from bootseer.checkpoint.service.service import CheckpointService
from bootseer.checkpoint.versions.resolve import Pinned, resolve
from bootseer.checkpoint.writing.saved_units import SavedUnits
from bootseer.ipc.channel import Channel
from tests.unit.bootseer.checkpoint.sources import put, stripe

UNIT_BYTES = 4096
DATA = bytes(range(256)) * 64  # 4 units


class Node:
    """A keeper, the launcher's end of its connection, and the children that it forks: they only sleep."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._launcher = Channel(theirs)
        self.service = CheckpointService(Channel(ours))
        self.loader = self.service._loader
        self.memory = self.loader._memory
        for resolver in (self.service._resolver, self.loader._pinner):
            resolver.ask = self._ask  # type: ignore[method-assign]
        self.memory._filler._fork = self._fork
        self.children: list[socket.socket] = []
        self.news: dict[str, dict[str, Any]] = {}  # by digest
        self._received: list[dict[str, Any]] = []

    def _ask(
        self,
        _url: str,
        _version: str,
        digest: str,
        found: Callable[[Mapping[str, Any]], object],
        without: Collection[str] = (),
        *,
        falls_back: bool = False,
    ) -> None:
        found(self.news[digest])

    def _fork(self, _work: Callable[[socket.socket], None]) -> Child:
        # First: until a moment after its exec it has all that is open here.
        pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.children.append(theirs)
        return Child(pid, Channel(ours))

    def start(self, url: str, **more: object) -> Pinned:
        """Has it look ahead; what it has found."""

        async def find() -> Pinned:
            store, path = store_at(url)
            try:
                return await resolve(store, path)
            finally:
                await store.aclose()

        pinned = aio.run_sync(find())
        self.news[""] = {"pinned": pinned}
        self.order("start", url=url, memory_bytes=1 << 30, arena_bytes=0, **more)
        self.hear("listening")
        return pinned

    def load(self, version: str, digest: str, attempt: int = 0, nodes: int = 1) -> None:
        self.order(
            "load", version=version, digest=digest, attempt=attempt, world_size=nodes, nnodes=nodes, group_rank=0
        )

    def order(self, do: str, **fields: object) -> None:
        self._launcher.send({"do": do, **fields})
        self.service._receive_requests()

    def hear(self, did: str) -> dict[str, Any]:
        self._received += self._launcher.receive_ready() or []
        while (answer := self._received.pop(0))["did"] != did:
            pass
        return answer

    def serve(self, take: Callable[[], object]) -> None:
        """Turns the keeper's loop while a thread of a rank or saver calls `take`."""
        thread = threading.Thread(target=take)
        thread.start()
        while thread.is_alive():
            for key, _ in self.service._selector.select(0.01):
                key.data()

    def make_ready(self, *units: tuple[int, int]) -> None:
        assert self.memory.arena is not None
        for unit in units:
            self.memory.arena.set_state(*unit, READY)

    def close(self) -> None:
        self.service._end()
        self.service._launcher.close()
        self._launcher.close()
        for each in self.children:
            each.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    for module in ("service", "loading"):
        monkeypatch.setattr(f"bootseer.checkpoint.service.{module}.pinned_of", lambda news: news["pinned"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the process is pytest's
    found = Node()
    yield found
    found.close()
    aio.close()


def test_the_path_is_that_of_the_ordered_version(node: Node, tmp_path: Path) -> None:
    url = str(tmp_path / "ckpt")
    put(url, {"step-20/model.bin": DATA})
    assert node.start(url).version == "step-20"
    # It is there, but is written anew at this moment.
    put(url, {"step-30/model.bin": DATA})
    node.news["3" * 64] = {"failed": "step-30 is another one by now"}
    node.load("step-30", "3" * 64, attempt=2)
    answer = node.hear("direct")
    assert (answer["path"], answer["attempt"]) == (f"{url}/step-30", 2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_version_that_this_node_does_not_have(nodes: int, node: Node, tmp_path: Path) -> None:
    """As on a disk of the other node's own. Of several nodes none loads what may be another version."""
    url = str(tmp_path / "ckpt")
    put(url, {"step-20/model.bin": DATA})
    node.start(url)
    if nodes > 1:
        put(url, {"step-30/model.bin": DATA})
    node.news["3" * 64] = {"absent": "step-30 does not exist", "kind": "none"}
    node.load("step-30", "3" * 64, attempt=2, nodes=nodes)
    answer = node.hear("failed")
    assert (answer["why"], answer["attempt"], answer["digest"]) == ("step-30 does not exist", 2, "3" * 64)
    assert answer["kind"] == "refused"


def test_answers_name_their_attempt(node: Node, tmp_path: Path) -> None:
    put(str(tmp_path / "ckpt"), {"model.bin": DATA, "other.bin": DATA})
    pinned = node.start(str(tmp_path / "ckpt"))
    node.load("", pinned.digest, attempt=3)
    node.loader._reported_s = -100.0
    node.make_ready((0, 0))
    node.memory._note([(0, 0)], "", "")
    assert node.hear("progress")["attempt"] == 3
    node.make_ready((1, 0))
    node.memory._note([(1, 0)], "", "")
    assert node.hear("ready")["attempt"] == 3


def test_what_a_reader_made_ready_before_it_died_is_not_waited_for(node: Node, tmp_path: Path) -> None:
    put(str(tmp_path / "ckpt"), {"model.bin": DATA})
    pinned = node.start(str(tmp_path / "ckpt"))
    node.load("", pinned.digest)
    node.make_ready((0, 0))
    node.children[-1].close()
    node.memory._filler.receive()
    assert node.hear("ready")["address"]


def test_a_reader_that_cannot_be_replaced_costs_the_arena(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(str(tmp_path / "ckpt"), {"model.bin": DATA})
    pinned = node.start(str(tmp_path / "ckpt"))
    node.load("", pinned.digest)

    def no_fork(_work: object) -> Child:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(node.memory._filler, "_fork", no_fork)
    node.children[-1].close()
    node.memory._filler.receive()
    assert "Resource temporarily unavailable" in node.hear("direct")["why"]


def test_memory_that_savers_left_counts_once(node: Node, tmp_path: Path) -> None:
    url = str(tmp_path / "ckpt")
    pinned = stripe(url, {"model.bin": DATA})
    node.start(url)
    node.order("start", url=url, memory_bytes=1 << 30, arena_bytes=1 << 20)
    saves = node.hear("listening")["saves"]
    other = f"{99:020d}-" + "a" * 12

    def leave() -> None:
        for version in (pinned.version, other):
            left = SavedUnits(saves, version)
            for unit in range(2):
                assert left.leave("model.bin", UNIT_BYTES, unit, memoryview(DATA)[:UNIT_BYTES])
            left.close()

    node.serve(leave)
    offers = node.memory._offers
    assert offers is not None
    assert (offers.bytes_of(pinned.version), offers.bytes) == (2 * UNIT_BYTES, 4 * UNIT_BYTES)
    node.memory.drop()
    node.news[pinned.digest] = {"pinned": pinned}
    node.load(pinned.version, pinned.digest)
    arena, room = node.memory.arena, node.memory._room
    assert arena is not None and arena.is_held and room is not None
    assert (arena.own_taken_bytes, arena.taken_bytes) == (0, 2 * UNIT_BYTES)
    assert room.free_bytes == (1 << 30) - len(DATA)


def test_the_url_is_shown_without_secrets(node: Node) -> None:
    node.news[""] = {"failed": "no such host"}
    node.order("start", url="https://user:word@host/m.pt?sig=abc", memory_bytes=None, arena_bytes=0)
    assert node.hear("listening")["shown"] == "https://user:***@host/m.pt?sig=***"


def test_why_a_job_starts_from_nothing(node: Node) -> None:
    node.news[""] = {"absent": "nothing whole: step-1", "kind": "unusable"}
    node.order("start", url="s3://b/c", memory_bytes=None, arena_bytes=0)
    node.order("resolve")
    answer = node.hear("absent")
    assert (answer["why"], answer["kind"]) == ("nothing whole: step-1", "unusable")


def test_a_file_that_does_not_fit_is_shown_as_a_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(node.loader._paths, "show_mount", lambda what, arena, then: shown.append((what, arena)))
    put("memory://fit/c", {"m l.bin": DATA})
    pinned = node.start("memory://fit/c/m%20l.bin")._replace(version="")
    node.order("start", url="memory://fit/c/m%20l.bin", memory_bytes=0, arena_bytes=0)
    node.memory.drop()
    node.news[pinned.digest] = {"pinned": pinned}
    node.load("", pinned.digest)
    [(what, arena)] = shown
    assert (what.path_in("/mnt"), arena) == ("/mnt/m l.bin", "")


def test_an_unfinished_order_of_an_earlier_attempt_changes_nothing(node: Node, tmp_path: Path) -> None:
    put(str(tmp_path / "ckpt"), {"model.bin": DATA})
    pinned = node.start(str(tmp_path / "ckpt"))
    node.load("", pinned.digest)
    waiting: list[object] = []
    node.loader._pinner.ask = lambda *_: waiting.append(None)  # type: ignore[method-assign]
    node.load("step-2", "2" * 64, attempt=1)
    node.memory._note([(0, 0)], "the store is away", "")
    assert node.loader._state is State.PINNING and waiting


@pytest.mark.parametrize("state", [State.LOADING, State.PINNING])
def test_a_load_that_goes_wrong_leaves_the_coordinators_question(state: State, node: Node, tmp_path: Path) -> None:
    """Another node has found the damage first: the next version is asked for before this one finds it, too."""
    put(str(tmp_path / "ckpt"), {"model.bin": DATA})
    pinned = node.start(str(tmp_path / "ckpt"))
    resolver = node.service._resolver
    del resolver.ask  # its own
    resolver._fork = node._fork
    node.load("", pinned.digest, nodes=2)
    assert node.loader._state is State.LOADING
    node.order("resolve", without=[pinned.digest], falls_back=True)
    looks = node.children[-1]
    if state is State.LOADING:
        node.memory._note([(0, 0)], "unit 0 is damaged", "damaged")
    else:
        node.news["2" * 64] = {"failed": "it is away"}
        node.load("step-2", "2" * 64, nodes=2)
    assert node.hear("failed")["why"] in ("unit 0 is damaged", "it is away")
    looks.sendall(b'{"absent": "there is no other", "kind": "none"}\n')
    resolver._hear()
    assert node.hear("absent")["why"] == "there is no other"
