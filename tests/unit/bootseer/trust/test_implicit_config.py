"""Settings that nobody named are read only where nobody else could have put them; else a line says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.job_file import read_job_file
from bootseer.trust.implicit_config import read_implicit_config
from launcher.cli.parser import parse
from launcher.spec import build_spec
from tests.support import lacking

FILE = "[setup]\ncommands = ['id']\n"
OTHER = 65534


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    (directory / "bootseer.toml").write_text(FILE)
    (directory / "train.py").touch()
    monkeypatch.chdir(directory)
    return directory


def of_bootrun(*words: str) -> tuple[str, ...]:
    environ = {"OMP_NUM_THREADS": "1"}
    found = build_spec(parse([*words, "train.py"], environ), environ).setup
    return () if found is None else tuple(found.commands)


def of_commands(*words: str) -> tuple[str, ...]:
    """As `bootseer env` reads it."""
    return tuple((read_job_file(words[1] if words else "", os.getcwd()) or {}).get("--setup", ()))


both = pytest.mark.parametrize("read", [of_bootrun, of_commands])


def share(directory: Path) -> None:
    directory.chmod(0o1777)


def let_a_group_write(directory: Path) -> None:
    (directory / "bootseer.toml").chmod(0o664)


def give_away(directory: Path) -> None:
    os.chown(directory / "bootseer.toml", OTHER, OTHER)


def link_to_strange_one(directory: Path) -> None:
    (directory / "other.toml").write_text(FILE)
    os.chown(directory / "other.toml", OTHER, OTHER)
    (directory / "bootseer.toml").unlink()
    (directory / "bootseer.toml").symlink_to("other.toml")


@both
def test_ones_own_file_is_read(here: Path, read: Callable[..., tuple[str, ...]]) -> None:
    assert read() == ("id",)
    (here / "bootseer.toml").unlink()
    assert read() == ()


@both
@pytest.mark.parametrize("how", [share, let_a_group_write])
def test_where_others_write_it_has_to_be_named(
    here: Path, read: Callable[..., tuple[str, ...]], how: Callable[[Path], None]
) -> None:
    how(here)
    check_refused_until_named(here, read)


@both
@pytest.mark.system
@pytest.mark.parametrize("how", [give_away, link_to_strange_one])
def test_somebody_elses_file_has_to_be_named(
    here: Path, read: Callable[..., tuple[str, ...]], how: Callable[[Path], None]
) -> None:
    if os.geteuid():
        lacking("files of other users can be made by root only")
    how(here)
    check_refused_until_named(here, read)


def check_refused_until_named(here: Path, read: Callable[..., tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"toml is not read, as another user may have written it") as caught:
        read()
    assert "name it: --config " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read("--config", "bootseer.toml") == ("id",)
    assert read("--config", "/dev/null") == ()


def test_whole_bytes_or_nothing(here: Path) -> None:
    path = os.fspath(here / "bootseer.toml")
    assert read_implicit_config(path, path, max_bytes=len(FILE)) == FILE.encode()
    with pytest.raises(ConfigError, match="at most 3"):
        read_implicit_config(path, path, max_bytes=3)
    assert read_implicit_config(path + "x", path, max_bytes=3) is None
