"""Early start of processes that the environment service needs to restore an environment.

For a mount: the sandbox process, and the daemon of a tree. For unpacking: unpack processes. They start while other
modules are imported, so modules that they do not need are imported later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bootseer.errors import BootseerError
from bootseer.linux.privileges import may_mount

if TYPE_CHECKING:
    from bootseer.mounts.sandbox.process import ImageSandbox


def fork_sandbox() -> ImageSandbox | None:
    """Fork the sandbox process before this process has threads. Return None if mounts are not possible."""
    if not may_mount():
        return None
    from bootseer.mounts.sandbox.process import ImageSandbox

    try:
        return ImageSandbox()
    except BootseerError:
        return None


def begin_spares(order: Mapping[str, Any]) -> None:
    """Start the processes that will probably be needed, as they take longer than the lookup.

    Skipped if the environment seems to be in place. Args: order: the first one of the service.
    """
    ways, spec = order["ways"], order["spec"]
    if "there" in ways and _seems_there(spec):
        return
    if "mount" in ways and may_mount():
        from bootseer.mounts.tree_daemon import waiting as tree_waiting

        tree_waiting.start_spare_daemon(spec["store"])
    elif "unpack" in ways:
        from bootseer.env.restore import unpack_processes

        unpack_processes.begin_spare(spec["store"], os.environ)


def end_spares() -> None:
    """End the unused ones."""
    if daemons := sys.modules.get("bootseer.mounts.tree_daemon.waiting"):
        daemons.end_spare_daemon()
    if processes := sys.modules.get("bootseer.env.restore.unpack_processes"):
        processes.end_spare()


def _seems_there(spec: Mapping[str, Any]) -> bool:
    """Return whether markers exist; they are verified later."""
    python = spec["python"]
    targets = spec["targets"] or ([os.path.dirname(os.path.dirname(python))] if os.path.isabs(python) else [])
    if not all(map(os.path.isdir, targets)):
        return False  # before any import for it
    from bootseer.env.restore.markers import open_markers

    try:
        return bool(targets) and all(
            open_markers(os.environ, target).made_s(os.path.realpath(target)) for target in targets
        )
    except BootseerError:
        return False
