"""The path that ranks get: of which version, of what kind, and what becomes of it."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.checkpoint.io.arena import READY, UNIT_BYTES, Arena
from bootseer.checkpoint.io.source import SourceFile
from bootseer.checkpoint.opening import single_file
from bootseer.checkpoint.service import rank_paths
from bootseer.checkpoint.service.rank_paths import RankPath, RankPathProvider, ShownVersion, own_path
from bootseer.errors import CheckpointError

VERSION = f"{5:020d}-" + "a" * 12
REMOTE = "s3://bucket/ckpt"


@pytest.mark.parametrize(
    ("url", "version", "path"),
    [
        ("/ckpt", "", "/ckpt"),
        ("/ckpt", "step-30", "/ckpt/step-30"),
        ("file:///ckpt", "step-30", "/ckpt/step-30"),
        ("/ckpt", VERSION, ""),
        ("/ckpt", f"step-30/v-{VERSION}", ""),
        (REMOTE, "step-30", ""),
    ],
)
def test_own_paths(url: str, version: str, path: str) -> None:
    assert own_path(url, version) == path


def test_urls_of_files(tmp_path: Path) -> None:
    for url in ("https://h/a/m%20l.pt?sign=a/b", "https://h/m l.pt", "s3://b/m l.pt", "/x/m l.pt"):
        assert single_file(url, "", ["m l.pt"]) == "m l.pt"
    assert single_file("s3://b/m.pt", "", ["m.pt", "n.pt"]) == ""
    assert single_file("s3://b/m.pt", VERSION, ["m.pt"]) == ""
    (tmp_path / "m.pt").mkdir()
    assert single_file(str(tmp_path / "m.pt"), "", ["m.pt"]) == ""
    assert ShownVersion("https://h/m.pt?sign=x", "", "", ("m.pt",)).path_in("/mnt") == "/mnt/m.pt"
    assert ShownVersion(REMOTE, "", "", ("m.pt",)).path_in("/mnt") == "/mnt"


class Mount:
    """In place of the process that mounts: the test says what comes of it."""

    made: list[Mount]
    error: OSError | None

    def __init__(
        self, _selector: object, folder: str, then: Any, lost: object, alive: object, damaged: object
    ) -> None:
        self.folder, self.then = folder, then
        self.calls: list[str] = []
        Mount.made.append(self)

    def start(self, *shown: str) -> None:
        if Mount.error is not None:
            raise Mount.error
        self.arena = shown[-1]

    def let_go(self) -> None:
        self.calls.append("let go")

    def end(self) -> None:
        self.calls.append("end")


class Copy:
    """In place of the process that copies to the disk."""

    made: list[Copy]
    error: Exception | None

    def __init__(self, _selector: object, _fork: object, folder: str, then: Any, progress: object) -> None:
        self.folder, self.then = folder, then
        self.calls: list[object] = []
        Copy.made.append(self)

    def start(self, *shown: object) -> None:
        if Copy.error is not None:
            raise Copy.error
        self.calls.append(shown)

    def end(self) -> None:
        self.calls.append("end")


def no_fork(_work: object) -> Any:
    raise AssertionError("the test plays the processes")


class Setting:
    def __init__(self, folder: Path, said: list[str]) -> None:
        self.folder = folder
        self.said = said
        self.found: list[RankPath] = []
        self.damaged: list[str] = []
        self.given_back = 0
        self.arena: Any = None
        self.selector = selectors.DefaultSelector()
        self.of_ranks = RankPathProvider(str(folder), self.selector, no_fork, lambda: None, self.damaged.append)

    @property
    def paths(self) -> list[str]:
        return [each.path for each in self.found]

    def show(self, url: str, *names: str, version: str = "", is_complete: bool = True) -> None:
        arena = Arena([SourceFile(name, 10) for name in names], [UNIT_BYTES] * len(names))
        for number in range(len(names)):
            arena.view(number, 0, 10)[:] = b"from arena"
            if is_complete:
                arena.set_state(number, 0, READY)
        if self.arena is not None:
            self.arena.close()
        self.arena = arena
        self.of_ranks.show(ShownVersion(url, version, "digest", names), arena, "address", self.found.append)

    def give_back(self) -> None:
        def done() -> None:
            self.given_back += 1
            self.of_ranks.drop_links()
            self.arena.close()

        self.of_ranks.give_back(done)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[Setting]:
    monkeypatch.setattr(rank_paths, "RankMount", Mount)
    monkeypatch.setattr(rank_paths, "RankCopy", Copy)
    Mount.made, Mount.error = [], None
    Copy.made, Copy.error = [], None
    found = Setting(tmp_path / "service", said)
    found.folder.mkdir()
    yield found
    found.of_ranks.drop()
    found.selector.close()
    found.arena.close()
    assert list(found.folder.iterdir()) == []


def test_links_into_the_arena_then_to_the_files_themselves(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "step-1" / "a").mkdir(parents=True)
    (tmp_path / "step-1" / "a" / "b").write_bytes(b"from disk!")
    setting.show(str(tmp_path), "a/b", version="step-1")
    file = Path(setting.paths[0], "a/b")
    assert file.read_bytes() == b"from arena"
    setting.give_back()
    assert file.read_bytes() == b"from disk!"
    assert setting.given_back == 1 and not Mount.made and not setting.said


def test_a_file_of_its_own(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"from disk!")
    setting.show(str(tmp_path / "m.pt"), "m.pt")
    assert Path(setting.paths[0]).read_bytes() == b"from arena"
    setting.give_back()
    assert Path(setting.paths[0]).read_bytes() == b"from disk!"


def test_what_is_nowhere_else_is_mounted_before_the_memory_goes(setting: Setting, tmp_path: Path) -> None:
    setting.show(REMOTE, "a/b", "c")
    setting.give_back()
    setting.give_back()
    [mount] = Mount.made
    assert mount.arena == ""
    assert setting.given_back == 0 and Path(setting.paths[0], "a/b").read_bytes() == b"from arena"
    (tmp_path / "mount" / "a").mkdir(parents=True)
    (tmp_path / "mount" / "a" / "b").write_bytes(b"from mount")
    mount.then(str(tmp_path / "mount"), "")
    assert setting.given_back == 1 and Path(setting.paths[0], "a/b").read_bytes() == b"from mount"


def test_without_mounts_a_copy_takes_the_place_of_the_memory(setting: Setting, tmp_path: Path) -> None:
    setting.show(REMOTE, "a")
    setting.give_back()
    Mount.made[0].then("", "no /dev/fuse")
    assert setting.given_back == 0
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a").write_bytes(b"from copy!")
    Copy.made[0].then(str(tmp_path / "copy"), "", "")
    assert setting.given_back == 1 and Path(setting.paths[0], "a").read_bytes() == b"from copy!"
    setting.of_ranks.drop()
    assert Copy.made[0].calls[-1] == "end"


@pytest.mark.parametrize("when", ["at once", "later"])
def test_files_that_can_be_nowhere_else_keep_the_memory(when: str, setting: Setting) -> None:
    if when == "at once":
        Copy.error = CheckpointError("no disk has room")
    setting.show(REMOTE, "a")
    setting.give_back()
    Mount.made[0].then("", "no /dev/fuse")
    if when == "later":
        Copy.made[0].then("", "no disk has room", "refused")
    assert setting.given_back == 0 and Path(setting.paths[0], "a").read_bytes() == b"from arena"
    [said] = setting.said
    assert said.startswith("warning: ") and "no /dev/fuse" in said and "no disk has room" in said


def test_a_copy_is_a_path_too(setting: Setting) -> None:
    shown = ShownVersion("https://h/m.pt", "v", "d", ("m.pt",), 10)
    setting.of_ranks.peers = "/peers"
    setting.of_ranks.show_copy(shown._replace(version=""), setting.found.append, lambda _done, _all: None)
    [copy] = Copy.made
    assert copy.calls == [("https://h/m.pt", "", "d", 10, "/peers")]
    copy.then("/copies", "", "")
    assert setting.found == [RankPath("/copies/m.pt")]
    setting.arena = setting.arena or Arena([SourceFile("a", 1)], [UNIT_BYTES])


def test_links_that_went_meanwhile_are_not_moved(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.show(REMOTE, "a")
    setting.give_back()
    setting.of_ranks.drop_links()
    monkeypatch.chdir(setting.folder)
    Mount.made[0].then("/mnt", "")
    assert setting.given_back == 1 and not setting.said


def test_a_new_attempt_keeps_the_memory(setting: Setting) -> None:
    setting.show(REMOTE, "a")
    setting.give_back()
    setting.of_ranks.drop()
    assert Mount.made[0].calls == ["end"] and setting.given_back == 0
    setting.show(REMOTE, "a")
    assert Path(setting.paths[1], "a").read_bytes() == b"from arena"


def test_a_mount_gives_up_the_arena_too(setting: Setting) -> None:
    setting.show(REMOTE, "a", is_complete=False)
    [mount] = Mount.made
    assert mount.arena == "address"
    mount.then("/mnt", "")
    assert setting.paths == ["/mnt"]
    setting.give_back()
    assert mount.calls == ["let go"] and setting.given_back == 1


def test_names_that_no_directory_has(setting: Setting, tmp_path: Path) -> None:
    setting.show(str(tmp_path), "a", "a/b")  # as an object store may have them
    assert setting.paths == [str(tmp_path)] and len(setting.said) == 1
    setting.show(REMOTE, "a", "a/b")
    assert Mount.made[0].arena == "address"


def test_a_process_that_cannot_be_started_costs_the_path(setting: Setting) -> None:
    Mount.error = BlockingIOError(11, "Resource temporarily unavailable")
    setting.show(REMOTE, "a", is_complete=False)
    assert setting.paths == [""] and "Resource temporarily unavailable" in setting.found[0].why
