"""Folders of --cache-dir may be anywhere: no link leads a start elsewhere, and no credential goes to the store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.compile_cache.collect import collect
from bootseer.env.compile_cache.directories import CachePlace
from bootseer.env.compile_cache.kinds import CacheKind
from tests.integration.test_env_caches import Node
from tests.support import lacking

OTHER = 65534
TOKEN = "hf_" + "Aa1" * 12


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """A node with this folder of its own."""
    made: list[Node] = []

    def make(name: str, directory: Path, **more: Any) -> Node:
        made.append(
            Node(tmp_path / name, os.fspath(tmp_path / "store"), own={"mine": os.fspath(directory)}, **more)
        )
        return made[-1]

    yield make
    for each in made:
        each.caches.close()
    aio.close()


def fill(directory: Path, *names: str, text: str = "compiled\n") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files(directory: Path) -> set[str]:
    return {os.path.relpath(path, directory) for path in directory.rglob("*") if path.is_file()}


def test_credentials_stay_here_and_are_named(node: Callable[..., Node], tmp_path: Path) -> None:
    home = tmp_path / "huggingface"
    fill(home, "hub/kernel.bin", "hub/tokenizer.json", text='"compiled"')
    fill(home, "token", "sub/stored_tokens", text=TOKEN)
    fill(home, ".netrc", text="machine h login a password b\n")
    fill(home, "id", text="-----BEGIN OPENSSH PRIVATE KEY-----\nx\n")
    first = node("a", home)
    assert first.caches.capture(settle_s=0.0).files == 2
    said = next(line for line in first.caches.notes if "credentials" in line)
    assert all(os.fspath(home / name) in said for name in ("token", ".netrc", "sub/stored_tokens", "id"))
    assert TOKEN not in said
    second = node("b", tmp_path / "other")
    assert second.seed().files == 2
    assert files(tmp_path / "other") == {"hub/kernel.bin", "hub/tokenizer.json"}
    assert not any(
        TOKEN.encode() in path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()
    )


def test_what_was_a_credential_is_looked_at_again_when_it_changes(tmp_path: Path) -> None:
    place = CachePlace(CacheKind("mine"), os.fspath(tmp_path))
    fill(tmp_path, "id", text="-----BEGIN RSA PRIVATE KEY-----\nx\n")
    sums: dict[str, Any] = {}
    found = collect([place], sums, settle_s=0.0)
    assert (found.found, found.left_out, found.secrets) == ([], {"credentials": 1}, [os.fspath(tmp_path / "id")])
    fill(tmp_path, "id", text="a kernel\n")
    found = collect([place], sums, settle_s=0.0)
    assert ([each.path for each in found.found], found.secrets) == (["mine/id"], [])


@pytest.mark.system
@pytest.mark.parametrize("place", ["hub", "hub/sub"])
def test_a_link_in_the_directory_leads_nowhere(node: Callable[..., Node], tmp_path: Path, place: str) -> None:
    fill(tmp_path / "own a", "hub/sub/kernel.bin", "plain.bin")
    node("a", tmp_path / "own a").caches.capture(settle_s=0.0)
    victim, own = tmp_path / "victim", tmp_path / "own b"
    (victim / "sub").mkdir(parents=True)
    (own / place).parent.mkdir(parents=True)
    (own / place).symlink_to(victim)
    if not os.geteuid():
        os.lchown(own / place, OTHER, OTHER)
    second = node("b", own)
    assert second.seed().files == 1
    assert files(own) == {"plain.bin"}
    assert files(victim) == set()
    assert any("is a link or a file: not filled" in line for line in second.caches.notes)


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_directory_that_others_write_to_is_neither_filled_nor_kept(
    node: Callable[..., Node], tmp_path: Path, mode: int
) -> None:
    fill(tmp_path / "own a", "plain.bin")
    assert node("a", tmp_path / "own a").caches.capture(settle_s=0.0).generation == 1
    shared = tmp_path / "shared"
    fill(shared, "theirs.bin")
    shared.chmod(mode)
    second = node("b", shared)
    assert second.seed().files == 0
    second.write("inductor/ab/cone.py")
    assert second.caches.capture(settle_s=0.0).files == 1  # all else is kept as ever
    assert files(shared) == {"theirs.bin"}
    said = [line for line in second.caches.notes if line.startswith(f"--cache-dir mine={shared}: neither")]
    assert len(said) == 1
    assert f"chmod go-w {shared}" in said[0]


@pytest.mark.system
def test_a_directory_is_not_made_through_somebody_elses_link(node: Callable[..., Node], tmp_path: Path) -> None:
    if os.geteuid():
        lacking("links of other users can be made by root only")
    fill(tmp_path / "own a", "plain.bin")
    node("a", tmp_path / "own a").caches.capture(settle_s=0.0)
    scratch, victim = tmp_path / "scratch", tmp_path / "victim"
    scratch.mkdir()
    victim.mkdir()
    scratch.chmod(0o1777)
    (scratch / "x").symlink_to(victim)
    os.lchown(scratch / "x", OTHER, OTHER)
    second = node("b", scratch / "x" / "cache")
    assert second.seed().files == 0
    assert list(victim.iterdir()) == []
    assert any("belongs to user" in line for line in second.caches.notes)
    third = node("c", scratch / "mine" / "cache")  # in a scratch folder that all share one may have one's own
    assert third.seed().files == 1
    assert (scratch / "mine").stat().st_mode & 0o777 == 0o700


def test_a_directory_may_be_behind_a_link_of_ones_own(node: Callable[..., Node], tmp_path: Path) -> None:
    fill(tmp_path / "own a", "sub/plain.bin")
    node("a", tmp_path / "own a").caches.capture(settle_s=0.0)
    (tmp_path / "large").mkdir()
    (tmp_path / "own b").symlink_to(tmp_path / "large")
    assert node("b", tmp_path / "own b").seed().files == 1
    assert files(tmp_path / "large") == {"sub/plain.bin"}


@pytest.mark.system
def test_a_directory_on_another_file_system_is_filled(node: Callable[..., Node], tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        lacking("needs a second file system at /dev/shm")
    fill(tmp_path / "own a", "sub/lib.so.bin", text="code" * 1000)
    node("a", tmp_path / "own a").caches.capture(settle_s=0.0)
    with tempfile.TemporaryDirectory(prefix="bootseer-test-", dir="/dev/shm") as other:
        second = node("b", Path(other))
        assert second.seed().files == 1, second.caches.notes
        there = Path(other) / "sub" / "lib.so.bin"
        assert there.read_text() == "code" * 1000
        assert there.stat().st_mtime_ns == (tmp_path / "own a" / "sub" / "lib.so.bin").stat().st_mtime_ns
        assert files(Path(other)) == {"sub/lib.so.bin"}
        assert second.caches.capture(settle_s=0.0).generation == 0  # the same
