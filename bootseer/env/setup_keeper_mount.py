"""What the keeper of a job's environment needs to mount one: a holder, and a daemon that is ready when it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bootseer.errors import BootseerError
from bootseer.mounts.holder import Holder
from bootseer.mounts.image_source import may_mount
from bootseer.mounts.tree_waiting import begin_spare


def make_holder() -> Holder | None:
    """Forks it; to be called before this process has threads. None: nothing is mounted."""
    if not may_mount():
        return None
    try:
        return Holder()
    except BootseerError:
        return None


def begin_daemon(order: Mapping[str, Any]) -> None:
    """Starts the daemon of a tree while it is still looked for which one: its start is longer than the mount.

    Not where the environment seems to be in its place. Args: order: the keeper's first one.
    """
    if not may_mount() or ("there" in order["ways"] and _seems_there(order["spec"])):
        return
    begin_spare(order["spec"]["store"])


def _seems_there(spec: Mapping[str, Any]) -> bool:
    """By the markers alone; whether they are right is looked at later."""
    from bootseer.env.markers import open_markers

    python = spec["python"]
    targets = spec["targets"] or ([os.path.dirname(os.path.dirname(python))] if os.path.isabs(python) else [])
    try:
        return bool(targets) and all(
            open_markers(os.environ, target).made_s(os.path.realpath(target)) for target in targets
        )
    except BootseerError:
        return False
