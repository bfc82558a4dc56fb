"""Where the secret comes from, and the files that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.secret import find_secret

GOOD = "correct horse battery staple"


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return os.fspath(path)


def test_no_secret_is_no_error() -> None:
    assert find_secret({}) is None


def test_the_order_is_conf_file_then_variables(tmp_path: Path) -> None:
    conf, file = write(tmp_path / "a", "A" * 20), write(tmp_path / "b", "B" * 20)
    environ = {"BOOTSEER_SECRET": "C" * 20}
    assert find_secret(environ) == b"C" * 20
    environ["BOOTSEER_SECRET_FILE"] = file
    assert find_secret(environ) == b"B" * 20
    assert find_secret(environ, conf) == b"A" * 20


def test_white_space_around_does_not_count(tmp_path: Path) -> None:
    assert find_secret({"BOOTSEER_SECRET_FILE": write(tmp_path / "s", f"\n{GOOD}\r\n")}) == GOOD.encode()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o777])
def test_a_file_for_others_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "s", GOOD, mode)
    with pytest.raises(ConfigError, match=f"{path}.*mode {mode:04o}.*chmod 600"):
        find_secret({"BOOTSEER_SECRET_FILE": path})


@pytest.mark.parametrize(("text", "words"), [("", "empty"), (" \n", "empty"), ("short", "5 bytes.*at least 16")])
def test_too_little_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_secret({}, write(tmp_path / "s", text))
    with pytest.raises(ConfigError, match=words):
        find_secret({"BOOTSEER_SECRET": text})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    (tmp_path / "big").chmod(0o600)
    for name, words in (
        ("none", "cannot open"),
        ("", "not a regular file"),
        ("fifo", "not a regular file"),
        ("big", "not a secret file"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_secret({"BOOTSEER_SECRET_FILE": os.fspath(tmp_path / name)})
    with pytest.raises(ConfigError, match="cannot open"):
        find_secret({"BOOTSEER_SECRET_FILE": "nul\0name"})
