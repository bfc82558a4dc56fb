"""Builders that are killed at any moment: in the end there is one good snapshot, and nobody waits for ever."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.store.lease import BuilderLease, LeaseUnavailable
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.storage import open_store
from bootseer.trust import Trust
from tests.campaign import IS_FULL
from tests.env_parts import NOW_S, document, write_environment
from tests.support import Program, wait_until

BUILDER = os.path.join(os.path.dirname(__file__), "env_builder.py")
BEAT_S = 0.15
KILLS = 100 if IS_FULL else 20
KEY, _ = document()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
    aio.close()


def test_web_servers_have_no_builder(tmp_path: Path) -> None:
    from tests.contract import servers

    with servers.serve_directory(tmp_path) as url:

        async def nothing() -> None:
            return None

        async def ask() -> object:
            store = open_store(url)
            try:
                return await BuilderLease(store, owner="node").acquire(KEY, nothing, 5)
            finally:
                await store.aclose()

        assert isinstance(aio.run_sync(ask()), LeaseUnavailable)


# ---- killed at any moment ------------------------------------------------------------------------------------


def snapshots(url: Path) -> tuple[list[str], FoundSnapshot | None]:
    """Files of generations, and what a start would find."""
    directory = url / "keys" / KEY
    names = (
        sorted(each.name for each in directory.iterdir() if each.name.startswith("env-"))
        if directory.exists()
        else []
    )

    async def find() -> FoundSnapshot | None:
        return await EnvStore(open_store(str(url)), str(url), Trust()).find(KEY, NOW_S)

    return names, aio.run_sync(find())


def is_good(url: Path) -> None:
    """Exactly one snapshot, every byte of it right."""
    names, found = snapshots(url)
    assert names == ["env-000001.json"]
    assert found is not None

    async def verify() -> Any:
        return await EnvStore(open_store(str(url)), str(url), Trust()).verify(found)

    done = aio.run_sync(verify())
    assert done.faults == []
    assert done.right_blocks == done.blocks > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_builders_killed_at_any_moment(program: Any, tmp_path: Path) -> None:
    """Kills all over a build's length; whoever comes afterwards finds, takes over or builds anew, and soon."""
    files = write_environment(tmp_path / "files")
    chance = random.Random(5)

    def start(url: Path) -> Program:
        return program.start(sys.executable, BUILDER, url, files, BEAT_S, 60)  # type: ignore[no-any-return]

    begun = start(tmp_path / "first")
    wait_until(lambda: "building" in begun.stdout, 60)
    building_s = time.monotonic()
    assert begun.wait(60).status == 0
    length_s = time.monotonic() - building_s
    seen = {"before": 0, "after": 0}
    for number in range(KILLS):
        url = tmp_path / f"store{number}"
        victim = start(url)
        wait_until(lambda victim=victim: "building" in victim.stdout or victim.process.poll() is not None, 60)
        time.sleep(chance.uniform(0, 1.2 * length_s))  # the moment is what the test is about
        victim.process.kill()
        victim.process.wait()
        names, _ = snapshots(url)
        seen["after" if names else "before"] += 1
        nodes = [start(url) for _ in range(2)]
        for node in nodes:
            run = node.wait(60)
            assert run.status == 0, (run.stdout, run.stderr)
            assert "neither" not in run.stdout, run.stdout
        is_good(url)
        if names:
            assert all("waited" in node.stdout for node in nodes)
        else:
            assert sorted("published True" in node.stdout for node in nodes) == [False, True]
    assert seen["before"] > 0
