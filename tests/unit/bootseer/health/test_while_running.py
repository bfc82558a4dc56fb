"""The process that looks again and again: what comes and goes is said once, and it ends with who started it."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.health.finding import FAIL
from bootseer.own_module import command_of

pytestmark = pytest.mark.leaks


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    made: list[subprocess.Popen[bytes]] = []

    def start(*argv: str) -> subprocess.Popen[bytes]:
        command = command_of("bootseer.health.while_running", "--every", "0.1", *argv)
        # Not buffered: select has to see all that was not read.
        made.append(subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.__exit__(None, None, None)


def next_about(popen: subprocess.Popen[bytes], where: str) -> dict:
    assert popen.stdout is not None
    while True:
        assert select.select([popen.stdout], [], [], 30)[0]
        found = json.loads(popen.stdout.readline())
        if found["where"] == where:
            return found


def test_what_comes_and_goes(start, tmp_path: Path) -> None:
    directory = os.fspath(tmp_path / "data")
    popen = start("--timeout", "20", "--", directory)
    found = next_about(popen, directory)
    assert (found["check"], found["level"], found["is_over"]) == ("space", FAIL, False)
    os.mkdir(directory)
    assert next_about(popen, directory)["is_over"] is True
    os.rmdir(directory)
    assert next_about(popen, directory)["is_over"] is False
    assert popen.stdin is not None
    popen.stdin.close()
    assert popen.wait(20) == 0


def test_it_ends_when_nobody_listens(start, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    popen = start("--timeout", "20", "--", os.fspath(directory))
    next_about(popen, os.fspath(directory))
    popen.stdout.close()
    directory.mkdir()  # there is something to say
    assert popen.wait(20) == 0
