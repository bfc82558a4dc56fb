"""Mounted environments and images whose store fails after the mount: the job goes on, by another way, and says so.

Real starts of bootrun. Their set-up copies a package; the blocks of its snapshot are damaged where it is kept.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree
from bootseer.report.agent_reports import is_fallback
from tests.integration.mounted_trees import need_mounts
from tests.integration.setup_jobs import Machine, agent_events, services_end, setup_span
from tests.support import Programs, Run

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

DEADLINE_S = 60.0
USES_IT = "import small\nprint('has', small.VERSION, flush=True)\n"


class Job:
    """Starts of one job on one node; its set-up copies package `small`."""

    def __init__(self, top: Path, bootrun: Programs) -> None:
        self.top = top
        self._bootrun = bootrun
        self._count = 0
        self.machine = Machine(top / "node")
        self.machine.environ |= {"BOOTSEER_RUNTIME": f"{top}/run", "BOOTSEER_MOUNT_DEADLINE": "1"}
        self.source = self.machine.folder / "src"
        (self.source / "small").mkdir(parents=True)
        (self.source / "small" / "__init__.py").write_text("VERSION = '1.0'\n")
        (self.source / "small" / "data.bin").write_bytes(random.Random(1).randbytes(300_000))
        self.machine.script.write_text(USES_IT)

    @property
    def logs(self) -> Path:
        """Of the last start."""
        return self.top / f"logs{self._count}"

    def start(self, *flags: str) -> Run:
        self._count += 1
        machine = self.machine
        (site,) = machine.venv.glob("lib/python*/site-packages")
        setup = f"cp -r {self.source}/. {site} && echo ran >> {machine.runs}"
        given = ["--standalone", "--no-keep-caches", "--setup", setup, "--setup-input", f"{self.source}"]
        given += ["--setup-target", f"{machine.venv}", "--env-store", f"{machine.store}"]
        given += ["--restart-backoff", "0", "--log-dir", f"{self.logs}", *flags]
        run = self._bootrun(*given, machine.script, env=machine.environ, deadline_s=DEADLINE_S)
        services_end()
        return run

    def damage(self) -> None:
        """All blocks that are kept; their index stays."""
        for pack in self.machine.store.glob("trees/*/packs/*"):
            pack.write_bytes(b"\xff" * pack.stat().st_size)

    def page(self, number: int = 0) -> str:
        (path,) = self.logs.rglob(f"failure-{number}.txt")
        return path.read_text()


@pytest.fixture
def job(tmp_path: Path, bootrun: Programs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{tmp_path}/run")
    yield Job(tmp_path, bootrun)
    for tree in list_trees():
        unmount_tree(tree.digest, force=True)


def test_a_damaged_environment_is_made_again_and_replaced(job: Job) -> None:
    machine = job.machine
    assert job.start().status == 0
    machine.renew()
    job.damage()
    run = job.start("--max-restarts", "1", "--env-way", "mount,unpack", "--tee", "3")
    assert (run.status, run.stdout) == (0, "[default0]:has 1.0\n"), run.stderr
    assert "disk" not in run.stderr, "no rule over what ranks print blames one either"
    assert machine.count() == 2, "set-up was run again"
    # Whose matter it is, and which block of what.
    assert "class mount (the environment" in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "warning: reads of the environment fail: " in line]
    assert "block " in line and f"{machine.store}/trees/" in line
    assert "mount (the environment" in job.page() and "disk" not in job.page()
    faults = [event for event in agent_events(job.logs) if event.name == "mount_fault"]
    assert faults and all(str(machine.store) in str(event.error) for event in faults)
    assert all(map(is_fallback, faults)), "bootseer report shows them"
    # What is damaged is never taken again.
    assert len(machine.snapshots()) == 2
    machine.renew()
    later = job.start("--env-way", "mount")
    assert (later.status, later.stdout) == (0, "has 1.0\n"), later.stderr
    assert (machine.count(), setup_span(job.logs).attrs["how"]) == (2, "mount")


def test_without_restarts_the_next_start_works(job: Job) -> None:
    machine = job.machine
    assert job.start().status == 0
    machine.renew()
    job.damage()
    run = job.start("--env-way", "mount,unpack")
    assert run.status == 1
    assert "class     : mount (the environment" in run.stderr
    assert os.listdir(machine.venv) == os.listdir(machine.pristine)
    run = job.start("--env-way", "mount,unpack")
    assert (run.status, run.stdout) == (0, "has 1.0\n"), run.stderr
    assert machine.count() == 2
