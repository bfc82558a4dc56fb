"""Snapshots that are believed, and hold what no environment may, or are for other folders: never restored."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import aio
from bootseer.env.store.snapshot import PAYLOAD_TYPE, Snapshot
from bootseer.env.store.store import EnvStore
from bootseer.storage import open_store
from bootseer.storage.below import SubdirectoryStore
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.opening import publish_index
from bootseer.trust import Trust, parse, seal
from tests import support
from tests.integration.setup_jobs import Machine, services_end
from tests.support import lacking

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
OTHER = 65534
IS_ROOT = os.geteuid() == 0


class Forger:
    """Somebody whose snapshots are believed: this user's own store, after a first start has published there."""

    def __init__(self, machine: Machine, start: Callable[..., support.Program]) -> None:
        self._machine, self._start = machine, start
        first = start().wait(DEADLINE_S)
        assert first.status == 0, first.stderr
        services_end()
        (path,) = machine.snapshots()
        payload = parse(path.read_bytes(), PAYLOAD_TYPE, "it", max_bytes=1 << 23).payload
        self.good = msgspec.json.decode(payload, type=Snapshot)

    def forge(self, directory: Path, **fields: Any) -> None:
        """The tree of a folder with `0` in it, and what the snapshot says of it."""

        async def begin() -> EnvStore:
            return EnvStore(open_store(str(self._machine.store)), str(self._machine.store), Trust())

        envs = aio.run_sync(begin())
        key = self.good.key
        built = build(DirectorySource(str(directory)), envs.packs(key).put, threads=1)
        aio.run_sync(publish_index(SubdirectoryStore(envs.store, f"trees/{key}"), built.digest, built.index_bytes))
        forged = msgspec.structs.replace(
            self.good, tree=built.digest, index_bytes=len(built.index_bytes), **fields
        )
        # The newest: what is refused may have been replaced.
        self._machine.snapshots()[-1].write_bytes(seal(msgspec.json.encode(forged), PAYLOAD_TYPE, None))

    def start(self, *flags: str) -> support.Run:
        """On a node that has never run the job."""
        self._machine.renew()
        done = self._start(*flags).wait(DEADLINE_S)
        services_end()
        return done


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node")


@pytest.fixture
def forger(machine: Machine, bootrun: support.Programs) -> Iterator[Forger]:
    def start(*flags: str) -> support.Program:
        argv = machine.flags("--env-way", "there,unpack", *flags)
        return bootrun.start(*argv, machine.script, env=machine.environ)

    yield Forger(machine, start)
    services_end()
    aio.close()


def make_site(directory: Path, machine: Machine) -> Path:
    """A tree that could be an environment; its site-packages."""
    lib = next((machine.venv / "lib").iterdir()).name
    site = directory / "0" / "lib" / lib / "site-packages"
    site.mkdir(parents=True)
    (site / "small.py").write_text('VERSION = "forged"\n')
    return site


def test_programs_with_others_rights_and_devices(machine: Machine, forger: Forger, tmp_path: Path) -> None:
    setuid = tmp_path / "setuid"
    make_site(setuid, machine)
    (setuid / "0" / "su").write_text("#!/bin/sh\n")
    (setuid / "0" / "su").chmod(0o4755)
    forger.forge(setuid)
    run = forger.start()
    assert run.status == 0, run.stderr
    assert "0/su' is setuid or setgid" in run.stderr
    assert "rank 0 has 1.0" in run.stdout, "set-up was run"
    assert machine.count() == 2
    assert not os.path.lexists(machine.venv / "su")

    if not IS_ROOT:
        lacking("making a device needs root")
    device = tmp_path / "device"
    make_site(device, machine)
    os.mknod(device / "0" / "mem", stat.S_IFCHR | 0o666, os.makedev(1, 1))
    forger.forge(device)
    run = forger.start()
    assert run.status == 0, run.stderr
    assert "0/mem' is a device" in run.stderr
    assert not os.path.lexists(machine.venv / "mem")


def test_other_directories_than_those_of_the_key(machine: Machine, forger: Forger, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_site(source, machine)
    elsewhere = tmp_path / "elsewhere"
    forger.forge(source, targets=[str(elsewhere)])
    run = forger.start()
    assert run.status == 0, run.stderr
    assert f"is for '{elsewhere}', but its key is for {machine.venv}" in run.stderr
    assert "rank 0 has 1.0" in run.stdout, "set-up was run"
    assert not elsewhere.exists()
    # The same by hand: the folder could be one, and the key's document says that it is not.
    forger.forge(source, targets=[str(elsewhere)])
    bootseer = Path(support.BOOTRUN).with_name("bootseer")
    done = subprocess.run(
        [bootseer, "env", "restore", forger.good.key, "--env-store", str(machine.store)],
        env={name: value for name, value in (os.environ | machine.environ).items() if value is not None},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode != 0
    assert "but its key is for" in done.stderr
    assert not elsewhere.exists()


def test_what_another_user_has_made_is_root_s_where_root_restores_it(
    machine: Machine, forger: Forger, tmp_path: Path
) -> None:
    if not IS_ROOT:
        lacking("giving files to others needs root")
    source = tmp_path / "source"
    site = make_site(source, machine)
    (site / "given.py").write_text("")
    for above, directories, files in os.walk(source):
        for name in (*directories, *files):
            os.chown(os.path.join(above, name), OTHER, OTHER)
    os.chown(site / "given.py", 12345, 12345)  # set-up has given it away
    forger.forge(source)
    run = forger.start()
    assert run.status == 0, run.stderr
    assert "rank 0 has forged" in run.stdout, "it was restored"
    place = machine.venv / site.relative_to(source / "0")
    assert {path.stat().st_uid for path in (machine.venv, place, place / "small.py")} == {0}
    assert {path.stat().st_gid for path in (machine.venv, place, place / "small.py")} == {0}
    assert (place / "given.py").stat().st_uid == 12345
