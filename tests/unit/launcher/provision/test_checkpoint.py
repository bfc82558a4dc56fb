"""bootrun's side of the checkpoint, with a keeper that the test plays: its orders, what ranks are given."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from bootseer.checkpoint.service import rank_paths
from bootseer.errors import LaunchError
from launcher.base.loop import Loop
from launcher.base.stage_span import StageSpan
from launcher.cli.parser import parse
from launcher.provision import checkpoint
from launcher.provision.checkpoint import NodeCheckpoint, own_path
from launcher.rendezvous.messages import CheckpointFailed, Pinned, World
from launcher.spec import LaunchSpec, build_spec
from launcher.supervisor.client import SupervisorClient
from tests.support import tune
from tests.unit.launcher.ranks.looping import run_for, run_until

URL = "s3://user:password@host/ckpt"
SHOWN = "s3://***@host/ckpt"
ENDPOINT = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1")
PINNED = Pinned("step-30", "aa")


class Supervisor:
    """Starts no keeper: the test is it."""

    def __init__(self) -> None:
        self.address = b""
        self.ended: list[int] = []

    def serve(self, number: int, _argv: object, _environ: object, _unset: object, address: bytes) -> None:
        self.number, self.address = number, address

    def end_service(self, number: int) -> None:
        self.ended.append(number)


class Bed:
    """A node's checkpoint on a loop of its own."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.loop = Loop()
        self.guard = Supervisor()
        self.said: list[str] = []
        self.loaded: list[dict[str, str]] = []
        self.resolved: list[tuple[Pinned | None, str]] = []
        guard = cast(SupervisorClient, self.guard)
        self.spans: list[StageSpan] = []
        said = self.said.append
        self.failed: list[CheckpointFailed] = []
        self.checkpoint = NodeCheckpoint(
            self.loop, guard, spec, (), said, said, self.spans.append, failed=self.failed.append
        )
        self.checkpoint.begin()
        self.come()

    def come(self) -> None:
        """The keeper that was started last is there."""
        self.service = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.service.connect(self.guard.address)
        self.service.setblocking(False)
        self._received = b""

    def hear(self, do: str) -> dict[str, Any]:
        """The newest order of this kind, once it has come."""
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            try:
                self._received += self.service.recv(1 << 20)
            except BlockingIOError:
                pass
            orders = [json.loads(line) for line in self._received.splitlines()]
            found[:] = [each for each in orders if each["do"] == do]
            return bool(found)

        run_until(self.loop, has_come)
        return found[-1]

    def answer(self, did: str, **fields: object) -> None:
        self.service.sendall(json.dumps({"did": did, **fields}).encode() + b"\n")

    def settle(self) -> None:
        """Until all that the keeper has said was heard: a line of text comes after it."""
        mark = f"mark {len(self.said)}"
        self.answer("said", text=mark)
        run_until(self.loop, lambda: mark in self.said)
        self.said.remove(mark)

    def listen(self) -> None:
        self.answer("listening", saves="", shown=SHOWN)
        self.settle()

    def resolve(self) -> None:
        self.checkpoint.resolve(lambda pinned, why: self.resolved.append((pinned, why)))

    def load(self, attempt: int = 0, pinned: Pinned | None = PINNED) -> None:
        self.checkpoint.load(World(attempt, 0, 0, 1, 0, 1, 0, 1, "h", 1, pinned), self.loaded.append)

    def die(self) -> None:
        ended = len(self.guard.ended)
        self.service.close()
        run_until(self.loop, lambda: len(self.guard.ended) > ended)

    def die_for_good(self) -> None:
        """The keeper, and each one that takes its place."""
        self.die()
        while self.guard.number >= len(self.guard.ended):
            self.come()
            self.die()

    def close(self) -> None:
        self.checkpoint.close()
        self.service.close()
        self.loop.close()


Make = Callable[..., Bed]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a Bed; more words are those of the command line."""
    beds: list[Bed] = []

    def start(*words: str, url: str = URL) -> Bed:
        environ = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        args = parse([*words, "--load-checkpoint", url, __file__], environ)
        beds.append(Bed(build_spec(args, environ)))
        return beds[-1]

    yield start
    for bed in beds:
        bed.close()


# ---- which version -------------------------------------------------------------------------------------------


def test_nothing_there_yet(make: Make) -> None:
    bed = make()
    bed.listen()
    bed.resolve()
    bed.answer("absent", why="no such folder", kind="none")
    bed.settle()
    assert bed.resolved == [(Pinned("", ""), "")]
    bed.load(pinned=Pinned("", ""))
    assert bed.said == [f"there is no checkpoint yet, so the job trains from scratch: {SHOWN}"]
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == ""


def test_what_is_there_but_cannot_be_loaded_is_said_with_the_reason(make: Make) -> None:
    bed = make()
    bed.listen()
    bed.resolve()
    bed.answer("absent", why="step-20/state.pt is cut short", kind="unusable")
    bed.settle()
    bed.load(pinned=Pinned("", ""))
    assert len(bed.said) == 1
    assert "step-20/state.pt is cut short" in bed.said[0] and "from scratch" in bed.said[0]


def test_the_url_is_reported_without_what_is_secret(make: Make) -> None:
    bed = make()
    bed.listen()
    bed.resolve()
    bed.answer("unresolved", why="no answer")
    bed.settle()
    assert bed.resolved == [(None, f"--load-checkpoint {SHOWN}: no answer")]


def test_before_it_is_known_what_is_secret_no_url_is_reported(make: Make) -> None:
    bed = make()
    bed.resolve()
    bed.answer("unresolved", why="no answer")
    bed.settle()
    assert bed.resolved == [(None, "--load-checkpoint: no answer")]


def test_nodes_do_not_start_without_a_pin(make: Make) -> None:
    """Each rank would choose for itself, at its own time."""
    bed = make("--nnodes", "2", *ENDPOINT)
    bed.resolve()
    bed.die_for_good()
    bed.resolve()
    run_until(bed.loop, lambda: len(bed.resolved) == 2)
    for pinned, why in bed.resolved:
        assert pinned is None
        assert "it closed its connection" in why and "start the job again" in why


@pytest.mark.parametrize("words", [(), ("--nnodes", "1", *ENDPOINT)])
@pytest.mark.parametrize("url", [URL, "/data/ckpt", os.path.dirname(__file__)])
def test_one_node_does_not_guess_either(url: str, words: tuple[str, ...], make: Make) -> None:
    """A folder that has versions is none of them: code that looks for its files there finds nothing."""
    bed = make(*words, url=url)
    bed.resolve()
    bed.die_for_good()
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved[0][0] is None and "start the job again" in bed.resolved[0][1]


def test_one_node_opens_a_plain_file_without_a_pin(make: Make) -> None:
    bed = make(url=__file__)
    bed.resolve()
    bed.die_for_good()
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved == [(None, "")]
    bed.load(pinned=None)
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == __file__


def test_the_last_service_takes_no_memory(make: Make) -> None:
    """For want of it the kernel may have ended the others."""
    bed = make("--checkpoint-memory", "1GiB", "--arena-bytes", "1MiB")
    bed.resolve()
    assert (bed.hear("start")["memory_bytes"], bed.hear("start")["arena_bytes"]) == (1 << 30, 1 << 20)
    for _ in range(checkpoint.MAX_SERVICES - 1):
        bed.die()
        bed.come()
    bed.hear("resolve")
    assert (bed.hear("start")["memory_bytes"], bed.hear("start")["arena_bytes"]) == (0, 0)


def test_nodes_that_were_started_otherwise(make: Make) -> None:
    bed = make("--nnodes", "2", *ENDPOINT)
    with pytest.raises(LaunchError, match="missing at the coordinator"):
        bed.load(pinned=None)
    assert not bed.loaded


# ---- versions that cannot be had -----------------------------------------------------------------------------

WHY = "a.s001: unit 3 of model.bin is damaged"


def fail(bed: Bed, kind: str = "damaged", attempt: int = 0, digest: str = "aa") -> None:
    bed.answer("failed", attempt=attempt, digest=digest, kind=kind, why=WHY, older=None)
    bed.settle()


def find(bed: Bed, **answer: str) -> tuple[Pinned | None, str]:
    """What the coordinator makes of the keeper's answer to its question."""
    bed.resolve()
    bed.hear("resolve")
    bed.answer(**answer)
    bed.settle()
    return bed.resolved[-1]


def test_the_coordinator_is_reported_and_no_rank_starts(make: Make) -> None:
    bed = make()
    bed.load()
    bed.hear("load")
    fail(bed, digest="another version")
    fail(bed, attempt=7)
    assert bed.failed == []
    fail(bed)
    assert bed.failed == [CheckpointFailed(0, "aa", True, WHY)] and not bed.loaded
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    bed.settle()
    assert not bed.loaded


def test_damage_ends_the_job_with_the_ways_out(make: Make) -> None:
    bed = make()
    bed.listen()
    assert find(bed, did="resolved", version="step-30", digest="aa") == (PINNED, "")
    bed.checkpoint.spoiled(CheckpointFailed(0, "aa", True, WHY))
    pinned, why = find(bed, did="resolved", version="step-20", digest="bb")
    assert bed.hear("resolve")["without"] == ["aa"]
    assert pinned is None
    for words in (WHY, "step-30", f"bootseer ckpt verify '{SHOWN}'", "step-20", "--checkpoint-fallback older"):
        assert words in why
    pinned, why = find(bed, did="absent", why="no other", kind="unusable")
    assert pinned is None and "no older" in why and WHY in why


def test_an_older_version_is_taken_and_it_is_said(make: Make) -> None:
    bed = make("--checkpoint-fallback", "older")
    bed.listen()
    find(bed, did="resolved", version="step-30", digest="aa")
    bed.checkpoint.spoiled(CheckpointFailed(0, "aa", True, WHY))
    assert find(bed, did="resolved", version="step-20", digest="bb") == (Pinned("step-20", "bb"), "")
    [said] = [text for text in bed.said if "warning" in text]
    assert said.startswith("warning: ") and all(each in said for each in ("step-20", "step-30", WHY))
    bed.checkpoint.spoiled(CheckpointFailed(1, "bb", True, WHY))
    bed.resolve()
    run_until(bed.loop, lambda: bed.hear("resolve")["without"] == ["aa", "bb"])
    bed.answer("absent", why="no other", kind="unusable")
    bed.settle()
    assert bed.resolved[-1][0] is None and "no older" in bed.resolved[-1][1]


def test_no_older_version_is_taken_for_a_store_that_is_away(make: Make) -> None:
    bed = make("--checkpoint-fallback", "older")
    bed.listen()
    find(bed, did="resolved", version="step-30", digest="aa")
    bed.checkpoint.spoiled(CheckpointFailed(0, "aa", False, "HTTP 503"))
    bed.resolve()
    run_until(bed.loop, lambda: len(bed.resolved) == 2)
    assert bed.resolved[-1] == (None, f"--load-checkpoint {SHOWN}: version step-30 cannot be loaded: HTTP 503")


@pytest.mark.parametrize("older", ["step-20", ""])
def test_a_damaged_manifest_of_the_newest_version(older: str, make: Make) -> None:
    bed = make()
    bed.listen()
    pinned, why = find(bed, did="unresolved", why="v-9/manifest.json: is damaged", older=older)
    assert pinned is None and "v-9/manifest.json: is damaged" in why and "ckpt verify" in why
    assert (f"{older} is older" in why) if older else ("no older" in why)


@pytest.mark.parametrize("kind", ["none", "unusable", "misplaced"])
@pytest.mark.parametrize("flag", [(), ("--require-checkpoint",)])
def test_what_is_absent(kind: str, flag: tuple[str, ...], make: Make) -> None:
    """A typo is always an error."""
    bed = make(*flag)
    bed.listen()
    pinned, why = find(bed, did="absent", why="not there", kind=kind)
    if flag or kind == "misplaced":
        assert pinned is None and "not there" in why
    else:
        assert (pinned, why) == (Pinned("", ""), "")


def test_after_the_first_step_damage_is_only_reported(make: Make) -> None:
    bed = make()
    bed.load()
    bed.answer("ready", attempt=0, path="/mount", address="", disk_bytes=0)
    bed.settle()
    bed.checkpoint.first_step_seen()
    fail(bed)
    assert bed.failed == [] and bed.said[-1].startswith("error: ") and WHY in bed.said[-1]


def test_ranks_that_read_by_our_loaders_may_get_the_url(make: Make) -> None:
    bed = make("--checkpoint-files", "off")
    assert bed.hear("start")["shows_url"] is True
    bed.load()
    bed.answer("ready", attempt=0, path="", address="/arena", disk_bytes=0)
    bed.settle()
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == URL


def test_another_service_takes_the_place_of_one_that_has_failed(make: Make) -> None:
    bed = make("--nnodes", "2", *ENDPOINT)
    bed.die()
    bed.resolve()
    bed.come()
    bed.die()  # while it looks for the version
    bed.come()
    bed.hear("resolve")
    bed.answer("resolved", version="step-30", digest="aa")
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved == [(PINNED, "")]
    assert bed.guard.ended == [0, 1]
    bed.checkpoint.on_service_ended(1, "an earlier one")
    bed.load()
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    run_until(bed.loop, lambda: bool(bed.loaded))
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == "/links"


def test_a_service_that_cannot_be_let_in_has_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As no descriptor is free, for one; the job goes on."""

    def accept(_listener: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    bed = make("--nnodes", "2", *ENDPOINT)
    bed.die()
    bed.resolve()
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        bed.come()
        run_until(bed.loop, lambda: bed.guard.ended == [0, 1])
    assert bed.said[-1].endswith("has failed, another one is started: it cannot be reached: Too many open files")
    bed.service.close()
    bed.come()
    bed.hear("resolve")
    bed.answer("resolved", version="step-30", digest="aa")
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved == [(PINNED, "")]


def test_a_service_that_no_socket_can_reach_has_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(_listener: socket.socket, _address: bytes) -> None:
        patch.undo()
        raise OSError(errno.ENOBUFS, "No buffer space available")

    bed = make("--nnodes", "2", *ENDPOINT)
    bed.die()
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", bind)
        bed.resolve()
    run_until(bed.loop, lambda: bed.guard.ended == [0, 1])
    assert bed.said[-1].endswith("another one is started: it cannot be reached: No buffer space available")
    bed.service.close()
    bed.come()
    bed.hear("resolve")
    bed.answer("resolved", version="step-30", digest="aa")
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved == [(PINNED, "")]


def test_a_user_with_a_high_number_is_let_in(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows users without a number of their own as 65534, or as 2^32 - 2."""
    bed = make()
    nobody = (1 << 32) - 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: nobody)
        patch.setattr(socket.socket, "getsockopt", lambda *_: struct.pack("@iII", 1, nobody, nobody))
        bed.resolve()
        assert bed.hear("resolve")


# ---- loading -------------------------------------------------------------------------------------------------


def test_ranks_get_the_path(make: Make) -> None:
    bed = make()
    bed.load(attempt=3)
    assert bed.hear("load")["attempt"] == 3
    assert "host" not in bed.hear("start")
    bed.answer("ready", attempt=3, path="/links", address="/arena", disk_bytes=0)
    bed.settle()
    assert bed.loaded == [
        {
            "BOOTSEER_CHECKPOINT": "/links",
            "BOOTSEER_CHECKPOINT_URL": URL,
            "BOOTSEER_CHECKPOINT_VERSION": "step-30",
            "BOOTSEER_CHECKPOINT_DIGEST": "aa",
            "BOOTSEER_ARENA": "/arena",
        }
    ]
    (span,) = bed.spans
    assert span.facts == {"version": "step-30", "how": "memory"} and span.began_ns <= span.ended_ns


def test_what_is_late_is_no_answer_to_the_next_attempt(make: Make) -> None:
    bed = make()
    bed.load(attempt=0)
    bed.checkpoint.cancel()
    bed.load(attempt=1, pinned=Pinned("step-40", "bb"))
    bed.answer("ready", attempt=0, path="/old", address="/old-arena", disk_bytes=0)
    bed.answer("direct", attempt=0, path="/old", why="of the last attempt")
    bed.settle()
    assert bed.loaded == [] and bed.said == []
    bed.answer("direct", attempt=1, path="", why="it has no room")
    bed.settle()
    assert [each["BOOTSEER_CHECKPOINT_DIGEST"] for each in bed.loaded] == ["bb"]


def test_an_answer_that_says_not_of_which_attempt_is_not_understood(make: Make) -> None:
    bed = make()
    bed.load()
    bed.answer("ready", path="/links", address="/arena", disk_bytes=0)
    run_until(bed.loop, lambda: bool(bed.said))
    assert "invalid message" in bed.said[-1] and "another one is started" in bed.said[-1]
    assert not bed.loaded


def test_a_number_without_end_is_not_understood(make: Make) -> None:
    bed = make()
    bed.load()
    bed.answer("progress", attempt=0, bytes=float("inf"), of_bytes=1)
    run_until(bed.loop, lambda: bool(bed.said))
    assert "invalid message" in bed.said[-1]


def test_trouble_of_whoever_is_reported_is_not_the_services(make: Make) -> None:
    bed = make()

    def trouble(_environ: dict[str, str]) -> None:
        raise ValueError("of the ranks")

    bed.checkpoint.load(World(0, 0, 0, 1, 0, 1, 0, 1, "h", 1, PINNED), trouble)
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    with pytest.raises(ValueError, match="of the ranks"):
        run_until(bed.loop, lambda: bool(bed.said))


STRIPED = "00000000000000000030-0123456789ab"


@pytest.mark.parametrize(
    ("url", "version", "path"),
    [
        ("/data/ckpt", "step-30", "/data/ckpt/step-30"),
        ("/data/ckpt", "", "/data/ckpt"),
        ("/data/a::b", "step-30", "/data/a::b/step-30"),
        ("file:///data/my%20ckpt", "step-30", "/data/my ckpt/step-30"),
        ("file://localhost/data/ckpt", "a/step-30", "/data/ckpt/a/step-30"),
        ("/data/ckpt", STRIPED, "/data/ckpt"),
        ("/data/ckpt", f"step-10/v-{STRIPED}", "/data/ckpt"),
        ("s3://bucket/ckpt", "step-30", "s3://bucket/ckpt"),
        ("zip://a::/data/ckpt.zip", "step-30", "zip://a::/data/ckpt.zip"),
        ("simplecache::file:///data/ckpt", "step-30", "simplecache::file:///data/ckpt"),
    ],
)
def test_what_a_version_is_called_without_the_service(url: str, version: str, path: str) -> None:
    assert own_path(url, version) == path
    assert (rank_paths.own_path(url, version) or url) == path, "as the keeper calls it"


def test_files_of_another_machine_have_no_path_here() -> None:
    assert own_path("file://elsewhere/data/ckpt", "step-30") == "file://elsewhere/data/ckpt"


@pytest.mark.parametrize("when", ["before", "while"])
def test_without_services_ranks_get_the_version_that_the_job_loads(when: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "step-30").mkdir()
    bed = make(url=str(tmp_path))
    if when == "before":
        bed.resolve()
        bed.die_for_good()
    bed.load()
    if when == "while":
        bed.die_for_good()
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == f"{tmp_path}/step-30"
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT_URL"] == str(tmp_path)


@pytest.mark.parametrize("url", [URL, "/data/ckpt"])
def test_without_services_and_files_no_rank_starts(url: str, make: Make) -> None:
    bed = make(url=url)
    bed.load()
    bed.die_for_good()
    assert not bed.loaded
    assert [(each.digest, each.is_damaged) for each in bed.failed] == [("aa", False)]


def test_another_service_loads_what_one_that_has_failed_did_not(make: Make) -> None:
    bed = make()
    bed.load()
    bed.die()
    bed.come()
    assert bed.hear("load")["digest"] == "aa"
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    bed.settle()
    assert bed.loaded[0]["BOOTSEER_CHECKPOINT"] == "/links"


# ---- a keeper that takes long --------------------------------------------------------------------------------


def test_a_silent_service_is_given_up_and_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, launcher__checkpoint_silence_s=0.05)
    bed = make()
    bed.load()
    run_until(bed.loop, lambda: bool(bed.said))
    assert "it has sent no message for" in bed.said[0]
    assert bed.guard.ended == [0]


@pytest.mark.parametrize("line", [{"did": "alive"}, {"did": "said", "text": "trying again"}])
def test_a_service_that_says_anything_is_waited_for(
    line: dict[str, str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, launcher__checkpoint_silence_s=0.5)
    bed = make()
    bed.resolve()
    for _ in range(6):
        run_for(bed.loop, 0.15)
        bed.answer(**line)
    bed.answer("resolved", version="step-30", digest="aa")
    run_until(bed.loop, lambda: bool(bed.resolved))
    assert bed.resolved == [(PINNED, "")]


# ---- the first step ------------------------------------------------------------------------------------------


def test_memory_that_no_first_step_gives_back_is_said_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FIRST_STEP_WARNING_S", 0.02)
    bed = make()
    bed.load()
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    bed.hear("statistics")
    bed.answer("statistics", taken_bytes=12_300_000_000)
    bed.settle()
    assert len(bed.said) == 1
    assert "12.3 GB" in bed.said[0] and "bootseer.heartbeat" in bed.said[0]


def test_after_the_first_step_nothing_is_said(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FIRST_STEP_WARNING_S", 0.1)
    bed = make()
    bed.load()
    bed.answer("ready", attempt=0, path="/links", address="/arena", disk_bytes=0)
    bed.settle()
    bed.checkpoint.first_step_seen()
    bed.hear("release")
    run_for(bed.loop, 0.3)
    assert bed.said == []
