"""What the keeper of a job's environment needs to restore one, begun before it is known which.

To mount it: a holder, and the daemon of a tree. To unpack it, where nothing is mounted: processes that do so. All
these start while the rest is imported: what is not needed for that is imported late.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bootseer.errors import BootseerError
from bootseer.mounts.privileges import may_mount

if TYPE_CHECKING:
    from bootseer.mounts.holder import Holder


def make_holder() -> Holder | None:
    """Forks it; to be called before this process has threads. None: nothing is mounted."""
    if not may_mount():
        return None
    from bootseer.mounts.holder import Holder

    try:
        return Holder()
    except BootseerError:
        return None


def begin_spares(order: Mapping[str, Any]) -> None:
    """Starts what will probably be needed: that takes longer than to look for the environment.

    Not where the environment seems to be in its place. Args: order: the keeper's first one.
    """
    ways, spec = order["ways"], order["spec"]
    if "there" in ways and _seems_there(spec):
        return
    if "mount" in ways and may_mount():
        from bootseer.mounts import tree_waiting

        tree_waiting.begin_spare(spec["store"])
    elif "unpack" in ways:
        from bootseer.env import unpack_processes

        unpack_processes.begin_spare(spec["store"], os.environ)


def end_spares() -> None:
    """What was not needed."""
    for name in ("bootseer.mounts.tree_waiting", "bootseer.env.unpack_processes"):
        if name in sys.modules:
            sys.modules[name].end_spare()


def _seems_there(spec: Mapping[str, Any]) -> bool:
    """By the markers alone; whether they are right is looked at later."""
    python = spec["python"]
    targets = spec["targets"] or ([os.path.dirname(os.path.dirname(python))] if os.path.isabs(python) else [])
    if not all(map(os.path.isdir, targets)):
        return False  # before anything is imported for it
    from bootseer.env.markers import open_markers

    try:
        return bool(targets) and all(
            open_markers(os.environ, target).made_s(os.path.realpath(target)) for target in targets
        )
    except BootseerError:
        return False
