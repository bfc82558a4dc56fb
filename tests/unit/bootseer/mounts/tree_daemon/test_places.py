"""The directory of a tree: what is read of its state file, which may be damaged."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.mounts.tree_daemon.places import TreeDirectory


def test_numbers_that_are_no_pid_are_left_out(tmp_path: Path) -> None:
    place = TreeDirectory(os.fspath(tmp_path), "1" * 64)
    os.makedirs(place.folder)
    place.write_state({"daemon": 7, "minder": 1 << 31, "other": -1})
    assert place.read_pids() == [7]
