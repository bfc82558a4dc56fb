"""A tree's daemon and the cgroup of the one that started it: the end of either is not that of the other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bootseer.mounts.tree_daemon.cgroup import NAME
from bootseer.mounts.tree_daemon.mount import mount_tree
from tests.integration.job_cgroup import group, try_remove
from tests.integration.mounted_trees import TOP, Trees, trees
from tests.support import is_running, wait_until
from tests.testing.trees import snapshot

pytestmark = pytest.mark.system
__all__ = ["group", "trees"]  # fixtures

START = """
import json, os, sys, time
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree
tree = mount_tree(sys.argv[2], options=TreeOptions(idle_s=0.0))
with tree.hold():
    print(json.dumps(tree.status()["pid"]), flush=True)
    time.sleep(1000)
"""


def test_the_end_of_a_job_s_cgroup_is_not_that_of_the_tree(trees: Trees, group: Path) -> None:
    job = trees.run(sys.executable, "-c", START, os.fspath(group), trees.url, env={"PYTHONPATH": TOP})
    wait_until(lambda: job.stdout.endswith("\n") or job.process.poll() is not None, 60, "the mount")
    assert job.stdout, job.stderr
    daemon = json.loads(job.stdout)
    assert (group / "cgroup.procs").read_text().split() == [str(job.pid)], "neither the daemon nor its minder"
    with mount_tree(trees.url).hold():  # another job's
        (group / "cgroup.kill").write_text("1")
        assert job.process.wait(20) == -9
        wait_until(lambda: try_remove(group), 20, "the scheduler sees the end of the job")
        assert is_running(daemon)
        tree = mount_tree(trees.url)
        assert tree.status()["pid"] == daemon
        assert snapshot(tree.folder) == snapshot(trees.built.source)
    assert tree.unmount()
    wait_until(
        lambda: not (group.parent / NAME).exists() or (group.parent / NAME / "cgroup.procs").read_text(), 10
    )
