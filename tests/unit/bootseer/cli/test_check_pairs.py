"""The network measured by hand: between real processes, with nobody there, and mistakes."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bootseer.cli import check
from tests.support import find_free_port

pytestmark = pytest.mark.leaks


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    value = secrets.token_hex(16)
    monkeypatch.delenv("BOOTSEER_SECRET_FILE", raising=False)
    monkeypatch.setenv("BOOTSEER_SECRET", value)
    return value


@pytest.fixture
def node(secret: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One that listens, and where."""
    argv = [sys.executable, "-c", "import sys; from bootseer.cli import check; sys.exit(check.main(sys.argv[1:]))"]
    environ = {**os.environ, "BOOTSEER_SECRET": secret, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*argv, "--pair-listen", "0"], bufsize=0, stdout=subprocess.PIPE, env=environ) as popen:
        assert popen.stdout is not None
        assert select.select([popen.stdout], [], [], 30)[0]
        place = popen.stdout.readline().decode().rpartition(":")[2].strip()
        yield f"127.0.0.1:{place}", popen
        popen.send_signal(signal.SIGINT)
        assert popen.wait(10) == 130


def test_two_nodes_and_one_that_is_not_there(
    node: tuple[str, subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    where, popen = node
    assert check.main(["--pair", where, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["check"], found["level"], found["where"]) == ("pairs", "ok", where)
    assert "B/s from it" in found["what"] and "ms round trip" in found["what"]
    nobody = f"127.0.0.1:{find_free_port()}"
    assert check.main(["--pair", where, "--pair", nobody]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ok      pairs {where}")
    assert lines[1].startswith(f"fail    pairs {nobody}: nothing goes through: Connection refused")
    assert popen.stdout is not None
    assert popen.stdout.readline().startswith(b"ok      pairs 127.0.0.1: ")


def test_another_secret(
    node: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOOTSEER_SECRET", secrets.token_hex(16))
    assert check.main(["--pair", node[0]]) == 3
    assert "it does not know the key of this test" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", ":7", "a:b", "a:0", "a:99999", "[::1]:"])
def test_places_that_are_none(text: str, secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--pair", text]) == 2
    assert f"--pair {text!r}: give HOST or HOST:PORT" in capsys.readouterr().err


def test_without_a_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("BOOTSEER_SECRET", raising=False)
    monkeypatch.delenv("BOOTSEER_SECRET_FILE", raising=False)
    for argv in (["--pair", "a"], ["--pair-listen", "0"]):
        assert check.main(argv) == 2
        assert "BOOTSEER_SECRET_FILE" in capsys.readouterr().err
