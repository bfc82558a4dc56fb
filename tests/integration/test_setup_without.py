"""`bootrun --setup` where an environment cannot be kept, or not as ever: what that costs is time, and no job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import support
from tests.integration.setup_jobs import Machine, services_end
from tests.support import lacking, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]

UNPACK = ("--env-way", "there,unpack")
DEADLINE_S = 90.0
NOT_KEPT = "set-up is run, and its result is not stored"
NO_FLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int flock(int fd, int operation) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length > 0) { path[length] = 0; if (strstr(path, "PLACE")) { errno = ENOSYS; return -1; } }
  int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
  return real(fd, operation);
}
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node")


Start = Callable[..., support.Program]


@pytest.fixture
def start(machine: Machine, bootrun: support.Programs, tmp_path: Path) -> Iterator[Start]:
    """Starts bootrun with set-up: alone, or as one of two nodes that meet at `port`."""
    count = 0

    def start(
        *flags: str, env: dict[str, str | None] | None = None, port: int = 0, rank: int = 0
    ) -> support.Program:
        nonlocal count
        count += 1
        argv = machine.flags("--log-dir", os.fspath(tmp_path / f"logs{count}"), *UNPACK, *flags)
        if port:
            argv.remove("--standalone")
            argv = [
                *("--nnodes", "2", "--rdzv-backend", "c10d", "--node-rank", str(rank), "--rdzv-id", f"j{port}"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", *argv),
            ]
        return bootrun.start(*argv, machine.script, env={**machine.environ, **(env or {})})

    yield start
    services_end()


# ---- what it is cannot be told ---------------------------------------------------------------------------------


def test_interpreter_that_answers_with_something_else(machine: Machine, start: Start) -> None:
    """Its start-up code ends it when it is asked; ranks and set-up run."""
    site = next(machine.venv.glob("lib/python*/site-packages"))
    (site / "odd.pth").write_text("import os, sys; 'base_probe' in str(sys.orig_argv) and os._exit(9)\n")
    run = start().wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "did not report what is installed (exit status 9)" in run.stderr and NOT_KEPT in run.stderr
    assert "has 1.0" in run.stdout
    assert machine.snapshots() == []


def test_project_with_more_beside_it_than_can_be_hashed(machine: Machine, start: Start) -> None:
    project = machine.folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\nname='p'\nversion='1'\n")
    with open(project / "train.bin", "wb") as file:
        file.truncate(11 << 30)  # of nothing
    machine.environ["BOOTSEER_WATCH_SETUP"] = "off"  # so that the key has all that the command names
    run = start("--setup", f"false && pip install {project} || true").wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "bytes: it cannot be hashed" in run.stderr and "the result of set-up is not stored" in run.stderr
    assert "has 1.0" in run.stdout
    assert machine.count() == 1
    assert machine.snapshots() == []


def test_input_that_is_not_there_ends_the_job(machine: Machine, start: Start) -> None:
    """The user's to mend: nothing is run."""
    run = start("--setup-input", os.fspath(machine.folder / "nothing")).wait(DEADLINE_S)
    assert run.status == 1
    assert "there is no such file or directory" in run.stderr
    assert machine.count() == 0


def test_read_only_root_with_the_environment_on_a_volume(machine: Machine, tmp_path: Path) -> None:
    """Neither beside the target nor in the cache can a lock be made."""
    if os.geteuid() != 0:
        lacking("needs root for mounts")
    shut = machine.folder / "shut"
    shut.mkdir()
    lines = [
        f"mount --bind {machine.place} {machine.place}",
        f"mount --bind {shut} {shut}",
        f"mount -o remount,bind,ro {shut}",
        f"mount -o remount,bind,ro {machine.place}",
        f"mount --bind {machine.pristine} {machine.venv}",
        'exec "$@"',
    ]
    argv = ["unshare", "--mount", "/bin/sh", "-c", " && ".join(lines), "sh", support.BOOTRUN]
    argv += machine.flags("--log-dir", os.fspath(tmp_path / "logs"), *UNPACK)
    argv.append(os.fspath(machine.script))
    environ = {**support.clean_environ(), **{k: v for k, v in machine.environ.items() if v is not None}}
    environ["BOOTSEER_CACHE"] = os.fspath(shut / "cache")
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    services_end()
    assert done.returncode == 0, done.stderr
    assert "has 1.0" in done.stdout


def test_file_system_without_locks(machine: Machine, start: Start, tmp_path: Path) -> None:
    """As Lustre without -o flock, or NFS without its lock manager."""
    compiler = shutil.which("cc")
    if compiler is None:
        lacking("needs a C compiler")
    source, library = tmp_path / "no_flock.c", tmp_path / "no_flock.so"
    source.write_text(NO_FLOCK.replace("PLACE", os.fspath(machine.place)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    run = start(env={"LD_PRELOAD": os.fspath(library)}).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "has 1.0" in run.stdout


# ---- nothing waits without bound -------------------------------------------------------------------------------


def test_service_of_one_of_two_nodes_hangs(start: Start) -> None:
    port = support.find_free_port()
    times = ["--rdzv-conf", "join_timeout=24", "--setup-timeout", "20", "--setup-wait", "3"]
    jobs = [start(*times, port=port, rank=rank) for rank in range(2)]

    def stop() -> bool:
        found = [
            process.pid
            for process in support.descendants(jobs[1].pid)
            if "bootseer.env.service.main" in process.command
        ]
        for pid in found[:1]:
            os.kill(pid, signal.SIGSTOP)
        return bool(found)

    wait_until(stop, 30, "the keeper")
    runs = [job.wait(DEADLINE_S) for job in jobs]
    assert [run.status for run in runs] == [0, 0], "\n".join(run.stderr for run in runs)
    assert "has sent nothing for 8 s" in runs[1].stderr


def test_job_of_two_nodes_waits_for_the_set_up_of_another_job(machine: Machine, start: Start) -> None:
    """Longer than nodes are waited for."""
    begun = machine.folder / "begun"
    first = start("--setup", f"touch {begun}; sleep 20")
    wait_until(begun.exists, 60, "set-up")
    port = support.find_free_port()
    began_s = time.monotonic()
    jobs = [start("--rdzv-conf", "join_timeout=9", port=port, rank=rank) for rank in range(2)]
    runs = [job.wait(DEADLINE_S) for job in jobs]
    assert time.monotonic() - began_s > 9
    assert [run.status for run in runs] == [0, 0], "\n".join(run.stderr for run in runs)
    assert all("waiting for another process that is modifying" in run.stderr for run in runs)
    assert first.wait(DEADLINE_S).status == 0


# ---- it heals --------------------------------------------------------------------------------------------------


def test_what_is_damaged_is_replaced(machine: Machine, start: Start) -> None:
    assert start().wait(DEADLINE_S).status == 0
    services_end()
    for pack in machine.store.glob("trees/*/packs/*"):
        pack.write_bytes(b"\xff" * pack.stat().st_size)
    for count in (2, 2):
        machine.renew()
        run = start().wait(DEADLINE_S)
        services_end()
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
        assert machine.count() == count, run.stderr
    assert [path.name for path in machine.snapshots()] == ["env-000001.json", "env-000002.json"]


def test_what_is_in_its_place_is_used(machine: Machine, start: Start) -> None:
    """Garbage collection does not take what is used daily."""
    assert start().wait(DEADLINE_S).status == 0
    services_end()
    assert list(machine.store.glob("keys/*/used")) == []
    run = start().wait(DEADLINE_S)
    services_end()
    assert "is already in place" in run.stderr
    assert len(list(machine.store.glob("keys/*/used"))) == 1


def test_node_that_could_not_publish_says_how_to(machine: Machine, start: Start) -> None:
    machine.store.rmdir()
    machine.store.write_text("no folder")
    assert start().wait(DEADLINE_S).status == 0
    services_end()
    machine.store.unlink()
    machine.store.mkdir(mode=0o755)
    run = start().wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "and the next start, or `bootseer env snapshot`, publishes" in run.stderr
    assert "--rebuild" not in run.stderr  # there is nothing to replace
    assert machine.count() == 1
