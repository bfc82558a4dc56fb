"""Environments that are mounted over their targets for the ranks alone: what ranks see, what the node sees."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.env.restore.mounted import mount_env
from bootseer.env.restore.restore import MountOptions
from bootseer.env.service.mount import begin_spares
from bootseer.errors import ConfigError, IntegrityError
from bootseer.linux import mount as kernel
from bootseer.mounts.sandbox.process import ImageSandbox
from bootseer.mounts.tree_daemon import waiting as tree_waiting
from bootseer.mounts.tree_daemon.mount import TreeOptions, unmount_tree
from tests.integration.mounted_trees import need_mounts
from tests.integration.test_env_restore import (
    Env,
    make_difference,
    make_env,
    make_target,
    seen,
    wait_tidy,
    wanted,
    write,
)
from tests.support import clean_environ, wait_until

pytestmark = pytest.mark.system
LOOK = "import json, sys; from tests.testing.trees import snapshot; print(repr(snapshot(sys.argv[1])))"
TOP = Path(__file__).parents[2]


class Job:
    """Mounts of one test, and programs in them."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._sandboxes: list[ImageSandbox] = []

    def mounting(self) -> MountOptions:
        self._sandboxes.append(ImageSandbox())
        return MountOptions(self._sandboxes[-1], options=TreeOptions(idle_s=0.0))

    def close(self) -> None:
        for sandbox in self._sandboxes:
            if sandbox.pid:
                sandbox.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    need_mounts()
    for name in os.environ.keys() - clean_environ().keys():
        if name.startswith("BOOTSEER_"):
            monkeypatch.delenv(name)
    for name in ("CACHE", "RUNTIME", "KEYS"):
        monkeypatch.setenv(f"BOOTSEER_{name}", os.fspath(tmp_path / name.lower()))
    made = Job(tmp_path)
    try:
        yield made
    finally:
        tree_waiting.end_spare_daemon()
        made.close()
        aio.close()
        while kernel.clear(os.fspath(tmp_path)):
            pass


def run(prefix: tuple[str, ...], *words: str) -> str:
    done = subprocess.run(
        [*prefix, *words], capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": str(TOP)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def end(env: Env) -> None:
    unmount_tree(env.digest, force=True)


def test_ranks_see_the_environment_and_the_node_does_not(tmp_path: Path, job: Job) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    done = env.restore(mounting=job.mounting())
    try:
        assert (done.how, done.failures, done.notes) == ("mount", (), ())
        found = eval(
            run(
                done.prefix,
                sys.executable,
                "-c",
                LOOK,
                str(target),
            ),
            _seen(),
        )
        expected = wanted(tmp_path, target)
        assert found == expected, "whiteouts, opaque folders and all"
        assert seen(target) == before
        run(
            done.prefix,
            "/bin/sh",
            "-c",
            f"echo more > {target}/lib/site/new/0.py; rm {target}/bin/tool; mkdir {target}/x",
        )
        assert run(done.prefix, "/bin/cat", f"{target}/lib/site/new/0.py") == "more\n", "all ranks see it"
        assert seen(target) == before
        assert not done.mounted or not done.mounted.is_lost()
    finally:
        assert done.mounted is not None
        done.mounted.close()
        end(env)
    assert not kernel.mounts_below(os.fspath(tmp_path / "runtime"))


def _seen() -> dict[str, object]:
    from tests.testing.trees import FileFacts

    return {"FileFacts": FileFacts}


def test_the_working_directory_may_be_in_a_target(tmp_path: Path, job: Job) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    done = env.restore(mounting=job.mounting())
    assert done.mounted is not None
    text = subprocess.run(
        [*done.prefix, "/bin/sh", "-c", "ls; echo $LD_LIBRARY_PATH"], cwd=target / "lib/site", capture_output=True,
        text=True, env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/mine"},
    )  # fmt: skip
    assert "new" in text.stdout.split(), text.stderr
    assert "/mine" in text.stdout, "the ranks' own variables stay"
    done.mounted.close()
    end(env)


def test_targets_that_do_not_exist_and_several(tmp_path: Path, job: Job) -> None:
    first, second = tmp_path / "a" / "venv", tmp_path / "b"
    source = tmp_path / "source"
    write(source / "0/bin/tool", "tool", mode=0o755)
    write(source / "1/data", "data")
    (source / "1").chmod(0o700)
    env = Env(source, tmp_path / "store", [first, second])
    done = env.restore(mounting=job.mounting())
    assert done.how == "mount", done.notes
    assert run(done.prefix, "/bin/cat", f"{first}/bin/tool", f"{second}/data") == "tooldata"
    assert run(done.prefix, "/usr/bin/stat", "-c", "%a", str(second)) == "700\n"
    assert os.listdir(first) == os.listdir(second) == []
    assert done.mounted is not None
    done.mounted.close()
    end(env)


def test_a_later_start_finds_the_daemon_again(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    pids, took = [], []
    for _ in range(3):
        mounting = job.mounting()
        began_s = time.monotonic()
        done = env.restore(mounting=mounting)
        took.append(time.monotonic() - began_s)
        assert done.mounted is not None
        pids.append(done.mounted.status()["pid"])
        with capsys.disabled():
            steps = {name: round(seconds * 1000) for name, seconds in done.mounted.seconds.items()}
            print(f"\nmount: {took[-1] * 1000:.0f} ms, {steps}")
        done.mounted.close()
    assert len(set(pids)) == 1
    assert min(took[1:]) < 0.1
    end(env)


def order_for(env: Env, target: Path) -> dict[str, object]:
    spec = {"store": os.fspath(env.store), "targets": [os.fspath(target)], "python": ""}
    return {"ways": ["there", "mount", "unpack"], "spec": spec}


def test_the_daemon_that_the_service_began_with_is_taken(tmp_path: Path, job: Job) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    begin_spares(order_for(env, target))
    (spare,) = tree_waiting._spare
    done = env.restore(mounting=job.mounting())
    assert done.mounted is not None
    assert os.getsid(int(str(done.mounted.status()["pid"]))) == spare._process.pid
    assert tree_waiting.take_spare_daemon() is None
    done.mounted.close()
    end(env)


def test_no_daemon_is_begun_where_the_environment_is_there(tmp_path: Path, job: Job) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    assert env.restore(ways=("unpack",)).how == "unpack"
    order = order_for(env, target)
    begin_spares(order)
    assert tree_waiting.take_spare_daemon() is None
    begin_spares({**order, "ways": ["mount"]})
    spare = tree_waiting.take_spare_daemon()
    assert spare is not None, "it is not asked whether it is there"
    spare.close()
    wait_tidy(tmp_path)


def test_what_runs_goes_on_when_the_job_is_over(tmp_path: Path, job: Job) -> None:
    """A program that outlives the launcher keeps its files."""
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    done = env.restore(mounting=job.mounting())
    assert done.mounted is not None
    code = f"import sys; sys.stdin.read(); print(open('{target}/lib/site/new/1.py').read())"
    rank = subprocess.Popen(
        [*done.prefix, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        wait_until(lambda: os.readlink(f"/proc/{rank.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"))
        done.mounted.close()
        assert rank.communicate("", timeout=30)[0] == "new 1\n"
    finally:
        rank.kill()
        rank.wait()
    end(env)


def test_where_nothing_can_be_mounted_it_is_unpacked(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    monkeypatch.setattr("bootseer.env.restore.mounted.may_mount", lambda: False)
    done = env.restore(mounting=job.mounting())
    assert done.how == "unpack"
    assert done.failures == ("the environment is not restored by mount: mounts need root (CAP_SYS_ADMIN)",)
    assert seen(target) == wanted(tmp_path, target)
    assert env.restore(mounting=job.mounting()).how == "there", "what is there needs no mount"
    wait_tidy(tmp_path)


def test_elsewhere_it_is_unpacked(tmp_path: Path, job: Job) -> None:
    target = tmp_path / "venv"
    env = Env(make_difference(tmp_path / "source"), tmp_path / "store", [target])
    done = env.restore(mounting=job.mounting(), targets=[os.fspath(tmp_path / "other")])
    assert done.how == "unpack"
    assert "has to be relocated to another path" in done.failures[0]
    assert stat.S_ISDIR((tmp_path / "other").stat().st_mode)
    wait_tidy(tmp_path)


def test_the_root_directory_is_no_target(tmp_path: Path, job: Job) -> None:
    env = Env(make_difference(tmp_path / "source"), tmp_path / "store", [tmp_path / "venv"])
    with pytest.raises(ConfigError, match="is the root directory"):
        mount_env(os.fspath(env.store), env.digest, ["/"], job.mounting().sandbox)
    end(env)


def test_what_is_no_environment_is_not_mounted(tmp_path: Path, job: Job) -> None:
    """Even where its daemon knows the tree already, as that of an image."""
    target = tmp_path / "venv"
    make_target(target)
    source = make_difference(tmp_path / "source")
    write(source / "0/bin/su", "#!/bin/sh", mode=0o4755)
    env = Env(source, tmp_path / "store", [target])
    before = seen(target)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="0/bin/su' is setuid"):
            env.restore(ways=["mount"], mounting=job.mounting())
    more = make_difference(tmp_path / "more")
    write(more / "1/file", "of a second target")
    env = Env(more, tmp_path / "store2", [target])
    with pytest.raises(IntegrityError, match="instead of one directory for each of 1 targets"):
        env.restore(ways=["mount"], mounting=job.mounting())
    assert seen(target) == before
