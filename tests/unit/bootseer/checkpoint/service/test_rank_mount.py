"""The keeper's side of a mount for ranks: signs of life, and an end that nobody has ordered."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.checkpoint.service import rank_mount
from bootseer.checkpoint.service.rank_mount import RankMount


class Process:
    """In place of the process that mounts."""

    made: Process

    def __init__(self, _command: object, stdin: int, **_more: Any) -> None:
        Process.made = self
        self.connection = socket.socket(fileno=os.dup(stdin))
        self.connection.settimeout(20)
        self.status = -9

    def wait(self, _limit_s: float) -> int:
        return self.status

    def say(self, **news: object) -> None:
        self.connection.sendall(json.dumps(news).encode() + b"\n")


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder / "mount")
        self.selector = selectors.DefaultSelector()
        self.shown: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.signs: list[None] = []
        self.mount = RankMount(
            self.selector,
            self.folder,
            lambda path, why: self.shown.append((path, why)),
            self.lost.append,
            lambda: self.signs.append(None),
        )
        self.mount.start("url", "version", "digest", "arena")
        self.process = Process.made

    def turn(self) -> None:
        for key, _ in self.selector.select(20):
            key.data()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr("bootseer.checkpoint.service.rank_mount.subprocess.Popen", Process)
    found = Setting(tmp_path)
    yield found
    found.mount.end()
    found.process.connection.close()
    found.selector.close()
    assert not os.path.exists(found.folder)


def test_it_is_reported_when_it_can_be_used_and_when_it_has_ended(setting: Setting) -> None:
    setting.process.say(alive=True)
    setting.turn()
    setting.process.say(mounted=True)
    setting.turn()
    assert (setting.shown, len(setting.signs)) == ([(setting.folder, "")], 1)
    setting.process.connection.shutdown(socket.SHUT_RDWR)
    setting.turn()
    assert setting.lost == [f"the mount at {setting.folder} has ended: its process died (status -9)"]
    setting.mount.end()
    assert len(setting.lost) == len(setting.shown) == 1


def test_an_end_that_was_ordered_is_no_news(setting: Setting) -> None:
    setting.process.say(mounted=True)
    setting.turn()
    setting.mount.let_go()
    setting.mount.end()
    assert not setting.selector.get_map()
    said = setting.process.connection.recv(1000).splitlines()
    assert json.loads(said[0])["arena"] == "arena" and json.loads(said[1]) == {"let_go": True}
    assert setting.process.connection.recv(1) == b"" and not setting.lost


@pytest.mark.parametrize("how", ["failed", "dies", "late"])
def test_why_there_is_none(how: str, setting: Setting) -> None:
    if how == "failed":
        setting.process.say(failed="no /dev/fuse")
        setting.turn()
    elif how == "dies":
        setting.process.connection.shutdown(socket.SHUT_RDWR)
        setting.turn()
    else:
        setting.mount.tick()
        assert not setting.shown
        setting.mount._limit_s = 0.0
        setting.mount.tick()
    [(path, why)] = setting.shown
    assert path == "" and why and not setting.lost


def test_a_process_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_args: object, **_more: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("bootseer.checkpoint.service.rank_mount.subprocess.Popen", no_process)
    before = os.listdir("/proc/self/fd")
    with selectors.DefaultSelector() as selector:
        mount = RankMount(selector, str(tmp_path / "m"), lambda *_: None, lambda _: None, lambda: None)
        with pytest.raises(BlockingIOError):
            mount.start("url", "version", "digest", "")
        mount.end()
    assert os.listdir("/proc/self/fd") == before
    assert rank_mount.READY_S < 90  # what the launcher waits for a sign of life
