"""Whether this user can have namespaces is what a child reports, also when it fails in another way or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from bootseer.errors import ConfigError
from bootseer.linux import namespaces

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def refuse() -> bool:
    raise ConfigError("no namespaces: run it as root")


def fail() -> bool:
    raise KeyError("uid")


def leave() -> bool:
    os._exit(3)


def die() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def no_process() -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.leaks
@pytest.mark.parametrize(
    ("separate", "why"),
    [
        (refuse, r"^no namespaces: run it as root$"),
        (fail, r"^no namespaces for an image here \(KeyError: 'uid'\): run it as root"),
        (leave, r"\(a trial process ended with status 3\)"),
        (die, r"\(a trial process was killed by signal 9\)"),
    ],
)
def test_a_trial_that_fails(separate: Callable[[], bool], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "separate", separate)
    with pytest.raises(ConfigError, match=why):
        namespaces.probe()


@pytest.mark.leaks
def test_a_trial_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "separate", lambda: True)
    namespaces.probe()


@pytest.mark.leaks
def test_a_trial_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", no_process)
    with pytest.raises(ConfigError, match="no process for a trial"):
        namespaces.probe()
