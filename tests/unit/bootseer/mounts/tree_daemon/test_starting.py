"""The start of a tree's daemon leaves no descriptor open when it fails on the way."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from bootseer.errors import StorageTimeout
from bootseer.mounts.tree_daemon import starting
from bootseer.mounts.tree_daemon.orders import DaemonOrder
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.waiting import WaitingDaemon
from tests.support import open_descriptors


class Daemon:
    """A daemon that waits for an order; `answer` is what it does with it, None: it thinks."""

    def __init__(self, answer: bytes | OSError | None = b"") -> None:
        self._answer = answer
        self.is_closed = False
        self.ready: list[int] = []

    def give(self, order: DaemonOrder) -> bool:
        if isinstance(self._answer, OSError):
            raise self._answer
        if self._answer is None:
            self.ready.append(os.dup(order.ready))
        else:
            os.write(order.ready, self._answer)
        return True

    def has_accepted(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True


class Validation:
    """As IndexValidation. Its `report` may fail."""

    def __init__(self, error: OSError | None = None) -> None:
        self._error = error

    def index_bytes(self) -> bytes:
        return b"index"

    def report(self, fd: int) -> None:
        os.close(fd)
        if self._error is not None:
            raise self._error


def full() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


def order(
    daemon: Daemon, place: Path, validation: Validation | None, left_s: float = 20.0
) -> dict[str, Any] | None:
    directory = TreeDirectory.of_directory(str(place / ("a" * 64)))
    end_s = time.monotonic() + left_s
    return starting._order(cast(WaitingDaemon, daemon), directory, 0, 2, {}, end_s, validation)


@pytest.mark.parametrize("place", [0, 1])
def test_no_pipe(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = os.pipe, list[int]()

    def make() -> tuple[int, int]:
        if len(made) == place:
            raise full()
        made.append(1)
        return pipe()

    before, daemon = open_descriptors(), Daemon()
    monkeypatch.setattr(os, "pipe", make)
    with pytest.raises(OSError, match="Too many open files"):
        order(daemon, tmp_path, Validation())
    assert open_descriptors() == before
    assert daemon.is_closed


@pytest.mark.parametrize("answer", [b"", full()])
@pytest.mark.parametrize("error", [None, full()])
def test_an_order_that_cannot_be_given(answer: bytes | OSError, error: OSError | None, tmp_path: Path) -> None:
    before, daemon = open_descriptors(), Daemon(answer)
    if answer or error:
        with pytest.raises(OSError, match="Too many open files"):
            order(daemon, tmp_path, Validation(error))
    else:
        assert order(daemon, tmp_path, Validation(error)) == {}
    assert open_descriptors() == before
    assert daemon.is_closed


def test_an_answer(tmp_path: Path) -> None:
    before, daemon = open_descriptors(), Daemon(b'{"ok": {}}\n')
    assert order(daemon, tmp_path, Validation()) == {"ok": {}}
    assert open_descriptors() == before
    assert daemon.is_closed


def test_no_answer_in_time(tmp_path: Path) -> None:
    before, daemon = open_descriptors(), Daemon(None)
    with pytest.raises(StorageTimeout, match="its daemon is not ready in time"):
        order(daemon, tmp_path, None, left_s=0.0)
    os.close(daemon.ready.pop())
    assert open_descriptors() == before
    assert daemon.is_closed
