"""The agent's loop continues if a process that it has killed waits in the kernel, or none can be started."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from launcher.base import children
from launcher.base.loop import Loop
from launcher.rendezvous import resolve
from launcher.rendezvous.identity import IdentityProbe
from launcher.rendezvous.messages import Identity
from tests.support import open_descriptors

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def loop() -> Iterator[Loop]:
    with closing(Loop()) as loop:
        yield loop


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processes that a signal was sent to; none reaches them before the end of the test."""
    kill, killed = os.kill, list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, _signum: killed.append(pid))
    monkeypatch.setattr(children, "_left", set())
    yield killed
    for pid in killed:
        kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for pid in killed:
        children.reap_killed(pid)


def test_a_listing_of_distributions(tmp_path: Path, loop: Loop, killed: list[int]) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    probe = IdentityProbe(loop, str(python), lambda _: None)
    probe.close()
    assert set(killed) == children._left


def test_a_resolution_of_a_name(loop: Loop, killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_look_up", lambda _host: signal.pause())
    query = resolve.resolve(loop, "a.test", lambda _addresses, _why: None)
    assert query is not None
    query.cancel()
    assert [query.pid] == killed
    assert set(killed) == children._left


def refuse(*_: object) -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("call", ["pipe2", "fork"])
def test_no_process_to_resolve_a_name(call: str, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        assert resolve.resolve(loop, "a.test", lambda *result: found.extend(result)) is None
    loop.run_once(0.0)
    assert found == [[], "no process can be started: Resource temporarily unavailable"]
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [0, 1])
def test_no_descriptors_for_a_listing(number: int, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe2, made, found = os.pipe2, list[int](), list[Identity]()
    before = open_descriptors()

    def pipe(flags: int) -> tuple[int, int]:
        if len(made) == number:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(1)
        return pipe2(flags)

    monkeypatch.setattr(os, "pipe2", pipe)
    IdentityProbe(loop, "/bin/false", found.append)
    loop.run_once(0.0)
    assert found == [Identity("", "cannot run /bin/false: Too many open files")]
    assert open_descriptors() == before
